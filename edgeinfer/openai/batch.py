"""Lines of files in OpenAI's batch format: the request of a line, and the line that answers it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NoReturn

from edgeinfer.core.errors import EdgeInferError, shown
from edgeinfer.core.records import dataclass
from edgeinfer.openai.contract import Event
from edgeinfer.openai.errors import RequestError, error_body

# The endpoints that a line may name, and the kinds of their requests.
_KINDS = {"/v1/chat/completions": "chat.completion", "/v1/completions": "text_completion"}
_HINT = 'A line is an OpenAI batch request, or an object with "prompt" or "messages".'


@dataclass(frozen=True)
class BatchRequest:
    """The request of a line; `make_completion` takes its kind."""

    kind: str
    body: Mapping[str, Any]


def read_object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data.decode("utf-8-sig").strip(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise _wrong(f"The line is not UTF-8 text (byte {error.start}).") from error
    except RecursionError as error:
        raise _wrong("The line is nested too deeply.") from error
    except ValueError as error:
        # The message of json gives the place of a mistake, and quotes nothing.
        what = "a number is too long"
        if isinstance(error, json.JSONDecodeError):
            what = f"{error.msg.removesuffix(' at')} at character {error.pos}"
        raise _wrong(f"The line is not JSON: {what}.") from error
    if not isinstance(value, dict):
        raise _wrong("The line is not a JSON object.")
    return value


def read_id(line: Mapping[str, Any], number: int) -> str:
    """The id of a line's request; by default its number, from 1."""
    name = line.get("custom_id")
    if name is None:
        return f"line-{number}"
    if not isinstance(name, str) or not name:
        raise _wrong(f"custom_id is {shown(name)}.", "Give a text of its own to each line.", "custom_id")
    return name


def read_request(line: Mapping[str, Any], defaults: Mapping[str, Any]) -> BatchRequest:
    """Read the request of a line. Without a seed, its id gives one, so that the same line gives the same text again."""
    if "body" in line or "url" in line:
        kind, body = _enclosed(line)
    else:
        body = {name: value for name, value in line.items() if name != "custom_id"}
        if ("prompt" in body) == ("messages" in body):
            raise _wrong("The line has both prompt and messages." if "prompt" in body else "The line has no request.")
        kind = _KINDS["/v1/completions" if "prompt" in body else "/v1/chat/completions"]
    given = dict(defaults)
    if "max_completion_tokens" in body:
        given.pop("max_tokens", None)
    if body.get("seed") is None and "sampling" not in body:
        given["seed"] = int.from_bytes(_digest(line)[:8], "big")
    given |= {name: value for name, value in body.items() if value is not None and name != "stream_options"}
    return BatchRequest(kind, given | {"stream": False})


def answer_line(custom_id: str, answer: Event | EdgeInferError) -> dict[str, Any]:
    """The line that answers a request: with the completion, or with the error."""
    status, body = error_body(answer) if isinstance(answer, EdgeInferError) else (200, answer)
    name = hashlib.sha256(custom_id.encode("utf-8", "surrogatepass")).hexdigest()[:24]
    response = {"status_code": status, "request_id": f"req_{name}", "body": body}
    return {"id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": None}


def damaged_line(number: int, custom_id: str | None, error: RequestError) -> dict[str, Any]:
    """The line that replaces one without a valid request."""
    body = {"code": error.code, "message": f"Line {number}: {error}", "param": error.param, "line": number}
    return {"id": f"batch_req_line_{number}", "custom_id": custom_id, "response": None, "error": body}


def _enclosed(line: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    url, body = line.get("url"), line.get("body")
    if line.get("method") not in (None, "POST"):
        raise _wrong(f"method is {shown(line['method'])}.", "It must be POST.", "method")
    if not isinstance(url, str) or url not in _KINDS:
        raise _wrong(f"url is {shown(url)}.", f"Choose one of {', '.join(_KINDS)}.", "url")
    if not isinstance(body, dict):
        raise _wrong("The line has no body.", "Give the request's JSON object.", "body")
    unknown = {name for name, value in line.items() if value is not None} - {"custom_id", "method", "url", "body"}
    if unknown:
        raise _wrong(f"Unknown field {shown(min(unknown))}.", "Fields of the request belong into body.", min(unknown))
    return _KINDS[url], body


def _digest(line: Mapping[str, Any]) -> bytes:
    named = line.get("custom_id") or json.dumps(line, sort_keys=True)
    return hashlib.sha256(named.encode("utf-8", "surrogatepass")).digest()


def _refuse_constant(name: str) -> NoReturn:
    raise json.JSONDecodeError(f"{name} is no JSON", name, 0)


def _wrong(message: str, hint: str = _HINT, param: str | None = None) -> RequestError:
    return RequestError(message, hint, param=param, code="invalid_line")
