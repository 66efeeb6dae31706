"""How models write calls of functions: the forms of `dialects.toml`, which a chat template uses, and calls as text."""

from __future__ import annotations

import hashlib
import json
import keyword
import re
import secrets
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from importlib.resources import files
from typing import Any, Literal, NoReturn

from edgeinfer.core.records import dataclass

_ID_LENGTH = 24
# Tags, any of which may be a special token.
TAG = re.compile(r"<[^<>\s{}]+>|\[[A-Z_]+\]")
# Dialects write text as it is and cannot escape it. Where it would end early, it is written as a JSON string instead,
# with this for "<", by which a reader knows it again.
_ESCAPED = "\\u003c"

Render = Callable[..., str]
Style = Literal["json", "tagged", "python", "bare"]


@dataclass(frozen=True)
class ToolFormat:
    """A form of calls; `dialects.toml` explains the fields."""

    name: str
    call: str
    calls: str = "{calls}"
    between: str = ""
    style: Style = "json"
    parameter: str = ""
    quote: str = ""
    marker: str = ""
    anywhere: bool = True  # whether text may precede the marker; else it only counts at the very start
    several: bool = True  # whether the models' templates know replies of more than one call
    ends_turn: bool = False  # whether a call ends with a stop token
    id: str = ""
    id_length: int = 0  # letters and digits of an id, where templates insist on it; 0 is OpenAI's
    signs: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    def known_by(self, template: str) -> bool:
        found = all(re.search(sign, template) for sign in self.signs)
        return bool(self.signs) and found and not any(re.search(sign, template) for sign in self.others)

    @cached_property
    def ends(self) -> tuple[str, str]:
        """The texts before and after all calls."""
        before, _, after = self.calls.partition("{calls}")
        return before, after

    @cached_property
    def parts(self) -> tuple[str, str, str]:
        """The texts before a call's name, between name and arguments, and after them."""
        head, _, rest = self.call.partition("{name}")
        middle, _, tail = rest.partition("{arguments}")
        return head, middle, tail

    @cached_property
    def tags(self) -> tuple[str, str, str]:
        """The texts before a parameter's key, between key and value, and after the value."""
        head, _, rest = self.parameter.partition("{key}")
        middle, _, tail = rest.partition("{value}")
        return head, middle, tail

    @property
    def family(self) -> tuple[ToolFormat, ...]:
        """The form and those that its models fall into."""
        return (self, *(FORMATS[name] for name in self.also))

    @cached_property
    def opening(self) -> str:
        """The marker, which may hold a function's name."""
        if self.marker:
            return self.marker
        text = self.ends[0] + self.parts[0]
        tag = TAG.match(text)
        return tag.group() if tag else text

    def markers(self, names: Sequence[str]) -> tuple[str, ...]:
        if "{name}" not in self.opening:
            return (self.opening,)
        return tuple(self.opening.replace("{name}", name) for name in names)

    @cached_property
    def tag_texts(self) -> tuple[str, ...]:
        """Texts in it that may be special tokens."""
        every = (self.calls, self.call, self.parameter, self.between)
        found = [tag for text in every for tag in TAG.findall(text)] + [self.quote]
        return tuple(dict.fromkeys(filter(None, found)))

    def new_id(self, name: str, index: int) -> str:
        if self.id:
            return self.id.format(name=name, index=index)
        if self.id_length:
            return secrets.token_hex(self.id_length)[: self.id_length]
        return f"call_{secrets.token_hex(_ID_LENGTH // 2)}"

    def fitted_id(self, id_: str, name: str, index: int) -> str:
        """A client's id of a call, changed to the form that templates of this format take."""
        if self.id:
            return self.id.format(name=name, index=index)
        if not self.id_length or (len(id_) == self.id_length and id_.isascii() and id_.isalnum()):
            return id_
        return hashlib.sha256(id_.encode("utf-8", "surrogatepass")).hexdigest()[: self.id_length]

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]], kinds: Kinds | None = None) -> str:
        """The text of calls, each a name and its arguments; `kinds` tell where a text stands without quotes."""
        texts = [self._written(name, arguments, place, kinds) for place, (name, arguments) in enumerate(calls)]
        return self.ends[0] + self.between.join(texts) + self.ends[1]

    def _written(self, name: str, arguments: Mapping[str, Any], place: int, kinds: Kinds | None) -> str:
        head, middle, tail = self.parts
        if self.style == "json":
            text = json.dumps(arguments, ensure_ascii=False)
        elif self.style == "tagged":
            known = kinds or Kinds({})
            text = "".join(self._parameter(key, value, known.of(name, key)) for key, value in arguments.items())
        elif self.style == "python":
            text = python_keywords(arguments)
        else:
            text = bare(arguments, self.quote)
        id_ = self.new_id(name, place)
        head, middle, tail = (part.replace("{index}", str(place)).replace("{id}", id_) for part in (head, middle, tail))
        return head + name + middle + text + tail

    def _parameter(self, key: str, value: Any, kind: Kind) -> str:
        head, middle, tail = self.tags
        if "{kind}" in middle:
            kind = "text" if isinstance(value, str) else "value"
            middle = middle.replace("{kind}", str(isinstance(value, str)).lower())
        close = tail.strip()
        if isinstance(value, str) and (kind == "text" or (kind == "either" and as_json(value) is None)):
            text = value if close not in value and not escaped(value) else _escaped_json(value)
        else:
            text = json.dumps(value, ensure_ascii=False)
            text = text.replace("<", _ESCAPED) if close in text else text
        return head + tag_key(key) + middle + text + tail


# Characters of a parameter's name that its tag could not hold.
_ODD_KEY = re.compile(r"[^\w .$-]|^ | $|[\n\r\t]")
_KEY_ESCAPE = re.compile(r"\\u\{([0-9a-f]{1,5})\}")


def tag_key(key: str) -> str:
    """A parameter's name as its tag holds it."""
    return _ODD_KEY.sub(lambda odd: f"\\u{{{ord(odd.group()):x}}}", key)


def plain_key(key: str) -> str:
    """A parameter's name as it was before a tag."""
    return _KEY_ESCAPE.sub(lambda found: chr(int(found.group(1), 16)), key)


Kind = Literal["text", "value", "either"]


@dataclass(frozen=True)
class Kinds:
    """By the schemas of functions, which of their parameters hold texts, which other values, and which may be both."""

    schemas: Mapping[str, Mapping[str, Any]]

    def of(self, name: str, key: str) -> Kind:
        properties = self.schemas.get(name, {}).get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return kind_of(schema, self.schemas.get(name, {}))


_MOST_HOPS = 8


def kind_of(schema: Any, root: Mapping[str, Any], hops: int = _MOST_HOPS) -> Kind:
    """Whether a schema allows texts only, no texts, or both."""
    if not isinstance(schema, Mapping) or not hops:
        return "either"
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return kind_of(target(reference, root), root, hops - 1)
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return _one_kind(["text" if isinstance(value, str) else "value" for value in values])
    named = schema.get("type")
    if named is not None:
        types = [named] if isinstance(named, str) else named
        return _one_kind(["text" if each == "string" else "value" for each in types])
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            return _one_kind([kind_of(each, root, hops - 1) for each in schema[word]])
    return "either"


def target(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference into `$defs` or `definitions` names; None for any other."""
    place, _, name = reference.removeprefix("#/").partition("/")
    parts = root.get(place) if place in ("$defs", "definitions") else None
    return parts.get(name) if isinstance(parts, Mapping) else None


def _one_kind(kinds: Sequence[Kind]) -> Kind:
    return kinds[0] if len(set(kinds)) == 1 else "either"


def as_json(text: str) -> tuple[Any] | None:
    """The value of a JSON text, in a tuple; None where it is none."""
    try:
        return (json.loads(text, strict=False, parse_constant=_refuse),)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def escaped(text: str) -> bool:
    """Whether a text is a JSON string that was written so for want of an escape."""
    return _ESCAPED in text and text.startswith('"') and isinstance((as_json(text) or (None,))[0], str)


def _escaped_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("<", _ESCAPED)


def python_keywords(arguments: Mapping[str, Any]) -> str:
    """Arguments as Python's keywords; names that Python has no keywords for in a dictionary behind `**`."""
    plain = {key: value for key, value in arguments.items() if key.isidentifier() and not keyword.iskeyword(key)}
    odd = {key: value for key, value in arguments.items() if key not in plain}
    texts = [f"{key}={_python(value)}" for key, value in plain.items()]
    return ", ".join([*texts, *([f"**{_python(odd)}"] if odd else [])])


def _python(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_python(key)}: {_python(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_python, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


_BARE_KEY = re.compile(r"[A-Za-z0-9_$.-]+")


def bare(value: Any, quote: str) -> str:
    """A value with bare keys and texts between `quote`s."""
    if isinstance(value, Mapping):
        pairs = [f"{bare_key(key)}:{bare(each, quote)}" for key, each in sorted(value.items())]
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(bare(each, quote) for each in value) + "]"
    if isinstance(value, str):
        return f"{quote}{value}{quote}" if quote not in value + quote[:-1] else _escaped_json(value)
    return json.dumps(value)


def bare_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _escaped_json(key)


def _formats() -> Iterator[ToolFormat]:
    known = {each.name for each in fields(ToolFormat)}
    for name, data in tomllib.loads(files(__package__).joinpath("dialects.toml").read_text("utf-8")).items():
        assert data.keys() <= known, f"{name} has fields that no dialect has"
        listed: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in data.items()
        }
        yield ToolFormat(name=name, **listed)


FORMATS = {form.name: form for form in _formats()}
HERMES = FORMATS["hermes"]
_TOOLS = re.compile(r"\btools\b")


@dataclass(frozen=True)
class Dialect:
    """How functions are described to a model, and how it calls them."""

    format: ToolFormat
    native: bool  # its template knows functions; else the system message describes them
