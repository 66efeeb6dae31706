"""API keys, what each may ask for in a minute, and what it has asked for."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edgeinfer.errors import UsageError
from edgeinfer.openai.errors import RequestError
from edgeinfer.results import Result

_SHORTEST = 8
_MINUTE_S = 60.0
_LIMITS = ("requests", "tokens")


@dataclass(frozen=True)
class ApiKey:
    """A key that requests may bear.

    Attributes:
        key: the secret.
        requests: that it may ask in a minute; None is any number.
        tokens: that may be evaluated and made for it in a minute; None is any number.

    Raises:
        UsageError: it is too short, cannot stand in a header, or has a limit of nothing.
    """

    key: str = field(repr=False)
    requests: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if len(self.key) < _SHORTEST or not self.key.isascii() or not self.key.isprintable() or " " in self.key:
            hint = f"It must be {_SHORTEST} or more ASCII characters without spaces, the more the safer."
            raise UsageError("The API key cannot be used.", hint)
        if any(limit is not None and limit <= 0 for limit in (self.requests, self.tokens)):
            raise UsageError("A limit of an API key is not positive.", "Leave the key out, so that it is refused.")

    def is_given(self, authorization: str | None) -> bool:
        """Whether a request bears it; takes as long for any key of the same length."""
        scheme, _, given = (authorization or "").partition(" ")
        same = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self.key.encode("ascii"))
        return same and scheme.lower() == "bearer"


def parse_keys(text: str, name: str) -> tuple[ApiKey, ...]:
    """The keys of a file: one a line, behind each what it may ask for in a minute, such as requests=60 tokens=20000."""
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        key, *words = line.split() or [""]
        if not key or key.startswith("#"):
            continue
        limits: dict[str, int] = {}
        for word in words:
            limit, equals, value = word.partition("=")
            if limit not in _LIMITS or not equals or not value.isdecimal() or len(value) > 12:
                raise UsageError(
                    f"Line {number} of {name} is no key with limits.", "Write KEY requests=60 tokens=20000."
                )
            limits[limit] = int(value)
        keys.append(ApiKey(key, **limits))
    if not keys:
        raise UsageError(f"{name} has no key.", "Write one into it, on one line.")
    return tuple(keys)


class _Allowance:
    """So much a minute, which comes back evenly; what is spent at once may be more, and is then waited for."""

    def __init__(self, limit: int | None, now: float) -> None:
        self._limit, self._left, self._since = limit, float(limit or 0), now

    def wait(self, now: float) -> float:
        """Seconds until there is any."""
        if self._limit is None:
            return 0.0
        self._left = min(self._limit, self._left + (now - self._since) * self._limit / _MINUTE_S)
        self._since = now
        return max(0.0, (1.0 - self._left) * _MINUTE_S / self._limit)

    def spend(self, count: int) -> None:
        """Takes so much."""
        self._left -= count


class KeyUse:
    """What was asked for with one key.

    Args:
        key: it.
        clock: tells seconds.
    """

    def __init__(self, key: ApiKey, clock: Callable[[], float] = time.monotonic) -> None:
        self.key, self._clock = key, clock
        self._requests, self._tokens = (_Allowance(limit, clock()) for limit in (key.requests, key.tokens))

    def admit(self) -> None:
        """Counts a request."""
        for name, allowance in (("requests", self._requests), ("tokens", self._tokens)):
            if (seconds := allowance.wait(self._clock())) > 0:
                message = f"The API key has had its {name} of this minute."
                hint = f"Ask again in {seconds:.0f} s." if seconds >= 1 else "Ask again in a moment."
                raise RequestError(message, hint, status=429, code="rate_limit_exceeded")
        self._requests.spend(1)

    def add(self, result: Result) -> None:
        """Counts the tokens that a reply took: of its prompt those that no cache held."""
        usage, cached = result.usage, result.timings.cached_prompt_tokens
        self._tokens.spend(max(0, usage.prompt_tokens - cached) + usage.completion_tokens)


class KeyUses:
    """What was asked for with each of some keys."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._uses = [KeyUse(key) for key in keys]

    def find(self, authorization: str | None) -> KeyUse | None:
        """Of the key that a request bears; None where it bears none of them."""
        found = [use for use in self._uses if use.key.is_given(authorization)]
        return found[0] if found else None
