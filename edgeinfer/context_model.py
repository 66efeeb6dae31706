"""A model with contexts before every prompt, which are evaluated once and kept."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, Unpack

from edgeinfer.batching import Replies
from edgeinfer.chat import Chat
from edgeinfer.core.contexts import Context, UnreadContextError
from edgeinfer.core.errors import StorageError, UsageError
from edgeinfer.core.options import require
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.core.options.types import ReplyDict
from edgeinfer.core.results import ContextUse, ModelInfo, Placement, Result
from edgeinfer.generation import TokenStream
from edgeinfer.lifecycle import ModelParts
from edgeinfer.model_thread import ModelThread
from edgeinfer.reply_decoding import GenerationRequest
from edgeinfer.runtime.backends.contract import PreemptedError
from edgeinfer.runtime.decoding.contexts import ContextMaker
from edgeinfer.runtime.decoding.sequence import Passes
from edgeinfer.runtime.kv_cache.contexts import (
    PLACEMENTS,
    ContextRows,
    JoinedContexts,
    KeptRows,
    Making,
    RowsInMemory,
    keep_rows,
    kept_place,
    read_rows,
)
from edgeinfer.runtime.kv_cache.session_file import SessionFile
from edgeinfer.tokenizing import TextEncoder

_log = logging.getLogger("edgeinfer")

T = TypeVar("T")

# Contexts of one request; their files are open one after the other.
_MOST = 256
# Selections of contexts that a model remembers, and prefixes of each, whose rows it holds.
_REMEMBERED, _PREFIXES = 8, 4
_APART = "\n\n"


class ContextModel:
    """Continues texts and answers messages with contexts before them; `Model.with_contexts` makes it.

    A context is evaluated when it is first used, and its rows are kept in a file. Contexts do not attend to each other,
    so replies differ from those to one joined text: `Result.contexts` says so.

    Args:
        reply_thread: the model's thread that makes replies for event loops.
        replies: starts the model's.
        contexts, placement, temperature: as `Model.with_contexts` takes them.
    """

    def __init__(
        self,
        texts: TextEncoder,
        reply_thread: ModelThread,
        replies: Replies,
        contexts: Sequence[Context | str | Path],
        placement: Placement,
        temperature: float,
    ) -> None:
        self.contexts = tuple(each if isinstance(each, Context) else Context(each) for each in contexts)
        require(0 < len(self.contexts) <= _MOST, "contexts", len(self.contexts), f"1 to {_MOST} texts")
        require(placement in PLACEMENTS, "placement", placement, "one of " + ", ".join(PLACEMENTS))
        require(0.1 <= temperature <= 10, "temperature", temperature, "between 0.1 and 10")
        self.reply_thread = reply_thread
        self._texts, self._replies = texts, replies
        self._placement: Placement = placement
        self._temperature = temperature
        self._joined: dict[tuple[tuple[int, ...], str | None], JoinedContexts] = {}
        self._encoded: dict[Context, tuple[tuple[int, ...] | None, tuple[int, ...]]] = {}  # versions and tokens
        self._holds_rows = False  # of contexts, as no file could be written

    @property
    def info(self) -> ModelInfo:
        """Which model it is."""
        return self._texts.lifecycle.facts.info

    def generate(self, prompt: str, **options: Unpack[ReplyDict]) -> Result:
        """Continue a text after the contexts; options and errors as of `Model.generate`."""
        return self.stream(prompt, **options).complete()

    def stream(self, prompt: str, **options: Unpack[ReplyDict]) -> TokenStream:
        """Continue a text after the contexts, chunk by chunk; options and errors as of `Model.stream`."""
        started = time.perf_counter()
        config = ReplyOptions.of(**options)
        ids = self._texts.prompt(prompt, True, config.parses_prompt)
        prefix = self._texts.prefix_ids
        del ids[: len(prefix)]
        if not prefix:
            # Attention rests on the first token, which all contexts must share.
            prefix = self._texts.data("\n")
        contexts = self._made(tuple(prefix), config.adapter)
        tokens = [*contexts.tokens, *ids]
        return self._replies.start(
            GenerationRequest(prompt=tokens, config=config, started=started, continues=True, contexts=contexts)
        )

    def chat(self, system: str | None = None, *, history: Sequence[Mapping[str, Any]] = ()) -> Chat:
        """Start a conversation with the contexts before its first message; as `Model.chat`."""
        return Chat(self, system, history)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        prefill: str = "",
        progress: Callable[[int], None] | None = None,
        on_finish: Callable[[Result], None] | None = None,
        **options: Unpack[ReplyDict],
    ) -> TokenStream:
        """Answer messages as `Model.stream_chat` does. `progress` is called with the tokens of each pass that evaluates
        contexts; its errors end the reply."""
        started = time.perf_counter()
        config = ReplyOptions.for_chat(self._texts.lifecycle.facts.sampling, options)
        prefix, rest = self._texts.split(messages, prefill)
        contexts = self._made(tuple(prefix), config.adapter, progress)
        return self._replies.start(
            GenerationRequest(
                prompt=[*contexts.tokens, *rest],
                config=config,
                started=started,
                continues=bool(prefill),
                contexts=contexts,
                template=self._texts.template_text,
                prefill=prefill,
                on_finish=on_finish,
            )
        )

    def tokenize_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of messages without the contexts."""
        return self._texts.chat(messages, None, None, "", parse_special=False, fitting=False)

    def save_session(self, path: str | Path, tokens: Sequence[int] | None = None, text: str = "") -> None:
        """Refuse, as rows of contexts have their own files."""
        raise UsageError(
            "A conversation with contexts is saved without its cache.", "Give it a name that ends in .json."
        )

    def resume(self, session: SessionFile) -> bool:
        """Take over nothing; return False."""
        return False

    def _made(
        self, prefix: tuple[int, ...], adapter: str | None, progress: Callable[[int], None] | None = None
    ) -> JoinedContexts:
        """The rows of the contexts after a prefix; contexts without a current file are evaluated."""
        texts = [self._tokens(context) for context in self.contexts]
        known = self._joined.get((prefix, adapter))
        whole = (*prefix, *(token for text in texts for token in text))
        if known is not None and known.tokens == whole and known.there:
            known.use = replace(known.use, evaluated=0)
            return known
        with self._replies.working() as parts:
            parts.sequence.use_adapter(adapter)
            reader = _Reader(parts, prefix, adapter, progress)
            rows = parts.scheduler.run(reader.read_all(list(zip(self.contexts, texts, strict=True))))
            parts.sequence.restart()
            edited = sum(each.edits > 0 for each in rows)
            lossless = len(rows) == 1 and not edited and self._temperature == 1
            tokens = sum(map(len, texts))
            use = ContextUse(len(rows), tokens, reader.evaluated, edited, self._placement, self._temperature, lossless)
            assert parts.decoder is not None, "the reader has looked"
            joined = JoinedContexts(parts.decoder, reader.prefix, rows, use)
        self._holds_rows = self._holds_rows or any(isinstance(each, RowsInMemory) for each in rows)
        self._joined[prefix, adapter] = joined
        while len(self._joined) > _PREFIXES:
            self._joined.pop(next(iter(self._joined)), None)
        return joined

    def _tokens(self, context: Context) -> tuple[int, ...]:
        version = context.version()  # before the text is read, as it may change meanwhile
        known = self._encoded.get(context)
        if known is not None and version is not None and known[0] == version:
            return known[1]
        tokens = tuple(self._texts.data(context.text() + _APART, "context"))
        if not tokens:
            raise UnreadContextError(context.path, f"{context.path} has no tokens.", "Leave it out.")
        self._encoded[context] = version, tokens
        return tokens


def remembered(known: dict[tuple[object, ...], ContextModel], made: ContextModel) -> ContextModel:
    """An equal model made earlier, whose rows conversations can continue, or else this one."""
    key = (made.contexts, made._placement, made._temperature)
    known[key] = made = known.pop(key, made)
    # Rows held in memory are in no plan.
    for other in [each for each, earlier in known.items() if earlier is not made and earlier._holds_rows]:
        known.pop(other, None)
    while len(known) > _REMEMBERED:
        known.pop(next(iter(known)), None)
    return made


class _Reader:
    """Finds or makes the rows of contexts after one prefix; `evaluated` counts the tokens it had to evaluate."""

    prefix: ContextRows

    def __init__(
        self, parts: ModelParts, prefix: tuple[int, ...], adapter: str | None, progress: Callable[[int], None] | None
    ) -> None:
        self._maker = ContextMaker(parts.sequence, parts.decoder, prefix, progress)
        kind = parts.sequence.cache.snapshot(0, 0)
        origin = parts.origin.with_adapter(parts.backend.adapters[adapter] if adapter else "")
        self._making = Making(origin, parts.vocabulary_digest, prefix, kind.kv, kind.scales)
        self._sequence, self._prefix = parts.sequence, prefix
        self.evaluated = 0

    def read_all(self, contexts: Sequence[tuple[Context, tuple[int, ...]]]) -> Passes[list[ContextRows]]:
        self.prefix = RowsInMemory.of(self._prefix, (yield from self._undisturbed(self._maker.prefix)))
        rows = []
        for context, tokens in contexts:
            rows.append((yield from self._undisturbed(partial(self.read, context, tokens))))
        return rows

    def _undisturbed(self, make: Callable[[], Passes[T]]) -> Passes[T]:
        """Call `make`, again each time that an older reply takes its pages."""
        while True:
            try:
                return (yield from make())
            except PreemptedError:
                yield from self._sequence.give_way()

    def read(self, context: Context, tokens: tuple[int, ...]) -> Passes[ContextRows]:
        path, kept = self._kept(context)
        if kept is not None and kept.tokens == tokens and (context.edits == "turn" or not kept.edits):
            return kept
        edits = 0
        if kept is not None and context.edits == "turn":
            rows, evaluated = yield from self._maker.edited(tokens, kept)
            edits = kept.edits + 1
        else:
            rows, evaluated = (yield from self._maker.whole(tokens)), len(tokens)
        self.evaluated += evaluated
        try:
            if path is not None:
                return keep_rows(path, self._making, tokens, rows, edits)
        except StorageError as error:
            if context.rows is not None:
                raise
            _log.warning("The rows of %s cannot be kept: %s", context.path, error.message)
        return RowsInMemory.of(tokens, rows, edits)

    def _kept(self, context: Context) -> tuple[Path | None, KeptRows | None]:
        """The path for the rows of a context, and the rows that it holds."""
        if context.rows is not None:
            path = Path(context.rows)
            return path, read_rows(path, self._making)
        try:
            path = kept_place(self._making, context.name_of_rows)
        except StorageError as error:
            _log.warning("Rows of contexts cannot be kept: %s", error.message)
            return None, None
        try:
            return path, read_rows(path, self._making)
        except UsageError as error:
            _log.warning("%s The context is evaluated again.", error.message)
            return path, None
