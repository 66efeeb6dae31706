"""How a family of models writes calls of functions: what every such format says of itself; knows no format."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["ToolFormat"]

_ID_LENGTH = 24


@dataclass(frozen=True)
class ToolFormat:
    """A format: `prefix`, calls with `between` in between, `suffix`, each call an object of `name` and arguments.

    Attributes:
        name: for whoever asks.
        signs: of a chat template, any of which tells that its model writes calls so.
        others: of a chat template, any of which tells that it does not, for all the signs.
        marker: tells a call from text; every way that `prefix` and a first call begin. May be a special token's text.
        anywhere: whether text may stand before the marker; else it only counts at the very beginning.
        key: of the arguments.
        several: whether the models' templates know replies of more than one call.
        id_length: letters and digits of an id, where templates are particular about it; 0 is OpenAI's.
    """

    name: str
    signs: tuple[str, ...]
    marker: str
    prefix: str
    between: str
    suffix: str
    anywhere: bool = True
    key: str = "arguments"
    several: bool = True
    id_length: int = 0
    others: tuple[str, ...] = ()

    def known_by(self, template: str) -> bool:
        """Whether the model of a chat template writes calls so."""
        return any(sign in template for sign in self.signs) and not any(sign in template for sign in self.others)

    def head(self, function: str) -> str:
        """What stands before the arguments of a call."""
        return f'{{"name": {json.dumps(function)}, "{self.key}": '

    @property
    def tail(self) -> str:
        """What stands behind the arguments."""
        return "}"

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """The text of calls, each a name and arguments."""
        texts = [self.head(name) + json.dumps(arguments, ensure_ascii=False) + self.tail for name, arguments in calls]
        return self.prefix + self.between.join(texts) + self.suffix

    def new_id(self) -> str:
        """An id for a call."""
        if self.id_length:
            return secrets.token_hex(self.id_length)[: self.id_length]
        return f"call_{secrets.token_hex(_ID_LENGTH // 2)}"

    def fitted_id(self, id_: str) -> str:
        """A client's id of a call as templates of this format take it."""
        if not self.id_length or (len(id_) == self.id_length and id_.isascii() and id_.isalnum()):
            return id_
        return hashlib.sha256(id_.encode("utf-8", "surrogatepass")).hexdigest()[: self.id_length]
