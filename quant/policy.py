"""How one matrix is quantized, and which scheme each tensor of a model gets."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self, TypeVar

from edgeinfer.bundle.kinds import KINDS, Segment, join_segments
from edgeinfer.bundle.manifest import PlannedTensor, PlanRecord
from edgeinfer.bundle.packing import BLOCK_SIZES
from edgeinfer.bundle.tables import POSITIONS, TOKEN_TYPES
from edgeinfer.core.errors import UsageError
from edgeinfer.core.options.load import BITS, FLOAT_BITS

# The fewest bits of a shared expert.
PROTECTED_BITS = 8
# A linear layer up to this size (256 KB of float32) costs nothing to keep wider, and only tiny models have them, which
# lose most by quantization: at 4 bits throughout, models of 0.26M and 1.3M weights gain 8% and 18% of perplexity.
_SMALL_WEIGHTS = 1 << 16
_WIDER = {2: 8, 3: 8, 4: 8, 5: 8, 6: 8, 8: FLOAT_BITS}
# Above this size (16 MB at 8 bits) embedding and head would take much of a small device's memory at 8 bits.
_LARGE_VOCABULARY = 1 << 24
_LARGE_MODEL = 1 << 26
# Zero points lower the error of 8 bits by a few percent and cost a third of the speed, which counts above this size.
_LARGE_WEIGHTS = 1 << 20
# A router decides which weights are read at all, and is tiny: it stays float32 whatever is asked for.
# So do the gates of a delta rule, which say how long every token is remembered, and what predicts and corrects streams.
_ALWAYS_FLOAT = (
    ".mlp.router",
    ".mlp.shared.gate",
    ".mixer.gates",
    ".streams.router",
    ".streams.predict",
    ".streams.correct",
    # Tables that an encoder adds to its embeddings, which are small.
    POSITIONS,
    TOKEN_TYPES,
)
# GGUF's types for rows of whole blocks of 256, and of 32; those that have minima.
_WIDE_KINDS = ("Q2_K", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K")
_NARROW_KINDS = ("IQ4_NL", "Q5_0", "Q5_1")
_WITH_MINIMA = ("Q2_K", "Q4_K", "Q5_K", "Q5_1")


@dataclass(frozen=True)
class QuantScheme:
    """Block-wise integer quantization along the input dimension."""

    bits: int  # 2, 3, 4 or 8 per value; also 5 or 6 of a kind
    block_size: int  # values that share a scale: 32, 64 or 128
    symmetric: bool = False  # the zero point is the middle of the range and is not stored
    e2m1: bool = False  # values are codes of E2M1, copied from a checkpoint; no quantizer makes them
    vectors: bool = False  # bytes of 2 bits are codes of vectors (edgeinfer.bundle.packing), without zero points
    kind: str = ""  # a type of GGUF that all rows are made, which says all else; native layout alone
    segments: tuple[Segment, ...] = ()  # rows in GGUF's types, copied from a file; no quantizer makes them

    @classmethod
    def of_file(cls, segments: Iterable[Segment]) -> Self:
        """The scheme of rows as a GGUF file has them."""
        joined = join_segments(segments)
        return cls(max(KINDS[each.kind].bits for each in joined), 32, symmetric=True, segments=joined)

    @classmethod
    def of_kind(cls, kind: str) -> Self:
        """The scheme of rows that are made a type of GGUF."""
        return cls(KINDS[kind].bits, 32, kind not in _WITH_MINIMA, kind=kind)

    def __post_init__(self) -> None:
        if self.segments or self.kind:
            return
        if self.bits not in BITS:
            raise UsageError(f"Cannot quantize to {self.bits} bits.", f"Choose one of {', '.join(map(str, BITS))}.")
        if self.block_size not in BLOCK_SIZES:
            sizes = ", ".join(map(str, BLOCK_SIZES))
            raise UsageError(f"A block of {self.block_size} values is not supported.", f"Choose one of {sizes}.")
        if self.vectors and (self.bits, self.symmetric) != (2, True):
            raise UsageError("Codes of vectors have 2 bits and no zero points.", "Leave vectors out, or choose those.")


def is_quantizable(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor may be quantized: a matrix that neither chooses nor weighs experts. Experts need sizes that are
    multiples of 32: ONNX Runtime's operator for them pads no blocks."""
    if len(shape) != 2 or name.endswith(_ALWAYS_FLOAT):
        return False
    halves = 2 if name.endswith(".gate_up") else 1
    return ".mlp.experts." not in name or (shape[0] // halves % 32 == 0 and shape[1] % 32 == 0)


def is_protected(name: str) -> bool:
    """Whether a matrix gets more bits than others: every token reads the shared expert of a mixture."""
    return ".mlp.shared." in name


def make_scheme(
    shape: tuple[int, ...],
    bits: int,
    block_size: int,
    *,
    symmetric: bool,
    vectors: bool = False,
    minima: bool = False,
) -> QuantScheme | None:
    """The scheme of a matrix (N, K) for bits and a largest block; None at 32 bits. Large 8-bit matrices never have zero
    points; with `vectors` 2 bits are codes of vectors where K is a multiple of the block. 5 and 6 bits, and with
    `minima` 4, are a type of GGUF with blocks of its own; without one for K, 5 and 6 bits become 8."""
    if bits == FLOAT_BITS:
        return None
    kind = block_type(shape[1], bits, symmetric=symmetric) if minima or bits not in BITS else ""
    if kind:
        return QuantScheme.of_kind(kind)
    bits = bits if bits in BITS else 8
    block = effective_block(shape[1], block_size)
    if vectors and bits == 2 and shape[1] % block == 0:
        return QuantScheme(bits, block, symmetric=True, vectors=True)
    plain = symmetric or (bits == 8 and math.prod(shape) > _LARGE_WEIGHTS)
    return QuantScheme(bits, block, plain)


def block_type(k: int, bits: int, *, symmetric: bool) -> str:
    """The type of GGUF for rows of K values of 4 bits with minima, or of 5 or 6 bits; "" where there is none."""
    if bits == 5 and (symmetric or k % 256) and k % 32 == 0:
        return "Q5_0"
    if k % 256 or (symmetric and bits == 4):
        return ""
    return {4: "Q4_K", 5: "Q5_K", 6: "Q6_K"}.get(bits, "")


def formats_for(k: int) -> tuple[QuantScheme, ...]:
    """The native layout's formats for rows of K values, those on the lower hull of squared error against bytes: with
    errors fed forward, of layers of Qwen2.5-Coder-0.5B and SmolLM2 on other texts (docs/log). Types of 256 values with
    scales of a few bits undercut all others of 2.6 to 6.6 bits; narrower rows have 4.5, 5.5 and 6 bits, and 8 above."""
    own = [block for block in (128, 64) if k % block == 0] or [32]
    kinds = _WIDE_KINDS if k % 256 == 0 else _NARROW_KINDS if k % 32 == 0 else ()
    vectors = (QuantScheme(2, block, True, vectors=k % block == 0) for block in own)
    narrow = (QuantScheme(bits, block) for bits in (3, 4) for block in own if k % 256)
    eight = (QuantScheme(8, block, True) for block in dict.fromkeys((own[0], 32)))
    return *vectors, *narrow, *(QuantScheme.of_kind(kind) for kind in kinds), *eight


def effective_block(k: int, requested: int) -> int:
    """The largest block up to `requested` that divides K; 32 with a padded end where none does. Sixteen is never
    chosen: ONNX Runtime's int8 kernels for all widths start at 32, so padding is faster."""
    return next((b for b in (128, 64, 32) if b <= requested and k % b == 0), 32)


def default_group_size(weights: int) -> int:
    """Default number of values that share a scale: 32 for models of up to 64 Mi weights, 128 above. A scale costs 32
    bits in the file and, packed, 64 in memory. At the 0.5B shape groups of 32 take 125 MB more than groups of 128 and a
    fifth of the speed; small models have little to lose except accuracy (docs/log)."""
    return 32 if weights <= _LARGE_MODEL else 128


def default_head_bits(bits: int, vocabulary_weights: int) -> int:
    """Default bits of embedding and head. The linear layers' at 8 and 32 bits; below, 8 for vocabularies of up to 16 Mi
    weights, else at least 4."""
    if bits >= 8:
        return bits
    return 8 if vocabulary_weights <= _LARGE_VOCABULARY else max(bits, 4)


@dataclass(frozen=True)
class QuantPolicy:
    """Bits of the linear layers and of the two vocabulary matrices; vectors are always float32."""

    bits: int  # of linear layers; 32 keeps float32
    head_bits: int  # of embedding and LM head
    block_size: int  # largest block
    symmetric: bool = False  # no stored zero points. Large 8-bit matrices never have any.
    # Linear layers of at most 65536 weights get more bits: 8 instead of 2 to 6, float32 instead of 8. Routed experts
    # never do; shared experts have at least 8 bits in any case.
    keep_small: bool = True
    vectors: bool = False  # 2 bits are codes of vectors, which the native layout alone can hold
    minima: bool = False  # 4 bits have a minimum for each group, which the native layout alone can hold

    def scheme(self, name: str, shape: tuple[int, ...]) -> QuantScheme | None:
        if not is_quantizable(name, shape):
            return None
        return self.make(shape, self._bits(name, shape))

    def make(self, shape: tuple[int, ...], bits: int) -> QuantScheme | None:
        """The scheme of a matrix whose bits are given."""
        signs = {"symmetric": self.symmetric, "vectors": self.vectors, "minima": self.minima}
        return make_scheme(shape, bits, self.block_size, **signs)

    def _bits(self, name: str, shape: tuple[int, ...]) -> int:
        if name in ("embed", "head"):
            return self.head_bits
        # Small experts are many, so that keeping them wider would not be free.
        small = self.keep_small and math.prod(shape) <= _SMALL_WEIGHTS and ".mlp.experts." not in name
        if small:
            return _WIDER.get(self.bits, self.bits)
        return max(self.bits, PROTECTED_BITS) if is_protected(name) else self.bits


Value = TypeVar("Value")


def match_patterns(patterns: Sequence[tuple[str, Value]], names: Iterable[str]) -> dict[str, Value]:
    """The value of the last pattern that matches each name; unmatched names are left out."""
    names = list(names)
    found: dict[str, Value] = {}
    for pattern, value in patterns:
        matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            shown = f"{names[0]} and {names[-1]}" if names else "none"
            hint = f"Names are like {shown}; edgeinfer inspect --tensors of any export lists them."
            raise UsageError(f"{pattern!r} matches no matrix that can be quantized.", hint)
        found.update(dict.fromkeys(matched, value))
    return found


@dataclass(frozen=True)
class QuantPlan:
    """The scheme of each matrix by its canonical name, and the method that finds the values."""

    # Of every matrix; None keeps it float32. Vectors are not listed and stay float32.
    schemes: Mapping[str, QuantScheme | None]
    method: str = "rtn"  # of edgeinfer.quant.methods, by name
    # Cost of quantizing a matrix, in nats of KL divergence per token, where known.
    predicted: Mapping[str, float] = field(default_factory=dict)
    budget_bytes: int | None = None  # limit of the weights; None where bits were given
    kept: frozenset[str] = frozenset()  # matrices whose values a checkpoint has in their schemes already

    @classmethod
    def from_policy(
        cls,
        policy: QuantPolicy,
        shapes: Mapping[str, tuple[int, ...]],
        bits_for: Sequence[tuple[str, int]] = (),
        method: str = "rtn",
        kept: Mapping[str, QuantScheme] | None = None,
    ) -> QuantPlan:
        """The plan of a policy, with the bits of some matrices given by patterns; the last match wins."""
        given = match_patterns(bits_for, [name for name, shape in shapes.items() if is_quantizable(name, shape)])
        schemes = {name: policy.scheme(name, shape) for name, shape in shapes.items() if len(shape) == 2}
        own = {name: scheme for name, scheme in (kept or {}).items() if name not in given}
        schemes |= own
        for name, bits in given.items():
            schemes[name] = policy.make(shapes[name], bits)
        return cls(schemes, method, kept=frozenset(own))

    def scheme(self, name: str) -> QuantScheme | None:
        """The scheme of a tensor; None keeps it float32, as everything that is no matrix."""
        return self.schemes.get(name)

    def record(self, calibration_sha256: str | None = None, calibration_tokens: int = 0) -> PlanRecord:
        tensors = tuple(self._entry(name, scheme) for name, scheme in self.schemes.items())
        return PlanRecord(self.method, tensors, calibration_sha256, calibration_tokens, self.budget_bytes)

    def _entry(self, name: str, scheme: QuantScheme | None) -> PlannedTensor:
        cost = self.predicted.get(name)
        if scheme is None:
            return PlannedTensor(name, FLOAT_BITS, predicted_kl=cost)
        segments = scheme.segments or (Segment(scheme.kind, 1),) * bool(scheme.kind)
        if segments:
            rows = sum(each.rows for each in segments)
            bits = sum(KINDS[each.kind].row_bytes(8 * 256) * each.rows for each in segments) / (256 * rows)
            kinds = "+".join(each.kind for each in segments)
            return PlannedTensor(name, bits, scheme.block_size, scheme.symmetric, cost, kinds)
        return PlannedTensor(name, scheme.bits, scheme.block_size, scheme.symmetric, cost)
