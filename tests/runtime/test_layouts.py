"""Choice of layouts; converted weights are made once, kept safely and not confused with others."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle.layouts import NATIVE, PORTABLE, WEIGHTS, Layout
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.writing import MANIFEST, seal
from edgeinfer.core.errors import BundleError, NativeUnavailableError, UsageError
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Pass
from edgeinfer.runtime.native.library import NativeKernel
from edgeinfer.runtime.weights import layouts
from edgeinfer.runtime.weights.layouts import choose_layout, prepare
from tests.kernel import require_kernel
from tests.runtime.models import bundle_of, make_graph_backend
from tests.tables import each_row

TEXT = np.array([0, 40, 41, 42, 43, 44])
linux = pytest.mark.skipif(sys.platform != "linux", reason="the cache lies elsewhere")


@pytest.fixture(scope="module")
def bundles() -> dict[Layout, Bundle]:
    """One model, quantized, in each layout."""
    config = ExportConfig(bits=4, keep_small=False, group_size=32, name="small", calibration="none")
    layouts: tuple[Layout, ...] = (NATIVE, PORTABLE)
    return {layout: bundle_of("qwen2", replace(config, layout=layout)) for layout in layouts}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of this user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "cache"


Availability = Callable[[bool], None]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Availability:
    """Says whether there is a native kernel, whatever machine this is."""

    def apply(there: bool) -> None:
        def find() -> NativeKernel:
            if not there:
                raise NativeUnavailableError("The native kernel was not built.", "Install a compiler.")
            return NativeKernel(Path("nowhere"), "best")

        monkeypatch.setattr(layouts, "native_kernel", find)

    return apply


@pytest.mark.parametrize(
    ("stored", "native", "there", "runs"),
    [
        (NATIVE, None, True, NATIVE),
        (NATIVE, None, False, PORTABLE),
        (NATIVE, False, True, PORTABLE),
        (NATIVE, True, True, NATIVE),
        (PORTABLE, None, True, PORTABLE),
        (PORTABLE, None, False, PORTABLE),
        (PORTABLE, False, False, PORTABLE),
        (PORTABLE, True, True, NATIVE),
        (NATIVE, True, False, None),
        (PORTABLE, True, False, None),
    ],
)
def test_the_stored_layout_runs_where_it_can(
    bundles: dict[Layout, Bundle],
    kernel: Availability,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stored: Layout,
    native: bool | None,
    there: bool,
    runs: Layout | None,
) -> None:
    kernel(there)
    layouts._warn.cache_clear()
    monkeypatch.delenv("EDGEINFER_NATIVE", raising=False)
    if runs is None:
        with pytest.raises(NativeUnavailableError, match="was not built"):
            choose_layout(bundles[stored], native)
        return
    assert choose_layout(bundles[stored], native) == runs
    # Only users who get less than the bundle promises see a message.
    told = [record.getMessage() for record in caplog.records]
    surprised = stored == NATIVE and native is None and not there
    assert told == (["The native kernel was not built. Install a compiler."] if surprised else [])


def test_who_switches_the_kernel_off_is_not_told_of_it(
    bundles: dict[Layout, Bundle], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("EDGEINFER_NATIVE", "0")
    assert choose_layout(bundles[NATIVE], None) == PORTABLE
    assert caplog.records == []
    with pytest.raises(NativeUnavailableError, match="EDGEINFER_NATIVE=0"):
        choose_layout(bundles[NATIVE], True)


def test_what_is_not_quantized_runs_natively_where_that_is_asked_for(kernel: Availability, tmp_path: Path) -> None:
    kernel(True)
    bundle = bundle_of("llama", ExportConfig(bits=32))
    assert choose_layout(bundle, None) == PORTABLE and choose_layout(bundle, True) == NATIVE
    graph = prepare(bundle, NATIVE)
    assert (graph.model.name, graph.weights) == ("model.native.onnx", bundle.path / WEIGHTS)
    shutil.copytree(bundle.path, tmp_path / "one")
    (tmp_path / "one" / "model.native.onnx").unlink()
    seal(tmp_path / "one", bundle.manifest)
    with pytest.raises(UsageError, match="no graph for the native kernel"):
        choose_layout(open_bundle(tmp_path / "one"), True)


@each_row("there", [True, False])
def test_a_cache_that_the_native_graph_alone_has_decides(
    bundles: dict[Layout, Bundle], kernel: Availability, there: bool
) -> None:
    kernel(there)
    for bundle in (bundles[PORTABLE], bundle_of("llama", ExportConfig(bits=32))):
        assert choose_layout(bundle, None, "float32") == choose_layout(bundle, False, "int8") == PORTABLE
        assert choose_layout(bundle, None, "int8") == (NATIVE if there else PORTABLE)
        assert choose_layout(bundle, None, "q8_0") == PORTABLE


def test_the_stored_layout_is_used_in_place(bundles: dict[Layout, Bundle], cache: Path) -> None:
    for layout, bundle in bundles.items():
        graph = prepare(bundle, layout)
        assert graph.weights == bundle.path / WEIGHTS
        graph.close()
        assert graph.weights.is_file()
    assert not cache.exists()


def logits(bundle: Bundle, layout: Layout | None = None) -> Floats:
    """Logits of a short text, by the onnx backend."""
    backend = make_graph_backend(bundle, 64, layout=layout)
    values = backend.forward(Pass(TEXT, np.arange(len(TEXT)), np.arange(len(TEXT)))).logits.copy()
    backend.close()
    return values


def files(folder: Path) -> dict[str, int]:
    """Files under a folder with the time of their last change."""
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


@linux
@each_row("stored", [NATIVE, PORTABLE])
def test_converted_weights_are_made_once_and_give_the_other_layouts_bits(
    bundles: dict[Layout, Bundle], cache: Path, caplog: pytest.LogCaptureFixture, stored: Layout
) -> None:
    bundle, other = bundles[stored], PORTABLE if stored == NATIVE else NATIVE
    caplog.set_level(logging.INFO)
    steps: list[tuple[str, int, int]] = []
    before = files(bundle.path)
    graph = prepare(bundle, other, lambda *step: steps.append(step))
    key = f"{bundle.manifest.files[WEIGHTS].sha256}-{other}-v1"
    assert graph.weights == cache / "edgeinfer" / "weights" / key / f"weights.{other}.bin"
    assert graph.model == graph.weights.with_name(f"model.{other}.onnx")
    assert files(bundle.path) == before
    assert steps[-1][1] == steps[-1][2] > 5
    assert [r.levelname for r in caplog.records] == ["INFO"]
    graph.close()

    require_kernel()
    made = files(cache)
    steps.clear()
    np.testing.assert_array_equal(logits(bundle, other), logits(bundles[other]))
    assert prepare(bundle, other, lambda *step: steps.append(step)).weights == graph.weights
    assert files(cache) == made
    assert steps == []


@linux
def test_what_is_left_of_an_interrupted_conversion_is_made_again(bundles: dict[Layout, Bundle], cache: Path) -> None:
    bundle = bundles[NATIVE]
    graph = prepare(bundle, PORTABLE)
    wanted = graph.weights.read_bytes()
    for damage in (wanted[:-1], wanted[:100], wanted[:-3] + b"xxx", b""):
        graph.weights.write_bytes(damage)
        graph.model.write_bytes(b"")
        again = prepare(bundle, PORTABLE)
        assert again.weights.read_bytes() == wanted
        assert again.model.read_bytes() == bundle.model_file(PORTABLE).read_bytes()
    assert {path.name for path in graph.weights.parent.iterdir()} == {graph.weights.name, graph.model.name}


def test_weights_converted_beside_the_bundle_are_used(
    bundles: dict[Layout, Bundle], cache: Path, tmp_path: Path
) -> None:
    shutil.copytree(bundles[NATIVE].path, tmp_path / "copy")
    made = prepare(bundles[NATIVE], PORTABLE)
    bundle = open_bundle(tmp_path / "copy")
    shutil.copy(made.weights, bundle.weights_file(PORTABLE))
    assert prepare(bundle, PORTABLE).weights == bundle.weights_file(PORTABLE)


@linux
@pytest.mark.parametrize("fault", ["a file is in the way", "no permission"])
def test_a_cache_that_cannot_be_written_is_gone_without(
    bundles: dict[Layout, Bundle], cache: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    bundle = bundles[NATIVE]
    if fault == "no permission":
        if os.geteuid() == 0:
            pytest.skip("root may write everywhere")
        cache.mkdir(mode=0o500)
    else:
        cache.write_text("not a folder")
    graph = prepare(bundle, PORTABLE)
    assert "Cannot write" in caplog.text
    assert "converted for this run only" in caplog.text
    assert len(caplog.records) == 1
    assert graph.weights.parent.name.startswith("edgeinfer-")
    assert graph.weights.parent.parent == cache.parent
    graph.close()
    assert not graph.weights.parent.exists()


@linux
def test_a_failed_conversion_leaves_nothing(
    bundles: dict[Layout, Bundle], cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(bundles[NATIVE].path, tmp_path / "damaged")
    with (tmp_path / "damaged" / WEIGHTS).open("r+b") as file:
        file.seek(1000)
        file.write(b"damage")
    bundle = open_bundle(tmp_path / "damaged")
    with pytest.raises(BundleError, match="does not match its sha256"):
        prepare(bundle, PORTABLE)
    assert files(cache) == {}
    cache.joinpath("edgeinfer").rename(tmp_path / "elsewhere")
    cache.rmdir()
    cache.write_text("not a folder")
    with pytest.raises(BundleError, match="does not match its sha256"):
        prepare(bundle, PORTABLE)
    assert [path for path in tmp_path.iterdir() if path.name.startswith("edgeinfer-")] == []


@pytest.mark.parametrize("digest", ["../" * 21 + "x", "/" * 64, "A" * 64])
def test_a_manifest_cannot_name_a_place_outside_the_cache(
    bundles: dict[Layout, Bundle], cache: Path, tmp_path: Path, digest: str
) -> None:
    shutil.copytree(bundles[NATIVE].path, tmp_path / "evil")
    manifest = json.loads((tmp_path / "evil" / MANIFEST).read_text())
    manifest["files"][WEIGHTS]["sha256"] = digest
    (tmp_path / "evil" / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="sha256"):
        prepare(open_bundle(tmp_path / "evil"), PORTABLE)
    assert not cache.exists()
