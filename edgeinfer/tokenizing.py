"""Texts and conversations to token ids and back, for a model that may be loaded or not."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from edgeinfer.bundle.store import Bundle
from edgeinfer.config import GenerationConfig
from edgeinfer.errors import BundleError, ContextLengthError, EdgeInferError, PromptError, TemplateError
from edgeinfer.lifecycle import ModelLifecycle
from edgeinfer.model_parts import ModelParts
from edgeinfer.option_types import Prompt
from edgeinfer.records import dataclass
from edgeinfer.runtime.planning.configuration import TOKENIZER
from edgeinfer.runtime.system.memory import process_memory, release_freed
from edgeinfer.runtime.text.contract import TokenizerLike, bytes_of, surely_longer
from edgeinfer.runtime.text.mapped import MappedTokenizer
from edgeinfer.runtime.text.template import ChatTemplate
from edgeinfer.runtime.text.tokenizer import Tokenizer
from edgeinfer.runtime.text.transient import TransientTokenizer
from edgeinfer.wording import Setting, shown

if TYPE_CHECKING:
    from edgeinfer.runtime.text.guarded_template import GuardedTemplate


TOOL_TEMPLATE = "chat_template.tool_use.jinja"  # as transformers names the template of conversations with tools
# By what a plan says of the tokenizer; that of a model's own file is the backend's.
TOKENIZERS: dict[str, Callable[[Bundle], TokenizerLike]] = {
    "mapped": MappedTokenizer.of,
    "kept": lambda bundle: Tokenizer.from_file(bundle.file(TOKENIZER)),
    "transient": lambda bundle: TransientTokenizer.from_file(bundle.file(TOKENIZER)),
}
# Options of generation_config.json that mean the same here; those of beam search and others do not.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class ParsedTokenizer:
    """A tokenizer, with milliseconds and bytes that making it took."""

    tokenizer: TokenizerLike
    ms: float
    bytes: int


def parsed_tokenizer(make: Callable[[], TokenizerLike]) -> ParsedTokenizer:
    """Makes a tokenizer, and gives back the memory that only parsing took."""
    started, before = time.perf_counter(), process_memory().anonymous
    tokenizer = make()
    tokenizer.rest()
    release_freed()
    return ParsedTokenizer(tokenizer, (time.perf_counter() - started) * 1e3, process_memory().anonymous - before)


class Tokenizing:
    """A model's tokenizer and chat template.

    Args:
        lifecycle: has the tokenizer.
        template: of the model; None where it has none.
    """

    def __init__(self, lifecycle: ModelLifecycle, template: ChatTemplate | None) -> None:
        self._lifecycle = lifecycle
        self._template = template
        self._guarded: GuardedTemplate | None = None

    @property
    def tokenizes_beside(self) -> bool:
        """Whether other threads may make tokens of texts while a reply is made."""
        return self._lifecycle.facts.tokenizes_beside

    @property
    def chat_template_text(self) -> str | None:
        """The source of the model's chat template; None where it has none."""
        return None if self._template is None else self._template.source

    @property
    def tool_template_text(self) -> str | None:
        """The same of the template that conversations with tools take, where they have one of their own."""
        own = None if self._template is None else self._template.tool_use
        return self.chat_template_text if own is None else own.source

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            add_special: with what the tokenizer itself puts around a text, such as a begin token.
            parse_special: special tokens spelled out in the text become those tokens; False takes it as plain text.

        Raises:
            PromptError: the text is no string, or no valid Unicode.
        """
        if not isinstance(text, str):
            raise PromptError(f"The text is {shown(text)}, which is not a string.", "Pass a string.")
        with self._lifecycle.acquire(verified=False) as parts:
            if parse_special:
                return parts.tokenizer.encode(text, add_special)
            return parts.literal_encoder.literal(text, add_special)

    def tokenize_data(self, text: str, *, fitting: str = "") -> list[int]:
        """Token ids of a text that stands inside others: no begin token, and no special token that it spells out.

        Args:
            fitting: what the text is called where it is far too long for the context, which is then refused before all
                of it is made tokens of; nothing is refused where this is empty.

        Raises:
            ContextLengthError: a text that is to be fitting is far too long.
        """
        with self._lifecycle.acquire(verified=False) as parts:
            if fitting:
                require_fitting_text(parts, text, fitting)
            return parts.literal_encoder.literal(text)

    def tokenize_prompt(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """The same for a text to go on with; one that is empty raises PromptError, and one that is far too long for the
        context ContextLengthError."""
        if isinstance(text, str) and not text:
            raise PromptError("The prompt is empty.", "Give some text to continue.")
        with self._lifecycle.acquire(verified=False) as parts:
            require_fitting_text(parts, text)
            return self.tokenize(text, add_special=add_special, parse_special=parse_special)

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
        template = self._require_template()
        with self._lifecycle.acquire(verified=False) as parts:
            if fitting:
                require_fitting_messages(parts, messages)
            if parse_special:
                text = template.render(messages, add_generation_prompt=True, tools=tools, variables=variables) + begun
            else:
                from edgeinfer.runtime.text.guarded_template import GuardedTemplate  # with jinja2, which chats need

                # One is kept for its analysis of the template; what it depends on stays when the model is loaded again.
                self._guarded = self._guarded or GuardedTemplate(template, parts.literal_encoder.marks)
                pieces = self._guarded.parts(messages, tools, variables, begun)
                text = "".join(pieces)
            if fitting:
                require_fitting_text(parts, text)
            if parse_special:
                return parts.tokenizer.encode(text, add_special_tokens=False)
            return parts.literal_encoder.marked(pieces)

    def split_chat(self, messages: Sequence[Mapping[str, Any]], begun: str = "") -> tuple[list[int], list[int]]:
        """Token ids of messages, and of the reply that was begun, before and behind where the first user message's text
        begins.

        Raises:
            TemplateError: the template does not write that text as it is; else as `tokenize_chat`.
        """
        template = self._require_template()
        mark = "[contexts]"
        while any(mark in str(each) for each in messages):
            mark += "]"
        users = [place for place, each in enumerate(messages) if each.get("role") == "user"]
        marked = list(map(dict, messages))
        for place in users[:1]:
            content = marked[place].get("content")
            texts = [content] if isinstance(content, str) else [part["text"] for part in content or ()]
            marked[place]["content"] = "".join([mark, *texts])
        with self._lifecycle.acquire(verified=False) as parts:
            require_fitting_messages(parts, messages)
            from edgeinfer.runtime.text.guarded_template import GuardedTemplate

            self._guarded = self._guarded or GuardedTemplate(template, parts.literal_encoder.marks)
            pieces = self._guarded.parts(marked, None, None, begun)
            require_fitting_text(parts, "".join(pieces))
            here = [place for place, piece in enumerate(pieces) if mark in piece]
            if len(here) != 1:
                message = "The chat template does not write the first message as it is."
                raise TemplateError(message, "Use generate() with plain text.")
            before, behind = pieces[here[0]].split(mark, 1)
            encoder = parts.literal_encoder
            return encoder.marked([*pieces[: here[0]], before]), encoder.marked([behind, *pieces[here[0] + 1 :]])

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that OpenAI-style messages become in the model's chat template. As a prompt, what messages spell out
        of special tokens becomes those tokens: `tokenize_chat` and `stream_chat` keep the two apart.

        Args:
            variables: as `Model.stream_chat` takes them; with "add_generation_prompt": False the text ends with the
                last message.

        Raises:
            TemplateError, ContextLengthError: as `Model.stream_chat`.
        """
        template = self._require_template()
        with self._lifecycle.acquire(verified=False) as parts:
            require_fitting_messages(parts, messages)
        return template.render(messages, add_generation_prompt=True, tools=tools, variables=variables)

    def _require_template(self) -> ChatTemplate:
        if self._template is None:
            message = f"{self._lifecycle.facts.info.name} has no chat template, so it cannot answer messages."
            raise TemplateError(message, "It continues texts: edgeinfer run, or generate() in Python.")
        return self._template

    def detokenize(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of token ids.

        Args:
            special: with special tokens spelled out, which are left out else.

        Raises:
            PromptError: one is no id of the model's vocabulary.
        """
        with self._lifecycle.acquire(verified=False) as parts:
            return parts.tokenizer.decode(_known_ids(parts, ids), skip_special_tokens=not special)

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes that each token stands for, special tokens spelled out; errors as `detokenize`."""
        with self._lifecycle.acquire(verified=False) as parts:
            return [bytes_of(parts.tokenizer, id_) for id_ in _known_ids(parts, ids)]


# Contexts that a prompt may fill whose beginning is forgotten anyway.
_FORGOTTEN = 16
# How many times longer than the context's text messages may be: templates leave out some of what they are given.
_LEFT_OUT = 16
# Of a token of ordinary text.
_CHARACTERS = 4


def require_fitting_text(parts: ModelParts, text: str, what: str = "prompt") -> None:
    """Refuses a text that is far too long, before all of it is made tokens of; `Engine.check` judges the rest.

    Args:
        what: the text is called in the refusal.
    """
    most = _most_tokens(parts)
    if len(text) > most and surely_longer(parts.tokenizer, text, most, lambda: parts.longest_token):
        raise _too_long(len(text), most, what)


def require_fitting_messages(parts: ModelParts, messages: Sequence[Mapping[str, Any]]) -> None:
    """The same for messages, before a template is given them."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    size = sum(len(content) for content in contents if isinstance(content, str))
    most = _most_tokens(parts)
    if size > most * _LEFT_OUT and size > most * _LEFT_OUT * parts.longest_token:
        raise _too_long(size, most)


def _most_tokens(parts: ModelParts) -> int:
    engine = parts.engine
    return engine.backend.cache.capacity * (1 if engine.context_shift is None else _FORGOTTEN)


def _too_long(size: int, most: int, what: str = "prompt") -> ContextLengthError:
    message = f"The {what} has {size} characters, far more than the {most} tokens that the model takes."
    hint = "Shorten it, or load the model with a larger " + Setting("context") + "."
    return ContextLengthError(message, hint, sizes=(max(most + 1, size // _CHARACTERS), most))


def token_ids(prompt: Sequence[int]) -> list[int]:
    """The prompt as a list, which is no text."""
    if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        hint = "Pass messages to create_chat_completion() or stream_chat(), or use model.chat()."
        raise PromptError("The prompt is a list of messages, not a string.", hint)
    ids = _integers(prompt)
    if ids is None:
        raise PromptError(
            f"The prompt is {shown(prompt)}, which is neither a string nor token ids.", "Pass one or the other."
        )
    return ids


def _integers(ids: object) -> list[int] | None:
    """Ids as Python's own integers, which numpy's become too; None where something else was given."""
    if not isinstance(ids, Iterable) or isinstance(ids, str | bytes | bytearray) or getattr(ids, "ndim", 1) != 1:
        return None
    given = list(ids)
    if not all(isinstance(each, Integral) and not isinstance(each, bool) for each in given):
        return None
    return list(map(operator.index, given))


def several(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """Prompts as they were given, which are not one text: that would be a prompt for each character."""
    if isinstance(prompts, str | bytes):
        raise PromptError(f"The prompts are one text, {shown(prompts)}.", "Pass a list, or call generate().")
    return prompts


def _known_ids(parts: ModelParts, ids: Sequence[int]) -> list[int]:
    known = _integers(ids)
    if known is None:
        raise PromptError(f"The ids are {shown(ids)}, which are no integers.", "Pass a list, as tokenize() returns it.")
    # Tokenizers may have tokens that the model has no rows for.
    vocabulary = max(parts.engine.backend.geometry.vocab_size, parts.tokenizer.vocab_size)
    for id_ in known:
        if not 0 <= id_ < vocabulary:
            message = f"The token id {id_} is outside the model's vocabulary of {vocabulary}."
            raise PromptError(message, f"Ids range from 0 to {vocabulary - 1}.")
    return known


def boundary_ids(bundle: Bundle) -> tuple[tuple[int, ...], frozenset[int]]:
    """The tokens that begin a text, one or none, and those that end a reply."""
    config = bundle.read_object("generation_config.json")
    begin, ends = config.get("bos_token_id"), config.get("eos_token_id", [])
    for name, ids in (("bos_token_id", [] if begin is None else [begin]), ("eos_token_id", ends)):
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
            expected = "an id" if name == "bos_token_id" else "a list of ids"
            raise BundleError(f"generation_config.json: {name} must be {expected}.", "Export the bundle again.")
    return () if begin is None else (begin,), frozenset(ends)


def recommended_sampling(bundle: Bundle) -> dict[str, Any]:
    """What the model's makers recommend; nothing where they recommend greedy decoding or say it in another way."""
    try:
        config = bundle.read_object("generation_config.json")
        given = {name: config[name] for name in _SAMPLING if config.get(name) is not None}
        GenerationConfig.of(**given)
    except EdgeInferError:
        return {}
    return given if config.get("do_sample", True) is True else {}


def chat_template(bundle: Bundle) -> ChatTemplate | None:
    """The bundle's chat template with its special tokens; None where it has none."""
    if not bundle.has("chat_template.jinja"):
        return None
    special = bundle.read_object("special_tokens.json") if bundle.has("special_tokens.json") else {}
    tool_source = bundle.read_text(TOOL_TEMPLATE) if bundle.has(TOOL_TEMPLATE) else None
    return ChatTemplate(bundle.read_text("chat_template.jinja"), special, tool_source=tool_source)
