"""Which form of calls a chat template uses: a known one, or one derived from how the template renders calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from edgeinfer.core.errors import EdgeInferError
from edgeinfer.core.results import Chunk
from edgeinfer.openai.calls import ArgumentsPiece, CallPiece, CallReader
from edgeinfer.openai.contract import ChatModel
from edgeinfer.openai.dialects import FORMATS, HERMES, TAG, Dialect, Kinds, Style, ToolFormat, as_json

Render = Callable[..., str]
_TOOLS = re.compile(r"\btools\b")
_MOST_TEMPLATES = 64

# Texts that a template writes into a call, which are found again in what it renders.
_NAMES, _KEYS, _VALUES, _REPLY = ("zqfone", "zqftwo"), ("zqka", "zqkb"), ("zqva", "zqvb"), "zqreply"
_ARGUMENTS = dict(zip(_KEYS, _VALUES, strict=True))
_SCHEMA = {"type": "object", "properties": {key: {"type": "string"} for key in _KEYS}, "required": [*_KEYS]}
_JSON = re.compile(r'\{\s*"zqka":\s*"zqva",\s*"zqkb":\s*"zqvb"\s*\}')
_TAGGED = re.compile(r"(?s)(.*?)zqka(.*?)zqva(.*?)zqkb(.*?)zqvb(.*)")

_found: dict[str | None, Dialect] = {}


def dialect_of(model: ChatModel[Any]) -> Dialect:
    """The dialect of a model; its template is looked at once."""
    template = model.tool_template_text
    found = _found.get(template)
    if found is None:
        if len(_found) >= _MOST_TEMPLATES:
            _found.clear()
        found = _found[template] = detect(template, model.render_chat)
    return found


def detect(template: str | None, render: Render | None = None) -> Dialect:
    """The dialect of a template. Hermes' in messages where it knows no functions, or none of their forms is found."""
    if template is None or not _TOOLS.search(template):
        return Dialect(HERMES, native=False)
    known = [form for form in FORMATS.values() if form.known_by(template)]
    rendered = None if render is None or len(known) == 1 else _rendered(template, render)
    if known:
        read = (form for form in known if rendered is not None and _reads(form, rendered[0], 1))
        return Dialect(next(read, known[0]), native=True)
    derived = None if rendered is None else _derived(*rendered)
    return Dialect(HERMES, native=False) if derived is None else Dialect(derived, native=True)


def _rendered(template: str, render: Render) -> tuple[str, str | None] | None:
    """What the template makes of a reply with one call and with two; None where it leaves calls out."""

    def turn(count: int) -> str:
        calls = [
            {"id": f"zqid0000{place}", "type": "function", "function": {"name": name, "arguments": _ARGUMENTS}}
            for place, name in enumerate(_NAMES[:count])
        ]
        reply = {"role": "assistant", "content": None, "tool_calls": calls} if calls else None
        messages = [{"role": "user", "content": "zquser"}, reply or {"role": "assistant", "content": _REPLY}]
        tools = [
            {"type": "function", "function": {"name": name, "description": "zqwhat", "parameters": _SCHEMA}}
            for name in _NAMES
        ]
        return render(messages, tools=tools, variables={"add_generation_prompt": False})

    try:
        plain, one = turn(0), turn(1)
    except EdgeInferError:
        return None
    try:
        two = turn(2)
    except EdgeInferError:
        two = None
    if _REPLY not in plain or ("<tool_call>" in one and "<tool_call>" not in template):
        return None  # calls were put into the text in Hermes' form
    head, _, end = plain.rpartition(_REPLY)
    return _between(one, head, end), None if two is None else _between(two, head, end)


def _between(text: str, before: str, behind: str) -> str:
    rest = text[len(_common_start(text, before)) :]
    return rest[: len(rest) - len(_common_end(rest, behind))]


def _reads(form: ToolFormat, text: str, count: int) -> bool:
    """Whether a reader of the form finds the calls in the text, and nothing else."""
    reader = CallReader(form, _NAMES, Kinds(dict.fromkeys(_NAMES, _SCHEMA)))
    pieces = [*reader.push(Chunk(text, ())), *reader.finish()]
    calls: list[list[str]] = []
    for piece in pieces:
        if isinstance(piece, CallPiece):
            calls.append([piece.name, ""])
        elif isinstance(piece, ArgumentsPiece):
            calls[piece.place][1] += piece.text
        elif piece.text.strip():
            return False
    return [(name, as_json(text)) for name, text in calls] == [(name, (_ARGUMENTS,)) for name in _NAMES[:count]]


def _derived(one: str, two: str | None) -> ToolFormat | None:
    """The form of rendered calls; None where it is none that can be written and read again."""
    head, name, rest = one.partition(_NAMES[0])
    if not name or not head.strip():
        return None
    parameter = ""
    style: Style = "json"
    if (found := _JSON.search(rest)) is not None:
        middle, tail = rest[: found.start()], rest[found.end() :]
    elif (tags := _TAGGED.fullmatch(rest)) is not None:
        before, inner, between, other, behind = tags.groups()
        if before == "(" and inner in ('="', "='") and behind.startswith(f"{inner[-1]})"):
            style, middle, tail = "python", "(", behind[1:]
        else:
            lead = _common_end(before, between)
            lead = lead[max(lead.rfind("<"), lead.rfind("["), 0) :]  # what is before the tag ends another
            end = between[: len(between) - len(lead)]
            if inner != other or not lead.strip() or not TAG.search(end) or not behind.startswith(end):
                return None
            style, parameter = "tagged", f"{lead}{{key}}{inner}{{value}}{end}"
            middle, tail = before[: len(before) - len(lead)], behind[len(end) :]
    else:
        return None
    calls = "{calls}"
    several = two is not None and _NAMES[1] in two
    between = ""
    if several and two is not None:
        # Between two calls stand the end of one, what separates them, and the start of the next.
        joint = two[: two.index(_NAMES[1])]
        joint = joint[joint.index(middle, joint.index(_NAMES[0])) + len(middle) :]
        joint = _behind_arguments(joint, len(_VALUES[1]), style, parameter)
        start = _common_end(head, joint)
        end = _common_start(tail, joint[: len(joint) - len(start)])
        calls = f"{head[: len(head) - len(start)]}{{calls}}{tail[len(end) :]}"
        end = end.rstrip()
        between = joint[len(end) : len(joint) - len(start)]
        head, tail = start, end
    else:
        tail = tail.rstrip()
    form = ToolFormat(
        "derived",
        call=f"{head}{{name}}{middle}{{arguments}}{tail}",
        calls=calls,
        between=between,
        style=style,
        parameter=parameter,
        several=several,
        anywhere=(opening := (calls.partition("{calls}")[0] + head).lstrip()).startswith("<")
        or TAG.match(opening) is not None,
    )
    read = _reads(form, one, 1) and (not several or two is None or _reads(form, two, 2))
    return form if read else None


def _behind_arguments(text: str, length: int, style: str, parameter: str) -> str:
    """What follows the arguments that a text begins with."""
    if style == "json":
        found = _JSON.match(text)
        return text if found is None else text[found.end() :]
    text = text[text.index(_VALUES[1]) + length :]
    return text[1:] if style == "python" else text[len(parameter.partition("{value}")[2]) :]


def _common_start(one: str, two: str) -> str:
    return one[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))]


def _common_end(one: str, two: str) -> str:
    return _common_start(one[::-1], two[::-1])[::-1]
