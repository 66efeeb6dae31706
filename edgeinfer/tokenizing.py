"""The tokenizer, chat template and generation defaults of a bundle, and checks of prompts and token ids."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import (
    BundleError,
    ContextLengthError,
    EdgeInferError,
    PromptError,
    Setting,
    TemplateError,
    shown,
)
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.core.options.types import Prompt
from edgeinfer.core.records import dataclass
from edgeinfer.lifecycle import ModelLifecycle, ModelParts
from edgeinfer.runtime.planning.facts import TOKENIZER
from edgeinfer.runtime.system.memory import process_memory, release_freed
from edgeinfer.runtime.text.contract import TokenizerLike, bytes_of, surely_longer
from edgeinfer.runtime.text.template import ChatTemplate
from edgeinfer.runtime.text.tokenizer import MappedTokenizer, Tokenizer

if TYPE_CHECKING:
    from edgeinfer.runtime.text.special_tokens import GuardedTemplate

TOOL_TEMPLATE = "chat_template.tool_use.jinja"  # as transformers names the template of conversations with tools
# By what a plan says of the tokenizer; that of a model's own file is the backend's.
TOKENIZERS: dict[str, Callable[[Bundle], TokenizerLike]] = {
    "mapped": MappedTokenizer.of,
    "kept": lambda bundle: Tokenizer.from_file(bundle.file(TOKENIZER)),
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
    """Make a tokenizer, and release the memory that only parsing took."""
    started, before = time.perf_counter(), process_memory().anonymous
    tokenizer = make()
    release_freed()
    return ParsedTokenizer(tokenizer, (time.perf_counter() - started) * 1e3, process_memory().anonymous - before)


# Contexts that a prompt may fill where context shift drops its beginning.
_FORGOTTEN = 16
# How many times longer than the context's text messages may be: templates leave out parts of them.
_LEFT_OUT = 16
# Of a token of ordinary text.
_CHARACTERS = 4


def require_fitting_text(parts: ModelParts, text: str, what: str = "prompt") -> None:
    """Refuse a text that is far too long before all of it is tokenized; `Sequence.check` judges the rest."""
    most = _most_tokens(parts)
    if len(text) > most and surely_longer(parts.tokenizer, text, most, lambda: parts.longest_token):
        raise _too_long(len(text), most, what)


def require_fitting_messages(parts: ModelParts, messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse messages that are far too long, before the template renders them."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    size = sum(len(content) for content in contents if isinstance(content, str))
    most = _most_tokens(parts)
    if size > most * _LEFT_OUT and size > most * _LEFT_OUT * parts.longest_token:
        raise _too_long(size, most)


def _most_tokens(parts: ModelParts) -> int:
    sequence = parts.sequence
    return sequence.cache.capacity * (1 if sequence.context_shift is None else _FORGOTTEN)


def _too_long(size: int, most: int, what: str = "prompt") -> ContextLengthError:
    message = f"The {what} has {size} characters, far more than the {most} tokens that the model takes."
    hint = "Shorten it, or load the model with a larger " + Setting("context") + "."
    return ContextLengthError(message, hint, sizes=(max(most + 1, size // _CHARACTERS), most))


def token_ids(prompt: Sequence[int]) -> list[int]:
    """A prompt of token ids as a list."""
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
    """Ids as Python integers, also from numpy's; None where something else was given."""
    if not isinstance(ids, Iterable) or isinstance(ids, str | bytes | bytearray) or getattr(ids, "ndim", 1) != 1:
        return None
    given = list(ids)
    if not all(isinstance(each, Integral) and not isinstance(each, bool) for each in given):
        return None
    return list(map(operator.index, given))


def several(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """Prompts as they are; refuse a single text, which would be a prompt for each character."""
    if isinstance(prompts, str | bytes):
        raise PromptError(f"The prompts are one text, {shown(prompts)}.", "Pass a list, or call generate().")
    return prompts


def known_ids(parts: ModelParts, ids: Sequence[int]) -> list[int]:
    known = _integers(ids)
    if known is None:
        raise PromptError(f"The ids are {shown(ids)}, which are no integers.", "Pass a list, as tokenize() returns it.")
    # Tokenizers may have tokens without a row in the model.
    vocabulary = max(parts.backend.geometry.vocab_size, parts.tokenizer.vocab_size)
    for id_ in known:
        if not 0 <= id_ < vocabulary:
            message = f"The token id {id_} is outside the model's vocabulary of {vocabulary}."
            raise PromptError(message, f"Ids range from 0 to {vocabulary - 1}.")
    return known


def boundary_ids(bundle: Bundle) -> tuple[tuple[int, ...], frozenset[int]]:
    """The begin token, if any, and the tokens that end a reply."""
    config = bundle.read_object("generation_config.json")
    begin, ends = config.get("bos_token_id"), config.get("eos_token_id", [])
    for name, ids in (("bos_token_id", [] if begin is None else [begin]), ("eos_token_id", ends)):
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
            expected = "an id" if name == "bos_token_id" else "a list of ids"
            raise BundleError(f"generation_config.json: {name} must be {expected}.", "Export the bundle again.")
    return () if begin is None else (begin,), frozenset(ends)


def recommended_sampling(bundle: Bundle) -> dict[str, Any]:
    """Options that the model's makers recommend; empty for greedy decoding or an unknown format."""
    try:
        config = bundle.read_object("generation_config.json")
        given = {name: config[name] for name in _SAMPLING if config.get(name) is not None}
        ReplyOptions.of(**given)
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


class TextEncoder:
    """Turns texts and messages into tokens and back, while the model is loaded; `template` is None where there is
    none."""

    def __init__(self, lifecycle: ModelLifecycle, template: ChatTemplate | None) -> None:
        self.lifecycle, self._template = lifecycle, template
        self._guarded: GuardedTemplate | None = None

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        if not isinstance(text, str):
            raise PromptError(f"The text is {shown(text)}, which is not a string.", "Pass a string.")
        with self.lifecycle.acquire(verified=False) as parts:
            if parse_special:
                return parts.tokenizer.encode(text, add_special)
            return parts.literal_encoder.literal(text, add_special)

    @property
    def prefix_ids(self) -> list[int]:
        """The tokens that `tokenize` puts before every text: the begin token, or nothing where it adds none."""
        begin = list(self.lifecycle.facts.begin_ids)
        return begin if begin and self.tokenize("a")[: len(begin)] == begin else []

    def data(self, text: str, fitting: str = "") -> list[int]:
        with self.lifecycle.acquire(verified=False) as parts:
            if fitting:
                require_fitting_text(parts, text, fitting)
            return parts.literal_encoder.literal(text)

    def prompt(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        if isinstance(text, str) and not text:
            raise PromptError("The prompt is empty.", "Give some text to continue.")
        with self.lifecycle.acquire(verified=False) as parts:
            require_fitting_text(parts, text)
            return self.tokenize(text, add_special, parse_special)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        prefill: str,
        *,
        parse_special: bool,
        fitting: bool,
    ) -> list[int]:
        template = self._require_template()
        with self.lifecycle.acquire(verified=False) as parts:
            if fitting:
                require_fitting_messages(parts, messages)
            if parse_special:
                text = template.render(messages, add_generation_prompt=True, tools=tools, variables=variables) + prefill
            else:
                from edgeinfer.runtime.text.special_tokens import GuardedTemplate  # with jinja2, which chats need

                # Kept for its analysis of the template, which stays valid when the model is loaded again.
                self._guarded = self._guarded or GuardedTemplate(template, parts.literal_encoder.special_tokens)
                pieces = self._guarded.parts(messages, tools, variables, prefill)
                text = "".join(pieces)
            if fitting:
                require_fitting_text(parts, text)
            if parse_special:
                return parts.tokenizer.encode(text, add_special_tokens=False)
            return parts.literal_encoder.encode_parts(pieces)

    def split(self, messages: Sequence[Mapping[str, Any]], prefill: str) -> tuple[list[int], list[int]]:
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
        with self.lifecycle.acquire(verified=False) as parts:
            require_fitting_messages(parts, messages)
            from edgeinfer.runtime.text.special_tokens import GuardedTemplate

            self._guarded = self._guarded or GuardedTemplate(template, parts.literal_encoder.special_tokens)
            pieces = self._guarded.parts(marked, None, None, prefill)
            require_fitting_text(parts, "".join(pieces))
            here = [place for place, piece in enumerate(pieces) if mark in piece]
            if len(here) != 1:
                message = "The chat template does not write the first message as it is."
                raise TemplateError(message, "Use generate() with plain text.")
            before, behind = pieces[here[0]].split(mark, 1)
            encoder = parts.literal_encoder
            return encoder.encode_parts([*pieces[: here[0]], before]), encoder.encode_parts(
                [behind, *pieces[here[0] + 1 :]]
            )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> str:
        template = self._require_template()
        with self.lifecycle.acquire(verified=False) as parts:
            require_fitting_messages(parts, messages)
        return template.render(messages, add_generation_prompt=True, tools=tools, variables=variables)

    @property
    def template_text(self) -> str | None:
        """The source of the template for conversations with tools, which may be a separate one."""
        own = None if self._template is None else self._template.tool_use or self._template
        return None if own is None else own.source

    def _require_template(self) -> ChatTemplate:
        if self._template is None:
            message = f"{self.lifecycle.facts.info.name} has no chat template, so it cannot answer messages."
            raise TemplateError(message, "It continues texts: edgeinfer run, or generate() in Python.")
        return self._template

    def detokenize(self, ids: Sequence[int], special: bool) -> str:
        with self.lifecycle.acquire(verified=False) as parts:
            return parts.tokenizer.decode(known_ids(parts, ids), skip_special_tokens=not special)

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        with self.lifecycle.acquire(verified=False) as parts:
            return [bytes_of(parts.tokenizer, id_) for id_ in known_ids(parts, ids)]
