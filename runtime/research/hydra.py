"""Drafts with heads that also see the tokens drafted before them (Hydra, Ankner et al. 2024, arXiv 2402.05109). The
output rows are those of the most frequent tokens only: on a CPU the whole output matrix would cost a good part of a
pass, and heads that see the tokens before them cannot share one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.bundle.additions import Heads
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.decoding.sequence import Passes
from edgeinfer.runtime.research.heads import Matrix, OutputRows, StateDrafter, silu
from edgeinfer.runtime.speculation.drafters.contract import DraftContext
from edgeinfer.runtime.speculation.drafters.method import DrafterMethod, drafter_heads_bytes


class HydraDrafter(StateDrafter):
    """Drafts with heads that also see the tokens drafted before them.

    Head i reads the state that predicted the root, the root's embedding and those of i drafted tokens, by one block
    with a projected residual, P z + SiLU(W z + b), before the model's output rows. Like those, the embeddings are those
    of the most frequent tokens only; any other token enters as zeros.
    """

    name = "hydra"

    def __init__(self, target: Backend, heads: Heads) -> None:
        super().__init__(target, heads.arrays["norm"])
        arrays, count = heads.arrays, sum(name.startswith("bias.") for name in heads.arrays)
        # (2, D, (2 + i) D) as one matrix: the projection first, then the block.
        stacked = [arrays[f"weight.{head}"] for head in range(count)]
        self._weights = [Matrix(weight.reshape(-1, weight.shape[2])) for weight in stacked]
        self._biases = [arrays[f"bias.{head}"].astype(np.float32) for head in range(count)]
        self._embeddings = arrays["embeddings"]  # (K, D), widened row by row when they are needed
        self._output = OutputRows(heads, target.geometry.vocab_size)
        self._input = np.empty((2 + count, len(self._norm)), np.float32)

    def _guessed(
        self, state: Floats, context: DraftContext, drafted: Sequence[int]
    ) -> Passes[Floats | None]:  # (D,) -> (V,)
        yield from ()
        head, size = len(drafted), len(state)
        if head >= len(self._weights):
            return None
        self._input[0] = state
        for place, token in enumerate((context.tokens[-1], *drafted)):
            row = self._output.places.get(token)
            self._input[1 + place] = 0 if row is None else self._embeddings[row]
        both = self._weights[head] @ self._input[: 2 + head].reshape(-1)  # (2 D,)
        return self._output.logits(both[:size] + silu(both[size:] + self._biases[head]))

    def nbytes(self) -> int:
        arrays = sum(array.nbytes for array in (*self._biases, self._embeddings, self._input))
        return super().nbytes() + arrays + sum(weight.nbytes for weight in self._weights) + self._output.nbytes


METHOD = DrafterMethod(
    name="hydra",
    help="heads that see the tokens drafted before them (Hydra)",
    make=lambda parts: HydraDrafter(parts.target, parts.heads("hydra")),
    in_auto=lambda parts: False,
    nbytes=lambda bundle, context: drafter_heads_bytes(bundle, "hydra"),
    runs="heads",
)
