"""Static bundles on disk: the same weights as ordinary ones, graphs of standard operators, and what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgeinfer.bundle.layouts import STATIC, WEIGHTS
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.writing import MANIFEST
from edgeinfer.core.errors import BundleError, UsageError
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig, StaticOptions
from tests.cli import edgeinfer, refuses
from tests.factories import make_checkpoint
from tests.tables import each_row

SHAPES = StaticOptions(context=48, chunk=16, widths=(1, 2, 4))
Exports = Callable[..., tuple[Bundle, Bundle]]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """Makes a static and an ordinary bundle of one checkpoint."""

    @cache
    def make(variant: str, **options: Any) -> tuple[Bundle, Bundle]:
        folder = tmp_path_factory.mktemp(variant)
        make_checkpoint(folder / "checkpoint", variant)
        asked: dict[str, Any] = {"keep_small": False, "bits": 4, "calibration": "none"} | options
        static = ExportConfig(static=SHAPES, **asked)
        made = export_checkpoint(folder / "checkpoint", folder / "static", static)
        ordinary = export_checkpoint(folder / "checkpoint", folder / "ordinary", ExportConfig(**asked))
        return open_bundle(made), open_bundle(ordinary)

    return make


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint."""
    folder = tmp_path_factory.mktemp("llama") / "checkpoint"
    make_checkpoint(folder, "llama")
    return folder


QUANTIZED = [{"bits": 4}, {"bits": 8}, {"bits": 4, "symmetric": True}, {"bits": 4, "head_bits": 4}, {"bits": 32}]


@pytest.mark.parametrize("options", QUANTIZED, ids=["4", "8", "4-symmetric", "4-head", "32"])
@pytest.mark.parametrize("variant", ["llama", "llama-tied", "phi3", "qwen3-tied-biases"])
def test_the_weights_are_those_of_an_ordinary_bundle(exports: Exports, variant: str, options: dict[str, Any]) -> None:
    static, ordinary = exports(variant, **options)
    assert static.manifest.layout == STATIC
    for entry in static.manifest.tensors:
        assert entry.bits == ordinary.manifest.tensor(entry.name).bits
        assert np.array_equal(static.tensor(entry.name), ordinary.tensor(entry.name)), entry.name


@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen2-tied", "qwen3", "phi3-partial-rotary"])
def test_graphs_have_fixed_shapes_and_standard_operators(exports: Exports, variant: str) -> None:
    bundle, _ = exports(variant, bits=4)
    static, spec = bundle.manifest.static, bundle.manifest.decoder
    assert static is not None and spec is not None
    assert [g.rows for g in static.all] == [1, 2, 4, 16]
    for shape in static.all:
        model = onnx.load(bundle.path / shape.file, load_external_data=False)
        onnx.checker.check_model(str(bundle.path / shape.file))
        inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
        values = [*inferred.graph.input, *inferred.graph.output, *inferred.graph.value_info]
        assert all(d.HasField("dim_value") and d.dim_value > 0 for v in values for d in v.type.tensor_type.shape.dim)
        assert {o.domain for o in model.opset_import} == {""} and model.opset_import[0].version == 21
        assert not {"If", "Loop", "Scan"} & {node.op_type for node in model.graph.node}
        places = {e.value for i in model.graph.initializer for e in i.external_data if e.key == "location"}
        assert places == {WEIGHTS}
        for found, wanted in zip(model.graph.input, shape.inputs(spec), strict=True):
            dims = tuple(d.dim_value for d in found.type.tensor_type.shape.dim)
            assert (found.name, dims) == (wanted.name, wanted.shape)
        assert [o.name for o in model.graph.output] == [o.name for o in shape.outputs(spec)]


def test_layers_are_left_out(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", "qwen2-windows", num_hidden_layers=4)
    kept = StaticOptions(context=32, chunk=8, widths=(2,), layers=(0, 3))
    shallow = open_bundle(
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "s", ExportConfig(bits=8, static=kept))
    ).manifest
    full = open_bundle(export_checkpoint(tmp_path / "checkpoint", tmp_path / "o", ExportConfig(bits=8)))
    assert shallow.static is not None and shallow.decoder is not None and full.manifest.decoder is not None
    assert (shallow.geometry.num_layers, shallow.static.layers) == (2, (0, 3))
    assert shallow.decoder.windows == (full.manifest.decoder.windows[0], full.manifest.decoder.windows[3])
    assert shallow.parameters < full.manifest.parameters
    last = open_bundle(tmp_path / "s").tensor("layers.1.mlp.down")
    assert np.array_equal(last, full.tensor("layers.3.mlp.down"))


def test_an_odd_number_of_rows_gets_8_bits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_checkpoint(tmp_path / "checkpoint", "llama-tied", vocab_size=321)
    config = ExportConfig(bits=4, head_bits=4, keep_small=False, static=SHAPES)
    with caplog.at_level(logging.WARNING, "edgeinfer"):
        bundle = open_bundle(export_checkpoint(tmp_path / "checkpoint", tmp_path / "static", config))
    assert "embed has an odd number of rows, 321" in caplog.text
    assert {bundle.manifest.tensor(name).bits for name in ("embed", "head")} == {8}
    assert np.array_equal(bundle.tensor("embed"), bundle.tensor("head"))


def test_broken_blocks_stay_float32(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_checkpoint(tmp_path / "checkpoint", "llama-mha-odd-sizes")
    config = ExportConfig(bits=4, keep_small=False, static=SHAPES)
    with caplog.at_level(logging.WARNING, "edgeinfer"):
        bundle = open_bundle(export_checkpoint(tmp_path / "checkpoint", tmp_path / "static", config))
    assert "layers.0.mlp.down has 172 columns, which is not a multiple of 32; it stays float32" in caplog.text
    assert {t.bits for t in bundle.manifest.tensors if t.name.startswith("layers.")} == {32}
    assert bundle.manifest.tensor("embed").bits == 8


def test_mixtures_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", "mixtral")
    with pytest.raises(UsageError, match="Mixtures of experts"):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "out", ExportConfig(static=StaticOptions()))


UNDONE: list[tuple[dict[str, Any], str]] = [
    ({"bits": 2}, "2 bits"),
    ({"head_bits": 2}, "2 bits"),
    ({"bits_for": (("head", 2),)}, "2 bits"),
    ({"target_size": 10**6}, "target_size"),
    ({"layout": "portable"}, "layout"),
    ({"exporter": "optimum"}, "exporter"),
    ({"format": "gguf"}, "format"),
]


def test_impossible_shapes_are_refused() -> None:
    for widths, layers in (((0, 2), ()), ((1, 300), ()), ((2, 2), ()), ((1, 2), (3, 1)), ((1, 2), (-1, 1))):
        with pytest.raises(UsageError, match=r"do not ascend|out of range"):
            StaticOptions(widths=widths, layers=layers)


@each_row(("options", "says"), UNDONE)
def test_what_static_graphs_cannot_hold_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=rf"{says}.* is not supported for static models"):
        ExportConfig(static=StaticOptions(), **options)


FORGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no graph": (lambda d: d["files"].pop("model.rows-2.onnx"), "no model.rows-2.onnx"),
    "no prompts": (lambda d: d["static"].update(chunk=32), "no model.prompt-32.onnx"),
    "context": (lambda d: d["static"].update(context=64), "a context of 64 tokens; the decoder has 3 and 48"),
    "huge": (lambda d: d["static"].update(context=1 << 40), "is impossible"),
    "layers": (lambda d: d["static"].update(layers=[0, 1]), "have 2 layers"),
    "order": (lambda d: d["static"].update(widths=[2, 1, 4]), "must ascend"),
    "negative": (lambda d: d["static"].update(widths=[-1, 1, 4]), "must be positive"),
    "not static": (lambda d: d.update(static=None), "disagree"),
    "backend": (lambda d: d.update(backend="onnx"), "disagree"),
    "layout": (lambda d: d.update(layout="portable"), "not in the portable layout"),
    "capabilities": (lambda d: d["capabilities"].update(row_multiple=2), "capabilities and tensors disagree"),
    "two bits": (lambda d: d["tensors"][2].update(bits=2), "transposed|inconsistent"),
}


@each_row("case", FORGED)
def test_forged_manifests_are_refused(exports: Exports, tmp_path: Path, case: str) -> None:
    bundle, _ = exports("llama", bits=4)
    change, says = FORGED[case]
    folder = tmp_path / "forged"
    folder.mkdir()
    for file in bundle.path.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    data = json.loads((folder / MANIFEST).read_text())
    change(data)
    (folder / MANIFEST).write_text(json.dumps(data))
    with pytest.raises(BundleError, match=says):
        open_bundle(folder)


def test_the_command_line(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", "llama")
    source, out = tmp_path / "checkpoint", tmp_path / "static"
    shapes = ["--static", "--static-context", "64", "--static-chunk", "16", "--static-widths", "2,4"]
    done = edgeinfer("export", source, out, *shapes, "--static-layers", "0-1", "--bits", "8")
    assert done.returncode == 0, done.stderr
    assert open_bundle(out).manifest.static is not None
    shown = edgeinfer("inspect", out)
    assert shown.returncode == 0 and b"onnx-static" in shown.stdout and b"draft trees" in shown.stdout
    assert b"passes of 2, 4 rows, prompts by 16, 64 tokens in all" in shown.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--static-widths", "2,4"], "Add --static"),
        (["--static", "--static-widths", "4,x"], "not a list of numbers"),
        (["--static", "--static-layers", "3-1"], "not a list of layers"),
        (["--static", "--format", "gguf"], "not supported for static models"),
    ],
)
def test_nonsense_on_the_command_line(checkpoint: Path, tmp_path: Path, options: list[str], says: str) -> None:
    refuses(2, says, edgeinfer("export", checkpoint, tmp_path / "out", *options))
