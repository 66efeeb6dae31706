"""Drafting with the high 4-bit plane of the target's 8-bit weights; knows nothing of how planes are stored.

The bit axis of ELMoE-3D's elastic self-speculation: half of the weights' bytes are read, and no second copy is held.
"""

from __future__ import annotations

from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import Backend, ForwardInput, require
from edgeinfer.runtime.speculation.drafters.self_drafter import SelfDrafter

__all__ = ["BitsDrafter"]


class BitsDrafter(SelfDrafter):
    """Implements `contracts.Drafter`.

    Args:
        target: must be able to read one plane.

    Raises:
        CapabilityError: it is not.
    """

    name = "bits"

    def __init__(self, target: Backend) -> None:
        hint = "Use a bundle of 8 bits in the native layout, or another drafter."
        require(target.capabilities.elastic, target, "read one plane of its weights", hint)
        super().__init__(target)

    def _run(self, tokens: Ints, positions: Ints, rows: Ints) -> Floats:
        return self._target.forward(ForwardInput(tokens, positions, rows, planes=1)).logits
