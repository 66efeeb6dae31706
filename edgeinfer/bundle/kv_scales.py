"""The scales of quantized KV caches: what they are, and `kv_scales.json`.

The file, beside the graphs of a bundle: {"format": "edgeinfer-kv-scales", "version": 1, "tokens": calibration rows,
"scales": {"int8": {"keys": [[scale, ...], ...], "values": [...]}, "int4": ...}}, one list per layer with a positive
float32 for each channel of each head.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.geometry import Geometry
from edgeinfer.bundle.kv_types import QUANTIZED_KV
from edgeinfer.bundle.store import Bundle
from edgeinfer.errors import BundleError, UsageError
from edgeinfer.records import dataclass

__all__ = ["KV_SCALES", "KVScales", "LayerScales", "most_bytes", "read_kv_scales"]

Floats = NDArray[np.float32]

KV_SCALES = "kv_scales.json"
_FORMAT = "edgeinfer-kv-scales"
_VERSION = 1
# The longest float32 as JSON writes it, with comma and space.
_NUMBER_BYTES = 26
_HEADER_BYTES = 1 << 10
# As Python's float, which compares with integers of any size.
_LARGEST = float(np.finfo(np.float32).max)
_AGAIN = "Export the bundle again."


@dataclass(frozen=True)
class LayerScales:
    """Scales of one layer for one KV type, (H h,) each."""

    keys: Floats
    values: Floats

    def __post_init__(self) -> None:
        for array in (self.keys, self.values):
            fits = array.dtype == np.float32 and array.ndim == 1 and array.size > 0
            # A subnormal scale has an infinite inverse.
            if not fits or not np.isfinite(array).all() or array.min() < np.finfo(np.float32).tiny:
                raise BundleError("KV scales must be positive float32 numbers.", _AGAIN)


@dataclass(frozen=True)
class KVScales:
    """Scales of all layers by the name of the KV type.

    Attributes:
        tokens: rows they were calibrated on.
    """

    layers: Mapping[str, tuple[LayerScales, ...]]
    tokens: int
    _digests: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    def of(self, kv: str) -> tuple[LayerScales, ...]:
        """The scales of a quantized type, one for each layer.

        Raises:
            UsageError: there are none for it.
        """
        if kv not in self.layers:
            raise UsageError(
                f"There are no scales for a KV cache of type {kv}.", f"Choose one of {', '.join(self.layers)}."
            )
        return self.layers[kv]

    def digest(self, kv: str) -> str:
        """Tells caches of one type with different scales apart."""
        if kv not in self._digests:
            digest = hashlib.sha256(kv.encode())
            for layer in self.of(kv):
                digest.update(layer.keys.tobytes())
                digest.update(layer.values.tobytes())
            self._digests[kv] = digest.hexdigest()
        return self._digests[kv]

    def check(self, geometry: Geometry) -> None:
        """Refuses scales that are not of this model.

        Raises:
            BundleError: another number of layers or channels.
        """
        channels = geometry.num_kv_heads * geometry.head_dim
        for kv, layers in self.layers.items():
            sizes = {array.size for layer in layers for array in (layer.keys, layer.values)}
            if len(layers) != geometry.num_layers or sizes != {channels}:
                raise BundleError(f"The KV scales for {kv} belong to another model.", _AGAIN)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], geometry: Geometry) -> KVScales:
        """Reads the object of `kv_scales.json`, strictly.

        Raises:
            BundleError: anything is not as it should be.
        """
        if data.get("format") != _FORMAT or data.get("version") != _VERSION:
            hint = f"This edgeinfer reads version {_VERSION}: update edgeinfer or export again."
            raise BundleError(f"{KV_SCALES} is not of a version that this edgeinfer knows.", hint)
        tokens, scales = data.get("tokens"), data.get("scales")
        _require(data.keys() == {"format", "version", "tokens", "scales"}, "has other fields than it should")
        _require(isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0, "has no number of tokens")
        _require(isinstance(scales, dict) and len(scales) > 0 and scales.keys() <= set(QUANTIZED_KV), "has no KV type")
        assert isinstance(scales, dict) and isinstance(tokens, int)
        return cls({kv: _read_layers(entry, geometry) for kv, entry in scales.items()}, tokens)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise BundleError(f"{KV_SCALES} {what}.", _AGAIN)


def _read_layers(entry: Any, geometry: Geometry) -> tuple[LayerScales, ...]:
    _require(isinstance(entry, dict) and entry.keys() == {"keys", "values"}, "lacks keys or values")
    keys, values = (_read_arrays(entry[name], geometry) for name in ("keys", "values"))
    return tuple(LayerScales(k, v) for k, v in zip(keys, values, strict=True))


def _read_arrays(rows: Any, geometry: Geometry) -> list[Floats]:
    channels = geometry.num_kv_heads * geometry.head_dim
    _require(isinstance(rows, list) and len(rows) == geometry.num_layers, "has another number of layers")
    for row in rows:
        _require(isinstance(row, list) and len(row) == channels, "has another number of channels")
        numbers = all(isinstance(n, int | float) and not isinstance(n, bool) for n in row)
        _require(numbers and all(0 < n <= _LARGEST for n in row), "has scales that are not positive")
    return [np.array(row, np.float32) for row in rows]


def read_kv_scales(bundle: Bundle) -> KVScales | None:
    """The scales in a bundle; None where it has none.

    Raises:
        BundleError: the file is damaged, too large, or of another model.
    """
    if not bundle.has(KV_SCALES):
        return None
    geometry = bundle.manifest.geometry
    _require(bundle.manifest.files[KV_SCALES].bytes <= most_bytes(geometry), "is too large")
    return KVScales.from_dict(bundle.read_object(KV_SCALES), geometry)


def most_bytes(geometry: Geometry) -> int:
    """What the scales of a model take as JSON at most."""
    numbers = 2 * len(QUANTIZED_KV) * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim
    return _HEADER_BYTES + numbers * _NUMBER_BYTES + 4 * len(QUANTIZED_KV) * geometry.num_layers
