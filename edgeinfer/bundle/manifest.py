"""The manifest `edgeinfer.json`: what a bundle says of itself, read strictly; knows nothing of the files' contents.

Tensor names in the table (all matrices are (rows, columns) = (output, input)):
  embed (V, D) · final_norm (D,) · head (V, D)
  layers.{i}.attn_norm (D,) · .attn.qkv (q+k+v, D) · .attn.qkv_bias · .attn.q_norm (h,) · .attn.k_norm (h,)
  layers.{i}.attn.out (D, q) · .attn.out_bias
  layers.{i}.mlp_norm (D,) · .mlp.gate_up (2 F, D) · .mlp.gate_up_bias · .mlp.down (D, F) · .mlp.down_bias
A tied head is listed with the embedding's own blobs.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from edgeinfer.bundle.packing import BITS, BLOCK_SIZES, blocks_per_row, packed_bytes
from edgeinfer.bundle.spec import DecoderSpec, Geometry
from edgeinfer.errors import BundleError

__all__ = ["FORMAT", "FORMAT_VERSION", "Blob", "Capabilities", "FileEntry", "Manifest", "TensorEntry"]

FORMAT = "edgeinfer-bundle"
FORMAT_VERSION = 1
_DAMAGED = "The bundle is damaged or was edited by hand; export or download it again."

Dtype = Literal["float32", "uint8"]
_ITEM_BYTES = {"float32": 4, "uint8": 1}


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise BundleError(f"Manifest: {what}.", _DAMAGED)


@dataclass(frozen=True)
class Blob:
    """A run of bytes in `weights.bin` and the array it holds."""

    offset: int
    dtype: Dtype
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        _require(self.dtype in _ITEM_BYTES, f"dtype {self.dtype!r} is unknown")
        _require(self.offset >= 0 and all(d > 0 for d in self.shape), f"blob {self.offset}, {self.shape} is impossible")

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        size = _ITEM_BYTES[self.dtype]
        for d in self.shape:
            size *= d
        return size


@dataclass(frozen=True)
class TensorEntry:
    """One weight: float32 (`bits` 32) or packed in blocks as edgeinfer.bundle.packing lays out.

    Attributes:
        shape: logical shape, (N, K) for a matrix.
        transposed: the stored float32 array is (K, N).
    """

    name: str
    shape: tuple[int, ...]
    bits: int
    data: Blob
    block_size: int = 0
    scales: Blob | None = None
    zero_points: Blob | None = None
    transposed: bool = False

    def __post_init__(self) -> None:
        if self.bits == 32:
            stored = self.shape[::-1] if self.transposed else self.shape
            _require(self.data.dtype == "float32" and self.data.shape == stored, f"{self.name} has inconsistent shapes")
            return
        _require(self.bits in BITS, f"{self.name} has {self.bits} bits")
        _require(self.block_size in BLOCK_SIZES and len(self.shape) == 2, f"{self.name} has block {self.block_size}")
        n, k = self.shape
        blocks = blocks_per_row(k, self.block_size)
        want = (n, blocks, packed_bytes(self.block_size, self.bits))
        _require(self.data.dtype == "uint8" and self.data.shape == want, f"{self.name} has inconsistent shapes")
        scales_fit = self.scales is not None and self.scales.dtype == "float32" and self.scales.shape == (n, blocks)
        _require(scales_fit, f"{self.name} has inconsistent scales")
        if self.zero_points is not None:
            want_zeros = (n, packed_bytes(blocks, self.bits))
            zeros_fit = self.zero_points.dtype == "uint8" and self.zero_points.shape == want_zeros
            _require(zeros_fit, f"{self.name} has inconsistent zero points")

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """All runs of bytes of this tensor."""
        return tuple(b for b in (self.data, self.scales, self.zero_points) if b is not None)

    @property
    def nbytes(self) -> int:
        """Stored bytes: values, scales and zero points."""
        return sum(b.nbytes for b in self.blobs)

    @property
    def size(self) -> int:
        """Number of parameters."""
        count = 1
        for d in self.shape:
            count *= d
        return count


@dataclass(frozen=True)
class FileEntry:
    """Size and digest of one file of the bundle."""

    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        _require(self.bytes >= 0 and len(self.sha256) == 64, "a file entry has no valid size and sha256")


@dataclass(frozen=True)
class Capabilities:
    """What the model file can do beyond plain decoding.

    Attributes:
        layer_skip: `layer_mask` is honoured.
        hidden: `hidden_in` / `hidden_out` are there.
        tree: a draft tree can be verified in one pass.
        row_multiple: passes whose row count is a multiple of this, and at least 2, give bit-identical rows.
    """

    layer_skip: bool
    hidden: bool
    tree: bool
    row_multiple: int = 1

    def __post_init__(self) -> None:
        _require(1 <= self.row_multiple <= 64, f"row_multiple {self.row_multiple} is impossible")


@dataclass(frozen=True)
class Manifest:
    """Everything `edgeinfer.json` holds.

    Attributes:
        backend: runtime backend that runs the model file: "onnx" or "onnx-optimum".
        geometry: sizes the runtime drives the model by.
        decoder: the model's full description; None where the model file is opaque (`onnx-optimum`).
        tensors: the weights in `weights.bin`; empty for backends with opaque weights.
        exits: layers after which an early exit is meaningful, ascending, the last is num_layers.
        drafters: folders of nested bundles.
        files: every other file of the bundle by its relative path.
        export: options the bundle was made with, for people to read.
        quality: figures measured at export by name.
    """

    name: str
    architecture: str
    backend: str
    geometry: Geometry
    parameters: int
    capabilities: Capabilities
    files: dict[str, FileEntry] = field(default_factory=dict)
    decoder: DecoderSpec | None = None
    tensors: tuple[TensorEntry, ...] = ()
    exits: tuple[int, ...] = ()
    drafters: tuple[str, ...] = ()
    export: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    quality: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [t.name for t in self.tensors]
        _require(len(names) == len(set(names)), "a tensor is listed twice")
        _require(self.parameters > 0, "parameters must be positive")
        _require(self.exits == tuple(sorted(set(self.exits))), "exits must ascend")
        _require(all(0 < e <= self.geometry.num_layers for e in self.exits), "exits must be layers")
        consistent = self.decoder is None or self.decoder.geometry == self.geometry
        _require(consistent, "decoder and geometry disagree")

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, blobs shared by two tensors counted once."""
        blobs = {(b.offset, b.nbytes) for t in self.tensors for b in t.blobs}
        if not blobs:
            return sum(f.bytes for path, f in self.files.items() if path.startswith("model."))
        return sum(size for _, size in blobs)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per parameter, scales and zero points included."""
        return self.weight_bytes * 8 / self.parameters

    def tensor(self, name: str) -> TensorEntry:
        """The entry of a tensor.

        Raises:
            BundleError: no such tensor.
        """
        for entry in self.tensors:
            if entry.name == name:
                return entry
        raise BundleError(f"The bundle has no tensor {name!r}.", _DAMAGED)

    def to_json(self) -> str:
        """The text of `edgeinfer.json`."""
        data = {"format": FORMAT, "format_version": FORMAT_VERSION} | dataclasses.asdict(self)
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Reads a manifest strictly: unknown, missing or mistyped fields are errors.

        Raises:
            BundleError: anything is not as it should be.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BundleError(f"edgeinfer.json is not valid JSON: {error}.", _DAMAGED) from error
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            hint = "Point to a directory made by edgeinfer export."
            raise BundleError("edgeinfer.json is not an edgeinfer manifest.", hint)
        version = data.pop("format_version", None)
        if version != FORMAT_VERSION:
            hint = f"This edgeinfer reads version {FORMAT_VERSION}: update edgeinfer or export again."
            raise BundleError(f"The bundle has format version {version!r}.", hint)
        manifest = _read(cls, data, "manifest")
        assert isinstance(manifest, cls)
        return manifest


def _read(kind: Any, value: Any, where: str) -> Any:
    """Turns parsed JSON into `kind`, a dataclass or a type built of JSON's types."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, where)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        candidates = [a for a in args if a is not type(None)]
        if len(candidates) == 1:
            return _read(candidates[0], value, where)
        _require(isinstance(value, tuple(candidates)), f"{where} has the wrong type")
        return value
    if origin is tuple:
        _require(isinstance(value, list), f"{where} must be a list")
        return tuple(_read(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        _require(isinstance(value, dict), f"{where} must be an object")
        return {k: _read(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if origin is Literal:
        _require(value in args, f"{where} must be one of {', '.join(map(str, args))}")
        return value
    if kind is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # Compared, not converted: an integer may be too large for a float. NaN compares as false.
        _require(number and abs(value) <= sys.float_info.max, f"{where} must be a finite number")
        return float(value)
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    _require(fits, f"{where} must be a {kind.__name__}")
    return value


def _read_dataclass(kind: Any, value: Any, where: str) -> Any:
    _require(isinstance(value, dict), f"{where} must be an object")
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for name in value:
        _require(name in fields, f"{where} has an unknown field {name!r}")
    for name, f in fields.items():
        optional = f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
        _require(optional or name in value, f"{where} lacks {name!r}")
    return kind(**{name: _read(hints[name], v, f"{where}.{name}") for name, v in value.items()})
