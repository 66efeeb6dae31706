"""Errors as HTTP answers, and what is logged of them."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from edgeinfer.core.errors import BundleError, EdgeInferError, InternalError
from edgeinfer.openai.errors import error_body

logger = logging.getLogger("edgeinfer.server")

_HEADERS: Mapping[int, Mapping[str, str]] = {
    401: {"WWW-Authenticate": "Bearer"},
    408: {"Connection": "close"},
    # Seconds after which a retry may succeed.
    429: {"Retry-After": "1"},
    503: {"Retry-After": "1"},
}
_OUR_FAULT = 500


class ClientGoneError(Exception):
    """The client hung up, so no answer is needed."""


def let_go(error: BaseException) -> None:
    """Free what an error's frames keep alive: traceback, frames and error form reference cycles, which would keep a
    request until the next garbage collection. Line numbers stay in the traceback."""
    known: set[int] = set()
    left = [error]
    while left:
        each = left.pop()
        if id(each) in known:
            continue
        known.add(id(each))
        traceback.clear_frames(each.__traceback__)
        left += [other for other in (each.__cause__, each.__context__) if other is not None]
        left += each.exceptions if isinstance(each, BaseExceptionGroup) else ()


def error_answer(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return status and body for an error; internal errors are logged with their place. Messages may quote a prompt, so
    they are logged at debug level only."""
    known = error if isinstance(error, EdgeInferError) else InternalError("Unexpected error.")
    status, body = error_body(known)
    if status == _OUR_FAULT:
        if isinstance(known, BundleError):
            # Found in the files of the loaded model; it quotes no prompt.
            logger.error("%s", known)
            return status, body
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown place"
        logger.error("unexpected %s at %s", type(error).__name__, place)
        logger.debug("what it says:", exc_info=error)
    let_go(error)
    return status, body


def error_response(error: Exception, path: str) -> Response:
    """Make the answer to a failed request in the shape that clients of its path expect."""
    status, body = error_answer(error)
    return JSONResponse(shape_of(path)(status, body), status_code=status, headers=_HEADERS.get(status))


def shape_of(path: str) -> Shape:
    """The error format of a path; OpenAI's unless another protocol owns it."""
    return next((shape for prefix, shape in _SHAPES.items() if path.startswith(prefix)), lambda _, body: body)


# Converts a status and OpenAI's body.
Shape = Callable[[int, dict[str, Any]], dict[str, Any]]


_ANTHROPIC = {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}
_ANTHROPIC |= {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error"}


def _as_anthropic(status: int, body: dict[str, Any]) -> dict[str, Any]:
    kind = _ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
    detail = body["error"]
    message = detail["message"]
    if "n_prompt_tokens" in detail:  # agents recognize this wording and shorten the conversation
        message = f"prompt is too long: {detail['n_prompt_tokens']} tokens > {detail['n_ctx']} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}}


_SHAPES: Mapping[str, Shape] = {
    "/api/": lambda _, body: {"error": body["error"]["message"]},
    "/v1/messages": _as_anthropic,
}
