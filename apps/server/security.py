"""Who may use the server: hosts, origins, API keys and their limits, sizes of requests."""

from __future__ import annotations

import dataclasses
import hmac
import ipaddress
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit

from edgeinfer.core.errors import Setting, UsageError
from edgeinfer.core.results import Result
from edgeinfer.openai.errors import RequestError

_SHORTEST = 8
_MINUTE_S = 60.0
_LIMITS = ("requests", "tokens")


@dataclass(frozen=True)
class ApiKey:
    """An API key of at least eight ASCII characters without spaces."""

    key: str = field(repr=False)
    requests: int | None = None  # allowed per minute; None is unlimited
    tokens: int | None = None  # evaluated and generated per minute; None is unlimited

    def __post_init__(self) -> None:
        if len(self.key) < _SHORTEST or not self.key.isascii() or not self.key.isprintable() or " " in self.key:
            hint = f"It must be {_SHORTEST} or more ASCII characters without spaces, the more the safer."
            raise UsageError("The API key cannot be used.", hint)
        if any(limit is not None and limit <= 0 for limit in (self.requests, self.tokens)):
            raise UsageError("A limit of an API key is not positive.", "Leave the key out, so that it is refused.")

    def is_given(self, authorization: str | None) -> bool:
        """Whether a request bears it, in constant time for keys of the same length."""
        scheme, _, given = (authorization or "").partition(" ")
        same = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self.key.encode("ascii"))
        return same and scheme.lower() == "bearer"


def parse_keys(text: str, name: str) -> tuple[ApiKey, ...]:
    """Parse a file of keys: one per line, followed by its limits per minute, such as requests=60 tokens=20000."""
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        key, *words = line.split() or [""]
        if not key or key.startswith("#"):
            continue
        limits: dict[str, int] = {}
        for word in words:
            limit, equals, value = word.partition("=")
            if limit not in _LIMITS or not equals or not value.isdecimal() or len(value) > 12:
                message = f"Line {number} of {name} is no key with limits."
                raise UsageError(message, "Write KEY requests=60 tokens=20000.")
            limits[limit] = int(value)
        keys.append(ApiKey(key, **limits))
    if not keys:
        raise UsageError(f"{name} has no key.", "Write one into it, on one line.")
    return tuple(keys)


class _Allowance:
    """A budget per minute, refilled evenly. Spending may overdraw it; the next request then waits."""

    def __init__(self, limit: int | None, now: float) -> None:
        self._limit, self._left, self._since = limit, float(limit or 0), now

    def wait(self, now: float) -> float:
        """Seconds until something is left."""
        if self._limit is None:
            return 0.0
        self._left = min(self._limit, self._left + (now - self._since) * self._limit / _MINUTE_S)
        self._since = now
        return max(0.0, (1.0 - self._left) * _MINUTE_S / self._limit)

    def spend(self, count: int) -> None:
        self._left -= count


class KeyUse:
    """The use of one key."""

    def __init__(self, key: ApiKey, clock: Callable[[], float] = time.monotonic) -> None:
        self.key, self._clock = key, clock
        self._requests, self._tokens = (_Allowance(limit, clock()) for limit in (key.requests, key.tokens))

    def admit(self) -> None:
        """Count a request, or refuse it."""
        for name, allowance in (("requests", self._requests), ("tokens", self._tokens)):
            if (seconds := allowance.wait(self._clock())) > 0:
                message = f"The API key has had its {name} of this minute."
                hint = f"Ask again in {seconds:.0f} s." if seconds >= 1 else "Ask again in a moment."
                raise RequestError(message, hint, status=429, code="rate_limit_exceeded")
        self._requests.spend(1)

    def add(self, result: Result) -> None:
        """Count the tokens of a reply, without cached prompt tokens."""
        usage, cached = result.usage, result.timings.cached_prompt_tokens
        self._tokens.spend(max(0, usage.prompt_tokens - cached) + usage.completion_tokens)


_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
# Interfaces that stand for every address of the machine.
_ALL_INTERFACES = ("0.0.0.0", "[::]")
_AUTHORITY = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:\d{1,5})?", re.ASCII | re.IGNORECASE)
# Bodies may take this fraction (1/N) of a memory budget.
_SHARE_OF_BODIES = 16


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an interface."""
    name = _bare(host)
    return name == "localhost" or (_is_address(name) and ipaddress.ip_address(name).is_loopback)


@dataclass(frozen=True)
class Security:
    """Who may use the server, and limits of requests. Another interface than loopback needs a key."""

    host: str = "127.0.0.1"  # interface that the server is bound to
    allowed_hosts: tuple[str, ...] = ()  # further names of it besides loopback ones; others are refused (DNS rebinding)
    # Other origins whose pages may use the server, such as "https://example.com"; "*" is all of them, with a key.
    allowed_origins: tuple[str, ...] = ()
    api_keys: tuple[ApiKey, ...] = ()  # of which requests must bear one
    max_body: int = 4 * 1000**2  # bytes of a request's body
    max_depth: int = 100  # nesting of objects and arrays in a body
    max_schema: int = 256 * 1000  # characters of a schema, a grammar, or a list of tools
    max_bodies: int = 16 * 1000**2  # bytes of all bodies being received or parsed, beyond which large ones are refused
    max_values: int = 300_000  # objects, arrays and their members in a body
    body_seconds: float = 10.0  # for a body to arrive, plus a second for every `body_rate` bytes of it
    body_rate: int = 16 * 1000  # bytes per second, at least
    comment_seconds: float = 10.0  # silence after which a stream sends a comment

    def __post_init__(self) -> None:
        for limit in dataclasses.fields(self):
            value = getattr(self, limit.name)
            if isinstance(value, int | float) and not 0 < value < math.inf:
                raise UsageError(Setting(limit.name, value) + " is out of range.", "Give a positive number.")
        if not self.api_keys and not is_loopback(self.host):
            message = f"On {self.host} others can reach the server, and it has no API key."
            raise UsageError(message, "Give one with --api-key-file or EDGEINFER_API_KEY, or bind to 127.0.0.1.")
        for name in (self.host, *self.allowed_hosts):
            if not _is_address(_bare(name)) and not _AUTHORITY.fullmatch(name):
                raise UsageError(f"{name!r} is not a host name.", "Give a name or an address, without scheme and port.")
        for origin in self.allowed_origins:
            self._check_origin(origin)

    def within(self, budget: int | None) -> Self:
        """Limit the memory for bodies to a share of a budget in bytes."""
        if budget is None:
            return self
        return dataclasses.replace(self, max_bodies=max(1, min(self.max_bodies, budget // _SHARE_OF_BODIES)))

    def _check_origin(self, origin: str) -> None:
        if origin == "*":
            if not self.api_keys:
                message = "Without an API key, any page that you open could use the model."
                raise UsageError(message, "Name the allowed origins, or give an API key.")
            return
        parts = urlsplit(origin)
        if not parts.scheme or not parts.netloc or parts.path or parts.query or parts.fragment:
            hint = "Write it like https://example.com or http://localhost:3000."
            raise UsageError(f"{origin!r} is not an origin.", hint)

    def knows_host(self, authority: str | None) -> bool:
        """Whether a Host header names this server."""
        match = _AUTHORITY.fullmatch(authority or "")
        if match is None:
            return False
        name = match["name"].lower()
        known = {_written(host) for host in (self.host, *self.allowed_hosts)}
        # An address cannot be rebound, as a name can.
        return name in known.union(_LOOPBACK) or (not known.isdisjoint(_ALL_INTERFACES) and _is_address(_bare(name)))

    def is_same_origin(self, origin: str, authority: str) -> bool:
        """Whether a page of an origin was served under the same authority."""
        return origin.lower() in (f"http://{authority.lower()}", f"https://{authority.lower()}")

    def allows_origin(self, origin: str) -> bool:
        """Whether pages of another origin may use the server."""
        return "*" in self.allowed_origins or origin.lower() in {known.lower() for known in self.allowed_origins}


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _bare(host: str) -> str:
    return host.lower().removeprefix("[").removesuffix("]")


def _written(host: str) -> str:
    """The form of a Host header: IPv6 addresses in brackets."""
    bare = _bare(host)
    return f"[{bare}]" if ":" in bare else bare
