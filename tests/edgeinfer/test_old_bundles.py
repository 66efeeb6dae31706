"""Bundles made before caches were paged load, run, convert and nest with float32 caches, and can be renewed."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

import edgeinfer
from edgeinfer.apps.cli.main import main
from edgeinfer.bundle.conversion import convert_bundle
from edgeinfer.bundle.geometry import PAGED_KV
from edgeinfer.bundle.layouts import LAYOUTS, NATIVE, PORTABLE, Layout
from edgeinfer.bundle.opening import nest_drafter, open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.writing import seal
from edgeinfer.errors import UsageError
from edgeinfer.export.renewal import renew_bundle
from edgeinfer.runtime.backends.contract import ForwardInput
from edgeinfer.runtime.backends.onnx.backend import OnnxBackend
from tests.cli import contents
from tests.old_bundle import TOKENS, old_bundle, old_logits

# What nothing reads of them any more: graphs for small caches, and scales that were calibrated.
SMALL = {f"model{layout}.kv-{kv}.onnx" for layout in ("", ".portable") for kv in ("int8", "int4")} | {"kv_scales.json"}


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return open_bundle(old_bundle(tmp_path / "old"))


def computed(bundle: Bundle, layout: Layout) -> list[np.ndarray]:
    """Logits of the last token, and of those of the largest logit one after the other."""
    backend = OnnxBackend(bundle, 64, threads=1, layout=layout)
    try:
        rows, tokens, start = [], TOKENS, 0
        for _ in range(5):
            positions = np.arange(start, start + len(tokens))
            rows.append(backend.forward(ForwardInput(tokens, positions, positions[-1:] - start)).logits[0].copy())
            tokens, start = rows[-1].argmax(keepdims=True), start + len(tokens)
        return rows
    finally:
        backend.close()


def test_it_computes_what_it_did_in_both_layouts(bundle: Bundle, tmp_path: Path) -> None:
    bundle.verify()
    assert not bundle.manifest.paged and not bundle.manifest.capabilities.paged
    assert bundle.superseded == SMALL
    convert_bundle(bundle, PORTABLE, tmp_path / "converted")
    converted = open_bundle(tmp_path / "converted")
    assert bundle.graphs == {"model.onnx": NATIVE, "model.portable.onnx": PORTABLE} and not converted.superseded
    assert converted.graphs == {"model.onnx": PORTABLE, "model.native.onnx": NATIVE}
    for of in (bundle, converted):
        for layout in LAYOUTS:
            assert of.kv_types(layout) == ("float32",) and of.manifest.capabilities_in(layout).paged is False
            np.testing.assert_allclose(np.stack(computed(of, layout)), old_logits(), rtol=0, atol=1e-5)


def test_it_is_loaded_with_its_drafter(bundle: Bundle) -> None:
    prompt = TOKENS.tolist()
    texts = {}
    for speculation in ("off", "model"):
        with edgeinfer.load(bundle.path, speculation=speculation, remember=False) as model:
            assert model.plan.configuration.kv == "float32"
            result = model.generate(prompt, max_tokens=24, ignore_eos=True)
            texts[speculation] = result.token_ids
    assert texts["off"] == texts["model"] and len(texts["off"]) == 24


@pytest.mark.parametrize("backend", ["onnx", "reference"])
def test_a_small_cache_needs_todays_graphs(bundle: Bundle, backend: str) -> None:
    for kv in ("int8", "int4"):
        with pytest.raises(UsageError, match=f"KV cache of type {kv} here.*edgeinfer convert BUNDLE OUT --renew"):
            edgeinfer.load(bundle.path, backend=backend, kv=kv, remember=False)


def test_as_a_drafter_it_leaves_out_graphs_and_scales_of_small_caches(bundle: Bundle, tmp_path: Path) -> None:
    alone = open_bundle(old_bundle(tmp_path / "alone"))
    shutil.rmtree(alone.path / "drafter")
    seal(alone.path, dataclasses.replace(alone.manifest, drafters=()))
    nested = nest_drafter(bundle.path, alone.path, tmp_path / "nested")
    graphs = {path.name for path in nested.path.glob("drafter/*.onnx")}
    assert graphs == {"model.onnx", "model.portable.onnx"} and not nested.has("drafter/kv_scales.json")
    assert nested.graphs == bundle.graphs and nested.superseded == SMALL


def test_renewed_it_has_the_graphs_of_today_and_the_same_weights(bundle: Bundle, tmp_path: Path) -> None:
    assert main(["convert", str(bundle.path), str(tmp_path / "new"), "--renew"]) == 0
    new = open_bundle(tmp_path / "new")
    new.verify()
    for name in (".", "drafter"):
        before, after = open_bundle(bundle.path / name), open_bundle(new.path / name)
        assert after.manifest.paged and after.kv_types(NATIVE) == PAGED_KV and after.kv_types(PORTABLE) == ("float32",)
        assert after.manifest.tensors == before.manifest.tensors
    assert {*new.manifest.files} == {name for name in bundle.manifest.files if "kv" not in name}
    same = {name for name, entry in new.manifest.files.items() if entry == bundle.manifest.files[name]}
    assert {name for name in new.manifest.files if not name.endswith((".onnx", "/edgeinfer.json"))} <= same
    with pytest.raises(UsageError, match="no graphs of an earlier edgeinfer"):
        renew_bundle(new, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_renewing_in_place_and_in_part(bundle: Bundle) -> None:
    # The drafter alone is of today, as where one that was trained since is put into an old bundle.
    renew_bundle(bundle, bundle.path.with_name("new"))
    mixed = nest_drafter(bundle.path, bundle.path.with_name("new") / "drafter", bundle.path.with_name("mixed"))
    assert not mixed.manifest.paged and open_bundle(mixed.path / "drafter").manifest.paged
    renew_bundle(mixed, mixed.path, replace_existing=True)
    assert contents(mixed.path) == contents(bundle.path.with_name("new"))
