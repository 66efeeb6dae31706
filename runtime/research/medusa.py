"""Drafts with one head for each place behind the root (Medusa, Cai et al. 2024, arXiv 2401.10774). No head sees what
stands at the places before its own, so the first guess of a round computes them all and a tree over their best tokens
costs no more than a chain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.bundle.additions import MOST_HEADS, STATE_EPS, Heads, heads_bytes
from edgeinfer.bundle.store import Bundle
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend, KVCache, Pass, require
from edgeinfer.runtime.decoding.sequence import Evaluate, Passes
from edgeinfer.runtime.research.heads import Matrix, OutputRows, StateDrafter, silu
from edgeinfer.runtime.speculation.drafters.contract import DraftContext, Round
from edgeinfer.runtime.speculation.drafters.method import DrafterMethod, drafter_heads_bytes


class MedusaDrafter(StateDrafter):
    """Drafts with heads n + SiLU(W n + b) over n, the state divided by its root mean square. What they give goes
    through the target's own final norm and head, in a pass that runs no layer; or through the output rows of the tokens
    that may be guessed, where those are in the bundle."""

    name = "medusa"
    at_once = True

    def __init__(self, target: Backend, cache: KVCache, heads: Heads) -> None:
        weights, count, size = heads.arrays["weight"], *heads.arrays["bias"].shape
        super().__init__(target, np.ones(size, np.float32))
        self._target, self._cache = target, cache
        self._weights = [Matrix(weight) for weight in weights]  # H of (D, D)
        self._bias = heads.arrays["bias"].astype(np.float32)  # (H, D)
        self._rows = OutputRows(heads, target.geometry.vocab_size) if "rows" in heads.arrays else None
        if self._rows is None:
            hint = "Use a natively exported bundle, or heads for some tokens only (--tokens)."
            require(target.capabilities.layer_skip, target, "run its LM head alone", hint)
        self.uses_target = self._rows is None
        self._no_layers = np.zeros(2 * target.geometry.num_layers, np.bool_)
        self._states = np.empty((count, size), np.float32)
        self._logits_of = np.empty((count, target.geometry.vocab_size), np.float32)  # of the round, by place
        self._places = 0  # of them that are known

    def repeat(self) -> None:
        self._known.clear()
        self._places = 0

    def begin(self, tokens: Sequence[int]) -> None:
        super().begin(tokens)
        self._places = 0

    def observe(self, round: Round) -> None:
        super().observe(round)
        self._places = 0

    def _guessed(
        self, state: Floats, context: DraftContext, drafted: Sequence[int]
    ) -> Passes[Floats | None]:  # (D,) -> (V,)
        if not self._places:
            yield from self._compute(state)
        if len(drafted) >= self._places:
            return None
        guessed: Floats = self._logits_of[len(drafted)]
        return guessed

    def _compute(self, state: Floats) -> Passes[None]:  # (D,)
        """The logits of every place for which there is a head and, where the target computes them, room."""
        for head, weight in enumerate(self._weights):
            self._states[head] = state + silu((weight @ state) + self._bias[head])
        if self._rows is None:
            yield from self._run_head()
            return
        for head, given in enumerate(self._states):
            self._logits_of[head] = self._rows.logits(given / np.sqrt(np.dot(given, given) / len(given) + STATE_EPS))
        self._places = len(self._states)

    def _run_head(self) -> Passes[None]:
        """The target's pass without layers, whose rows go again."""
        start, room = self._cache.length, self._cache.capacity
        self._places = min(len(self._states), room - start)
        if not self._places:
            return
        rows = np.arange(self._places)
        nothing, states = np.zeros_like(rows), self._states[: len(rows)]
        batch = Pass(nothing, rows + start, rows, layer_mask=self._no_layers, hidden=states)
        (output,) = yield Evaluate(self._target, ((self._cache, batch),))
        self._logits_of[: len(rows)] = output.logits
        self._cache.trim(start)

    def nbytes(self) -> int:
        matrices = sum(weight.nbytes for weight in self._weights) + (0 if self._rows is None else self._rows.nbytes)
        arrays = self._bias.nbytes + self._states.nbytes + self._logits_of.nbytes
        return super().nbytes() + matrices + arrays


def _nbytes(bundle: Bundle, context: int) -> int:
    """Bytes of the heads and of all their logits, a copy and what the target's pass gives."""
    geometry = bundle.manifest.geometry
    # Of a head, as half floats, of which `heads_bytes` counts three times as many.
    least = 3 * 2 * geometry.hidden_size * (geometry.hidden_size + 1)
    count = min(MOST_HEADS, heads_bytes(bundle, "medusa") // least)
    return drafter_heads_bytes(bundle, "medusa") + 2 * 4 * count * geometry.vocab_size


METHOD = DrafterMethod(
    name="medusa",
    help="one head for each place behind the last token (Medusa)",
    make=lambda parts: MedusaDrafter(parts.target, parts.cache, parts.heads("medusa")),
    in_auto=lambda parts: False,
    nbytes=_nbytes,
    runs="heads",
)
