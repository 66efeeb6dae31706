"""Errors as OpenAI's clients read them: a status and a body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgeinfer.core.errors import (
    BudgetError,
    CapabilityError,
    ContextLengthError,
    EdgeInferError,
    GrammarError,
    TemplateError,
    UsageError,
)
from edgeinfer.core.options import nearest

# Status and code of errors, by the first class that an error is of; the last is EdgeInferError.
Kinds = tuple[tuple[type[EdgeInferError], int, str | None], ...]

_KINDS: Kinds = (
    (ContextLengthError, 400, "context_length_exceeded"),
    (GrammarError, 400, "unsupported_schema"),
    (CapabilityError, 501, "not_supported"),
    (UsageError, 400, None),
    (TemplateError, 400, "template_rejected"),
    (BudgetError, 503, "insufficient_memory"),
    (EdgeInferError, 500, "internal_error"),
)
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
# Characters of a text in an answer: long inputs are not sent back.
_MOST_SHOWN = 1000
# Characters of a quoted name, and how many names an answer lists.
_LONGEST_NAME = 200
_NAMED = 8
_INTERNAL = "The model could not answer; the server's own output says why."


class RequestError(UsageError):
    """A field of a request that cannot be followed, by its place such as "messages[0].content"."""

    def __init__(
        self,
        message: str,
        hint: str = "",
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        sizes: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message, hint)
        self.sizes = sizes
        self.param = param
        self.code = code
        self.status = status


def unknown_model(name: str, known: Sequence[str] = ()) -> RequestError:
    """The error of a request for a model that is not served."""
    close = nearest(name, known)
    listed = ", ".join(known[:_NAMED]) + (", ..." if len(known) > _NAMED else "")
    hints = [f"Did you mean {close!r}?"] if close else [f"Models here: {listed}."] if known else []
    hint = " ".join([*hints, "GET /v1/models lists what is served."])
    message = f"The model {name[:_LONGEST_NAME]!r} does not exist here."
    return RequestError(message, hint, param="model", code="model_not_found", status=404)


def error_body(error: EdgeInferError) -> tuple[int, dict[str, Any]]:
    """The HTTP status of an error, which may bring its own, and its JSON object, without internal details."""
    status, code = status_and_code(error, _KINDS)
    message = _INTERNAL if status == 500 else _cut(str(error))
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    param = getattr(error, "param", None)
    param = _cut(param) if isinstance(param, str) else param
    body = {"message": message, "type": kind, "param": param, "code": code}
    if sizes := getattr(error, "sizes", None):  # as llama.cpp's server names them
        body |= {"n_prompt_tokens": sizes[0], "n_ctx": sizes[1]}
    return status, {"error": body}


def status_and_code(error: EdgeInferError, kinds: Kinds) -> tuple[int, str | None]:
    """The HTTP status and the code of an error, which may bring its own."""
    status, code = next((status, code) for kind, status, code in kinds if isinstance(error, kind))
    return getattr(error, "status", status), getattr(error, "code", None) or code


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
