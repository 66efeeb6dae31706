"""The calls of functions that one request allows: told to the model, held to by a grammar, read from its replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgeinfer.errors import GrammarError
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.messages import Message
from edgeinfer.openai.pieces import PlainReader, Reader
from edgeinfer.openai.tools.choice import ToolChoice
from edgeinfer.openai.tools.conversation import conversation
from edgeinfer.openai.tools.grammar import calls_grammar
from edgeinfer.openai.tools.reader import CallReader
from edgeinfer.openai.tools.registry import Dialect

if TYPE_CHECKING:
    from edgeinfer.api import Model

__all__ = ["ToolUse"]

# Of the forms a reply may be asked to have, those that can be had besides calls.
_WITH_CALLS = ("json_schema", "json_object")
_OTHERS = ("regex", "grammar", "choices")


@dataclass(frozen=True)
class ToolUse:
    """What a request says of functions, for one model.

    Attributes:
        dialect: how the model is told of them and calls them.
        choice: what may be called.
    """

    dialect: Dialect
    choice: ToolChoice

    @property
    def calls(self) -> bool:
        """Whether a reply may hold calls."""
        return self.choice.mode != "none"

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """What the model's chat template is given."""
        if not (self.calls and self.dialect.native):
            return None
        return [function.as_tool() for function in self.choice.functions]

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation as the model's chat template takes it."""
        return conversation(messages, self.dialect, self.choice.functions if self.calls else ())

    def options(self, model: Model, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Options of GenerationConfig for a reply that may hold calls, from those that were asked for.

        Raises:
            RequestError: a form is asked for that cannot be had besides calls, or a function's schema cannot be
                followed.
        """
        if not self.calls:
            return dict(asked)
        other = next((name for name in _OTHERS if name in asked), None)
        if other is not None:
            raise RequestError(f"{other} cannot be combined with tools.", "Leave one out.", param=other)
        options = {name: value for name, value in asked.items() if name not in _WITH_CALLS}
        content = {"type": "object"} if "json_object" in asked else asked.get("json_schema")
        if content is not None and not self.dialect.format.anywhere:
            message = "A form of the reply cannot be combined with tools: this model's calls are JSON objects too."
            raise RequestError(message, "Leave one out.", param="tools")
        try:
            grammar = calls_grammar(self.dialect.format, self.choice, self._marker_id(model), content)
        except GrammarError as error:
            raise RequestError(error.message, error.hint, param="tools", code="unsupported_schema") from error
        return {**options, "grammar": grammar}

    def reader(self, model: Model) -> Reader:
        """Takes one reply apart."""
        return CallReader(self.dialect.format, self._marker_id(model)) if self.calls else PlainReader()

    def _marker_id(self, model: Model) -> int | None:
        """The marker's id where it is a special token, which has no text; None where text spells it."""
        ids = model.tokenize(self.dialect.format.marker)
        # Not every tokenizer adds the begin token that its model has.
        ids = ids[1:] if ids[:1] == model.begin_ids else ids
        return ids[0] if len(ids) == 1 and not model.detokenize(ids) else None
