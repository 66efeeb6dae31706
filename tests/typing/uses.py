"""Forty typical uses of the public names, which type checkers take without a word and tests execute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import edgeinfer
from edgeinfer import Cache, Chat, Model, ReducedCompute, Sampling, Search, Speculation

PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}

Loads = Callable[[], Model]
Asks = Callable[[Model], object]

# Loading and planning. Each is called without an argument, and the model is closed.
LOADS: list[Loads] = [
    lambda: edgeinfer.load(),
    lambda: edgeinfer.load(None, memory="4GB", context=256, threads=1),
    lambda: edgeinfer.load(memory=4_000_000_000, progress=lambda stage, done, total: print(stage, done, total)),
    lambda: edgeinfer.load(speculation="off", device="cpu", idle_unload=300),
    lambda: edgeinfer.load(speculation=Speculation("copy,ngram", draft_max=8, remember=False)),
    lambda: edgeinfer.load(speculation={"drafters": "copy", "draft_max": 4}),
    lambda: edgeinfer.load(cache=Cache(overflow="window", prefix_cache="20MB")),
    lambda: edgeinfer.load(cache={"kv": "float32"}, weights="mapped", exact=False, native=None),
    # As the README showed it before there were groups.
    lambda: edgeinfer.load(kv="float32", draft_max=8, prefix_cache="20MB", overflow="stop", remember=False),
]


def plan_before_loading() -> None:
    plan: edgeinfer.MemoryPlan = edgeinfer.plan(memory="4GB", context=512)
    assert plan.fits and plan.planned_bytes <= 4_000_000_000
    with edgeinfer.load(memory="4GB", context=plan.context) as model:
        assert model.plan.planned_bytes <= 4_000_000_000


def handle_errors() -> None:
    try:
        edgeinfer.load("no/such/path")
    except edgeinfer.ModelError as error:
        assert error.message and error.hint
    try:
        edgeinfer.load(memory="1MB")
    except edgeinfer.BudgetError as error:
        assert error.minimum_bytes > 1_000_000 and error.terms


# Asking a loaded model.
ASKS: list[Asks] = [
    lambda model: model.generate(PROMPT, max_tokens=8).text.upper(),
    lambda model: model.generate([5, 6, 7], max_tokens=2).token_ids[0] + 1,
    lambda model: model.generate(PROMPT, max_tokens=8, temperature=0.7, top_p=0.9, top_k=40, seed=1),
    lambda model: model.generate(PROMPT, max_tokens=8, stop="."),
    lambda model: model.generate(PROMPT, max_tokens=8, stop=[".", "!"], stop_token_ids=[3], ignore_eos=True),
    lambda model: model.generate(PROMPT, max_tokens=8, sampling=Sampling(temperature=0.7, min_p=0.05, seed=2)),
    lambda model: model.generate(PROMPT, max_tokens=8, sampling={"repetition_penalty": 1.1, "logit_bias": {5: -1.0}}),
    lambda model: model.generate(PROMPT, max_tokens=8, min_p=0.05, frequency_penalty=0.1, logit_bias={5: -1.0}),
    lambda model: model.generate(PROMPT, choices=("yes", "no")).text,
    lambda model: model.generate(PROMPT, json_schema=SCHEMA, max_tokens=40).parsed["ok"],
    lambda model: model.generate(PROMPT, regex="[ab]+", max_tokens=8),
    lambda model: model.generate(PROMPT, max_tokens=8, speculation="off").timings.per_token_p95_ms * 2,
    lambda model: model.generate(PROMPT, max_tokens=8, speculation={"draft_width": 2, "verification": "rejection"}),
    lambda model: model.generate(PROMPT, max_tokens=8, speculation=Speculation("copy")).speculation.drafted,
    lambda model: model.generate(PROMPT, max_tokens=8, search="beam", beams=4).search,
    lambda model: model.generate(PROMPT, max_tokens=8, search=Search("beam", beams=4, beam_groups=2)),
    lambda model: model.generate(PROMPT, max_tokens=8, search={"method": "momentum", "resistance": [0, 1.0]}),
    lambda model: model.generate(PROMPT, max_tokens=8, compute="exit", exit_confidence=0.8).compute,
    lambda model: model.generate(PROMPT, max_tokens=8, compute=ReducedCompute("unified", compute_speedup=1.2)),
    lambda model: model.generate(PROMPT, max_tokens=8).memory.terms.items(),
]


def print_a_stream(model: Model) -> None:
    with model.stream(PROMPT, max_tokens=8, logprobs=2) as stream:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
            assert all(each.logprob <= 0 for each in chunk.logprobs)
    assert stream.result.finish_reason in ("stop", "length")


def share_options(model: Model) -> None:
    options: edgeinfer.ReplyDict = {"max_tokens": 8, "search": "beam", "beams": 2, "seed": 1}
    assert model.generate(PROMPT, **options).token_ids == model.stream(PROMPT, **options).complete().token_ids


def talk(model: Model) -> None:
    chat: Chat = model.chat("You are brief.", history=[{"role": "user", "content": "Hello"}])
    print(chat.send("Tell me a story.", max_tokens=8, temperature=0.7).text)
    for chunk in chat.stream("Go on.", max_tokens=8, search="momentum"):
        print(chunk.text, end="")
    assert [message["role"] for message in chat.messages][:2] == ["system", "user"]


def save_a_conversation(model: Model, folder: Path) -> None:
    chat = model.chat()
    chat.send("Hello", max_tokens=4)
    chat.save(folder / "talk.session")
    assert model.load_chat(folder / "talk.session").messages == chat.messages


def stream_messages(model: Model) -> None:
    stream = model.stream_chat(MESSAGES, max_tokens=8, temperature=0.5, seed=1, on_finish=lambda result: None)
    assert stream.complete().usage.total_tokens


def complete_as_openai(model: Model) -> None:
    answer = model.create_chat_completion(MESSAGES, max_tokens=8, temperature=0.7, seed=1, n=2)
    content: str | None = answer["choices"][0]["message"]["content"]
    assert content is not None and answer["usage"]["total_tokens"]
    form: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    model.create_chat_completion(MESSAGES, response_format=form, max_tokens=40, stream=False, user="me")
    model.create_chat_completion(MESSAGES, tools=[TOOL], tool_choice="none", max_tokens=4, min_p=0.1, draft_max=4)


def stream_as_openai(model: Model) -> None:
    chunks: Iterator[Mapping[str, Any]] = model.create_chat_completion(MESSAGES, stream=True, max_tokens=8)
    assert list(chunks)
    for chunk in model.create_chat_completion(MESSAGES, stream=True, max_tokens=8):
        print(chunk["choices"][0]["delta"].get("content"), end="")


async def generate_beside_a_loop(model: Model) -> None:
    result: edgeinfer.Result = await model.agenerate(PROMPT, max_tokens=8, temperature=0.7, seed=1)
    print(result.text)


async def stream_beside_a_loop(model: Model) -> None:
    async for chunk in model.astream(PROMPT, max_tokens=8, search="beam", beams=2):
        print(chunk.text, end="")
    async with model.chat().astream("Hello", max_tokens=8) as stream:
        async for chunk in stream:
            print(chunk.text, end="")


async def load_beside_a_loop() -> None:
    with await edgeinfer.aload(memory="4GB", kv="float32") as model:
        print((await model.chat().asend("Hello", max_tokens=4)).text)
