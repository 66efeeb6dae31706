"""Drafts with trained prompt tokens as probe rows in the target's passes (PPD).

Parallel prompt decoding (Chen et al. 2024): behind nodes of a draft the pass has a row for each of a few trained
embeddings. What the model says in those of the node where the accepted path ends are its guesses for the places after
the next root. They cost rows of a pass and no work of their own. All rows of such a pass enter by their embeddings, so
those of the tokens are read from the model itself, by a pass that runs no layer, and kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.bundle.additions import Heads
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import Backend, ForwardInput, require
from edgeinfer.runtime.speculation.drafters.contract import DraftContext, ProbingDrafter, Round
from edgeinfer.runtime.speculation.drafters.logit_drafter import LogitDrafter

# Tokens whose embeddings are kept; beyond them all are forgotten, which costs a few short passes.
_KEPT = 1024
# Nodes that have all prompt tokens in a pass at most; more of them may have a few.
_NODES = 4
_NO_ROWS = np.zeros(0, np.int64)


class PromptDrafter(LogitDrafter, ProbingDrafter):
    """Drafts with prompt tokens as probe rows.

    Args:
        target: in whose passes the prompt tokens are probe rows.
        heads: of kind "prompt".

    Raises:
        CapabilityError: the target cannot take embeddings in place of tokens.
    """

    name = "prompt"

    def __init__(self, target: Backend, heads: Heads) -> None:
        can, size = target.capabilities, target.geometry.hidden_size
        hint = "Use a natively exported bundle, or another drafter."
        require(can.hidden and can.layer_skip, target, "take embeddings in place of tokens", hint)
        super().__init__(target.geometry.vocab_size)
        self._target = target
        self._prompts = heads.arrays["embeddings"].astype(np.float32)  # (P, D)
        self.probes = len(self._prompts)
        self.most_probes = _NODES * self.probes
        self._no_layers = np.zeros(2 * target.geometry.num_layers, np.bool_)
        self._kept = np.empty((min(_KEPT, target.geometry.vocab_size), size), np.float32)
        self._rows: dict[int, int] = {}
        self._states = np.empty((0, size), np.float32)
        self._logits_after = np.empty((self.probes, target.geometry.vocab_size), np.float32)
        self._places = 0  # behind the root, of which the last pass told

    @staticmethod
    def kept_bytes(vocabulary: int, size: int, probes: int) -> int:
        """What it will hold for a model of these sizes besides the prompt tokens, with the logits of its rows."""
        return 4 * (min(_KEPT, vocabulary) * size + (1 + _NODES) * probes * vocabulary)

    def embed(self, fed: Ints, probes: Sequence[int]) -> Floats | None:  # (S,) -> (S + rows, D)
        """Embeddings of the tokens, then the prompt tokens' behind each of them."""
        tokens, count = fed.tolist(), len(fed)
        if not self._know(tokens):
            return None
        total = count + sum(probes)
        if total > len(self._states):
            self._states = np.empty((total, self._kept.shape[1]), np.float32)
        states = self._states[:total]
        np.take(self._kept, [self._rows[token] for token in tokens], axis=0, out=states[:count])
        np.take(self._prompts, [place for own in probes for place in range(own)], axis=0, out=states[count:])
        return states

    def _know(self, tokens: Sequence[int]) -> bool:
        """Reads the embeddings that are missing; whether all are there now."""
        wanted = list(dict.fromkeys(tokens))
        missing = [token for token in wanted if token not in self._rows]
        if not missing:
            return True
        start, most = self._target.cache.length, len(self._kept)
        full = len(self._rows) + len(missing) > most
        if len(wanted) > most or len(wanted if full else missing) > self._target.cache.capacity - start:
            return False
        if full:
            self._rows.clear()
            missing = wanted
        places = np.arange(start, start + len(missing))
        output = self._target.forward(
            ForwardInput(np.array(missing, np.int64), places, _NO_ROWS, layer_mask=self._no_layers)
        )
        assert output.hidden is not None, "a backend that takes states in gives them out"
        first = len(self._rows)
        self._kept[first : first + len(missing)] = output.hidden
        self._rows |= {token: first + place for place, token in enumerate(missing)}
        self._target.cache.trim(start)
        return True

    def begin(self, tokens: Sequence[int]) -> None:
        """Waits for the first pass with its rows."""
        super().begin(tokens)
        self._places = 0

    def observe(self, round: Round) -> None:
        """Keeps what the model predicted after its rows, if the text went on where they were."""
        super().observe(round)
        self._places = 0 if round.probed is None else min(self.probes, len(round.probed))
        if round.probed is not None:
            self._logits_after[: self._places] = round.probed[: self._places]

    def _logits(self, context: DraftContext, drafted: Sequence[int]) -> Floats | None:  # (V,)
        if len(drafted) >= self._places:
            return None
        said: Floats = self._logits_after[len(drafted)]
        return said

    def nbytes(self) -> int:
        """Bytes that it holds."""
        arrays = (self._prompts, self._kept, self._logits_after, self._states)
        return super().nbytes() + sum(array.nbytes for array in arrays)
