"""What a caller may ask of an export, validated on construction; knows nothing of how it is done."""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.errors import UsageError
from edgeinfer.quant import QuantPolicy, default_head_bits

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
        head_bits: of embedding and LM head; None decides by their size, see edgeinfer.quant.default_head_bits.
        keep_small: linear layers of at most 65536 weights stay wider: 8 bits instead of 2 or 4, float32 instead of 8.
        exporter: "native" builds the graph itself, "optimum" goes through optimum-onnx.
        name: name in the manifest; None takes the folder's.
        force: replace a bundle that is already there.
    """

    bits: int = 4
    group_size: int = 32
    symmetric: bool = False
    head_bits: int | None = None
    keep_small: bool = True
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

    def policy(self, vocabulary_weights: int) -> QuantPolicy:
        """The bits each tensor of a model gets.

        Args:
            vocabulary_weights: number of weights of the embedding.
        """
        head_bits = self.head_bits or default_head_bits(self.bits, vocabulary_weights)
        return QuantPolicy(self.bits, head_bits, self.group_size, self.symmetric, self.keep_small)


def _choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed or isinstance(value, bool):
        choices = ", ".join(str(a) for a in allowed if a is not None)
        raise UsageError(f"{name}={value!r} is not possible.", f"Choose one of {choices}.")
