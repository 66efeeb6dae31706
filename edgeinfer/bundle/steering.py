"""Steering vectors of a bundle: what is added to logits to move a model's text, in `steering/NAME.safetensors`.

A file holds `tokens` (K,) int32, ids that differ, and `values` (K,) float32, nats to add to their logits. Its notes say
its format and what it was learnt from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.array_file import ArrayFileError, decode_arrays, encode_arrays
from edgeinfer.bundle.geometry import Geometry
from edgeinfer.bundle.opening import add_file, open_bundle
from edgeinfer.bundle.store import Bundle, reading
from edgeinfer.bundle.writing import MANIFEST
from edgeinfer.errors import BundleError, StorageError, UsageError
from edgeinfer.records import dataclass

_FOLDER, _SUFFIX = "steering", ".safetensors"
_FORMAT, _VERSION = "edgeinfer-steering", "1"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_AGAIN = "Learn it again with edgeinfer tune --steering, or download the bundle again."
# Tokens of a vector: with it, a reply may still have as many biases of its own.
MOST_STEERED = 2048
# Nats of a value at most; more than this bans or forces a token.
_LARGEST = 50.0


@dataclass(frozen=True)
class SteeringVector:
    """What is added to logits.

    Attributes:
        tokens: ids, each once. (K,)
        values: nats to add to their logits at scale 1. (K,)
        notes: for people: what it was learnt from, and what it gained.
    """

    tokens: NDArray[np.int32]
    values: NDArray[np.float32]
    notes: Mapping[str, str] = field(default_factory=dict)

    def check(self, geometry: Geometry) -> None:
        """Refuses what steers no model of these sizes."""
        tokens, values = self.tokens, self.values
        typed = tokens.dtype == np.int32 and values.dtype == np.float32
        shaped = tokens.ndim == 1 and tokens.shape == values.shape and 1 <= len(tokens) <= MOST_STEERED
        _require(typed and shaped, "has arrays of a wrong type or shape")
        inside = 0 <= int(tokens.min()) <= int(tokens.max()) < geometry.vocab_size
        _require(inside and len(np.unique(tokens)) == len(tokens), "names impossible tokens")
        _require(bool((np.abs(values) <= _LARGEST).all()), f"adds more than {_LARGEST:g} nats, or no number")


def require_name(name: str) -> None:
    """Refuses a name that is none of a file."""
    if not _NAME.fullmatch(name):
        message = f"{name!r} is no name of a steering vector."
        raise UsageError(message, "Use up to 64 letters, digits, dots, dashes and underscores; begin with a letter.")


def steering_names(bundle: Bundle) -> tuple[str, ...]:
    """The names of a bundle's steering vectors."""
    folder = f"{_FOLDER}/"
    files = (name for name in bundle.manifest.files if name.startswith(folder) and name.endswith(_SUFFIX))
    return tuple(sorted(name[len(folder) : -len(_SUFFIX)] for name in files))


def read_steering(bundle: Bundle, name: str) -> SteeringVector:
    """A bundle's vector of a name, compared with its digest."""
    if name not in (names := steering_names(bundle)):
        message = f"The model's bundle has no steering vector {name!r}."
        hint = f"It has {', '.join(names)}." if names else "Learn one with edgeinfer tune --steering NAME --text FILE."
        raise UsageError(message, hint)
    file = _file(name)
    path = bundle.file(file)
    with reading(path):
        data = path.read_bytes()
    try:
        arrays, notes = decode_arrays(data, ("I32", "F32"))
    except ArrayFileError as error:
        raise BundleError(f"{file} {error}.", _AGAIN) from error
    _require((notes.get("format"), notes.get("version")) == (_FORMAT, _VERSION), "is of an unknown version")
    _require(arrays.keys() == {"tokens", "values"}, "lacks an array or has one too many")
    vector = SteeringVector(arrays["tokens"], arrays["values"], notes)
    vector.check(bundle.manifest.geometry)
    return vector


def add_steering(path: Path, name: str, vector: SteeringVector) -> Bundle:
    """Puts a vector into the bundle at `path`, instead of any of its name, and opens the bundle again."""
    require_name(name)
    bundle = open_bundle(path)
    if not (bundle.path / MANIFEST).is_file():
        message = f"{path} is a plain GGUF file, which has no place for steering vectors."
        raise StorageError(message, "Export it as a bundle.")
    vector.check(bundle.manifest.geometry)
    notes = dict(vector.notes) | {"format": _FORMAT, "version": _VERSION}
    return add_file(bundle, _file(name), encode_arrays({"tokens": vector.tokens, "values": vector.values}, notes))


def _file(name: str) -> str:
    return f"{_FOLDER}/{name}{_SUFFIX}"


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise BundleError(f"A steering vector {what}.", _AGAIN)
