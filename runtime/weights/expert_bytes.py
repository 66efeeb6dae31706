"""How many different experts a pass needs, and the bytes that takes: what a pass over a model with experts costs.

MoESD (arXiv:2505.19645): tokens that choose K of E experts independently need
N(t) = E (1 - (1 - K/E)^t) of them in a pass over t tokens. Real texts need fewer, as neighbours choose alike.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

from edgeinfer.bundle.manifest import TensorEntry
from edgeinfer.bundle.packing import find_expert
from edgeinfer.bundle.parts import MoESpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.records import dataclass

# What the system may map around an expert that is touched: of pieces of 64 KB in which it lies, those that begin before
# it and end after it.
AROUND_BYTES = 2 * (64 - 4) * 1024


def expected_experts(experts: int, top_k: float, tokens: int) -> float:
    """Different experts of a layer that so many tokens need, each choosing `top_k` of them at random."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


@dataclass(frozen=True)
class ExpertBytes:
    """What the quantized experts of a model take.

    Attributes:
        moe: None where there are none; the others are 0 then.
        total: bytes of all of them, on pages of their own.
        least: that must fit into memory for the largest layer to run, whatever its tokens choose.
    """

    moe: MoESpec | None
    total: int
    least: int

    @classmethod
    def of(cls, decoder: DecoderSpec | None, tensors: Iterable[TensorEntry]) -> ExpertBytes:
        """By the table of the layout that runs."""
        layers: dict[int, int] = {}
        for tensor in tensors:
            expert = find_expert(tensor.name)
            if expert is not None and tensor.bits < 32:
                pages = sum(-(-blob.nbytes // mmap.PAGESIZE) + 1 for blob in tensor.blobs)
                layers[expert.layer] = layers.get(expert.layer, 0) + pages * mmap.PAGESIZE
        if decoder is None or decoder.moe is None or not layers:
            return cls(None, 0, 0)
        around = decoder.moe.experts * AROUND_BYTES
        return cls(decoder.moe, sum(layers.values()), max(layers.values()) + around)

    def needed(self, tokens: int) -> float:
        """Bytes of experts that a pass over so many tokens is expected to read."""
        if self.moe is None:
            return 0.0
        return self.total * expected_experts(self.moe.experts, self.moe.top_k, tokens) / self.moe.experts
