"""The JSON of request bodies, checked before and after it is parsed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from edgeinfer.apps.server.errors import ClientGoneError
from edgeinfer.apps.server.security import Security
from edgeinfer.openai.errors import RequestError

# Key of a scope: the context manager around the use of a request's body.
BODY = "edgeinfer.body"
# Parsing a larger body would delay other streams: one is parsed at a time, on another thread.
LARGE = 64 * 1024
# Fields that are compiled, or put into the prompt as they are; compiling takes time that grows with their size.
_COMPILED = (
    "response_format", "format", "output_config", "tools", "functions", "text", "json_schema", "regex", "grammar",
    "choices", "structured_outputs", "output_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "ebnf",
)  # fmt: skip
# Strings, which are left out when values are counted.
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


async def read_json(
    request: Request, security: Security, *, most: int | None = None, optional: bool = False
) -> dict[str, Any]:
    """Read a request's JSON object of at most `most` bytes; if `optional`, a missing body is an empty object."""
    async with json_body(request, security, most=most, optional=optional) as body:
        return body


@contextlib.asynccontextmanager
async def json_body(
    request: Request, security: Security, *, most: int | None = None, optional: bool = False
) -> AsyncIterator[dict[str, Any]]:
    """Give a request's JSON object while it is used; large bodies take turns. See `read_json`."""
    data = await _bytes(request, most)
    async with request.scope.get(BODY, contextlib.nullcontext)():
        if optional and not data:
            yield {}
        elif len(data) <= LARGE:
            yield parse_json(data, security)
        else:
            body = await asyncio.to_thread(parse_json, data, security)
            del data
            yield body


async def _bytes(request: Request, most: int | None) -> bytes:
    """Read a request's body without keeping it in the request."""
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
    """Whether a request has a schema or grammar to compile, which takes long if it is hostile."""
    return any(body.get(name) is not None for name in _COMPILED)


def parse_json(data: bytes, security: Security) -> dict[str, Any]:
    """Parse and check an object."""
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
        # Messages of json name the place of a mistake and quote nothing.
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
    """Refuse, before parsing, a body whose many values would take far more memory than its text."""
    if _separators(data) > security.max_values and _separators(_TEXT.sub(b"", data)) > security.max_values:
        message = f"The request's body has more than {security.max_values} values."
        raise RequestError(message, "Send fewer.", code="too_many_values")


def _separators(data: bytes) -> int:
    """Count separators of values: at least the number of values less one."""
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def _check_values(body: Mapping[str, Any], security: Security) -> None:
    """Refuse deep nesting, and numbers and texts that the rest of the program cannot handle."""
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


def ignored_header(ignored: Sequence[str]) -> dict[str, str]:
    """The header that names ignored fields."""
    return {"Warning": f'299 - "ignored: {", ".join(ignored)}"'} if ignored else {}


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
    message = f"The request's body nests objects and arrays more than {security.max_depth} levels deep."
    return RequestError(message, "Send a flatter one.", code="too_deep")
