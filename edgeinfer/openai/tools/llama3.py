"""Calls as Llama 3.1 and later write them: the reply is one JSON object."""

from __future__ import annotations

from edgeinfer.openai.tools.format import ToolFormat

__all__ = ["LLAMA3"]

LLAMA3 = ToolFormat(
    name="llama3",
    signs=("<|python_tag|>", '"parameters": dictionary'),
    marker='{"name": "',
    prefix="",
    between="; ",
    suffix="",
    anywhere=False,
    key="parameters",
    # "This model only supports single tool-calls at once!", its template says.
    several=False,
)
