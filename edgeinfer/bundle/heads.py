"""What is trained beside a model and kept in its bundle's `heads/`: its files and their shapes, read strictly.

Each kind is a safetensors file of its own. D is the hidden size, K the number of tokens that may be guessed, L the
number of layers, H the number of heads, P the number of prompt tokens:

medusa      weight (H, D, D) and bias (H, D) of the heads, whose output goes through the model's final norm and head;
            or, where only some tokens may be guessed, through their rows (K, D) of the head times the norm's weight,
            for tokens (K,) int32
hydra       norm (D,), the model's final one; tokens (K,) int32, those that may be guessed; rows and embeddings (K, D),
            theirs of the model's head and embedding; of head i: weight.{i} (2, D, (2 + i) D) and bias.{i} (D,), over
            the state, the root's embedding and those of i tokens behind it
prompt      embeddings (P, D) of prompt tokens
routers     weight (L, D), bias (L,): which layers a prompt needs
judge       weight (D,), bias (1,): of the score by which a drafted token may stay though the model would say another
acceptance  weight (D, D), bias (D,) of one block that is run three times; out (2, D), out_bias (2,): rejected, accepted

All are float32 or float16 but for the tokens. The notes of a file say its format, its kind, and what it was trained on.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.array_file import ArrayFileError, Arrays, decode_arrays, encode_arrays
from edgeinfer.bundle.geometry import Geometry
from edgeinfer.bundle.opening import add_file, open_bundle
from edgeinfer.bundle.store import Bundle, reading
from edgeinfer.bundle.writing import MANIFEST, write_bundle
from edgeinfer.errors import BundleError, StorageError
from edgeinfer.records import dataclass

_FOLDER = "heads"
_FORMAT, _VERSION = "edgeinfer-heads", "1"
MOST_HEADS = 8
_TYPES = ("F32", "F16", "I32")
# Figures of an acceptance head: how well it tells what is accepted, and how well the drafter's own probability does.
JUDGED, TRUSTED = "area under the curve", "of the drafter's own probability"
# Of the norm through which heads see states; they are trained with it, whatever the model's own is.
STATE_EPS = 1e-6
_AGAIN = "Train them again, or download the bundle again."

_Shapes = dict[str, tuple[int, ...]]


def _medusa(arrays: Arrays, geometry: Geometry) -> _Shapes:
    size, heads, tokens = geometry.hidden_size, _length(arrays, "bias"), _length(arrays, "tokens")
    _require(1 <= heads <= MOST_HEADS, f"have {heads} heads")
    shapes: _Shapes = {"weight": (heads, size, size), "bias": (heads, size)}
    return shapes | {"tokens": (tokens,), "rows": (tokens, size)} if {"tokens", "rows"} & arrays.keys() else shapes


def _hydra(arrays: Arrays, geometry: Geometry) -> _Shapes:
    size, tokens = geometry.hidden_size, _length(arrays, "tokens")
    heads = sum(name.startswith("bias.") for name in arrays)
    _require(1 <= heads <= MOST_HEADS, f"have {heads} heads")
    shapes: _Shapes = {"norm": (size,), "tokens": (tokens,), "rows": (tokens, size), "embeddings": (tokens, size)}
    for head in range(heads):
        shapes |= {f"weight.{head}": (2, size, (2 + head) * size), f"bias.{head}": (size,)}
    return shapes


def _prompt(arrays: Arrays, geometry: Geometry) -> _Shapes:
    count = _length(arrays, "embeddings")
    _require(1 <= count <= MOST_HEADS, f"have {count} prompt tokens")
    return {"embeddings": (count, geometry.hidden_size)}


def _routers(arrays: Arrays, geometry: Geometry) -> _Shapes:
    return {"weight": (geometry.num_layers, geometry.hidden_size), "bias": (geometry.num_layers,)}


def _judge(arrays: Arrays, geometry: Geometry) -> _Shapes:
    return {"weight": (geometry.hidden_size,), "bias": (1,)}


def _acceptance(arrays: Arrays, geometry: Geometry) -> _Shapes:
    size = geometry.hidden_size
    return {"weight": (size, size), "bias": (size,), "out": (2, size), "out_bias": (2,)}


# What the arrays of each kind must be, given those whose length is free.
_SHAPES: dict[str, Callable[[Arrays, Geometry], _Shapes]] = {
    "medusa": _medusa,
    "hydra": _hydra,
    "prompt": _prompt,
    "routers": _routers,
    "judge": _judge,
    "acceptance": _acceptance,
}
HEADS = tuple(_SHAPES)


@dataclass(frozen=True)
class Heads:
    """One kind of heads.

    Attributes:
        kind: one of HEADS.
        arrays: as the module says.
        notes: for people: what they were trained on, how well they guess.
    """

    kind: str
    arrays: Mapping[str, NDArray[Any]]
    notes: Mapping[str, str] = field(default_factory=dict)

    def check(self, geometry: Geometry) -> None:
        """Refuses heads that are not of a model of these sizes."""
        _require(self.kind in _SHAPES, f"are of the unknown kind {self.kind!r}")
        shapes = _SHAPES[self.kind](self.arrays, geometry)
        _require(self.arrays.keys() == shapes.keys(), f"of {self.kind} lack an array or have one too many")
        for name, shape in shapes.items():
            array = self.arrays[name]
            types = (np.dtype(np.int32),) if name == "tokens" else (np.dtype(np.float32), np.dtype(np.float16))
            fits = array.shape == shape and array.dtype in types
            _require(fits, f"of {self.kind} have {name} of shape {array.shape}, not {shape}, or of a wrong type")
        if "tokens" in shapes:
            tokens = self.arrays["tokens"]
            inside = len(tokens) > 0 and 0 <= int(tokens.min()) <= int(tokens.max()) < geometry.vocab_size
            _require(inside and len(np.unique(tokens)) == len(tokens), f"of {self.kind} guess impossible tokens")

    def to_bytes(self) -> bytes:
        """The file that holds them."""
        notes = {"format": _FORMAT, "version": _VERSION, "kind": self.kind}
        return encode_arrays(self.arrays, dict(self.notes) | notes)


def heads_file(kind: str) -> str:
    """Where a bundle keeps heads of a kind."""
    return f"{_FOLDER}/{kind}.safetensors"


def has_heads(bundle: Bundle, kind: str) -> bool:
    """Whether a bundle has heads of a kind; does not read them."""
    return heads_file(kind) in bundle.manifest.files


def heads_bytes(bundle: Bundle, kind: str) -> int:
    """What heads of a kind take in memory at most, as float32; 0 where the bundle has none."""
    # Their file may hold half floats, and is read whole before they are widened.
    return 3 * bundle.manifest.files[heads_file(kind)].bytes if has_heads(bundle, kind) else 0


def read_heads(bundle: Bundle, kind: str) -> Heads | None:
    """The heads of a kind, compared with their digest; None where the bundle has none."""
    if not has_heads(bundle, kind):
        return None
    name = heads_file(kind)
    path = bundle.file(name)
    with reading(path):
        data = path.read_bytes()
    try:
        arrays, notes = decode_arrays(data, _TYPES)
    except ArrayFileError as error:
        raise BundleError(f"{name} {error}.", _AGAIN) from error
    if (notes.get("format"), notes.get("version")) != (_FORMAT, _VERSION):
        hint = f"This edgeinfer reads version {_VERSION}: update edgeinfer or train them again."
        raise BundleError(f"{name} is not of a version that this edgeinfer knows.", hint)
    _require(notes.get("kind") == kind, f"in {name} are of another kind")
    heads = Heads(kind, arrays, {k: v for k, v in notes.items() if k not in ("format", "version", "kind")})
    heads.check(bundle.manifest.geometry)
    return heads


def add_heads(path: Path, heads: Heads) -> Bundle:
    """Puts heads into the bundle at `path`, instead of any of their kind that it has, and opens it again.

    At every moment of it the bundle can be opened: without these heads, or with them.
    """
    bundle = _with_files(path)
    heads.check(bundle.manifest.geometry)
    return add_file(bundle, heads_file(heads.kind), heads.to_bytes())


def copy_with_heads(path: Path, out: Path, heads: Heads) -> Bundle:
    """Writes a copy of the bundle at `path` that has these heads, whole or not at all."""
    bundle = _with_files(path)
    heads.check(bundle.manifest.geometry)
    with write_bundle(out) as work:
        for name in (*bundle.manifest.files, MANIFEST):
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle.path / name, work / name)
        add_heads(work, heads)
    return open_bundle(out)


def _with_files(path: Path) -> Bundle:
    bundle = open_bundle(path)
    if not (bundle.path / MANIFEST).is_file():
        raise StorageError(f"{path} is a plain GGUF file, which has no place for heads.", "Export it as a bundle.")
    return bundle


def _length(arrays: Arrays, name: str) -> int:
    return len(arrays[name]) if name in arrays and arrays[name].ndim else 0


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise BundleError(f"Heads {what}.", _AGAIN)
