"""List the project's files and classes that a token passes, between two streamed pieces of a real reply.

    python -m tests.tools.trace_token                  one token per pass
    python -m tests.tools.trace_token --spec ngram     rounds for which the drafter was asked
    python -m tests.tools.trace_token --http           a chat request, from the socket to its first token, and threads

The built-in model replies. The first token is left out, as what it takes is the prompt's. Native code and other
packages do not count.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from types import FrameType
from typing import Any
from unittest.mock import patch

import edgeinfer
from edgeinfer.runtime.planning import ledger
from tests.speculation import known_costs

# The function of a round; pieces without it took a plain step.
DRAFTED = ".guesses"
PROMPT = "Once upon a time there was a little dog. The little dog liked the little cat. The little dog"


# Functions that run in fewer pieces than this keep house: buffers grow, the budget is looked at.
SELDOM = 0.5


@dataclass
class Trace:
    """The calls of some tokens."""

    pieces: int = 0  # of the reply that were followed
    files: Counter[str] = field(default_factory=Counter)  # names of modules, with the pieces that entered them
    # Of the project, whose methods ran, as module and name, with the pieces.
    classes: Counter[str] = field(default_factory=Counter)
    functions: Counter[str] = field(default_factory=Counter)  # calls of each, as module and name

    def enter(self, frame: FrameType, event: str, argument: Any) -> None:
        """Record a call; a callback of `sys.setprofile`."""
        module = frame.f_globals.get("__name__", "")
        if event != "call" or not module.startswith("edgeinfer"):
            return
        self.files[module] = 1
        self.functions[f"{module}.{frame.f_code.co_qualname}"] += 1
        owner = frame.f_locals.get("self")
        if owner is not None and type(owner).__module__.startswith("edgeinfer"):
            self.classes[f"{type(owner).__module__}.{type(owner).__qualname__}"] = 1

    def add(self, piece: Trace) -> None:
        """Add the calls of one piece."""
        self.pieces += 1
        self.files += piece.files
        self.classes += piece.classes
        self.functions += piece.functions

    def usual(self, counted: Counter[str]) -> list[str]:
        """The files or classes that more than a few pieces entered."""
        return sorted(name for name, pieces in counted.items() if pieces >= SELDOM * self.pieces)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record calls inside the block."""
        sys.setprofile(self.enter)
        try:
            yield
        finally:
            sys.setprofile(None)


def trace_reply(speculation: str = "off", tokens: int = 300, prompt: str = PROMPT) -> Trace:
    """The calls of tokens 2 to n of a reply; with drafters, of pieces for which a drafter was asked.

    Raises:
        RuntimeError: no drafter drafted.
    """
    trace = Trace()
    asked: dict[str, Any] = {"speculation": speculation, "remember": False}
    # Pieces that are followed take long: the look at the budget goes by the clock, and would come in each. What passes
    # cost is made up, as a busy machine may find that no draft pays.
    with known_costs(), patch.object(ledger, "LOOK_S", 60.0), edgeinfer.load(**asked) as model:
        # Passes of each size are set up when they first run.
        model.generate(prompt, max_tokens=tokens, speculation=speculation, ignore_eos=True)
        with model.stream(prompt, max_tokens=tokens, speculation=speculation, ignore_eos=True) as stream:
            next(stream)
            for _ in range(tokens - 1):
                piece = Trace()
                with piece.watching():
                    next(stream)
                if speculation == "off" or any(name.endswith(DRAFTED) for name in piece.functions):
                    trace.add(piece)
    if not trace.files:
        raise RuntimeError("Nothing was drafted: ask for more tokens, or give another prompt.")
    return trace


@dataclass
class RequestTrace(Trace):
    """The calls of one request to a server, on all of its threads."""

    recording: bool = False
    threads: list[str] = field(default_factory=list)  # of the process while it answers eight clients

    def enter(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.recording:
            super().enter(frame, event, argument)


def trace_request(clients: int = 8) -> RequestTrace:
    """The calls of a streamed chat request up to its first token, and the threads that serve several at once."""
    from edgeinfer.apps.server.app import make_app
    from edgeinfer.apps.server.host import ModelHost
    from edgeinfer.apps.server.security import Security
    from edgeinfer.apps.server.serving import Server

    trace, urls = RequestTrace(pieces=1), queue.Queue[str]()
    # Started now, and thus not traced.
    mine = {*threading.enumerate()}
    threading.setprofile(trace.enter)
    host = ModelHost(parallel=clients)
    found: list[str] = []

    async def load() -> None:
        await host.load(None, {"threads": 1})
        urls.put(found[0])

    server = Server(
        make_app(host, Security()), "127.0.0.1", 0, ready=found.append, alongside=load, stopping=host.unload
    )
    serving = threading.Thread(target=server.run, name="server")
    serving.start()
    try:
        address = urls.get().removeprefix("http://")
        _ask(address, 8).getresponse().read()  # sets up what the first request does
        first = _ask(address, 64, trace).getresponse()
        while b"content" not in (line := first.readline()):
            if not line:
                raise RuntimeError("The server gave no token.")
        trace.recording = False
        first.read()
        asked = [_ask(address, 200) for _ in range(clients)]
        answers = [connection.getresponse() for connection in asked]
        for answer in answers:
            answer.readline()
        trace.threads = sorted(thread.name for thread in threading.enumerate() if thread not in mine)
        for answer in answers:
            answer.read()
    finally:
        threading.setprofile(None)
        server.stop()
        serving.join(timeout=60)
    return trace


def _ask(address: str, tokens: int, trace: RequestTrace | None = None) -> HTTPConnection:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": tokens, "stream": True, "ignore_eos": True}
    connection = HTTPConnection(address)
    if trace is not None:
        trace.recording = True
    headers = {"Content-Type": "application/json", "Connection": "close"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    return connection


def main() -> None:
    """Prints files, classes and functions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default="off", help="drafter, as `edgeinfer run --spec` takes it")
    parser.add_argument("--http", action="store_true", help="trace a request to a server instead")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--functions", action="store_true", help="list functions too, with how often each was called")
    options = parser.parse_args()
    trace = trace_request() if options.http else trace_reply(options.spec, options.tokens)
    if isinstance(trace, RequestTrace):
        print(f"{len(trace.threads)} threads serve eight clients:", ", ".join(trace.threads))
    for title, counted in (("files", trace.files), ("classes", trace.classes)):
        usual = trace.usual(counted)
        print(f"{len(usual)} {title} in {trace.pieces} pieces")
        for name in usual:
            print("   ", name)
        for name in sorted(counted.keys() - set(usual)):
            print("    seldom:", name)
    if options.functions:
        for name, calls in trace.functions.most_common():
            print(f"{calls:7}  {name}")


if __name__ == "__main__":
    main()
