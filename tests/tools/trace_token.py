"""Which of the project's files and classes make a token: those entered between two streamed pieces of a real reply.

    python -m tests.tools.trace_token                  one token per pass
    python -m tests.tools.trace_token --spec ngram     rounds for which the drafter was asked

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

# The function of a round; pieces without it took a plain step.
DRAFTED = ".guesses"
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

    def add(self, other: Trace) -> None:
        """Adds what another one noted."""
        self.files |= other.files
        self.classes |= other.classes
        for name, calls in other.functions.items():
            self.functions[name] = self.functions.get(name, 0) + calls

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notes calls inside the block."""
        sys.setprofile(self.enter)
        try:
            yield
        finally:
            sys.setprofile(None)


def trace_reply(speculation: str = "off", tokens: int = 300, prompt: str = PROMPT) -> Trace:
    """The calls behind tokens 2 to n of a reply; with drafters, of those pieces for which a drafter was asked.

    Raises:
        RuntimeError: no drafter drafted.
    """
    trace = Trace()
    with edgeinfer.load(speculation=speculation, remember=False) as model:
        model.generate(prompt, max_tokens=4, speculation="off", ignore_eos=True)  # passes of one row are set up
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


def main() -> None:
    """Prints files, classes and functions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default="off", help="drafter, as `edgeinfer run --spec` takes it")
    parser.add_argument("--tokens", type=int, default=300)
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
