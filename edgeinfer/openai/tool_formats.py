"""How families of models write calls of functions, and which of these formats a chat template speaks."""

from __future__ import annotations

import hashlib
import json
import re
import secrets

from edgeinfer.records import dataclass

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


FORMATS = {form.name: form for form in (HERMES, MISTRAL, LLAMA3)}
_TOOLS = re.compile(r"\btools\b")


@dataclass(frozen=True)
class Dialect:
    """How a model is told of functions, and calls them.

    Attributes:
        native: whether its template knows functions; else messages say it all.
    """

    format: ToolFormat
    native: bool


def dialect_of(template: str | None) -> Dialect:
    """The dialect of a chat template's model; Hermes' in messages where the template knows no format of ours."""
    if template is not None and _TOOLS.search(template):
        for form in FORMATS.values():
            if form.known_by(template):
                return Dialect(form, native=True)
    return Dialect(HERMES, native=False)
