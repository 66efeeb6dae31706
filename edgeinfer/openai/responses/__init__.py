"""/v1/responses: a request's fields and items, and answers and events as OpenAI's reference has them; knows no HTTP."""

from __future__ import annotations

from edgeinfer.openai.responses.completion import ResponseCompletion

__all__ = ["ResponseCompletion"]
