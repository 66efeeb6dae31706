"""Array files added to a bundle: trained heads, steering vectors, and the tokens that a draft module can draft.

Heads lie in `heads/KIND.safetensors`. D is the hidden size, K the number of tokens that may be guessed, L the number of
layers, H the number of heads:

medusa      weight (H, D, D) and bias (H, D) of the heads, whose output goes through the model's final norm and head;
            or, where only some tokens may be guessed, through their rows (K, D) of the head times the norm's weight,
            for tokens (K,) int32
hydra       norm (D,), the model's final one; tokens (K,) int32, those that may be guessed; rows and embeddings (K, D),
            theirs of the model's head and embedding; of head i: weight.{i} (2, D, (2 + i) D) and bias.{i} (D,), over
            the state, the root's embedding and those of i tokens behind it
routers     weight (L, D), bias (L,): which layers a prompt needs

All are float32 or float16 except the tokens.

Steering vectors lie in `steering/NAME.safetensors`: tokens (K,) int32, ids that differ, and values (K,) float32, the
nats that are added to their logits.

The notes of a file give its format and version, and for people what it was trained on.
"""

from __future__ import annotations

import re
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
from edgeinfer.core.errors import BundleError, StorageError, UsageError
from edgeinfer.core.records import dataclass

MOST_HEADS = 8
# Epsilon of the norm of the states that heads read; they are trained with it, whatever the model's own is.
STATE_EPS = 1e-6
# Tokens of a steering vector: with it, a reply may still have as many biases of its own.
MOST_STEERED = 2048
DRAFT_TOKENS = "draft_tokens.safetensors"
_HEADS_FORMAT, _STEERING_FORMAT, _DRAFT_TOKENS_FORMAT = (
    "edgeinfer-heads",
    "edgeinfer-steering",
    "edgeinfer-draft-tokens",
)
_VERSION = "1"
_STEERING_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
# The largest value of a steering vector, in nats; more than this bans or forces a token.
_LARGEST = 50.0
_AGAIN = "Make it again, or download the bundle again."

_Shapes = dict[str, tuple[int, ...]]


def _medusa(arrays: Arrays, geometry: Geometry) -> _Shapes:
    size, heads, tokens = geometry.hidden_size, _length(arrays, "bias"), _length(arrays, "tokens")
    _require_count("medusa heads", heads)
    shapes: _Shapes = {"weight": (heads, size, size), "bias": (heads, size)}
    return shapes | {"tokens": (tokens,), "rows": (tokens, size)} if {"tokens", "rows"} & arrays.keys() else shapes


def _hydra(arrays: Arrays, geometry: Geometry) -> _Shapes:
    size, tokens = geometry.hidden_size, _length(arrays, "tokens")
    heads = sum(name.startswith("bias.") for name in arrays)
    _require_count("hydra heads", heads)
    shapes: _Shapes = {"norm": (size,), "tokens": (tokens,), "rows": (tokens, size), "embeddings": (tokens, size)}
    for head in range(heads):
        shapes |= {f"weight.{head}": (2, size, (2 + head) * size), f"bias.{head}": (size,)}
    return shapes


def _routers(arrays: Arrays, geometry: Geometry) -> _Shapes:
    return {"weight": (geometry.num_layers, geometry.hidden_size), "bias": (geometry.num_layers,)}


# The shapes of each kind's arrays, given the arrays whose length is free.
_SHAPES: dict[str, Callable[[Arrays, Geometry], _Shapes]] = {
    "medusa": _medusa,
    "hydra": _hydra,
    "routers": _routers,
}
HEADS = tuple(_SHAPES)


@dataclass(frozen=True)
class Heads:
    kind: str  # one of HEADS
    arrays: Mapping[str, NDArray[Any]]
    notes: Mapping[str, str] = field(default_factory=dict)  # for people: what they were trained on, how well they guess

    def check(self, geometry: Geometry) -> None:
        """Refuses heads that were not made for a model of these sizes."""
        kind = self.kind
        _require(kind in _SHAPES, f"There is no kind of heads called {kind!r}.")
        shapes = _SHAPES[kind](self.arrays, geometry)
        _require(self.arrays.keys() == shapes.keys(), f"The {kind} heads lack an array or have one too many.")
        for name, shape in shapes.items():
            array = self.arrays[name]
            types = (np.int32,) if name == "tokens" else (np.float32, np.float16)
            fits = array.shape == shape and array.dtype in types
            _require(fits, f"The {kind} heads have {name} of shape {array.shape}, not {shape}, or of a wrong type.")
        fault = tokens_fault(self.arrays["tokens"], geometry.vocab_size) if "tokens" in shapes else ""
        _require(not fault, f"The tokens of the {kind} heads {fault}.")

    def to_bytes(self) -> bytes:
        notes = {"format": _HEADS_FORMAT, "version": _VERSION, "kind": self.kind}
        return encode_arrays(self.arrays, dict(self.notes) | notes)


def heads_file(kind: str) -> str:
    return f"heads/{kind}.safetensors"


def has_heads(bundle: Bundle, kind: str) -> bool:
    """Whether a bundle has heads of a kind; does not read them."""
    return heads_file(kind) in bundle.manifest.files


def heads_bytes(bundle: Bundle, kind: str) -> int:
    """Memory that heads of a kind take at most, as float32; 0 where the bundle has none."""
    # Their file may hold half floats, and is read whole before they are widened.
    return 3 * bundle.manifest.files[heads_file(kind)].bytes if has_heads(bundle, kind) else 0


def read_heads(bundle: Bundle, kind: str) -> Heads | None:
    """The heads of a kind, compared with their digest; None where the bundle has none."""
    if not has_heads(bundle, kind):
        return None
    name = heads_file(kind)
    arrays, notes = _read(bundle, name, _HEADS_FORMAT, ("F32", "F16", "I32"))
    _require(notes.pop("kind", "") == kind, f"{name} holds another kind of heads.")
    heads = Heads(kind, arrays, notes)
    heads.check(bundle.manifest.geometry)
    return heads


def add_heads(path: Path, heads: Heads) -> Bundle:
    """Puts heads into the bundle at `path`, replacing any of their kind, and opens it again."""
    bundle = _open_folder(path)
    heads.check(bundle.manifest.geometry)
    return add_file(bundle, heads_file(heads.kind), heads.to_bytes())


def copy_with_heads(path: Path, out: Path, heads: Heads) -> Bundle:
    """Writes a copy of the bundle at `path` that has these heads, whole or not at all."""
    bundle = _open_folder(path)
    heads.check(bundle.manifest.geometry)
    with write_bundle(out) as work:
        for name in (*bundle.manifest.files, MANIFEST):
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle.path / name, work / name)
        add_heads(work, heads)
    return open_bundle(out)


@dataclass(frozen=True)
class SteeringVector:
    tokens: NDArray[np.int32]  # ids, each once. (K,)
    values: NDArray[np.float32]  # nats to add to their logits at scale 1. (K,)
    notes: Mapping[str, str] = field(default_factory=dict)  # for people: what it was learnt from, and what it gained

    def check(self, geometry: Geometry) -> None:
        """Refuses vectors that were not made for a model of these sizes."""
        tokens, values = self.tokens, self.values
        typed = tokens.dtype == np.int32 and values.dtype == np.float32
        shaped = tokens.ndim == 1 and tokens.shape == values.shape and 1 <= len(tokens) <= MOST_STEERED
        _require(typed and shaped, "The steering vector has arrays of a wrong type or shape.")
        fault = tokens_fault(tokens, geometry.vocab_size)
        _require(not fault, f"The tokens of the steering vector {fault}.")
        finite = bool((np.abs(values) <= _LARGEST).all())
        _require(finite, f"The steering vector adds more than {_LARGEST:g} nats, or something that is no number.")


def require_steering_name(name: str) -> None:
    """Refuses names that cannot be part of a file's name."""
    if not _STEERING_NAME.fullmatch(name):
        message = f"{name!r} cannot be the name of a steering vector."
        raise UsageError(message, "Use up to 64 letters, digits, dots, dashes and underscores; begin with a letter.")


def steering_names(bundle: Bundle) -> tuple[str, ...]:
    found = (re.fullmatch(r"steering/([^/]+)\.safetensors", name) for name in bundle.manifest.files)
    return tuple(sorted(match[1] for match in found if match))


def read_steering(bundle: Bundle, name: str) -> SteeringVector:
    """A bundle's steering vector, compared with its digest."""
    if name not in (names := steering_names(bundle)):
        message = f"The model's bundle has no steering vector {name!r}."
        hint = f"It has {', '.join(names)}." if names else "Learn one with edgeinfer tune --steering NAME --text FILE."
        raise UsageError(message, hint)
    file = _steering_file(name)
    arrays, notes = _read(bundle, file, _STEERING_FORMAT, ("I32", "F32"))
    _require(arrays.keys() == {"tokens", "values"}, f"{file} lacks an array or has one too many.")
    vector = SteeringVector(arrays["tokens"], arrays["values"], notes)
    vector.check(bundle.manifest.geometry)
    return vector


def add_steering(path: Path, name: str, vector: SteeringVector) -> Bundle:
    """Puts a vector into the bundle at `path`, replacing any of its name, and opens the bundle again."""
    require_steering_name(name)
    bundle = _open_folder(path)
    vector.check(bundle.manifest.geometry)
    notes = dict(vector.notes) | {"format": _STEERING_FORMAT, "version": _VERSION}
    data = encode_arrays({"tokens": vector.tokens, "values": vector.values}, notes)
    return add_file(bundle, _steering_file(name), data)


def encode_draft_tokens(tokens: NDArray[np.integer]) -> bytes:  # (Vd,)
    """The file of the tokens that a module can draft."""
    notes = {"format": _DRAFT_TOKENS_FORMAT, "version": _VERSION}
    return encode_arrays({"tokens": np.ascontiguousarray(tokens, np.int32)}, notes)


def read_draft_tokens(bundle: Bundle) -> NDArray[np.int64] | None:  # (Vd,)
    """The tokens that a bundle's module can draft; None where it can draft all of the target's."""
    manifest = bundle.manifest
    if manifest.module is None or not manifest.module.vocab_size:
        return None
    arrays, _ = _read(bundle, DRAFT_TOKENS, _DRAFT_TOKENS_FORMAT, ("I32",))
    _require(arrays.keys() == {"tokens"}, f"{DRAFT_TOKENS} lacks its array or has one too many.")
    tokens = arrays["tokens"]
    fault = tokens_fault(tokens, manifest.geometry.vocab_size)
    if not fault and len(tokens) != manifest.module.vocab_size:
        fault = f"are {len(tokens)}, and the module drafts {manifest.module.vocab_size}"
    _require(not fault, f"The tokens in {DRAFT_TOKENS} {fault}.")
    return tokens.astype(np.int64)


def tokens_fault(tokens: NDArray[np.integer], vocabulary: int) -> str:  # (K,)
    """What is wrong with token ids that must all differ, to be read after "the tokens"; empty where nothing is."""
    if tokens.ndim != 1 or not len(tokens):
        return f"are of shape {tokens.shape}"
    outside = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if len(outside):
        return f"name {int(outside[0])}, which is outside a vocabulary of {vocabulary}"
    return "name a token twice" if len(np.unique(tokens)) < len(tokens) else ""


def _steering_file(name: str) -> str:
    return f"steering/{name}.safetensors"


def _open_folder(path: Path) -> Bundle:
    bundle = open_bundle(path)
    if not (bundle.path / MANIFEST).is_file():
        raise StorageError(f"{path} is a plain GGUF file, to which nothing can be added.", "Export it as a bundle.")
    return bundle


def _read(
    bundle: Bundle, name: str, kind: str, types: tuple[str, ...]
) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """The arrays of a file of a bundle, compared with its digest, and its notes for people."""
    path = bundle.file(name)
    with reading(path):
        data = path.read_bytes()
    try:
        arrays, notes = decode_arrays(data, types)
    except ArrayFileError as error:
        raise BundleError(f"{name} {error}.", _AGAIN) from error
    _require(
        (notes.pop("format", ""), notes.pop("version", "")) == (kind, _VERSION),
        f"{name} has an unknown format version.",
    )
    return arrays, notes


def _length(arrays: Arrays, name: str) -> int:
    return len(arrays[name]) if name in arrays and arrays[name].ndim else 0


def _require_count(what: str, count: int) -> None:
    _require(1 <= count <= MOST_HEADS, f"There are {count} {what}, not 1 to {MOST_HEADS}.")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise BundleError(message, _AGAIN)
