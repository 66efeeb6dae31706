"""What a caller's check costs: calls for each token, and time beside plain sampling and a mask of all tokens.

    python -m tests.tools.checks

The built-in model writes stories without words of more than five letters, by a check that looks for them.
"""

from __future__ import annotations

import re
import time

import edgeinfer

_TOO_LONG = re.compile(r"[^\W\d_]{6,}")
# Of the built-in model.
_VOCABULARY = 4096
_REPLIES, _TOKENS = 8, 60


def _main() -> None:
    model = edgeinfer.load(threads=1)
    calls = 0

    def check(text: str, ended: bool) -> bool:
        nonlocal calls
        calls += 1
        return _TOO_LONG.search(text) is None

    for name, checker in (("plain", None), ("checked", check)):
        tokens, broken, started = 0, 0, time.process_time()
        for seed in range(_REPLIES):
            result = model.generate(
                "Once upon a time", max_tokens=_TOKENS, temperature=0.8, seed=seed, speculation="off", checker=checker
            )
            tokens += result.usage.completion_tokens
            broken += len(_TOO_LONG.findall(result.text))
        spent = (time.process_time() - started) * 1e3 / tokens
        print(f"{name}: {spent:.2f} ms of processor time a token, {calls / tokens:.2f} calls, {broken} long words")
    text, started = "Once upon a time there was a little girl", time.process_time()
    for token in range(_VOCABULARY):
        check(text + model.detokenize([token]), False)
    print(f"asking about every token: {(time.process_time() - started) * 1e3:.1f} ms")


if __name__ == "__main__":
    _main()
