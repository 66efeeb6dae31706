"""What a caller may ask of an export, validated on construction; knows nothing of how it is done."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from edgeinfer.bundle import LAYOUTS, NATIVE, Layout
from edgeinfer.errors import UsageError
from edgeinfer.quant import QuantPolicy, default_group_size, default_head_bits

__all__ = ["EXPORTERS", "ExportConfig"]

EXPORTERS = ("native", "optimum")
_BITS = (2, 4, 8, 32)
_GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class ExportConfig:
    """How a checkpoint becomes a bundle.

    Attributes:
        bits: of the linear layers; 32 keeps float32.
        group_size: values that share a scale; None decides by the model's size, see edgeinfer.quant.default_group_size.
            A layer whose width it does not divide takes the next smaller that does.
        symmetric: no stored zero points: a tenth smaller, a little less exact.
        head_bits: of embedding and LM head; None decides by their size, see edgeinfer.quant.default_head_bits.
        keep_small: linear layers of at most 65536 weights stay wider: 8 bits instead of 2 or 4, float32 instead of 8.
        layout: "native" stores weights as our own kernel reads them, "portable" as MatMulNBits does; either is
            converted to the other by `edgeinfer convert`, or on the device that needs it.
        exporter: "native" builds the graph itself, "optimum" goes through optimum-onnx.
        name: name in the manifest; None takes the folder's.
        force: replace a bundle that is already there.
    """

    bits: int = 4
    group_size: int | None = None
    symmetric: bool = False
    head_bits: int | None = None
    keep_small: bool = True
    layout: Layout = NATIVE
    exporter: str = "native"
    name: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        _choice("bits", self.bits, _BITS)
        _choice("group_size", self.group_size, (None, *_GROUP_SIZES))
        _choice("head_bits", self.head_bits, (None, *_BITS))
        _choice("layout", self.layout, LAYOUTS)
        _choice("exporter", self.exporter, EXPORTERS)
        if self.name is not None and not self.name.strip():
            raise UsageError("The name is empty.", "Leave it out to take the folder's name.")

    def resolve(self, weights: int, vocabulary_weights: int) -> ExportConfig:
        """The same with everything decided that was left to the model's size.

        Args:
            weights: number of weights of the model.
            vocabulary_weights: number of weights of the embedding.
        """
        return dataclasses.replace(
            self,
            head_bits=self.head_bits or default_head_bits(self.bits, vocabulary_weights),
            group_size=self.group_size or default_group_size(weights),
        )

    @property
    def policy(self) -> QuantPolicy:
        """The bits each tensor of a model gets; of a resolved configuration only."""
        assert self.head_bits is not None and self.group_size is not None, "resolve first"
        return QuantPolicy(self.bits, self.head_bits, self.group_size, self.symmetric, self.keep_small)

    @property
    def options(self) -> dict[str, str | int | float | bool | None]:
        """What the manifest records: all but what it says elsewhere, and where the bundle was written."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in ("name", "layout", "force")}


def _choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed or isinstance(value, bool):
        choices = ", ".join(str(a) for a in allowed if a is not None)
        raise UsageError(f"{name}={value!r} is not possible.", f"Choose one of {choices}.")
