"""Calls as Mistral's models write them: a list behind a special token."""

from __future__ import annotations

from edgeinfer.openai.tools.format import ToolFormat

__all__ = ["MISTRAL"]

MISTRAL = ToolFormat(
    name="mistral",
    signs=("[TOOL_CALLS]",),
    marker="[TOOL_CALLS]",
    prefix="[TOOL_CALLS][",
    between=", ",
    suffix="]",
    # "Tool call IDs should be alphanumeric strings with length 9!", its templates say.
    id_length=9,
    # Of later models, which write [TOOL_CALLS]name[ARGS]{...}.
    others=("[ARGS]",),
)
