"""Drafting with a small model of the same tokenizer, and a head that tells which of its tokens will be accepted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.bundle.additions import STATE_EPS, Heads
from edgeinfer.bundle.store import Bundle
from edgeinfer.errors import ModelError
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import Backend, ForwardInput
from edgeinfer.runtime.speculation.drafters.contract import DraftContext
from edgeinfer.runtime.speculation.drafters.following import Follower
from edgeinfer.runtime.speculation.drafters.heads import Matrix, silu
from edgeinfer.runtime.speculation.drafters.logit_drafter import LogitDrafter
from edgeinfer.runtime.text.vocabularies import vocabulary_difference

# Times that the one block is run: SpecDec++ (Huang et al. 2024) shares it between its three places.
_TIMES = 3


class AcceptanceJudge:
    """Estimates whether the target will accept a draft model's next token, by a head over its state (SpecDec++).

    Args:
        heads: of kind "acceptance", of the draft model.
    """

    def __init__(self, heads: Heads) -> None:
        names = ("weight", "bias", "out", "out_bias")
        weight, *others = (heads.arrays[name].astype(np.float32) for name in names)
        self._weight = Matrix(weight)
        self._bias, self._out, self._out_bias = others

    def accepts(self, state: Floats) -> float:  # (D,)
        """Probability that the model's likeliest token from this state, before its final norm, is accepted."""
        state = state / np.sqrt(np.dot(state, state) / len(state) + STATE_EPS)
        for _ in range(_TIMES):
            state = state + silu((self._weight @ state) + self._bias)
        rejected, accepted = (self._out @ state + self._out_bias).tolist()
        return float(1 / (1 + np.exp(min(rejected - accepted, 60.0))))

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(array.nbytes for array in (self._weight, self._bias, self._out, self._out_bias))


class ModelDrafter(LogitDrafter):
    """Drafts with a small model, whose cache keeps what earlier rounds fed and catches up when a guess is asked for.

    Args:
        backend: of the drafter's bundle, which nothing but drafters uses; they do not close it.
        chunk: most tokens of a pass that catches up.
        vocabulary: V, columns of the target's logits; None is as many as the drafter's. Where the two are padded
            differently, tokens that only one of them has are never proposed.
        acceptance: the drafter's head that judges its tokens; None leaves that to their probabilities.
    """

    name = "model"

    def __init__(
        self, backend: Backend, chunk: int, vocabulary: int | None = None, acceptance: Heads | None = None
    ) -> None:
        own = backend.geometry.vocab_size
        super().__init__(vocabulary or own)
        self._backend = backend
        self._own = own
        self._follower = Follower(backend, self._run, chunk)
        self._judge = None if acceptance is None or not backend.capabilities.hidden else AcceptanceJudge(acceptance)
        self._states: Floats | None = None  # of the rows whose logits the last pass gave; a view (R, D)
        self._row = -1  # of them, whose logits are learnt from now
        # Columns that the drafter lacks stay impossible.
        self._padded = np.full(vocabulary if vocabulary and vocabulary > own else 0, -np.inf, np.float32)

    def _run(self, tokens: Ints, positions: Ints, rows: Ints) -> Floats:
        return self._run_tree(tokens, positions, rows, None)

    def _run_tree(self, tokens: Ints, positions: Ints, rows: Ints, tree: Ints | None) -> Floats:
        # An id of the target's padding means nothing to either model; any other one stands for it here.
        output = self._backend.forward(ForwardInput(np.minimum(tokens, self._own - 1), positions, rows, tree=tree))
        if self._judge is not None and output.hidden is not None and len(rows):
            self._states = output.hidden[rows[0] :]
        return output.logits

    def _judged(self, path: tuple[int, ...]) -> float | None:
        """The head's word, where there is one."""
        return None if self._judge is None or self._states is None else self._judge.accepts(self._states[self._row])

    def begin(self, tokens: Sequence[int]) -> None:
        """Forgets the guesses of the last round; what the cache shares with the prompt stays."""
        super().begin(tokens)
        self._follower.doubt()

    def unread(self, context: DraftContext) -> int:
        """What the cache lacks of the text; nothing where the text does not fit it, so that none of it is read."""
        return self._follower.unread(context.tokens) if len(context.tokens) <= self._backend.cache.capacity else 0

    def _logits(self, context: DraftContext, drafted: Sequence[int]) -> Floats | None:  # (V,)
        if len(context.tokens) + len(drafted) > self._backend.cache.capacity:
            return None
        self._row = -1
        return self._widened(self._follower.follow(context.tokens, drafted, 1)[0])

    def after(self, tokens: Sequence[int]) -> Floats | None:  # (V,)
        """Logits after a text that has only grown since `begin`, a view; None where it does not fit the cache."""
        if len(tokens) > self._backend.cache.capacity:
            return None
        return self._widened(self._follower.follow(tokens, (), 1)[0])

    def behind(self, tokens: Sequence[int], count: int) -> list[Floats] | None:
        """Copies of the logits (V,) after each of the last tokens of such a text; None where it does not fit."""
        if len(tokens) > self._backend.cache.capacity:
            return None
        return [self._widened(row).copy() for row in self._follower.follow(tokens, (), count)]

    def _widened(self, logits: Floats) -> Floats:  # (V of the drafter,) -> (V,)
        if not len(self._padded):
            return logits[: len(self._powers)]
        self._padded[: self._own] = logits
        return self._padded

    def knows(self, drafted: Sequence[int]) -> bool:
        """Whether a guess after this path needs no pass."""
        return tuple(drafted) in self._known

    @property
    def verifies_trees(self) -> bool:
        """Whether what `look_ahead` is given may branch."""
        return self._backend.capabilities.tree

    def look_ahead(
        self, context: DraftContext, drafted: Sequence[int], proposed: Sequence[int], parents: Sequence[int], width: int
    ) -> None:
        """Works out in one pass the guesses after a path, and after each proposed token that is the first of such.

        `guesses` then gives up to `width` of them without a pass: the very ones that it would have given anyway.

        Args:
            proposed, parents: nodes of a tree behind the path, parents before children; -1 is the path's end.
        """
        room = self._backend.cache.capacity - len(context.tokens) - len(drafted)
        if room < 0 or self.knows(drafted):
            return
        path, proposed, parents = tuple(drafted), proposed[:room], parents[:room]
        rows = self._follower.explore(context.tokens, path, proposed, parents, self._run_tree)  # (1 + N, V)
        kept: list[int] = []
        node: int | None = -1
        while node is not None:
            self._row = 1 + node
            first = self._learn(context, path, self._widened(rows[1 + node]), width)[0]
            children = (child for child, parent in enumerate(parents) if parent == node)
            node = next((child for child in children if proposed[child] == first.token), None)
            if node is not None:
                kept.append(node)
                path = (*path, first.token)
        self._follower.keep(kept)

    def nbytes(self) -> int:
        """Bytes that its backend allocated, and its own."""
        judge = 0 if self._judge is None else self._judge.nbytes
        return sum(self._backend.nbytes().values()) + super().nbytes() + self._padded.nbytes + judge


def check_same_vocabulary(target: Bundle, drafter: Bundle) -> None:
    """Refuses a drafter whose token ids do not mean what the target's mean."""
    difference = vocabulary_difference(target, drafter)
    if difference is not None:
        message = f"{target.path} and its drafter {drafter.path} have {difference}."
        raise ModelError(message, "Choose a drafter that was made for this model, or speculate without one.")
