"""Which of the project's files and classes make a token: those entered between two streamed pieces of a real reply.

    python -m tests.tools.trace_token                  one token per pass
    python -m tests.tools.trace_token --spec ngram     rounds in which the drafter's tokens were verified

The built-in model replies. The first token is left out, as what it takes is the prompt's. Native code and other
packages do not count.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import edgeinfer

PROMPT = "Once upon a time there was a little dog. The little dog liked the little cat. The little dog"


@dataclass
class Trace:
    """What was entered.

    Attributes:
        files: names of modules.
        classes: of the project, whose methods ran, as module and name.
        functions: calls of each, as module and name.
    """

    files: set[str] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)
    functions: dict[str, int] = field(default_factory=dict)

    def enter(self, frame: FrameType, event: str, argument: Any) -> None:
        """Notes a call, as `sys.setprofile` tells it."""
        module = frame.f_globals.get("__name__", "")
        if event != "call" or not module.startswith("edgeinfer"):
            return
        self.files.add(module)
        name = f"{module}.{frame.f_code.co_qualname}"
        self.functions[name] = self.functions.get(name, 0) + 1
        owner = frame.f_locals.get("self")
        if owner is not None and type(owner).__module__.startswith("edgeinfer"):
            self.classes.add(f"{type(owner).__module__}.{type(owner).__qualname__}")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notes calls inside the block."""
        sys.setprofile(self.enter)
        try:
            yield
        finally:
            sys.setprofile(None)


def trace_reply(speculation: str = "off", tokens: int = 48, prompt: str = PROMPT) -> Trace:
    """The calls behind tokens 2 to n of a reply; with a drafter, of the pieces that a verified draft gave."""
    trace = Trace()
    with edgeinfer.load(speculation="off" if speculation == "off" else speculation) as model:
        stream = model.stream(prompt, max_tokens=tokens, speculation=speculation, ignore_eos=True)
        next(stream)
        for _ in range(tokens - 1):
            with trace.watching():
                next(stream)
        stream.close()
        result = stream.result
    if speculation != "off" and result.speculation.drafted == 0:
        raise RuntimeError("Nothing was drafted: ask for more tokens, or give another prompt.")
    return trace


def main() -> None:
    """Prints files, classes and functions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default="off", help="drafter, as `edgeinfer run --spec` takes it")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--functions", action="store_true", help="list functions too, with how often each was called")
    options = parser.parse_args()
    trace = trace_reply(options.spec, options.tokens)
    for title, names in (("files", trace.files), ("classes", trace.classes)):
        print(f"{len(names)} {title}")
        for name in sorted(names):
            print("   ", name)
    if options.functions:
        for name, calls in sorted(trace.functions.items(), key=lambda item: -item[1]):
            print(f"{calls:7}  {name}")


if __name__ == "__main__":
    main()
