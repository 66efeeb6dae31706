"""What a caller may ask of an export, validated on construction; knows nothing of how it is done."""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.errors import UsageError
from edgeinfer.quant import QuantPolicy

__all__ = ["EXPORTERS", "ExportConfig"]

EXPORTERS = ("native", "optimum")
_BITS = (2, 4, 8, 32)
_GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class ExportConfig:
    """How a checkpoint becomes a bundle.

    Attributes:
        bits: of the linear layers; 32 keeps float32.
        group_size: values that share a scale; a layer whose width it does not divide takes the next smaller that does.
        symmetric: no stored zero points: a tenth smaller, a little less exact.
        head_bits: of embedding and LM head; None decides by their size, see `resolve_head_bits`.
        exporter: "native" builds the graph itself, "optimum" goes through optimum-onnx.
        name: name in the manifest; None takes the folder's.
        force: replace a bundle that is already there.
    """

    bits: int = 4
    group_size: int = 32
    symmetric: bool = False
    head_bits: int | None = None
    exporter: str = "native"
    name: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        _choice("bits", self.bits, _BITS)
        _choice("group_size", self.group_size, _GROUP_SIZES)
        _choice("head_bits", self.head_bits, (None, *_BITS))
        _choice("exporter", self.exporter, EXPORTERS)
        if self.name is not None and not self.name.strip():
            raise UsageError("The name is empty.", "Leave it out to take the folder's name.")

    def resolve_head_bits(self, vocabulary_weights: int) -> int:
        """Bits of embedding and head.

        Where None is given: as the linear layers at 8 and 32 bits, else 8.

        Args:
            vocabulary_weights: number of weights of the embedding.
        """
        if self.head_bits is not None:
            return self.head_bits
        return max(self.bits, 8)

    def policy(self, vocabulary_weights: int) -> QuantPolicy:
        """The bits each tensor gets."""
        return QuantPolicy(self.bits, self.resolve_head_bits(vocabulary_weights), self.group_size, self.symmetric)


def _choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed or isinstance(value, bool):
        choices = ", ".join(str(a) for a in allowed if a is not None)
        raise UsageError(f"{name}={value!r} is not possible.", f"Choose one of {choices}.")
