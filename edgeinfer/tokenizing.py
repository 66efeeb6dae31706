"""Texts and conversations to token ids and back, for a model that may be loaded or not; knows nothing of replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgeinfer.errors import PromptError, TemplateError
from edgeinfer.prompt_sizes import require_fitting_messages, require_fitting_text
from edgeinfer.residence import Residence
from edgeinfer.runtime.text import ChatTemplate, GuardedTemplate, Tokenizer

__all__ = ["Tokenizing"]


class Tokenizing:
    """A model's tokenizer and chat template.

    Args:
        residence: has the tokenizer.
        template: of the model; None where it has none.
    """

    def __init__(self, residence: Residence, template: ChatTemplate | None) -> None:
        self._residence = residence
        self._template = template
        self._guarded: GuardedTemplate | None = None

    @property
    def tokenizes_beside(self) -> bool:
        """Whether other threads may make tokens of texts while a reply is made."""
        return isinstance(self._residence.parts().tokenizer, Tokenizer)

    @property
    def chat_template_text(self) -> str | None:
        """The source of the model's chat template; None where it has none."""
        return None if self._template is None else self._template.source

    def tokenize(self, text: str, *, parse_special: bool = True) -> list[int]:
        """Token ids of a text, with the tokenizer's own begin token.

        Args:
            parse_special: special tokens spelled out in the text become those tokens; False takes it as plain text.
        """
        if not text:
            raise PromptError("The prompt is empty.", "Give some text to continue.")
        with self._residence.held(verified=False) as parts:
            if parse_special:
                return parts.tokenizer.encode(text)
            return parts.literal_encoder.literal(text, add_special_tokens=True)

    def tokenize_prompt(self, text: str, *, parse_special: bool = True) -> list[int]:
        """The same for a text to go on with; raises ContextLengthError for one that is far too long for the context."""
        with self._residence.held(verified=False) as parts:
            require_fitting_text(parts, text)
            return self.tokenize(text, parse_special=parse_special)

    def tokenize_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        begun: str = "",
        parse_special: bool = False,
        fitting: bool = False,
    ) -> list[int]:
        """Token ids of OpenAI-style messages in the model's chat template, up to where the reply goes on.

        Args:
            tools, variables, begun: as `Model.stream_chat` takes them.
            parse_special: special tokens spelled out in these become those tokens, and not only the template's own.
            fitting: refuse what is far too long for the context before all of it is made tokens of.

        Raises:
            TemplateError, ContextLengthError: as `Model.stream_chat`, the latter for what is not `fitting`.
        """
        template = self._template
        if template is None:
            raise TemplateError(
                f"{self._residence.facts.info.name} has no chat template.", "Use generate() with plain text."
            )
        with self._residence.held(verified=False) as parts:
            if fitting:
                require_fitting_messages(parts, messages)
            if parse_special:
                text = template.render(messages, add_generation_prompt=True, tools=tools, variables=variables) + begun
            else:
                # One is kept for its analysis of the template; what it depends on stays when the model is loaded again.
                self._guarded = self._guarded or GuardedTemplate(template, parts.literal_encoder.marks)
                pieces = self._guarded.parts(messages, tools, variables, begun)
                text = "".join(pieces)
            if fitting:
                require_fitting_text(parts, text)
            if parse_special:
                return parts.tokenizer.encode(text, add_special_tokens=False)
            return parts.literal_encoder.marked(pieces)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        with self._residence.held(verified=False) as parts:
            return parts.tokenizer.decode(ids)
