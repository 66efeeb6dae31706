"""Compiles a grammar that may be hostile in a process of its own, with limits. Run as a program it is that process: it
imports nothing of edgeinfer, reads a grammar from its input and writes what is wrong with it, or nothing."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

# What the engine may take. Its other defaults bound a mask to some tens of milliseconds; a state of its lexer takes up
# to 2 kB, and nothing in jsonschemabench needs more than a tenth of these.
ENGINE_LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "verbose_errors": False}

# The engine bounds its work by counts of its own, but for texts that are long, whose rules nest by reference (its
# stack overflows at two thousand), and for large numbers (repetitions, multiples). Bounds of numbers are none of those:
# 60 ranges of 15 digits took 0.04 s.
_SHORT = 4096
_LARGE_NUMBER = re.compile(r"\d{4,}|\d[eE][+-]?\d")
_BOUND = re.compile(r'"(?:minimum|maximum)": -?\d{1,19}(?:\.\d{1,20})?(?=[,}])')
_TOKENS = re.compile(r"<\[[\d,]+\]>")  # of a model's vocabulary, by id
_SECONDS = 5
_BYTES = 2**30
# Of the stack; less than threads have anywhere, so that what gets through here gets through there.
_STACK = 512 * 1024
_BOUNDED = os.name == "posix"  # where `_bounded` ends what takes too much of the processor
_REFUSED = "it is too large, too deeply nested or too ambiguous"


def needs_trial(grammar: str) -> bool:
    """Whether compiling could take long, much memory or the process down."""
    short = _BOUND.sub('""', _TOKENS.sub("", grammar))
    return len(grammar) > _SHORT or _LARGE_NUMBER.search(short) is not None


def tried(grammar: str, library: Any) -> str:
    """Compile a grammar in another process; return its error, or "". Takes 0.1 s more than compiling, at most 10 s."""
    command = [sys.executable, "-I", "-S", __file__, str(Path(library.__file__).parent.parent)]
    try:
        done = subprocess.run(command, input=grammar.encode("utf-8"), capture_output=True, timeout=2 * _SECONDS)
    except subprocess.TimeoutExpired as error:
        if _BOUNDED:
            raise TimeoutError from error
        return _REFUSED
    except OSError as error:  # no other process can be started here
        return f"it is too large to be compiled without trying it in another process first ({error})"
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else _REFUSED


def _bounded() -> None:
    try:
        import resource
    except ImportError:  # Windows; the time is limited from outside
        return
    for kind, limit in ((resource.RLIMIT_CPU, _SECONDS), (resource.RLIMIT_AS, _BYTES), (resource.RLIMIT_CORE, 0)):
        # macOS knows the limit of memory and does not keep it; what is started there is bounded in time alone.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (limit, limit))


class _Bytes:
    """A vocabulary of single bytes."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)

    def __init__(self) -> None:
        self.tokens = [bytes([value]) for value in range(256)] + [b"\xff<|end|>"]

    def __call__(self, text: str | bytes) -> list[int]:
        return []


def wrong(grammar: str) -> str:
    """Compile a grammar and return its error, or ""."""
    import llguidance

    vocabulary: Any = _Bytes()
    tokens = llguidance.LLTokenizer(vocabulary)
    limits = llguidance.LLParserLimits(**ENGINE_LIMITS)
    matcher = llguidance.LLMatcher(tokens, _TOKENS.sub("<[0]>", grammar), log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return str(matcher.get_error())


def _main() -> None:
    _bounded()
    sys.path.insert(0, sys.argv[1])
    grammar = sys.stdin.buffer.read().decode("utf-8")
    found: list[str] = []
    threading.stack_size(_STACK)
    thread = threading.Thread(target=lambda: found.append(wrong(grammar)))
    thread.start()
    thread.join()
    if not found:
        sys.exit(1)
    sys.stdout.buffer.write(found[0].encode("utf-8"))


if __name__ == "__main__":
    _main()
