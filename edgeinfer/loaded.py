"""What a loaded model tells of itself, and what its cache holds, kept in files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.errors import ModelError
from edgeinfer.lifecycle import resume, save
from edgeinfer.model_parts import ModelParts
from edgeinfer.results import ExpertUse, LoadCosts, ModelInfo
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.kv_cache.session_file import SessionFile, open_session
from edgeinfer.runtime.planning.plan import MemoryPlan
from edgeinfer.tokenizing import Tokenizing

if TYPE_CHECKING:
    from edgeinfer.runtime.tuning.measure import TokenScores


class LoadedModel(Tokenizing):
    """A model whose facts can be asked for."""

    def __repr__(self) -> str:
        info = self.info
        kept = f"{info.bits_per_weight:.1f} bits, context {self.context}, {info.backend} on {info.device}"
        return f"<{type(self).__name__} {info.name}: {kept}>"

    def _require_idle(self) -> None:
        """Ends a reply that was left unfinished."""
        raise NotImplementedError

    def _alone(self) -> AbstractContextManager[None]:
        """Keeps replies of other threads from beginning before the block ends; errors as `_require_idle`."""
        raise NotImplementedError

    @property
    def _parts(self) -> ModelParts:
        return self._lifecycle.parts()

    @contextmanager
    def _idle(self) -> Iterator[ModelParts]:
        """The parts while no reply is running, which stay inside the block."""
        with self._alone(), self._lifecycle.acquire() as parts:
            yield parts

    @property
    def plan(self) -> MemoryPlan:
        """The memory plan in force."""
        return self._lifecycle.facts.plan

    @property
    def info(self) -> ModelInfo:
        """Which model this is."""
        return self._lifecycle.facts.info

    @property
    def context(self) -> int:
        """Tokens of prompt plus reply."""
        return self._lifecycle.facts.plan.context

    @property
    def digest(self) -> str:
        """The sha256 of weights and decoder, in hexadecimal digits: which model it is, wherever it lies."""
        return self._lifecycle.facts.digest

    @property
    def vocabulary_digest(self) -> str:
        """The sha256 of what each token id stands for: equal for models whose ids mean the same."""
        return self._parts.vocabulary_digest

    @property
    def in_memory(self) -> bool:
        """Whether the model is in memory now; if not, the next request loads it again."""
        return self._lifecycle.in_memory

    def reload(self) -> None:
        """Loads the model again now, if it was unloaded, as the next request would.

        Raises:
            EdgeInferError: as `edgeinfer.load`; the next request tries again.
        """
        self._lifecycle.parts()

    @property
    def threads(self) -> int:
        """How many threads a pass works with."""
        return self._lifecycle.facts.threads

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that replies can be made with."""
        return self._lifecycle.facts.adapters

    def require_contexts(self) -> None:
        """Refuses where `with_contexts` would refuse this model, before any text is read.

        Raises:
            CapabilityError: contexts cannot be evaluated apart of this model, or by its backend.
        """
        from edgeinfer.runtime.decoding.contexts import require_contexts

        with self._lifecycle.acquire(verified=False) as parts:
            require_contexts(parts.engine, parts.decoder)

    @property
    def experts(self) -> ExpertUse | None:
        """How the tokens so far used experts, since the model was last loaded; None where it has none."""
        watched = self._parts.watched
        return None if watched is None else watched.use()

    @property
    def load_costs(self) -> LoadCosts:
        """What loading took."""
        return self._lifecycle.facts.load

    @property
    def begin_ids(self) -> list[int]:
        """The begin token, in a list; empty where the model has none."""
        return list(self._lifecycle.facts.begin_ids)

    @property
    def sampling(self) -> Mapping[str, Any]:
        """Generation options that the model's makers recommend. Chats use them unless the caller gives others."""
        return self._lifecycle.facts.sampling

    @property
    def prefix_ids(self) -> list[int]:
        """What `tokenize` puts before every text: the begin token, or nothing where the tokenizer adds none."""
        begin = self.begin_ids
        return begin if begin and self.tokenize("a")[: len(begin)] == begin else []

    @property
    def end_ids(self) -> list[int]:
        """The tokens that end a reply, ascending."""
        return sorted(self._lifecycle.facts.end_ids)

    def logits(self, tokens: Sequence[int], adapter: str | None = None) -> Iterator[Floats]:
        """The logits after each token of a text, as arrays of a few rows each, which the next overwrites: (R, V).

        Empties the cache. Nothing else may be asked of the model before the last of them.

        Args:
            adapter: name of that with which the text is evaluated.
        """
        self._require_idle()

        def rows(logits: Iterator[Floats]) -> Iterator[Floats]:
            with self._idle():
                yield from logits

        with self._lifecycle.acquire() as parts:
            from edgeinfer.runtime.tuning.measure import token_logits

            parts.engine.use_adapter(adapter)
            return rows(token_logits(parts.engine, tokens))

    def score(self, tokens: Sequence[int], adapter: str | None = None) -> TokenScores:
        """Log-probabilities of a given text and the best next token after each of its tokens; empties the cache.

        Args:
            adapter: name of that with which the text is evaluated.
        """
        from edgeinfer.runtime.tuning.measure import score_tokens

        with self._idle() as parts:
            parts.engine.use_adapter(adapter)
            return score_tokens(parts.engine, tokens)

    def save_session(self, path: str | Path, tokens: Sequence[int] | None = None, text: str = "") -> None:
        """Writes what the cache holds to a file, for `load_session` to go on without evaluating it again.

        Args:
            tokens: of a prompt; only what both share is written. None writes all.
            text: kept in the file.

        Raises:
            StorageError: the path cannot be written.
        """
        with self._idle() as parts:
            save(parts, Path(path), tokens, text)

    def load_session(self, path: str | Path) -> list[int]:
        """Takes over what `save_session` wrote; the token ids it is of. What was made in another way is made again.

        Raises:
            UsageError: the file is missing, damaged or no session file.
            ModelError: it is another model's.
        """
        with open_session(Path(path)) as session, self._idle() as parts:
            if session.origin.model != parts.origin.model:
                message = f"{path} was written by another model than {self.info.name}."
                raise ModelError(message, "Load the model it was written by.")
            resume(parts, session)
            return list(session.tokens)

    def resume(self, session: SessionFile) -> bool:
        """Takes over the rows of an open session file, if they are this model's; whether they were."""
        with self._idle() as parts:
            return resume(parts, session)
