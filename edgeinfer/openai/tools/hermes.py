"""Calls as Hermes, Qwen and many others write them, and how a model is told of it that knows no functions."""

from __future__ import annotations

import json
from collections.abc import Sequence

from edgeinfer.openai.tools.format import ToolFormat
from edgeinfer.openai.tools.functions import Function

__all__ = ["HERMES", "described", "response"]

HERMES = ToolFormat(
    name="hermes",
    signs=("<tool_call>",),
    marker="<tool_call>",
    prefix="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    suffix="\n</tool_call>",
    # Of Qwen3-Coder and GLM, whose arguments are elements of XML.
    others=("<function=", "<arg_key>"),
)
# As Qwen's templates say it.
_DESCRIPTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{functions}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def described(functions: Sequence[Function]) -> str:
    """What a system message says of functions."""
    lines = [json.dumps(function.as_tool(), ensure_ascii=False) for function in functions]
    return _DESCRIPTION.format(functions="\n".join(lines))


def response(content: str) -> str:
    """What a user's message says of a function's answer."""
    return f"<tool_response>\n{content}\n</tool_response>"
