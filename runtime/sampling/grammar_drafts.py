"""Where drafts of JSON Schema differ: which one a schema is by, what counts beside `$ref`, what texts encode."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from edgeinfer.errors import GrammarError
from edgeinfer.records import dataclass


@dataclass(frozen=True)
class SchemaDraft:
    """A draft of JSON Schema.

    Attributes:
        number: of the draft, or the year of those since the seventh.
        uri: of its own schema, as the grammar engine knows it, by which it tells what keywords there are.
        ids: keywords that name a schema.
        lone_ref: `$ref` makes a reference of an object whose other keywords say nothing (draft 7, core, 8.3).
        checks_content: `contentEncoding` and `contentMediaType` may be assertions (draft 7, validation, 8), which later
            drafts forbid and earlier ones do not know.
    """

    number: int
    uri: str
    ids: tuple[str, ...] = ("$id",)
    lone_ref: bool = False
    checks_content: bool = False

    @property
    def recent(self) -> bool:
        """Whether it has the keywords that came in 2019."""
        return self.number >= 2019

    def overrides(self, schema: Mapping[str, Any], keyword: str) -> bool:
        """Whether a keyword says nothing in a schema because `$ref` stands beside it."""
        return self.lone_ref and keyword in _OVERRIDDEN and isinstance(schema.get("$ref"), str)


NEWEST = SchemaDraft(2020, "https://json-schema.org/draft/2020-12/schema")
_DRAFTS: Mapping[str, SchemaDraft] = {
    "draft-04": SchemaDraft(4, "http://json-schema.org/draft-04/schema#", ids=("id", "$id"), lone_ref=True),
    "draft-06": SchemaDraft(6, "http://json-schema.org/draft-06/schema#", lone_ref=True),
    "draft-07": SchemaDraft(7, "http://json-schema.org/draft-07/schema#", lone_ref=True, checks_content=True),
    "draft/2019-09": SchemaDraft(2019, "https://json-schema.org/draft/2019-09/schema"),
    "draft/2020-12": NEWEST,
}
_URI = re.compile(r"https?://json-schema\.org/(draft[-/][\d-]+)/(?:hyper-)?schema#?")
# Keywords that demand something. Others may stay: references lead through some.
_OVERRIDDEN = frozenset(
    {"$id", "id", "additionalItems", "additionalProperties", "allOf", "anyOf", "const", "contains", "contentEncoding"}
)
_OVERRIDDEN |= {"contentMediaType", "dependencies", "else", "enum", "exclusiveMaximum", "exclusiveMinimum", "format"}
_OVERRIDDEN |= {"if", "items", "maxItems", "maxLength", "maxProperties", "maximum", "minItems", "minLength", "minimum"}
_OVERRIDDEN |= {"minProperties", "multipleOf", "not", "oneOf", "pattern", "patternProperties", "properties", "then"}
_OVERRIDDEN |= {"propertyNames", "required", "type", "uniqueItems"}
# As encoders write it: RFC 4648, section 4, with padding, of which the bits that stand for nothing are 0 (3.5).
_BASE64 = "^(?:[0-9A-Za-z+/]{4})*(?:[0-9A-Za-z+/][AQgw]==|[0-9A-Za-z+/]{2}[AEIMQUYcgkosw048]=)?$"
# Of which every text is a document.
_ANY_TEXT = ("text/plain", "text/markdown")


def draft_of(schema: Mapping[str, Any]) -> SchemaDraft:
    """The draft that a schema names; the newest where it names none."""
    uri = schema.get("$schema")
    if not isinstance(uri, str):
        return NEWEST
    found = _URI.fullmatch(uri)
    if found is None or found[1] not in _DRAFTS:
        hint = "Name draft-04, -06, -07, 2019-09 or 2020-12 by its full address, or leave $schema out for the last."
        raise GrammarError(f"json_schema cannot be used: $schema: {uri[:80]!r} is not supported.", hint)
    return _DRAFTS[found[1]]


def content_pattern(schema: Mapping[str, Any], draft: SchemaDraft) -> str | None:
    """An expression, as the grammar engine writes it, of the texts that a schema's content keywords allow; None where
    they allow every text.
    """
    encoding, kind = schema.get("contentEncoding"), schema.get("contentMediaType")
    if not draft.checks_content:
        return None
    hint = "Leave it out, or $schema: by the newest draft it describes texts and demands nothing."
    if isinstance(kind, str) and (encoding is not None or kind.partition(";")[0].strip().lower() not in _ANY_TEXT):
        raise GrammarError(f"json_schema cannot be used: contentMediaType: {kind[:80]!r} is not supported.", hint)
    if not isinstance(encoding, str):
        return None
    if encoding.lower() != "base64":
        raise GrammarError(f"json_schema cannot be used: contentEncoding: {encoding[:80]!r} is not supported.", hint)
    return _BASE64
