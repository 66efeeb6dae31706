"""What drafters with a draft module share: they follow the target's passes and read the text before they guess."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.spec import WAITING_ROWS, DraftModule
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import Backend, KVCache, Pass, PassResult
from edgeinfer.runtime.decoding.sequence import Evaluate, Passes, run_alone
from edgeinfer.runtime.speculation.drafters.contract import DraftContext, Round
from edgeinfer.runtime.speculation.drafters.logit_drafter import LogitDrafter


@dataclass(frozen=True, slots=True, eq=False)
class Unread:
    """Rows of the text that a module has not read."""

    # That follow each of them.
    tokens: Ints  # (S,)
    # Of the rows.
    positions: Ints  # (S,)
    # Of the target in them, views.
    states: Floats  # (S, W)
    last: bool  # whether the root is behind the last of them


class TargetStates:
    """Follows the rows of a target's cache by its passes; `observe` is called after each. A module's row for a token
    reads the state before it, so a row can be `read` once the token behind it is known. Rows that no pass showed, as
    those of a prefix that was kept elsewhere, are left out."""

    def __init__(
        self,
        width: int,
        state: Callable[[PassResult], Floats | None],
        read: Callable[[Unread], Passes[None]],
        trim: Callable[[int], None],
    ) -> None:
        self._state, self._read, self._trim = state, read, trim
        self._done: list[tuple[int, int]] = []  # rows that were read, ascending, each with the token behind it
        self._first = 0  # the first row that waits
        self._tokens: list[int] = []  # of the rows that wait
        self._states = np.empty((WAITING_ROWS, width), np.float32)
        self._branches: tuple[list[int], Floats] | None = None  # of a tree, of which verification keeps a path

    @property
    def done(self) -> int:
        """Rows that were read."""
        return len(self._done)

    @property
    def waiting(self) -> int:
        """Rows that were not read."""
        return len(self._tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that wait."""
        return self._states.nbytes

    def observe(self, start: int, batch: Pass, output: PassResult) -> None:
        """A pass of the target over new tokens, from row `start` on."""
        self.cut(start)
        self._branches = None
        states = self._state(output)
        whole = batch.planes == 2 and batch.experts is None and batch.layer_mask is None
        if states is None or not whole:
            return
        tokens = batch.tokens.tolist()
        if self._done and self._done[-1][0] == start - 1 and self._done[-1][1] != tokens[0]:
            self._forget(self.done - 1)
        if self._first + len(self._tokens) != start:
            self._tokens.clear()
            self._first = start
        if batch.tree is None:
            self._append(tokens, states)
        else:
            self._branches = tokens, states.copy()

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last pass, if it was over a tree, in this order."""
        if self._branches is not None:
            tokens, states = self._branches
            self._branches = None
            self._append([tokens[row] for row in rows], states[list(rows)])

    def cut(self, row: int) -> None:
        """The text's rows from this one on are dropped."""
        del self._tokens[max(0, row - self._first) :]
        kept = self.done
        while kept and self._done[kept - 1][0] >= row:
            kept -= 1
        self._forget(kept)

    def compare(self, tokens: Sequence[int]) -> None:
        """Follow a text that may be another: rows are dropped from the first on behind which these tokens differ."""
        for place, (row, behind) in enumerate(self._done):
            if row + 1 >= len(tokens) or tokens[row + 1] != behind:
                self._forget(place)
                return

    def catch_up(self, base: int, root: int) -> Passes[bool]:
        """Read all rows up to the one before the root, whose row `base` will be; false where that one is not known."""
        self.cut(base)
        if self._first + len(self._tokens) != base or not self._tokens:
            return False
        yield from self._hand_over([*self._tokens[1:], root], last=True)
        return True

    def clear(self) -> None:
        """Forget all rows."""
        self._tokens.clear()
        self._branches = None
        self._forget(0)

    def _append(self, tokens: Sequence[int], states: Floats) -> None:  # (S, W)
        at = 0
        while at < len(tokens):
            if len(self._tokens) == WAITING_ROWS:
                # The last one waits for the token behind it. Within a pass of the target none can be waited for, so
                # what is read here shares no pass with others.
                run_alone(self._hand_over(self._tokens[1:], last=False))
            size = min(len(tokens) - at, WAITING_ROWS - len(self._tokens))
            waiting = len(self._tokens)
            self._states[waiting : waiting + size] = states[at : at + size]
            self._tokens.extend(tokens[at : at + size])
            at += size

    def _hand_over(self, behind: Sequence[int], *, last: bool) -> Passes[None]:
        """Has the first rows read, behind which these tokens are."""
        size = len(behind)
        positions = np.arange(self._first, self._first + size)
        yield from self._read(Unread(np.array(behind, np.int64), positions, self._states[:size], last))
        self._done.extend(zip(positions.tolist(), behind, strict=True))
        left = len(self._tokens) - size
        self._states[:left] = self._states[size : size + left]
        del self._tokens[:size]
        self._first += size

    def _forget(self, kept: int) -> None:
        if kept < self.done:
            del self._done[kept:]
            self._trim(kept)


_NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class OpenModule:
    """A draft module that was loaded for a target."""

    target: Backend  # whose passes it follows
    text: KVCache  # of the text that it follows there
    backend: Backend  # the module's, which nothing but its drafter uses; the drafter does not close it
    cache: KVCache  # its own
    described: DraftModule  # what the module reads
    tapped: bool  # whether that is the states of tapped layers; otherwise the last ones
    tokens: NDArray[np.int64] | None  # the target's tokens that the module's are; None where they are the same. (Vd,)


class ModuleDrafter(LogitDrafter):
    """Drafts with a draft module, whose cache holds rows of the text and, behind them, those of a draft."""

    follows_passes = True

    def __init__(self, own: OpenModule) -> None:
        vocabulary = own.backend.geometry.vocab_size
        super().__init__(vocabulary)
        self._tokens = own.tokens
        self._all = np.full(0 if own.tokens is None else vocabulary, -np.inf, np.float32)
        self._target, self._text, self._module, self._cache = own.target, own.text, own.backend, own.cache
        self._states = TargetStates(own.described.width, _tapped if own.tapped else _last, self._read, self._trim)
        self._ready = False  # it has read the text up to the root
        self._lost = 0
        self._cache.trim(0)
        self._target.observers.append(self)

    def passed(self, cache: KVCache, start: int, batch: Pass, result: PassResult) -> None:
        """Follow a pass over the text."""
        if cache is self._text:
            self._states.observe(start, batch, result)

    def kept(self, cache: KVCache, start: int, rows: Sequence[int]) -> None:
        """Follow the path of a tree that was kept."""
        if cache is self._text:
            self._states.keep(rows)

    def _evaluate(self, batch: Pass) -> Passes[PassResult]:
        """Run a pass of the module."""
        (output,) = yield Evaluate(self._module, [(self._cache, batch)])
        return output

    def begin(self, tokens: Sequence[int]) -> None:
        """Follow a text that may be another, or the same that has been fed further."""
        super().begin(tokens)
        self._leave_draft()
        self._states.compare(tokens)

    def observe(self, round: Round) -> None:
        """A round is over: the draft's own rows go."""
        super().observe(round)
        self._leave_draft()

    def unread(self, context: DraftContext) -> int:
        """Rows that wait, besides the one before the root."""
        return 0 if self._ready else max(0, self._states.waiting - 1)

    @abstractmethod
    def _read(self, unread: Unread) -> Passes[None]:
        """Read rows of the text."""

    @abstractmethod
    def _trim(self, rows: int) -> None:
        """Leaves so many rows of the text in the module's cache, and none of a draft."""

    def _leave_draft(self) -> None:
        """A round is over: what was computed for it is of no use."""
        self._ready = False

    def _catch_up(self, context: DraftContext, base: int) -> Passes[bool]:
        """Read the text up to the root; false where the row before it is not known."""
        if self._ready:
            return True
        if context.lost() != self._lost:
            # Rows have moved, and what they were is not known.
            self._lost = context.lost()
            self._states.clear()
        self._ready = yield from self._states.catch_up(base, context.tokens[-1])
        return self._ready

    def _widened(self, logits: Floats) -> Floats:  # (Vd,) -> (V,)
        """Logits of all tokens, where those that the module cannot draft are impossible; a view."""
        if self._tokens is None:
            return logits
        self._all[self._tokens] = logits
        return self._all

    def nbytes(self) -> int:
        return sum(self._module.nbytes().values()) + super().nbytes() + self._states.nbytes + self._all.nbytes

    def close(self) -> None:
        """Follow the target's passes no longer."""
        super().close()
        if self in self._target.observers:
            self._target.observers.remove(self)


class StepDrafter(ModuleDrafter):
    """Drafts with a module whose row before the root gives logits and a state, from which it goes on; arguments as
    its base."""

    def __init__(self, own: OpenModule) -> None:
        super().__init__(own)
        drafted = own.backend.geometry.vocab_size if own.tokens is None else len(own.tokens)
        self._first = np.empty(drafted, np.float32)  # logits behind the root

    @abstractmethod
    def _begin_at(self, state: Floats) -> None:  # (D,)
        """Take the module's state in the row before the root, a view that the next pass overwrites."""

    def _read(self, unread: Unread) -> Passes[None]:
        self._leave_draft()
        rows = np.array([len(unread.tokens) - 1]) if unread.last else _NO_ROWS
        output = yield from self._evaluate(Pass(unread.tokens, unread.positions, rows, tapped=unread.states))
        if not unread.last:
            return
        assert output.hidden is not None, "modules give their states"
        self._first[:] = output.logits[0]
        self._begin_at(output.hidden[-1])

    def nbytes(self) -> int:
        return super().nbytes() + self._first.nbytes


def _tapped(output: PassResult) -> Floats | None:  # (S, W)
    return output.tapped


def _last(output: PassResult) -> Floats | None:  # (S, D)
    return output.hidden
