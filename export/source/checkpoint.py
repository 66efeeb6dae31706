"""Lazy reading of a Hugging Face safetensors checkpoint, and of a bundle's weights as one.

Tensors are read with plain file reads instead of a memory map, because mapped pages count against the memory of an
export. The `safetensors` library is not used for that reason, and because its numpy side has no bfloat16.

8-bit floats (E4M3) follow DeepSeek-V3's published weights and transformers' FineGrainedFP8Config: a matrix `NAME` has a
`NAME_scale_inv`, whose numbers multiply blocks of 128 rows and 128 columns, or one number that multiplies all of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.array_file import ArrayFileError, StoredArray, read_index, read_into
from edgeinfer.bundle.layouts import WEIGHTS
from edgeinfer.bundle.spec import DecoderSpec, uncommon_fields
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import CheckpointError, UsageError

FLOATS = ("F32", "F16", "BF16", "F64")
_WIDER: dict[str, type[np.generic]] = {"F16": np.float16, "F64": np.float64}
_INTEGERS: dict[str, type[np.generic]] = {"I64": np.int64, "I32": np.int32, "BOOL": np.bool_}

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_AGAIN = "Download the checkpoint again."
# Bytes read at a time; the float32 copy of one piece is small relative to the tensor.
_PIECE_BYTES = 1 << 22


@dataclass(frozen=True)
class _Tensor:
    file: Path
    stored: StoredArray


class TensorFile(Protocol):
    """What holds a model's tensors by name, whatever its format; `Checkpoint` is one."""

    def read(
        self, name: str, start: int = 0, stop: int | None = None, *, within: int | None = None
    ) -> NDArray[np.float32]:
        """Reads rows `start` to `stop` of a tensor, or of one of those that it stacks, as float32."""

    def read_packed(self, name: str, start: int, stop: int, *, within: int | None = None) -> NDArray[np.uint8]:
        """Reads rows of a packed tensor as bytes."""


class OpenFiles:
    """Files that are opened when they are first read, without buffers, and closed when the block ends."""

    def __init__(self) -> None:
        self._files: dict[Path, BinaryIO] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def _open(self, path: Path) -> BinaryIO:
        if path not in self._files:
            self._files[path] = path.open("rb", buffering=0)
        return self._files[path]


class Checkpoint(OpenFiles):
    """The tensors of a checkpoint directory, in one file or in shards, by name; opening reads the headers only."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._tensors: dict[str, _Tensor] = {}
        single, index = folder / _SINGLE, folder / _INDEX
        if single.is_file():
            self._tensors = _read_header(single)
        elif index.is_file():
            self._read_shards(index)
        else:
            raise _no_weights(folder)
        eights = [name for name, tensor in self._tensors.items() if tensor.stored.dtype == E4M3]
        # Scales, and the scales of inputs, which are not read.
        self._companions = {fp8_scale_name(name) for name in eights}
        self._companions |= {f"{name.removesuffix('weight')}activation_scale" for name in eights}

    def include(self, folder: str) -> None:
        """Adds the tensors of a file in a folder inside, by that folder's name and a slash before their own."""
        inside = _read_header(self.folder / folder / _SINGLE)
        self._tensors |= {f"{folder}/{name}": tensor for name, tensor in inside.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors except scales."""
        return frozenset(self._tensors.keys() - self._companions)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._tensors[name].stored.shape for name in self.names}

    def dtype(self, name: str) -> str:
        """The type of a tensor as the format spells it: F32, BF16 and so on."""
        return self._tensors[name].stored.dtype

    def require(self, name: str, shape: tuple[int, ...], types: tuple[str, ...] = FLOATS) -> None:
        """Checks that a tensor is there with this shape and one of these types."""
        tensor = self._tensors.get(name)
        if tensor is None:
            hint = "The checkpoint is incomplete, or config.json describes another model."
            raise CheckpointError(f"{self.folder} has no tensor {name!r} (expected shape {shape}).", hint)
        stored, file = tensor.stored, tensor.file.name
        if stored.shape != shape:
            message = f"Tensor {name!r} in {file} has shape {stored.shape}, config.json implies {shape}."
            raise CheckpointError(message, "Check that config.json belongs to these weights.")
        if stored.dtype == E4M3 and types == FLOATS and fp8_scale_name(name) in self._tensors:
            scales = fp8_scale_name(name)
            whole = math.prod(self._tensors[scales].stored.shape) == 1
            blocks = (*shape[:-2], *(math.ceil(size / FP8_BLOCK) for size in shape[-2:]))
            self.require(scales, self._tensors[scales].stored.shape if whole else blocks)
        elif stored.dtype not in types:
            hint = "Export from float32, float16 or bfloat16 weights; quantized checkpoints cannot be converted."
            raise CheckpointError(f"Tensor {name!r} in {file} has type {stored.dtype}.", hint)

    def read(
        self, name: str, start: int = 0, stop: int | None = None, *, within: int | None = None
    ) -> NDArray[np.float32]:
        """Rows `start` to `stop` of a tensor as float32, a single number as (1,); `require` must have accepted it."""
        tensor = self._tensors[name]
        shape = (tensor.stored.shape or (1,)) if within is None else tensor.stored.shape[1:]
        stop = shape[0] if stop is None else stop
        if tensor.stored.dtype == E4M3:
            return self._read_scaled(name, start, stop, within)
        row_items = math.prod(shape[1:])
        values = np.empty((stop - start, *shape[1:]), np.float32)
        start += 0 if within is None else within * shape[0]
        with _reading(tensor.file):
            self._read_into(values.reshape(-1), tensor, start * row_items)
        return values

    def _read_scaled(self, name: str, start: int, stop: int, within: int | None) -> NDArray[np.float32]:
        values = _FP8_NUMBERS[self.read_packed(name, start, stop, within=within)]
        if math.prod(self._tensors[fp8_scale_name(name)].stored.shape) == 1:
            values *= self.read(fp8_scale_name(name)).reshape(())
            return values
        first, last = start // FP8_BLOCK, -(-stop // FP8_BLOCK)
        scales = self.read(fp8_scale_name(name), first, last, within=within)  # (blocks of the rows, blocks)
        blocks = np.arange(start, stop) // FP8_BLOCK - first
        for column in range(scales.shape[1]):
            values[:, column * FP8_BLOCK : (column + 1) * FP8_BLOCK] *= scales[blocks, column, None]
        return values

    def read_packed(self, name: str, start: int, stop: int, *, within: int | None = None) -> NDArray[np.uint8]:
        """Rows of a tensor of bytes."""
        tensor = self._tensors[name]
        shape = tensor.stored.shape if within is None else tensor.stored.shape[1:]
        values = np.empty((stop - start, *shape[1:]), np.uint8)
        first = (start if within is None else within * shape[0] + start) * math.prod(shape[1:])
        self._fill(tensor, first, values)
        return values

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors have the same type, shape and bytes."""
        pair = [self._tensors.get(each) for each in (name, other)]
        one, two = (None if tensor is None else (tensor.stored.dtype, tensor.stored.shape) for tensor in pair)
        if one is None or one != two:
            return False
        found = [tensor for tensor in pair if tensor is not None]
        for start in range(0, found[0].stored.nbytes, _PIECE_BYTES):
            pieces = [np.empty(min(_PIECE_BYTES, tensor.stored.nbytes - start), np.uint8) for tensor in found]
            for tensor, piece in zip(found, pieces, strict=True):
                self._fill(tensor, start, piece)
            if not np.array_equal(pieces[0], pieces[1]):
                return False
        return True

    def read_integers(self, name: str) -> NDArray[np.int64]:
        """A whole tensor of integers, or of booleans as 0 and 1, in its shape."""
        tensor = self._tensors.get(name)
        if tensor is None or tensor.stored.dtype not in _INTEGERS:
            found = "no" if tensor is None else f"a {tensor.stored.dtype}"
            raise CheckpointError(f"{self.folder} has {found} tensor {name!r}, which must be integers.", _AGAIN)
        values: NDArray[Any] = np.empty(tensor.stored.shape, _INTEGERS[tensor.stored.dtype])
        self._fill(tensor, 0, values)
        return values.astype(np.int64)

    def _fill(self, tensor: _Tensor, start: int, values: NDArray[Any]) -> None:
        """Fills an array with a tensor's bytes from `start` on."""
        with _reading(tensor.file):
            file = self._open(tensor.file)
            file.seek(tensor.stored.offset + start)
            read_into(file, values)

    def _read_into(self, flat: NDArray[np.float32], tensor: _Tensor, start: int) -> None:
        """Fills a flat array with a tensor's numbers from `start` on, piece by piece."""
        stored = tensor.stored
        file = self._open(tensor.file)
        file.seek(stored.offset + start * stored.item_bytes)
        step = _PIECE_BYTES // stored.item_bytes
        for begin in range(0, flat.size, step):
            piece = flat[begin : begin + step]
            if stored.dtype == "F32":
                read_into(file, piece)
                continue
            raw = np.empty(piece.size * stored.item_bytes, np.uint8)
            read_into(file, raw)
            if stored.dtype != "BF16":
                piece[:] = raw.view(_WIDER[stored.dtype])
            else:
                # bfloat16 is the upper half of a float32.
                np.left_shift(raw.view(np.uint16), 16, out=piece.view(np.uint32), dtype=np.uint32)

    def _read_shards(self, index: Path) -> None:
        data = parse_object(read_bytes(index), str(index))
        shards = data.get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(f, str) for f in shards.values()):
            raise CheckpointError(f"{index} has no weight_map from tensors to files.", _AGAIN)
        present = {entry.name for entry in self.folder.iterdir() if entry.is_file()}
        headers: dict[str, dict[str, _Tensor]] = {}
        for name, file in shards.items():
            if file not in headers:
                if PurePosixPath(file).name != file or "\\" in file:
                    raise CheckpointError(f"{index} names {file!r}, which is outside its folder.", "Do not use it.")
                if file not in present:
                    raise CheckpointError(f"{self.folder / file} is missing, although {index.name} lists it.", _AGAIN)
                headers[file] = _read_header(self.folder / file)
            if name not in headers[file]:
                raise CheckpointError(
                    f"{self.folder / file} has no tensor {name!r}, although {index.name} lists it.", _AGAIN
                )
            self._tensors[name] = headers[file][name]


def _no_weights(folder: Path) -> CheckpointError:
    if not folder.is_dir():
        return CheckpointError(f"{folder} is not a directory.", "Point to a Hugging Face checkpoint directory.")
    if any(folder.glob("pytorch_model*.bin")) or any(folder.glob("*.pth")):
        hint = "Load it with transformers once and save it with save_pretrained(..., safe_serialization=True)."
        return CheckpointError(f"{folder} has pickled weights only, and pickles are never loaded.", hint)
    return CheckpointError(f"{folder} has neither {_SINGLE} nor {_INDEX}.", _AGAIN)


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Names the file in every error of reading it."""
    try:
        yield
    except OSError as error:
        raise _unreadable(path, error) from error
    except ArrayFileError as error:
        raise CheckpointError(f"{path} {error}.", _AGAIN) from error


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"Cannot read {path}: {error.strerror}.", "Check the file and its permissions.")


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """Parses bytes that must be a JSON object."""
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not valid JSON: {error}.", _AGAIN) from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{what} is not a JSON object.", _AGAIN)
    return parsed


def _read_header(path: Path) -> dict[str, _Tensor]:
    with _reading(path), path.open("rb") as file:
        index = read_index(file, path.stat().st_size)
    return {stored.name: _Tensor(path, stored) for stored in index.arrays}


E4M3 = "F8_E4M3"
FP8_BLOCK = 128
Floats = NDArray[np.float32]

_MANTISSA_BITS, _BIAS = 3, 7


def _fp8_table() -> Floats:  # (256,)
    """The value of each code; 0x7F and 0xFF are NaN."""
    codes = np.arange(128)
    exponents, mantissas = codes >> _MANTISSA_BITS, (codes & 7).astype(np.float32)
    above = np.where(exponents > 0, np.float32(1 << _MANTISSA_BITS), np.float32(0))
    half = np.ldexp(above + mantissas, np.maximum(exponents, 1) - _BIAS - _MANTISSA_BITS)
    half[-1] = np.nan
    return np.concatenate([half, -half]).astype(np.float32)


_FP8_NUMBERS = _fp8_table()


def fp8_scale_name(name: str) -> str:
    return f"{name}_scale_inv"


def checkpoint_config(bundle: Bundle) -> dict[str, Any]:
    """The config.json of a checkpoint that computes the same as the bundle."""
    generation = bundle.read_object("generation_config.json")
    ends = generation.get("eos_token_id")
    end = (ends[0] if ends else None) if isinstance(ends, list) else ends
    return _config(_plain_spec(bundle)) | {"bos_token_id": generation.get("bos_token_id"), "eos_token_id": end}


def _plain_spec(bundle: Bundle) -> DecoderSpec:
    spec = bundle.manifest.decoder
    odd = spec is None or spec.moe or spec.whole_norm or spec.window_size or spec.mlp_bias or spec.activation != "silu"
    if (
        spec is None
        or odd
        or uncommon_fields(spec)
        or uncommon_fields(spec.rope)
        or spec.rope.type != "default"
        or spec.rope.dim != spec.head_dim
    ):
        message = f"{bundle.path} cannot be turned back into a checkpoint, as it is not a plain Llama, Qwen2 or Qwen3."
        raise UsageError(message, "Use the checkpoint itself.")
    return spec


def _config(spec: DecoderSpec) -> dict[str, Any]:
    family = "Qwen3" if spec.qk_norm else "Qwen2" if spec.qkv_bias and not spec.output_bias else "Llama"
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions,
        "rope_theta": spec.rope.theta,
        "rms_norm_eps": spec.norm_eps,
        "hidden_act": "silu",
        "attention_bias": spec.qkv_bias,
        "tie_word_embeddings": spec.tied,
        "torch_dtype": "float32",
    }


def checkpoint_tensors(bundle: Bundle) -> Iterator[tuple[str, Floats]]:
    """Every tensor by its Hugging Face name; packed tensors of the bundle are split."""
    spec = _plain_spec(bundle)
    bundle.check(WEIGHTS)
    yield "model.embed_tokens.weight", bundle.tensor("embed")
    sizes = {"q": spec.q_size, "k": spec.kv_size, "v": spec.kv_size}
    for layer in range(spec.num_layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        yield f"{theirs}input_layernorm.weight", bundle.tensor(f"{ours}attn_norm")
        yield f"{theirs}post_attention_layernorm.weight", bundle.tensor(f"{ours}mlp_norm")
        yield f"{theirs}self_attn.o_proj.weight", bundle.tensor(f"{ours}attn.out")
        for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
            joined = bundle.tensor(f"{ours}attn.qkv" + ("_bias" if kind == "bias" else ""))
            parts = np.split(joined, np.cumsum(list(sizes.values()))[:-1])
            yield from ((f"{theirs}self_attn.{name}_proj.{kind}", p) for name, p in zip(sizes, parts, strict=True))
        if spec.qk_norm:
            yield f"{theirs}self_attn.q_norm.weight", bundle.tensor(f"{ours}attn.q_norm")
            yield f"{theirs}self_attn.k_norm.weight", bundle.tensor(f"{ours}attn.k_norm")
        if spec.output_bias:
            yield f"{theirs}self_attn.o_proj.bias", bundle.tensor(f"{ours}attn.out_bias")
        gate, up = np.split(bundle.tensor(f"{ours}mlp.gate_up"), 2)
        yield from ((f"{theirs}mlp.gate_proj.weight", gate), (f"{theirs}mlp.up_proj.weight", up))
        yield f"{theirs}mlp.down_proj.weight", bundle.tensor(f"{ours}mlp.down")
    yield "model.norm.weight", bundle.tensor("final_norm")
    if not spec.tied:
        yield "lm_head.weight", bundle.tensor("head")
