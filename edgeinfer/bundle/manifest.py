"""The manifest `edgeinfer.json`: what a bundle says of itself, read strictly.

Tensor names in the table (all matrices are (rows, columns) = (output, input)):
  embed (V, D) · final_norm (D,) · head (V, D)
  layers.{i}.attn_norm (D,) · .attn.qkv (q+k+v, D) · .attn.qkv_bias · .attn.q_norm (h,) · .attn.k_norm (h,)
  layers.{i}.attn.out (D, q) · .attn.out_bias
  layers.{i}.mlp_norm (D,) · .mlp.gate_up (2 F, D) · .mlp.gate_up_bias · .mlp.down (D, F) · .mlp.down_bias
  and instead of the MLP where a layer has E experts:
  layers.{i}.mlp.router (E, D) · .mlp.router_norm (E,) · .mlp.experts.{e}.gate_up (2 F, D), or .up (F, D) where they are
  not gated · .mlp.experts.{e}.down (D, F) · .mlp.shared.gate_up (2 Fs, D) · .mlp.shared.down (D, Fs)
  .mlp.shared.gate (1, D). Router and gate are float32.
and where the decoder has them: head_bias (V,) · a norm's own _bias · layers.{i}.attn_post_norm, .mlp_post_norm (D,)
  .attn.sinks (heads,) · .attn.gate (q or heads, D) · .attn.inner_norm (q,) · .mlp.inner_norm (F,)
  .mlp.router_bias (E,) · .mlp.choice_bias (E,) · .mlp.experts.gate_up_bias (E 2 F,) · .mlp.experts.down_bias (E D,)
  .mlp.up (F, D) for gate_up in an MLP without a gate, and for qkv in latent attention .attn.q (q, D), or
  .attn.q_a (r, D)   .attn.q_a_norm (r,) .attn.q_b (q, r) · .attn.kv_a (rank + rotated, D) · .attn.kv_norm (rank,)
  .attn.k_b (heads rank, plain) · .attn.v_b (heads v, rank). What stands in for attention is .mixer.in,
  .out, .conv and the vectors of edgeinfer.bundle.parts. A tied head is listed with the embedding's own blobs.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import field

from edgeinfer.bundle.geometry import Geometry
from edgeinfer.bundle.kinds import KINDS, MOST_SEGMENTS, Segment
from edgeinfer.bundle.layouts import (
    LAYOUT_VERSIONS,
    NATIVE,
    PORTABLE,
    STATIC,
    STATIC_BITS,
    Layout,
    native_parts,
    static_parts,
    tensor_layout,
)
from edgeinfer.bundle.packing import BLOCK_SIZES, Dtype, Parts, QuantizedShape, find_expert, portable_parts
from edgeinfer.bundle.parts import MoESpec
from edgeinfer.bundle.peft import Module
from edgeinfer.bundle.spec import DecoderSpec, DraftModule
from edgeinfer.bundle.static_graph import BACKEND, StaticGraphs
from edgeinfer.bundle.strict_json import DAMAGED, read, require, wrong
from edgeinfer.core.errors import BundleError
from edgeinfer.core.options.load import BITS, CONVERTED_BITS, FLOAT_BITS, KvType
from edgeinfer.core.records import dataclass


def _require_plan(condition: bool, what: str) -> None:
    if not condition:
        raise BundleError(f"Plan: {what}.", "The bundle is damaged or was edited by hand; export or download it again.")


@dataclass(frozen=True)
class PlannedTensor:
    """The planned format of one matrix."""

    name: str
    # Of each value; 32 keeps float32. For a tensor of a GGUF file with its scales, such as 4.5 for Q4_K.
    bits: int | float
    block_size: int = 0  # values that share a scale; 0 at 32 bits
    symmetric: bool = False
    predicted_kl: float | None = None  # predicted cost of quantizing it, in nats per token; None without a prediction
    type: str = ""  # llama.cpp's name of a GGUF tensor's type

    def __post_init__(self) -> None:
        known = self.bits in CONVERTED_BITS or (self.type != "" and 0 < self.bits <= FLOAT_BITS)
        _require_plan(known, f"{self.name} has {self.bits} bits")
        blocks = self.block_size > 0 if self.bits < FLOAT_BITS else self.block_size == 0
        _require_plan(
            blocks or (self.type != "" and self.block_size > 0), f"{self.name} has a block of {self.block_size}"
        )
        _require_plan(self.predicted_kl is None or self.predicted_kl >= 0, f"{self.name} has a negative prediction")


@dataclass(frozen=True)
class PlanRecord:
    """How every matrix of a bundle was quantized."""

    method: str  # name of a method of edgeinfer.quant
    # Every matrix, in the order of the table; a tied head is its embedding and not listed.
    tensors: tuple[PlannedTensor, ...] = ()
    calibration_sha256: str | None = None  # of the calibration text; None without one
    calibration_tokens: int = 0
    budget_bytes: int | None = None  # limit of the weights' bytes; None where their bits were given

    def __post_init__(self) -> None:
        names = {tensor.name for tensor in self.tensors}
        _require_plan(len(names) == len(self.tensors), "a tensor is listed twice")
        _require_plan(self.calibration_tokens >= 0, f"{self.calibration_tokens} tokens are impossible")
        _require_plan(self.budget_bytes is None or self.budget_bytes > 0, f"{self.budget_bytes} bytes are impossible")

    @property
    def predicted_kl(self) -> float | None:
        """The predicted cost of quantizing the model, in nats per token; None without predictions."""
        costs = [tensor.predicted_kl for tensor in self.tensors if tensor.predicted_kl is not None]
        return sum(costs) if costs else None


@dataclass(frozen=True)
class CacheQuality:
    """What a type of the KV cache adds to the divergence of a bundle's model."""

    kv_type: KvType
    divergence: float  # nats per token


@dataclass(frozen=True)
class QualityRecord:
    """How far a bundle's model is from the float model that it was made of, on held-out text."""

    tokens: int  # that were compared
    divergence: float  # of Kullback and Leibler, nats per token
    top1: float  # the share of tokens after which both find the same token the likeliest
    caches: tuple[CacheQuality, ...] = ()
    repeating: float | None = None  # the share of greedy replies that repeat themselves; None where it does not chat

    def __post_init__(self) -> None:
        require(self.tokens > 0, f"quality is of {self.tokens} tokens")
        shares = (self.top1, self.repeating or 0)
        require(self.divergence >= 0 and all(0 <= share <= 1 for share in shares), "quality has impossible figures")
        types = [cache.kv_type for cache in self.caches]
        require(len(set(types)) == len(types), "quality has a cache twice")


FORMAT = "edgeinfer-bundle"
FORMAT_VERSION = 5

# The arrays of a quantized matrix in each layout; their names are fields of TensorEntry.
PARTS: dict[Layout, Callable[[QuantizedShape], Parts]] = {
    NATIVE: native_parts,
    PORTABLE: portable_parts,
    STATIC: static_parts,
}
_ITEM_BYTES: dict[Dtype, int] = {"float32": 4, "uint8": 1, "uint16": 2}


@dataclass(frozen=True)
class Blob:
    """A run of bytes in `weights.bin` and the array it holds."""

    offset: int
    dtype: Dtype
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in _ITEM_BYTES:
            raise wrong(f"dtype {self.dtype!r} is unknown")
        if self.offset < 0 or min(self.shape, default=1) <= 0:
            raise wrong(f"blob {self.offset}, {self.shape} is impossible")

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class TensorEntry:
    """One weight: float32 (`bits` 32), or quantized in blocks and stored in the bundle's layout."""

    name: str
    shape: tuple[int, ...]  # logical shape, (N, K) for a matrix
    bits: int
    data: Blob  # float32 values, or quantized ones; the high plane of 8 bits in the native layout
    block_size: int = 0
    # `scales`, `zero_points`: of the blocks; inline scales are in `data`; without zero points the zero is the middle.
    scales: Blob | None = None
    zero_points: Blob | None = None
    low: Blob | None = None  # the low plane of 8 bits in the native layout
    paired: bool = False  # two quantized matrices of N / 2 rows each, gate and up
    transposed: bool = False  # the stored array is (K, N): float32, or quantized in the static layout
    interleaved: bool = False  # the rows of gate and up alternate in the stored arrays; portable or float32 only
    e2m1: bool = False  # values are codes of E2M1 in blocks of 32 without zero points; native experts only
    inline_scales: bool = False  # scales lie among the values of the native layout, or will after a conversion to it
    modules: tuple[Module, ...] = ()  # the checkpoint's modules that make it up, where adapters can change them
    vectors: bool = False  # values of 2 bits are fields of codes of vectors in whole blocks; native only
    # Rows in GGUF's types (edgeinfer.bundle.kinds), with `bits` of the widest; `data` holds all then.
    segments: tuple[Segment, ...] = ()
    factor: float = 1.0  # multiplies products and rows of a matrix with segments

    def __post_init__(self) -> None:
        require(all(d > 0 for d in self.shape), f"{self.name} has an impossible shape")
        halves = len(self.shape) == 2 and self.shape[0] % 2 == 0 and not self.transposed
        require(halves or not self.interleaved, f"{self.name} has no halves to interleave")
        require(0 < abs(self.factor) < math.inf, f"{self.name} has a factor of {self.factor}")
        if self.segments:
            self._check_segments()
            return
        require(self.factor == 1, f"{self.name} has a factor, but no segments")
        if self.bits == 32:
            stored = self.shape[::-1] if self.transposed else self.shape
            require(self.data.dtype == "float32" and self.data.shape == stored, f"{self.name} has inconsistent shapes")
            plain = len(self.blobs) == 1 and not (self.paired or self.inline_scales or self.vectors)
            require(plain, f"{self.name} has parts that float32 has not")
            return
        require(self.bits in BITS and (self.bits != 3 or self.layout == NATIVE), f"{self.name} has {self.bits} bits")
        require(self.block_size in BLOCK_SIZES and len(self.shape) == 2, f"{self.name} has block {self.block_size}")
        require(not self.paired or self.shape[0] % 2 == 0, f"{self.name} has halves of different sizes")
        whole = self.bits in STATIC_BITS and self.shape[0] * self.bits % 8 == self.shape[1] % self.block_size == 0
        require(whole or not self.transposed, f"{self.name} is quantized and transposed")
        turns = self.paired and self.layout == PORTABLE
        require(turns or not self.interleaved, f"{self.name} has no halves to interleave")
        form = (self.layout, self.bits, self.zero_points)
        coded = not self.inline_scales and self.block_size == 32 and form == (NATIVE, 4, None)
        require(coded or not self.e2m1, f"{self.name} has codes of E2M1")
        blocks = self.shape[1] % self.block_size == 0 and form == (NATIVE, 2, None)
        require(blocks or not self.vectors, f"{self.name} has codes of vectors")
        parts = PARTS[self.layout](self.quantized)
        for part in ("data", "low", "scales", "zero_points"):
            blob: Blob | None = getattr(self, part)
            found = None if blob is None else (blob.dtype, blob.shape)
            require(found == parts.get(part), f"{self.name} has inconsistent {part.replace('_', ' ')}")

    def _check_segments(self) -> None:
        rows, found = sum(segment.rows for segment in self.segments), [KINDS.get(each.kind) for each in self.segments]
        kinds = [kind for kind in found if kind is not None]
        require(len(kinds) == len(found) <= MOST_SEGMENTS, f"{self.name} has unknown types")
        plain = (len(self.blobs), self.block_size) == (1, 32) and not (self.e2m1 or self.inline_scales or self.vectors)
        require(
            plain and not (self.transposed or self.interleaved), f"{self.name} has parts that GGUF's types have not"
        )
        require(len(self.shape) == 2 and self.shape[0] == rows, f"{self.name} has segments of {rows} rows")
        require(len(kinds) == 1 or not any(kind.floats for kind in kinds), f"{self.name} has floats among its types")
        halves = not self.paired or (len(kinds) == 1 and rows % 2 == 0)
        require(halves and min(each.rows for each in self.segments) > 0, f"{self.name} has impossible segments")
        require(all(kind.fits(self.shape[1]) for kind in kinds), f"{self.name} has incomplete blocks")
        require(self.bits == max(kind.bits for kind in kinds), f"{self.name} has {self.bits} bits")
        found_data = {"data": (self.data.dtype, self.data.shape)}
        require(found_data == native_parts(self.quantized), f"{self.name} has inconsistent data")

    @property
    def floats(self) -> bool:
        """Whether the values are floats, of 32 or of 16 bits."""
        return self.bits >= 16

    @property
    def layout(self) -> Layout:
        """The layout of a quantized tensor, by its scales and its order."""
        if self.scales is None or self.scales.dtype == "uint16":
            return NATIVE
        return STATIC if self.transposed else PORTABLE

    @property
    def quantized(self) -> QuantizedShape:
        marks = (self.zero_points is not None, self.paired, self.e2m1, self.inline_scales, self.vectors)
        return QuantizedShape(self.shape[0], self.shape[1], self.bits, self.block_size, *marks, self.segments)

    @property
    def blobs(self) -> tuple[Blob, ...]:
        return tuple(b for b in (self.data, self.low, self.scales, self.zero_points) if b is not None)

    @property
    def nbytes(self) -> int:
        """Stored bytes: values, scales and zero points."""
        return sum(b.nbytes for b in self.blobs)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class FileEntry:
    """Size and digest of one file of the bundle."""

    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        digest = len(self.sha256) == 64 and set(self.sha256) <= set("0123456789abcdef")
        require(self.bytes >= 0 and digest, "a file entry has no valid size and sha256")


@dataclass(frozen=True)
class Capabilities:
    """What the model file can do beyond plain decoding."""

    layer_skip: bool  # `layer_mask` is honoured
    hidden: bool  # `hidden_in` / `hidden_out` are there
    tree: bool  # a draft tree can be verified in one pass
    row_multiple: int = 1  # passes whose row count is a multiple of this, and at least 2, give bit-identical rows
    high_planes: bool = False  # layers can be read by their high 4-bit planes alone (the input `planes`)
    # Numbers of experts that a pass may give to each token, ascending; the last is the whole model. Empty for models
    # without experts.
    expert_counts: tuple[int, ...] = ()
    exact: bool = True  # rows can be bit-identical at all
    copies: bool = True  # rows of the cache can be copied out and in anywhere, without a state that they depend on
    # The graph's attention reads pages of a pool, so a row depends on its own path alone, and the type of the cache is
    # chosen when it is loaded.
    paged: bool = False

    def __post_init__(self) -> None:
        require(1 <= self.row_multiple <= 64, f"row_multiple {self.row_multiple} is impossible")
        ascending = self.expert_counts == tuple(sorted(set(self.expert_counts)))
        require(ascending and min(self.expert_counts, default=1) > 0, "expert_counts must ascend")


def capabilities_in(
    capabilities: Capabilities, tensors: Iterable[TensorEntry], layout: Layout, moe: MoESpec | None = None
) -> Capabilities:
    """The capabilities of a model whose quantized tensors are run in `layout`, whatever layout they are stored in.

    MatMulNBits takes two rows at a time at blocks of 64 and 128, and an odd last row goes another way. Our own kernel
    computes what it is asked for; ONNX Runtime's operators have one number of experts each, so there are two of them.
    """
    tensors = list(tensors)
    quantized = [t for t in tensors if t.bits < 32]
    pairs = layout == PORTABLE and any(t.block_size >= 64 for t in quantized)
    high_planes = layout == NATIVE and any(t.bits == 8 and t.name.startswith("layers.") for t in quantized)
    counts: tuple[int, ...] = ()
    if moe is not None:
        counts = tuple(range(1, moe.top_k + 1)) if layout == NATIVE else tuple(sorted({moe.draft_count, moe.top_k}))
    # ONNX Runtime multiplies the tokens of an expert together, so a row's result depends on rows with the same experts.
    exact = moe is None or (layout == NATIVE and all(t.bits < 32 for t in tensors if find_expert(t.name)))
    row_multiple = 2 if pairs else 1
    return dataclasses.replace(
        capabilities,
        row_multiple=row_multiple,
        high_planes=high_planes,
        expert_counts=counts,
        exact=exact,
        paged=layout == NATIVE,
    )


@dataclass(frozen=True)
class Manifest:
    """The contents of `edgeinfer.json`."""

    name: str
    architecture: str
    backend: str  # "onnx", "onnx-encoder", "onnx-static", "onnx-optimum" or "llamacpp"
    geometry: Geometry
    parameters: int
    capabilities: Capabilities
    files: dict[str, FileEntry] = field(default_factory=dict)  # every other file of the bundle by its relative path
    # The model's full description; None where the model file is opaque (`onnx-optimum`, `llamacpp`).
    decoder: DecoderSpec | None = None
    tensors: tuple[TensorEntry, ...] = ()  # the weights in `weights.bin`; empty for backends with opaque weights
    layout: Layout = PORTABLE
    layout_version: int = 1
    exits: tuple[int, ...] = ()  # layers after which an early exit is meaningful, ascending, the last is num_layers
    drafters: tuple[str, ...] = ()  # folders of nested bundles
    # Options the bundle was made with, for people to read.
    export: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)  # measured after training, by name
    quality: QualityRecord | None = None  # what quantizing cost, as measured after it; None where it was not
    plan: PlanRecord | None = None  # how the bits of the weights were chosen; None where that is not known
    static: StaticGraphs | None = None  # the graphs of an "onnx-static" bundle; None in all others
    # Layers before which a pass also gives the hidden states, for the draft module inside; L is after the last.
    taps: tuple[int, ...] = ()
    module: DraftModule | None = None  # how the decoder of a draft module reads its target; None for other bundles

    def __post_init__(self) -> None:
        names = [t.name for t in self.tensors]
        require(len(names) == len(set(names)), "a tensor is listed twice")
        require(self.parameters > 0, "parameters must be positive")
        require(self.exits == tuple(sorted(set(self.exits))), "exits must ascend")
        require(all(0 < e <= self.geometry.num_layers for e in self.exits), "exits must be layers")
        require(all(0 <= tap <= self.geometry.num_layers for tap in self.taps), "taps must be layers")
        consistent = self.decoder is None or self.decoder.geometry == self.geometry
        require(consistent, "decoder and geometry disagree")
        known = LAYOUT_VERSIONS[self.layout]
        if self.layout_version != known:
            hint = f"This edgeinfer reads version {known}: update edgeinfer or export again."
            raise BundleError(f"The bundle has version {self.layout_version} of the {self.layout} layout.", hint)
        for tensor in self.tensors:
            fits = tensor.bits == 32 or tensor.layout == tensor_layout(tensor.name, self.layout)
            require(fits, f"{tensor.name} is not in the {self.layout} layout")
        is_static = (self.static is not None, self.layout == STATIC)
        require(is_static == (self.backend == BACKEND,) * 2, "backend, layout and graphs disagree")
        agree = self.capabilities == self.capabilities_in(self.layout)
        require(agree, "capabilities and tensors disagree")

    def capabilities_in(self, layout: Layout) -> Capabilities:
        """The capabilities in a layout, whether stored or converted to."""
        if not self.tensors:
            return self.capabilities
        moe = None if self.decoder is None else self.decoder.moe
        return capabilities_in(self.capabilities, self.tensors, layout, moe)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, shared ones counted once."""
        blobs = {(b.offset, b.nbytes) for t in self.tensors for b in t.blobs}
        if not blobs:
            gguf = self.gguf_files
            return sum(f.bytes for path, f in self.files.items() if path.startswith("model.") or path in gguf)
        return sum(size for _, size in blobs)

    @property
    def gguf_files(self) -> tuple[str, ...]:
        """Names of GGUF files; of a plain file without its ending, its own."""
        named = tuple(name for name in self.files if name.endswith(".gguf"))
        return named or (tuple(self.files) if self.backend == "llamacpp" else ())

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per parameter, scales and zero points included."""
        return self.weight_bytes * 8 / self.parameters

    def tensor(self, name: str) -> TensorEntry:
        for entry in self.tensors:
            if entry.name == name:
                return entry
        raise BundleError(f"The bundle has no tensor {name!r}.", DAMAGED)

    def to_json(self) -> str:
        data = {"format": FORMAT, "format_version": FORMAT_VERSION} | dataclasses.asdict(self)
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Reads a manifest strictly: unknown, missing or mistyped fields are errors."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BundleError(f"edgeinfer.json is not valid JSON: {error}.", DAMAGED) from error
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            hint = "Point to a directory made by edgeinfer export."
            raise BundleError("edgeinfer.json is not an edgeinfer manifest.", hint)
        version = data.pop("format_version", None)
        if version != FORMAT_VERSION:
            hint = f"This edgeinfer reads version {FORMAT_VERSION}: export the model again, or update edgeinfer."
            raise BundleError(f"The bundle has format version {version!r}.", hint)
        manifest: Manifest = read(Manifest, data, "manifest")
        return manifest
