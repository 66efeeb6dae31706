"""What a loaded model tells of itself, and what its cache holds, kept in files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgeinfer.errors import ModelError
from edgeinfer.lifecycle import resume, save
from edgeinfer.measured import Measured
from edgeinfer.results import ExpertUse, LoadCosts, ModelInfo
from edgeinfer.runtime.experts.statistics import ExpertCounts
from edgeinfer.runtime.kv_cache.session_file import SessionFile, open_session
from edgeinfer.runtime.planning.plan import MemoryPlan

__all__ = ["LoadedModel"]


class LoadedModel(Measured):
    """A model whose facts can be asked for."""

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
    def threads(self) -> int:
        """How many threads a pass works with."""
        return self._lifecycle.facts.threads

    @property
    def experts(self) -> ExpertUse | None:
        """How the tokens so far used experts, since the model was last loaded; None where it has none."""
        watched = self._parts.watched
        return None if watched is None else watched.use()

    @property
    def expert_counts(self) -> ExpertCounts | None:
        """The same as counts of tokens for each layer and expert; None where it has none."""
        watched = self._parts.watched
        return None if watched is None else watched.counts

    @property
    def load_costs(self) -> LoadCosts:
        """What loading took."""
        return self._lifecycle.facts.load

    @property
    def begin_ids(self) -> list[int]:
        """The begin token, in a list; empty where the model has none."""
        return list(self._lifecycle.facts.begin_ids)

    @property
    def end_ids(self) -> list[int]:
        """The tokens that end a reply, ascending."""
        return sorted(self._lifecycle.facts.end_ids)

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
