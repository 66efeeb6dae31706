"""When a model is in memory: loaded when it is asked for, unloaded when it was idle, its cache kept in between. What
the cache held is put aside while the model is away, in a file of the user's cache that only this user may read, so that
the next request goes on where the last one ended. The file is gone once it was used, and when the program ends."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.bundle.manifest import TensorEntry
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.writing import storage_errors
from edgeinfer.core.errors import BackendError, EdgeInferError, StorageError, UsageError
from edgeinfer.core.records import dataclass
from edgeinfer.core.results import LoadCosts, ModelInfo
from edgeinfer.core.user_files import user_cache
from edgeinfer.core.version import SAMPLING
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.backends.expert_use import ExpertUseObserver
from edgeinfer.runtime.decoding import sequence as sequences
from edgeinfer.runtime.decoding.scheduler import Scheduler
from edgeinfer.runtime.decoding.sequence import Passes
from edgeinfer.runtime.kv_cache.session_file import Origin, SessionFile, open_session, write_session
from edgeinfer.runtime.planning.ledger import Ledger
from edgeinfer.runtime.planning.plan import MemoryPlan
from edgeinfer.runtime.sampling.constraint import ChoiceLists
from edgeinfer.runtime.speculation.batch import SequenceDrafting
from edgeinfer.runtime.speculation.speculator import Speculator
from edgeinfer.runtime.system.forks import finalize_here, keep_for_good, renewed_in_children
from edgeinfer.runtime.system.memory import release_freed
from edgeinfer.runtime.text.contract import TokenizerLike, longest_token, vocabulary_digest
from edgeinfer.runtime.text.special_tokens import LiteralEncoder
from edgeinfer.runtime.text.tokenizer import Tokenizer
from edgeinfer.runtime.weights.verification import Verification

if TYPE_CHECKING:
    from edgeinfer.runtime.decoding.embedding import DecoderEmbedder
    from edgeinfer.runtime.layer_skip.reduced_compute import ReducedComputeStrategies
    from edgeinfer.runtime.remote.decoding import RemoteDeciding
    from edgeinfer.runtime.sampling.grammar_tokens import GrammarVocabulary


@dataclass(frozen=True)
class ModelParts:
    sequence: sequences.Sequence  # of the reply that has the model to itself, or of one of several
    tokenizer: TokenizerLike
    loaded: ModelInfo  # which model it is, without the state of verification that `info` adds
    begin_ids: tuple[int, ...]
    eos_ids: frozenset[int]
    load: LoadCosts
    tensors: tuple[TensorEntry, ...]
    origin: Origin
    speculator: Speculator
    make_reduced: Callable[[], ReducedComputeStrategies]
    make_embedder: Callable[[], DecoderEmbedder]
    ledger: Ledger
    verification: Verification  # of its files; replies wait for it
    threads: int
    watched: ExpertUseObserver | None = None  # counts how the model's experts are used, if it has any
    decoder: DecoderSpec | None = None  # description of the layers, where the bundle has one
    sampling: Mapping[str, Any] = field(default_factory=dict)  # generation options that its makers recommend for chats
    main: ModelParts | None = None  # in the parts of one of several sequences, the model's own parts
    drafting: SequenceDrafting | None = None  # in the parts of one of several sequences, its drafting
    # In those too: takes over rows of a text that other sequences have, or waits until they do.
    join: Callable[[Sequence[int]], Passes[None]] | None = None
    # The server that decides the text which this model drafts; None where this model decides.
    remote: RemoteDeciding | None = None

    def for_sequence(
        self, sequence: sequences.Sequence, replies: Callable[[], int], join: Callable[[Sequence[int]], Passes[None]]
    ) -> ModelParts:
        """These parts with another sequence, for replies side by side."""
        drafting = SequenceDrafting(sequence.cache, replies)
        return replace(self, sequence=sequence, watched=None, main=self, drafting=drafting, join=join)

    @property
    def backend(self) -> Backend:
        return self.sequence.backend

    @cached_property
    def scheduler(self) -> Scheduler:
        """It makes all replies of the model."""
        if self.main is not None:
            return self.main.scheduler
        return Scheduler(self.backend, self.sequence.chunk)

    @property
    def info(self) -> ModelInfo:
        return replace(self.loaded, verified=self.verification.outcome)

    @property
    def plan(self) -> MemoryPlan:
        return self.ledger.plan

    @cached_property
    def reduced(self) -> ReducedComputeStrategies:
        """The strategies of replies that take less compute."""
        return self.make_reduced()

    @cached_property
    def grammar_vocabulary(self) -> GrammarVocabulary:
        """The vocabulary in the form that grammars need, with memory planned for it."""
        if self.main is not None:
            return self.main.grammar_vocabulary
        from edgeinfer.runtime.sampling.grammar_tokens import GrammarVocabulary  # of few replies

        self.ledger.plan_grammars()
        sliced = self.plan.configuration.grammars == "sliced"
        return GrammarVocabulary(self.tokenizer, self.backend.geometry.vocab_size, sliced=sliced)

    @cached_property
    def choice_lists(self) -> ChoiceLists:
        """The lists of choices of recent replies."""
        if self.main is not None:
            return self.main.choice_lists
        return ChoiceLists(self.tokenizer, self.literal_encoder, self.backend.geometry.vocab_size)

    @cached_property
    def literal_encoder(self) -> LiteralEncoder:
        """The tokenizer for texts that must not become special tokens."""
        if self.main is not None:
            return self.main.literal_encoder
        return LiteralEncoder(self.tokenizer, self.eos_ids)

    @cached_property
    def vocabulary_digest(self) -> str:
        return vocabulary_digest(self.tokenizer)

    @cached_property
    def longest_token(self) -> int:
        return longest_token(self.tokenizer)


_log = logging.getLogger("edgeinfer")

# Session files of a process id, including leftovers of killed processes.
_OURS = re.compile(r"\.?aside-(\d+)-\d+\.session.*")


@dataclass(frozen=True)
class Facts:
    """Facts of a model that stay known while it is unloaded."""

    plan: MemoryPlan
    info: ModelInfo
    begin_ids: tuple[int, ...]
    end_ids: frozenset[int]
    load: LoadCosts
    tensors: tuple[TensorEntry, ...]
    threads: int
    adapters: tuple[str, ...]
    sampling: Mapping[str, Any]
    digest: str
    tokenizes_concurrently: bool


class ModelLifecycle:
    """Loads the parts of a model when they are needed, and frees them when they were idle."""

    def __init__(
        self,
        make: Callable[
            [float, MemoryPlan | None], ModelParts
        ],  # of the request's time, and of the plan after the first
        started: float,  # time of the first request, which is served at once
        idle_s: float | None,  # seconds without use after which the model is unloaded
        aside: bool,  # keep the cache's contents in a file while the model is unloaded
    ) -> None:
        self._make = make
        self._idle_s = idle_s
        self._closed = False
        self._puts_aside = aside
        self._parts: ModelParts | None = None
        self._renew()
        self._parts = make(started, None)
        self._facts = _facts(self._parts)
        renewed_in_children(self)

    def _renew(self) -> None:
        self._lock = threading.RLock()
        self._holders = 0
        self._timer: threading.Timer | None = None
        self._aside: Path | None = None
        self._forget_aside: Callable[[], object] = lambda: None

    def renew(self) -> None:
        """Forget the parts in the child of a fork, where they lack their threads."""
        if self._parts is not None:
            self._facts = _facts(self._parts)
            keep_for_good(self._parts)
            self._parts = None
        self._renew()

    @property
    def facts(self) -> Facts:
        """Facts of the model; does not load it."""
        parts = self._parts
        return self._facts if parts is None else _facts(parts)

    @property
    def in_memory(self) -> bool:
        return self._parts is not None

    def parts(self) -> ModelParts:
        """The parts, loaded if necessary. Only `acquire` and `take` keep them in memory."""
        with self._lock:
            if self._closed:
                raise UsageError("The model is closed.", "Load it again.")
            if self._parts is None:
                self._parts = self._make(time.perf_counter(), self._facts.plan)
                self._bring_back(self._parts)
            self._wait()
            return self._parts

    def take(self) -> ModelParts:
        """The parts, which stay in memory until `leave`."""
        with self._lock:
            parts = self.parts()
            self._holders += 1
            self._wait()
            return parts

    def leave(self) -> None:
        """Undo one `take`; the last one of a closed model frees it."""
        with self._lock:
            self._holders = max(0, self._holders - 1)  # parts taken before a fork are left in the child too
            if self._closed:
                self._free_for_good()
            else:
                self._wait()

    @contextmanager
    def acquire(self, *, verified: bool = True) -> Iterator[ModelParts]:
        """The parts, which stay in memory inside the block; `verified` waits until all files are verified."""
        parts = self.take()
        try:
            if verified:
                parts.verification.require()
            yield parts
        finally:
            self.leave()

    def unload(self) -> None:
        with self._lock:
            if self._parts is None or self._holders:
                return
            self._stop_waiting()
            parts, self._parts = self._parts, None
            self._facts = _facts(parts)
            self._put_aside(parts)
            _free(parts)
        del parts
        release_freed()

    def shut(self) -> None:
        """Refuse further requests; current users keep the parts."""
        with self._lock:
            self._stop_waiting()
            self._closed = True

    def close(self) -> None:
        """Free the parts for good, at once or when the last user leaves."""
        with self._lock:
            self.shut()
            self._forget_aside()
            self._free_for_good()

    def _free_for_good(self) -> None:
        if self._parts is not None and not self._holders:
            self._facts = _facts(self._parts)
            parts, self._parts = self._parts, None
            _free(parts)
            del parts
            # Models have reference cycles.
            gc.collect()
            release_freed()

    def _wait(self) -> None:
        """Restart the idle timer unless the parts are in use."""
        self._stop_waiting()
        if self._idle_s is None or self._holders or self._parts is None:
            return
        waiting = weakref.ref(self)  # the timer must not keep the model alive
        timer = threading.Timer(self._idle_s, lambda: _call(waiting, timer))
        timer.daemon = True
        self._timer = timer
        timer.start()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _waited(self, timer: threading.Timer) -> None:
        with self._lock:
            # A request may have come while this thread waited for the lock.
            if timer is self._timer:
                self.unload()

    def _put_aside(self, parts: ModelParts) -> None:
        self._forget_aside()
        if not (self._puts_aside and parts.sequence.cached_tokens and parts.sequence.cache.copyable):
            return
        if not parts.verification.passed:
            return
        try:
            path = _place()
            save(parts, path)
        except StorageError as error:
            _log.info("The conversation could not be saved while the model was unloaded. %s", error.message)
            return
        self._aside = path
        # Called when the program ends, unless it was called before.
        self._forget_aside = finalize_here(self, _remove, path)

    def _bring_back(self, parts: ModelParts) -> None:
        if self._aside is not None:
            try:
                with open_session(self._aside) as session:
                    resume(parts, session)
            except EdgeInferError as error:
                _log.info("The saved conversation is lost and will be evaluated again. %s", error.message)
            self._forget_aside()
            self._aside = None


def _call(waiting: weakref.ref[ModelLifecycle], timer: threading.Timer) -> None:
    lifecycle = waiting()
    if lifecycle is not None:
        lifecycle._waited(timer)


def _facts(parts: ModelParts) -> Facts:
    return Facts(
        parts.plan,
        parts.info,
        parts.begin_ids,
        parts.eos_ids,
        parts.load,
        parts.tensors,
        parts.threads,
        tuple(parts.backend.adapters),
        parts.sampling,
        parts.origin.model,
        isinstance(parts.tokenizer, Tokenizer),
    )


def _free(parts: ModelParts) -> None:
    parts.verification.stop()
    parts.speculator.close()
    parts.sequence.evict_prefixes()
    parts.backend.close()


def _place() -> Path:
    """A path for a session file; removes leftovers of processes that have ended."""
    import psutil  # only here: a megabyte of modules

    folder = user_cache() / "edgeinfer" / "aside"
    with storage_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in folder.iterdir():
            ours = _OURS.fullmatch(path.name)
            if ours is not None and not psutil.pid_exists(int(ours[1])):
                _remove(path)
    return folder / f"aside-{os.getpid()}-{time.time_ns()}.session"


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def save(parts: ModelParts, path: Path, tokens: Sequence[int] | None = None, text: str = "") -> None:
    """Write the cache to a file, of the common prefix with `tokens` as far as it can be resumed; None writes all."""
    sequence = parts.sequence
    shared = len(sequence.cached_tokens) if tokens is None else sequence.shared(tokens)
    cached = sequence.cached_tokens[: sequence.cache.rewindable_to(shared)]
    origin = parts.origin.with_adapter(_digests(sequence)[sequence.adapter])
    write_session(path, origin, cached, sequence.cache.snapshot, text)


def _digests(sequence: sequences.Sequence) -> dict[str | None, str]:
    """Digests of the adapters by name, and an empty one for no adapter."""
    return {None: "", **dict(sequence.backend.adapters.items())}


def resume(parts: ModelParts, session: SessionFile) -> bool:
    """Take over the rows of a session file if this model would make the same; return whether it did, or log why not."""
    if session.sampling != SAMPLING:
        _log.warning(
            "The conversation in %s was sampled by version %d: a seed now gives other text (version %d).",
            session.path,
            session.sampling,
            SAMPLING,
        )
    sequence = parts.sequence
    kind = sequence.cache.snapshot(0, 0)
    known = {parts.origin.with_adapter(digest).run: adapter for adapter, digest in _digests(sequence).items()}
    obstacles = {
        "they are another model's": session.origin.model != parts.origin.model,
        "the model ran with other settings, or an adapter that it has not": session.origin.run not in known,
        "the KV cache has another data type": (session.kv, session.scales) != (kind.kv, kind.scales),
        "the context is smaller": len(session.tokens) > sequence.cache.capacity,
        "its token ids are not in the vocabulary": max(session.tokens, default=0)
        >= sequence.backend.geometry.vocab_size,
    }
    reason = next((reason for reason, met in obstacles.items() if met), None)
    if reason is None and session.tokens:
        try:
            sequence.use_adapter(known[session.origin.run])
            sequence.adopt(session.tokens, session.pieces())
        except (BackendError, UsageError) as error:
            reason = error.message.rstrip(".")
    if reason is not None:
        _log.warning("The conversation in %s will be evaluated again: %s.", session.path, reason)
    return reason is None
