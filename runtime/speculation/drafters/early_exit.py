"""Drafting with the target's first layers, whose work verification then goes on from; knows nothing of training exits.

LayerSkip's self-speculation (Elhoushi et al. 2024): keys, values and hidden states of the first layers are those that
a whole pass would compute, so verification runs the remaining layers only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.errors import UsageError
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import Backend, ForwardInput, require
from edgeinfer.runtime.speculation.contracts import Context, Resumption
from edgeinfer.runtime.speculation.drafters.self_drafter import SelfDrafter

__all__ = ["EarlyExitDrafter"]

_FIRST_ROWS = 16


class EarlyExitDrafter(SelfDrafter):
    """Implements `contracts.Drafter`.

    Args:
        target: must skip layers and resume from hidden states.
        exit_layer: E, layers that draft; in [1, L).

    Raises:
        CapabilityError: the target can do neither.
        UsageError: there is no such exit.
    """

    name = "exit"

    def __init__(self, target: Backend, exit_layer: int) -> None:
        can, layers = target.capabilities, target.geometry.num_layers
        hint = "Use a natively exported bundle, or another drafter."
        require(can.layer_skip and can.hidden, target, "leave a pass early and resume it", hint)
        if not 0 < exit_layer < layers:
            raise UsageError(
                f"A model of {layers} layers has no exit after layer {exit_layer}.",
                f"Choose one from 1 to {layers - 1}." if layers > 1 else "Choose another drafter.",
            )
        super().__init__(target)
        self._first = np.arange(2 * layers) < 2 * exit_layer  # (2 L,)
        self._hidden = np.empty((_FIRST_ROWS, target.geometry.hidden_size), np.float32)  # of the drafted rows

    def _run(self, tokens: Ints, positions: Ints, rows: Ints) -> Floats:
        output = self._target.forward(ForwardInput(tokens, positions, rows, layer_mask=self._first))
        assert output.hidden is not None, "a backend that resumes gives hidden states"
        start = int(positions[0]) - self._follower.start
        end = start + len(tokens)
        if end > len(self._hidden):
            self._hidden = np.concatenate([self._hidden, np.empty((end, self._hidden.shape[1]), np.float32)])
        # A copy: the output is a view that the next pass overwrites.
        self._hidden[start:end] = output.hidden
        return output.logits

    def resume(self, context: Context, drafted: Sequence[int]) -> Resumption | None:
        """Runs the first layers for what they have not seen, cuts the cache to the context and hands over their states.

        None where no row of the chain was drafted here: a whole pass is cheaper then than one in two parts.
        """
        head = self._head(context)
        if not self._follower.shared(head, drafted):
            return None
        self._follower.follow(head, drafted, 0)
        # The pass that follows starts at the same row and masks the first layers, which leaves their rows as they are.
        self._follower.restart(self._follower.start)
        return Resumption(self._hidden[: 1 + len(drafted)], ~self._first)

    def nbytes(self) -> int:
        """Bytes that it holds, hidden states included."""
        return super().nbytes() + self._hidden.nbytes
