"""Reads the JSON object of a request and refuses what is none, or is too deep or too large; knows nothing of its
fields' meaning but that some hold schemas."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from edgeinfer.apps.server.errors import ClientGoneError
from edgeinfer.apps.server.guard import UPLOAD
from edgeinfer.apps.server.security import Security
from edgeinfer.openai.errors import RequestError

__all__ = ["compiles", "json_body", "parse_json", "read_json"]

# Fields whose values are compiled, or put before the model as they are; compiling takes time that grows with them.
_COMPILED = ("response_format", "tools", "functions", "text", "json_schema", "regex", "grammar", "choices")
# Parsing more than this takes long enough for others' streams to notice, unless another thread does it.
_LARGE = 64 * 1024
# Texts are left out where values are counted, as what stands in them is none.
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


async def read_json(
    request: Request, security: Security, *, most: int | None = None, optional: bool = False
) -> dict[str, Any]:
    """The object that a request's body is.

    Args:
        most: bytes that it may have, where that is less than the server takes.
        optional: a request without a body has an object without fields.

    Raises:
        RequestError: it is none, or too large in some way.
        ClientGoneError: the client hung up before its end.
    """
    async with json_body(request, security, most=most, optional=optional) as body:
        return body


@contextlib.asynccontextmanager
async def json_body(
    request: Request, security: Security, *, most: int | None = None, optional: bool = False
) -> AsyncIterator[dict[str, Any]]:
    """The same while something is made of it, which of large bodies happens to one at a time."""
    data = await _bytes(request, most)
    async with request.scope.get(UPLOAD, contextlib.nullcontext)():
        if optional and not data:
            yield {}
        elif len(data) <= _LARGE:
            yield parse_json(data, security)
        else:
            body = await asyncio.to_thread(parse_json, data, security)
            del data
            yield body


async def _bytes(request: Request, most: int | None) -> bytes:
    """A request's body, which is not kept with it; arguments and errors as `json_body`."""
    announced = request.headers.get("content-length", "")
    if most is not None and announced.isdecimal() and int(announced[:20]) > most:
        raise _too_large(most)
    data = bytearray()
    try:
        async for part in request.stream():
            data += part
            if most is not None and len(data) > most:
                raise _too_large(most)
    except ClientDisconnect as error:
        raise ClientGoneError from error
    return bytes(data)


def compiles(body: Mapping[str, Any]) -> bool:
    """Whether a request has something that is compiled, which takes long where it is hostile."""
    return any(body.get(name) is not None for name in _COMPILED)


def parse_json(data: bytes, security: Security) -> dict[str, Any]:
    """The object that some bytes are; errors as `read_json`."""
    if not data:
        raise RequestError("The request has no body.", "Send a JSON object.", code="invalid_json")
    _check_count(data, security)
    try:
        body = json.loads(data.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise _malformed(f"byte {error.start} is not UTF-8") from error
    except RecursionError as error:
        raise _too_deep(security) from error
    except ValueError as error:
        # What json says of a mistake tells its place, and quotes nothing.
        raise _malformed(str(error) if isinstance(error, json.JSONDecodeError) else "a number is too long") from error
    if not isinstance(body, dict):
        raise RequestError("The request's body is not a JSON object.", "Send one, as {...}.", code="invalid_json")
    _check_values(body, security)
    for name in _COMPILED:
        if len(data) > security.max_schema and len(json.dumps(body.get(name))) > security.max_schema:
            message = f"{name} is larger than {security.max_schema} characters."
            raise RequestError(message, "Send a smaller one.", code="schema_too_large", param=name)
    return body


def _check_count(data: bytes, security: Security) -> None:
    """Refuses what has so many values that they take far more memory than their text, before they are made."""
    if _separators(data) > security.max_values and _separators(_TEXT.sub(b"", data)) > security.max_values:
        message = f"The request's body has more than {security.max_values} values."
        raise RequestError(message, "Send fewer.", code="too_many_values")


def _separators(data: bytes) -> int:
    """At least as many as there are values, but for one."""
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def _check_values(body: Mapping[str, Any], security: Security) -> None:
    """Refuses what is too deep, and numbers and texts that nothing behind this could handle."""
    level: list[Any] = [body]
    for _ in range(security.max_depth):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += value.keys()
                inner += value.values()
            elif isinstance(value, list):
                inner += value
            elif isinstance(value, str):
                _check_text(value)
            elif isinstance(value, float) and not math.isfinite(value):
                raise _malformed("a number is too large")
        if not inner:
            return
        level = inner
    raise _too_deep(security)


def _check_text(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _malformed("a text has half of a surrogate pair, which is no character") from error


def _refuse_constant(name: str) -> NoReturn:
    raise json.JSONDecodeError(f"{name} is not JSON", name, 0)


def _malformed(reason: str) -> RequestError:
    message = f"The request's body is not valid JSON: {reason}."
    return RequestError(message, "Send a JSON object in UTF-8.", code="invalid_json")


def _too_large(most: int) -> RequestError:
    message = f"The request's body is larger than {most} bytes, far more than the model's context holds."
    return RequestError(message, "Send less.", status=413, code="body_too_large")


def _too_deep(security: Security) -> RequestError:
    message = f"The request's body has more than {security.max_depth} objects and arrays in one another."
    return RequestError(message, "Send a flatter one.", code="too_deep")
