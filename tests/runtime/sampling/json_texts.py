"""Texts that a schema's grammar accepts and generates over a vocabulary of single bytes, and a validator."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

import pytest

from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.runtime.sampling.grammar import GrammarConstraint
from edgeinfer.runtime.sampling.grammar_source import grammar_source
from edgeinfer.runtime.sampling.grammar_tokens import GrammarVocabulary

jsonschema = pytest.importorskip("jsonschema")

Schema = dict[str, Any]

END = 256
_CLOSING = frozenset(b'"]},:')


class _Bytes:
    """A tokenizer with a token for each byte, and one that ends texts."""

    vocab_size = END + 1
    special_ids = frozenset({END})
    control_texts: Mapping[str, int] = {"</s>": END}
    decoder_types = ("Replace", "ByteFallback")

    def id_to_token(self, id_: int) -> str | None:
        return "</s>" if id_ == END else f"<0x{id_:02X}>"

    def token_to_id(self, text: str) -> int | None:
        return END if text == "</s>" else int(text[3:5], 16)

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_between(self, parts: Sequence[str]) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(id_ for id_ in ids if id_ != END).decode("utf-8")


@cache
def vocabulary() -> GrammarVocabulary:
    """A token for each byte, and one that ends texts."""
    return GrammarVocabulary(_Bytes(), END + 1)


def follow(schema: Any) -> GrammarConstraint:
    """The constraint of a schema at its beginning."""
    source = grammar_source(ReplyOptions(json_schema=schema))
    assert source is not None
    return GrammarConstraint(vocabulary(), source, [END])


def accepts(constraint: GrammarConstraint, text: str) -> bool:
    """Whether a whole text may be a reply; the constraint is left as it was."""
    pushed, fits = 0, True
    for byte in (*text.encode("utf-8"), END):
        if byte not in constraint.allowed():
            fits = False
            break
        constraint.push(byte)
        pushed += 1
    constraint.pop(pushed)
    return fits


def drawn_text(constraint: GrammarConstraint, chance: random.Random, limit: int = 300) -> str | None:
    """A text drawn byte by byte, rather short; None where it took too many. The constraint is left as it was."""
    reply: list[int] = []
    for _ in range(limit):
        ids = constraint.allowed().tolist()
        if ids[-1] == END and (len(ids) == 1 or chance.random() < 0.3):
            break
        closing = [id_ for id_ in ids if id_ in _CLOSING]
        byte = chance.choice(closing if closing and chance.random() < 0.3 else [id_ for id_ in ids if id_ != END])
        constraint.push(byte)
        reply.append(byte)
    else:
        constraint.pop(len(reply))
        return None
    constraint.pop(len(reply))
    return bytes(reply).decode("utf-8")


def _multiple(validator: Any, step: float, value: Any, schema: Any) -> Any:
    if validator.is_type(value, "number") and Fraction(repr(value)) % Fraction(repr(step)):
        yield jsonschema.ValidationError(f"{value} is no multiple of {step}")


def _matches(validator: Any, pattern: str, value: Any, schema: Any) -> Any:
    if isinstance(value, str) and not re.search(re.sub(r"(?<!\\)\$$", r"\\Z", pattern), value, re.ASCII):
        yield jsonschema.ValidationError(f"{value} does not match {pattern}")


# ECMAScript's end of a text, and multiples without the errors of doubles.
VALIDATOR = jsonschema.validators.extend(
    jsonschema.Draft202012Validator, {"multipleOf": _multiple, "pattern": _matches}
)
FORMATS = jsonschema.FormatChecker(["date", "ipv4", "ipv6", "uuid", "email"])


def check_replies(schema: Schema, seed: int, count: int) -> int:
    """How many of some replies came to an end, each of which is a document that the schema allows."""
    constraint, chance, ended = follow(schema), random.Random(seed), 0
    for _ in range(count):
        text = drawn_text(constraint, chance)
        if text is None:
            continue
        ended += 1
        # Names that are open may stand twice; whichever a reader keeps, the document is valid.
        for keep in (dict, lambda pairs: dict(reversed(pairs))):
            value = json.loads(text, object_pairs_hook=keep)
            VALIDATOR(schema, format_checker=FORMATS).validate(value)
    return ended
