"""What a manifest says of how its weights' bits were chosen."""

from __future__ import annotations

from edgeinfer.config import CONVERTED_BITS, FLOAT_BITS
from edgeinfer.errors import BundleError
from edgeinfer.records import dataclass


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise BundleError(f"Plan: {what}.", "The bundle is damaged or was edited by hand; export or download it again.")


@dataclass(frozen=True)
class PlannedTensor:
    """What was planned for one matrix.

    Attributes:
        bits: of each value; 32 keeps float32. Of a tensor of a GGUF file with its scales, 4.5 for Q4_K.
        block_size: values that share a scale; 0 at 32 bits.
        symmetric: without zero points.
        predicted_kl: what quantizing it was predicted to cost, in nats per token; None where nothing was predicted.
        type: of a tensor of a GGUF file, by llama.cpp's name.
    """

    name: str
    bits: int | float
    block_size: int = 0
    symmetric: bool = False
    predicted_kl: float | None = None
    type: str = ""

    def __post_init__(self) -> None:
        known = self.bits in CONVERTED_BITS or (self.type != "" and 0 < self.bits <= FLOAT_BITS)
        _require(known, f"{self.name} has {self.bits} bits")
        blocks = self.block_size > 0 if self.bits < FLOAT_BITS else self.block_size == 0
        _require(blocks or (self.type != "" and self.block_size > 0), f"{self.name} has a block of {self.block_size}")
        _require(self.predicted_kl is None or self.predicted_kl >= 0, f"{self.name} has a negative prediction")


@dataclass(frozen=True)
class PlanRecord:
    """How every matrix of a bundle was quantized.

    Attributes:
        method: of edgeinfer.quant.methods, by name.
        tensors: every matrix, in the order of the table; a tied head is its embedding and not listed.
        calibration_sha256: of the text that the model was run on; None where there was none.
        calibration_tokens: that were run.
        budget_bytes: what the weights were allowed to take; None where their bits were given.
    """

    method: str
    tensors: tuple[PlannedTensor, ...] = ()
    calibration_sha256: str | None = None
    calibration_tokens: int = 0
    budget_bytes: int | None = None

    def __post_init__(self) -> None:
        names = {tensor.name for tensor in self.tensors}
        _require(len(names) == len(self.tensors), "a tensor is listed twice")
        _require(self.calibration_tokens >= 0, f"{self.calibration_tokens} tokens are impossible")
        _require(self.budget_bytes is None or self.budget_bytes > 0, f"{self.budget_bytes} bytes are impossible")

    @property
    def predicted_kl(self) -> float | None:
        """What quantizing the model was predicted to cost, in nats per token; None where nothing was predicted."""
        costs = [tensor.predicted_kl for tensor in self.tensors if tensor.predicted_kl is not None]
        return sum(costs) if costs else None
