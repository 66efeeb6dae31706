"""Graphs of weights in GGUF's types: what is fused, what is a product of its own, and all against the reference."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import onnx
import pytest
from gguf import quants

from edgeinfer.bundle.codecs import CODECS, segment_places
from edgeinfer.bundle.kinds import Segment
from edgeinfer.bundle.layouts import LAYOUT_VERSIONS, NATIVE, WEIGHTS
from edgeinfer.bundle.manifest import TensorEntry, capabilities_in
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.packing import QuantizedMatrix, blocks_of_file
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.tables import Outline, lay_out
from edgeinfer.bundle.writing import MANIFEST, seal
from edgeinfer.export.architectures.tensors import Source, TensorPlan
from edgeinfer.export.graph.decoder import decoder_graphs
from edgeinfer.export.options import ExportConfig
from edgeinfer.export.weights.planning import outline, write_floats
from edgeinfer.quant.policy import QuantScheme, is_quantizable
from tests.export.test_graphs import Array, distance, export, kinds, nodes
from tests.kernel import require_kernel
from tests.runtime.models import feed, make_graph_backend
from tests.runtime.test_parity import feed_in

FLOATS = ExportConfig(bits=32, head_bits=32)
# By the end of a matrix's name: the types of its rows, in equal shares of 16 rows, and the factor of its products.
Types = Callable[[str], tuple[Sequence[str], float]]


def retyped(bundle: Bundle, folder: Path, types: Types) -> Bundle:
    """A bundle of floats with its matrices rounded to GGUF's types."""
    require_kernel()
    spec, weights, outlines = bundle.manifest.decoder, {}, []
    assert spec is not None
    for tensor in bundle.manifest.tensors:
        if tensor.name == "head" and spec.tied:
            outlines.append(Outline("head", tensor.shape, shares="embed"))
            continue
        weights[tensor.name], scheme, factor = bundle.tensor(tensor.name), None, 1.0
        if is_quantizable(tensor.name, tensor.shape):
            names, factor = types(tensor.name)
            share = tensor.shape[0] // len(names) // 16 * 16
            rows = [share] * (len(names) - 1)
            rows.append(tensor.shape[0] - sum(rows))
            scheme = QuantScheme.of_file(map(Segment, names, rows))
        outlines.append(outline(TensorPlan(tensor.name, (Source(tensor.name, tensor.shape, scale=factor),)), scheme))
    entries = lay_out(outlines, NATIVE)
    folder.mkdir()
    for name in bundle.manifest.files:
        if name != WEIGHTS and not name.endswith(".onnx"):
            shutil.copyfile(bundle.path / name, folder / name)
    with (folder / WEIGHTS).open("wb") as file:
        for entry in entries[: len(weights)]:
            if entry.segments:
                CODECS[NATIVE].write(file, entry, partial(rounded, weights[entry.name], entry))
            else:
                write_floats(file, entry, partial(taken, weights[entry.name]))
    for name, graph in decoder_graphs(spec, entries, NATIVE).items():
        (folder / name).write_bytes(graph)
    changed = dataclasses.replace(
        bundle.manifest,
        tensors=entries,
        layout=NATIVE,
        layout_version=LAYOUT_VERSIONS[NATIVE],
        capabilities=capabilities_in(bundle.manifest.capabilities, entries, NATIVE, spec.moe),
        files={},
    )
    seal(folder, changed)
    return open_bundle(folder)


def taken(weight: Array, start: int, stop: int) -> Array:
    return weight[start:stop]


def rounded(weight: Array, entry: TensorEntry, start: int, stop: int) -> QuantizedMatrix:
    """Rows in the type of their segment."""
    part = next(p for row, _, p in segment_places(entry.quantized) if row <= start < row + p.n)
    scaled = (weight[start:stop] / np.float32(entry.factor)).astype(np.float32)
    blocks = quants.quantize(scaled, gguf.GGMLQuantizationType[part.segments[0].kind])
    return blocks_of_file(np.ascontiguousarray(blocks).view(np.uint8))


@pytest.fixture
def llama(tmp_path: Path) -> Bundle:
    """Queries, keys and values of three types, gate and up of two, factors of residuals and of embedded rows."""
    of: dict[str, tuple[Sequence[str], float]] = {
        "embed": (["Q5_1"], 3.5),
        "qkv": (["Q5_0", "Q4_1", "Q8_0"], 1.0),
        "out": (["Q8_0"], 0.25),
        "gate_up": (["Q4_0", "Q8_0"], 1.0),
        "down": (["MXFP4"], -2.0),
    }
    floats = export("llama-tied", FLOATS, hidden_size=64, intermediate_size=128)
    return retyped(floats, tmp_path / "retyped", lambda name: of[name.rpartition(".")[2]])


def test_types_and_factors_compute_what_they_say(llama: Bundle) -> None:
    assert llama.layouts == (NATIVE,)
    assert distance(llama) < 0.1
    assert distance(llama, planes=1) < 0.1
    assert kinds(llama)["Activation"] == 3 and not kinds(llama)["Mul"]
    model = onnx.load(str(llama.model_file(NATIVE)), load_external_data=False)
    readers = {node.output[0] for node in nodes(model.graph) if "planes" in node.input}
    assert len(readers) == 3 * 3


def test_rows_depend_on_themselves_alone(llama: Bundle) -> None:
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    together, alone = (make_graph_backend(llama, 64) for _ in "ab")
    np.testing.assert_array_equal(feed_in(alone, tokens, [1, 2, 1, 8]), feed(together, tokens))
    together.close()
    alone.close()


def always(chosen: tuple[Sequence[str], float], name: str) -> tuple[Sequence[str], float]:
    return chosen


def test_pairs_of_one_type_are_gated_in_their_product(tmp_path: Path) -> None:
    floats = export("llama-biases", FLOATS, hidden_size=64, intermediate_size=96)
    for kind in ("Q4_1", "Q8_0", "MXFP4"):
        chosen: tuple[Sequence[str], float] = ([kind], 1.0)
        bundle = retyped(floats, tmp_path / kind, partial(always, chosen))
        assert not kinds(bundle)["Activation"]
        assert distance(bundle) < 0.1


def test_floats_of_16_bits_are_multiplied_as_they_are(tmp_path: Path) -> None:
    floats = export("llama-tied", FLOATS, hidden_size=64, intermediate_size=96)
    for kind in ("F16", "BF16"):
        chosen: tuple[Sequence[str], float] = ([kind], 1.0)
        bundle = retyped(floats, tmp_path / kind, partial(always, chosen))
        assert kinds(bundle)["LinearFloat"] == 4 * 3 + 1
        assert bundle.manifest.weight_bytes < 0.6 * floats.manifest.weight_bytes
        assert distance(bundle) < 1e-5


def test_experts_of_many_types(tmp_path: Path) -> None:
    floats = export("qwen2-moe", FLOATS, hidden_size=64, moe_intermediate_size=64, shared_expert_intermediate_size=64)
    types = itertools.cycle(["Q4_0", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "MXFP4"])

    def choose(name: str) -> tuple[Sequence[str], float]:
        return [next(types)], -0.5 if ".experts." in name and name.endswith("down") else 1.0

    bundle = retyped(floats, tmp_path / "retyped", choose)
    assert (bundle.path / MANIFEST).is_file()
    for planes in (1, 2):
        assert distance(bundle, planes=planes) < 0.15
