"""Twenty mistakes, each on a line of its own that both type checkers refuse; the others they take.

A mark names the codes of the errors that mypy and pyright give.
"""

from __future__ import annotations

import edgeinfer
from edgeinfer import Cache, Model, Sampling, Search, Speculation

MESSAGES = [{"role": "user", "content": "Hello"}]


def load() -> None:
    edgeinfer.load(memroy="600MB")  # wrong: call-arg reportCallIssue
    edgeinfer.load(thread=2)  # wrong: call-arg reportCallIssue
    edgeinfer.load(None, "600MB")  # wrong: call-arg reportCallIssue
    edgeinfer.load(context="2048")  # wrong: arg-type reportArgumentType
    edgeinfer.load(kv="int9")  # wrong: arg-type reportArgumentType
    edgeinfer.load(cache={"overflow": "windows"})  # wrong: arg-type reportArgumentType
    edgeinfer.load(temperature=0.7)  # wrong: call-arg reportCallIssue
    edgeinfer.plan(weights="mmap")  # wrong: arg-type reportArgumentType
    Cache(prefix_cash="50MB")  # wrong: call-arg reportCallIssue
    edgeinfer.laod()  # wrong: attr-defined reportAttributeAccessIssue


def ask(model: Model) -> None:
    model.generate("Hi", temprature=0.7)  # wrong: call-arg reportCallIssue
    model.generate("Hi", max_tokens="lots")  # wrong: arg-type reportArgumentType
    model.generate(None)  # wrong: arg-type reportArgumentType
    model.generate("Hi", search="beam", bems=4)  # wrong: call-arg reportCallIssue
    model.generate("Hi", search={"methods": "beam"})  # wrong: arg-type reportArgumentType
    model.stream("Hi", speculation=Speculation("copy", draft_maximum=4))  # wrong: call-arg reportCallIssue
    model.stream("Hi", sampling=Sampling(temperature="hot"))  # wrong: arg-type reportArgumentType
    model.stream("Hi", compute=Search("beam"))  # wrong: arg-type reportArgumentType
    print(model.generate("Hi").txt)  # wrong: attr-defined reportAttributeAccessIssue
    model.chat().send(["Hi"])  # wrong: arg-type reportArgumentType
    model.create_chat_completion(MESSAGES, temprature=1)  # wrong: call-overload reportCallIssue
    next(model.create_chat_completion(MESSAGES, stream=False))  # wrong: call-overload reportArgumentType


async def ask_beside_a_loop(model: Model) -> None:
    await model.agenerate("Hi", temprature=0.7)  # wrong: call-arg reportCallIssue
    for chunk in model.astream("Hi"):  # wrong: attr-defined reportGeneralTypeIssues
        print(chunk)
