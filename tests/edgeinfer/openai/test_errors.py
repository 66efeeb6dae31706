"""Errors as clients read them: statuses, codes, fields, and nothing of what broke inside."""

from __future__ import annotations

from typing import Any

from edgeinfer.errors import (
    BackendError,
    BudgetError,
    BundleError,
    CapabilityError,
    ContextLengthError,
    EdgeInferError,
    GrammarError,
    PromptError,
    TemplateError,
    UsageError,
)
from edgeinfer.openai.errors import RequestError, error_body, unknown_model
from tests.tables import each_row


class BusyError(UsageError):
    """An error that names its own status."""

    status = 503
    code = "busy"


CASES: list[tuple[EdgeInferError, int, str, str | None, str | None]] = [
    (UsageError("No.", "Do."), 400, "invalid_request_error", None, None),
    (PromptError("No."), 400, "invalid_request_error", None, None),
    (ContextLengthError("No."), 400, "invalid_request_error", "context_length_exceeded", None),
    (GrammarError("No."), 400, "invalid_request_error", "unsupported_schema", None),
    (TemplateError("No."), 400, "invalid_request_error", "template_rejected", None),
    (CapabilityError("No."), 501, "not_supported_error", "not_supported", None),
    (BudgetError("No."), 503, "unavailable_error", "insufficient_memory", None),
    (BusyError("No."), 503, "unavailable_error", "busy", None),
    (BundleError("No."), 500, "server_error", "internal_error", None),
    (RequestError("No.", param="n", code="x", status=429), 429, "rate_limit_error", "x", "n"),
    (unknown_model("gpt"), 404, "invalid_request_error", "model_not_found", "model"),
]


@each_row(("error", "status", "kind", "code", "param"), CASES)
def test_errors(error: EdgeInferError, status: int, kind: str, code: Any, param: Any) -> None:
    found, body = error_body(error)
    assert found == status
    assert set(body) == {"error"}
    told = body["error"]
    assert (told["type"], told["code"], told["param"]) == (kind, code, param)
    assert status == 500 or told["message"] == str(error)


def test_nothing_of_what_broke_inside_is_told() -> None:
    status, body = error_body(BackendError("onnxruntime failed at /home/someone/model.onnx", "secret hint"))
    assert status == 500
    assert "someone" not in str(body) and "secret" not in str(body)
