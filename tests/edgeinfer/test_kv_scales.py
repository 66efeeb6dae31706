"""Scales of quantized caches in an older bundle: read bit by bit, and refused where anything is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.bundle import Bundle, Geometry, KVScales, open_bundle, seal
from edgeinfer.bundle import kv_scales as module
from edgeinfer.bundle.kv_scales import KV_SCALES, LayerScales, read_kv_scales
from edgeinfer.errors import BundleError, UsageError
from edgeinfer.export import ExportConfig
from tests.cache import export_checkpoint
from tests.factories import make_checkpoint
from tests.tables import each_row

LAYERS, CHANNELS = 3, 32


def some_scales(layers: int = LAYERS, channels: int = CHANNELS) -> KVScales:
    draw = np.random.default_rng(0)

    def one() -> LayerScales:
        keys, values = np.exp(draw.normal(size=(2, channels)) * 5).astype(np.float32)
        return LayerScales(keys, values)

    return KVScales({kv: tuple(one() for _ in range(layers)) for kv in ("int8", "int4")}, tokens=9)


def assert_same(actual: KVScales | None, expected: KVScales) -> None:
    assert actual is not None and actual.tokens == expected.tokens
    for kv in ("int8", "int4"):
        for mine, other in zip(actual.of(kv), expected.of(kv), strict=True):
            assert np.array_equal(mine.keys, other.keys) and np.array_equal(mine.values, other.values)
        assert actual.digest(kv) == expected.digest(kv)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kv-scales")
    make_checkpoint(folder / "checkpoint", "llama")
    return export_checkpoint(folder / "checkpoint", folder / "bundle", ExportConfig(keep_small=False))


@pytest.fixture
def bundle(exported: Path, tmp_path: Path) -> Bundle:
    shutil.copytree(exported, tmp_path / "bundle")
    return open_bundle(tmp_path / "bundle")


def as_written(scales: KVScales) -> dict[str, Any]:
    """What is in the file of a bundle with these scales, of which decimals are read back as the same float32."""
    listed = {
        kv: {name: [[float(str(n)) for n in getattr(layer, name)] for layer in layers] for name in ("keys", "values")}
        for kv, layers in scales.layers.items()
    }
    return {"format": "edgeinfer-kv-scales", "version": 1, "tokens": scales.tokens, "scales": listed}


def write(bundle: Bundle, text: str) -> Bundle:
    (bundle.path / KV_SCALES).write_text(text)
    seal(bundle.path, bundle.manifest)
    return open_bundle(bundle.path)


def test_scales_are_read_bit_by_bit(bundle: Bundle) -> None:
    assert read_kv_scales(bundle) is None
    assert_same(read_kv_scales(write(bundle, json.dumps(as_written(some_scales())))), some_scales())


def test_scales_of_another_model_are_refused(bundle: Bundle) -> None:
    for wrong in (some_scales(layers=2), some_scales(channels=31)):
        with pytest.raises(BundleError, match="belong to another model"):
            wrong.check(bundle.manifest.geometry)


def test_a_type_without_scales_is_refused() -> None:
    scales = KVScales({"int8": some_scales().of("int8")}, tokens=1)
    with pytest.raises(UsageError, match="no scales for a KV cache of type int4"):
        scales.of("int4")


def changed(where: list[Any], value: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        for key in where[:-1]:
            data = data[key]
        data[where[-1]] = value

    return change


FIRST = ["scales", "int8", "keys", 0]
FAULTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "format": (changed(["format"], "other"), "version"),
    "version": (changed(["version"], 2), "version"),
    "unknown-field": (changed(["more"], 1), "other fields"),
    "tokens": (changed(["tokens"], 0), "number of tokens"),
    "tokens-bool": (changed(["tokens"], True), "number of tokens"),
    "no-types": (changed(["scales"], {}), "no KV type"),
    "unknown-type": (changed(["scales", "int3"], {}), "no KV type"),
    "no-values": (changed(["scales", "int8"], {"keys": []}), "lacks keys or values"),
    "layers": (changed(["scales", "int4", "values"], [[1.0] * CHANNELS]), "number of layers"),
    "channels": (changed(FIRST, [1.0]), "number of channels"),
    "no-list": (changed(FIRST, 1.0), "number of channels"),
    "text": (changed([*FIRST, 0], "1"), "not positive"),
    "bool": (changed([*FIRST, 0], True), "not positive"),
    "zero": (changed([*FIRST, 0], 0), "not positive"),
    "negative": (changed([*FIRST, 5], -1.0), "not positive"),
    "nan": (changed([*FIRST, 5], float("nan")), "not positive"),
    "infinite": (changed([*FIRST, 5], float("inf")), "not positive"),
    "too-large": (changed([*FIRST, 5], 1e39), "not positive"),
    "huge-integer": (changed([*FIRST, 5], 10**400), "not positive"),
    "vanishing": (changed([*FIRST, 5], 1e-60), "positive float32"),
}


@each_row(("change", "message"), FAULTS.values())
def test_malformed_scales_are_refused(bundle: Bundle, change: Callable[[dict[str, Any]], None], message: str) -> None:
    data = as_written(some_scales())
    change(data)
    with pytest.raises(BundleError, match=message):
        read_kv_scales(write(bundle, json.dumps(data)))


@each_row(("text", "message"), [("[", "not valid JSON"), ("[1]", "not a JSON object")])
def test_what_is_not_json_is_refused(bundle: Bundle, text: str, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        read_kv_scales(write(bundle, text))


def test_a_file_too_large_for_the_model_is_not_read(bundle: Bundle) -> None:
    with pytest.raises(BundleError, match="too large"):
        read_kv_scales(write(bundle, json.dumps(as_written(some_scales())) + " " * 20_000))


def test_the_longest_numbers_are_not_too_large() -> None:
    longest = LayerScales(*np.full((2, 64), 1.1754944e-38, np.float32))
    geometry = Geometry(10, 64, num_layers=2, num_kv_heads=1, head_dim=64, max_positions=10)
    scales = KVScales(dict.fromkeys(("int8", "int4"), (longest, longest)), tokens=10**6)
    assert len(json.dumps(as_written(scales))) <= module.most_bytes(geometry)
