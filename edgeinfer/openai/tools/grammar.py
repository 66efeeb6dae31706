"""Grammars of replies that may, or must, call functions; knows nothing of requests or of reading replies."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from edgeinfer.openai.tools.choice import ToolChoice
from edgeinfer.openai.tools.format import ToolFormat
from edgeinfer.runtime.sampling import json_rule

__all__ = ["calls_grammar"]

_ANY = "/(?s:.*)/"


def calls_grammar(
    form: ToolFormat, choice: ToolChoice, marker_id: int | None, content: Mapping[str, Any] | None = None
) -> str:
    """A grammar in Lark's notation: free text up to the marker, from there on valid calls and nothing else.

    Args:
        form: how calls are written.
        choice: what may be called, and whether something must be.
        marker_id: of the marker where it is a special token, which no text spells; else None.
        content: schema of a reply without calls; None leaves it free.

    Raises:
        GrammarError: a schema is too large, too deep or not JSON.
    """
    marker = json.dumps(form.marker) if marker_id is None else f"<[{marker_id}]>"
    more = f" ({json.dumps(form.between)} call)*" if choice.several and form.several else ""
    calls = f"first{more}" + (f" {json.dumps(form.suffix)}" if form.suffix else "")
    rules = _call_rules(form, choice)
    if choice.mode == "required":
        return "\n".join([f"start: {marker} {calls}", *rules])
    if content is not None:
        return "\n".join([f"start: content | {marker} {calls}", f"content: {json_rule(content)}", *rules])
    if not form.anywhere:
        free = f"TEXT: {_ANY} & ~/{_escaped(form.marker)}(?s:.*)/"
        return "\n".join([f"start: TEXT | {marker} {calls}", free, *rules])
    if marker_id is not None:
        return "\n".join([f"start: TEXT | TEXT {marker} {calls}", f"TEXT: {_ANY}", *rules])
    free = f"text: {_ANY}\nbefore[suffix={marker}]: {_ANY}"
    return "\n".join([f"start: text | before {calls}", free, *rules])


def _call_rules(form: ToolFormat, choice: ToolChoice) -> list[str]:
    """`first` stands behind the marker, `call` behind another call."""
    names = [function.name for function in choice.functions]
    behind = len(form.marker)
    firsts = _alternatives([(form.prefix + form.head(name))[behind:] for name in names], form.tail)
    calls = _alternatives([form.head(name) for name in names], form.tail)
    rules = [json_rule(function.arguments, compact=True) for function in choice.functions]
    arguments = [f"args_{i}: {rule}" for i, rule in enumerate(rules)]
    return [f"first: {firsts}", f"call: {calls}", *arguments]


def _alternatives(heads: Sequence[str], tail: str) -> str:
    return " | ".join(f"{json.dumps(head)} args_{i} {json.dumps(tail)}" for i, head in enumerate(heads))


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
