"""How many rows a pass had best have: llama.cpp's repacked matrices take rows in fours; knows no context.

A kernel of repacked weights multiplies four rows for about the price of one, and each row that is left over for the
price of one: c(2) and c(3) exceed c(4), c(6) and c(7) exceed c(8). Sixteen are cheaper still, by the row, so that c(13)
exceeds c(16) too. Other kernels cost more with every row.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.bundle.gguf.reader import GgufFile
from edgeinfer.runtime.backends.llamacpp.memory import is_head_packed, looks_up, packed_bytes
from edgeinfer.runtime.backends.llamacpp.placement import EXPERTS

__all__ = ["Stairs"]

_TOGETHER, _MOST_TOGETHER = 4, 16
# Rows left over, and the share of repacked weights from which on filling them up to four pays.
_PAYS = {3: 0.25, 2: 0.75}


@dataclass(frozen=True)
class Stairs:
    """What of a model takes rows in fours.

    Attributes:
        layers: share of repacked bytes in what a pass reads.
        head: the same of the head alone, which computes the rows that logits are wanted of: 1 or 0.
    """

    layers: float
    head: float

    @classmethod
    def of(cls, gguf: GgufFile, weights: str) -> Stairs:
        """Of a file whose weights are kept this way; of mixtures nothing, as rows nobody asked for fetch experts."""
        if any(EXPERTS.fullmatch(tensor.name) for tensor in gguf.tensors):
            return cls(0.0, 0.0)
        read = gguf.tensor_bytes
        if "output.weight" in gguf.by_name and looks_up(gguf, weights):
            read -= gguf.by_name["token_embd.weight"].nbytes
        return cls(packed_bytes(gguf, weights) / max(read, 1), float(is_head_packed(gguf, weights)))

    def padding(self, size: int, outputs: int) -> tuple[int, int]:
        """Rows to add to a pass over so many tokens, and of how many of these logits had best be computed too."""
        rows = _missing(size, self.layers)
        return rows, min(rows, _missing(outputs, self.head))


def _missing(rows: int, share: float) -> int:
    left = rows % _TOGETHER
    if left == 1 and rows % _MOST_TOGETHER == _MOST_TOGETHER - 3 and share >= _PAYS[2]:
        return 3
    return _TOGETHER - left if share >= _PAYS.get(left, 2.0) else 0
