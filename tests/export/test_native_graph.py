"""The nodes of native graphs: what is fused, shared and read; and every form of weights against the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from edgeinfer.bundle import graph
from edgeinfer.bundle.layouts import NATIVE
from edgeinfer.bundle.manifest import Blob, TensorEntry
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.graph.attention import PagedLayer
from edgeinfer.export.graph.decoder import build_decoder_graph
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.backends.contract import ExpertChoice, ForwardInput
from edgeinfer.runtime.backends.onnx.paged_backend import PagedBackend
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from tests.cache import made
from tests.export.passes import TOKENS
from tests.factories import make_checkpoint
from tests.kernel import require_kernel

Array = NDArray[Any]
CAPACITY = 64


def make(folder: Path, arch: str, config: ExportConfig, settings: dict[str, Any]) -> None:
    make_checkpoint(folder / "checkpoint", arch, **settings)
    export_checkpoint(folder / "checkpoint", folder / "bundle", config)


def export(arch: str, config: ExportConfig, **settings: Any) -> Bundle:
    return open_bundle(made(make, arch, config, settings) / "bundle")


def nodes(model_graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in model_graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes(attribute.g)


def kinds(bundle: Bundle) -> Counter[str]:
    model = onnx.load(str(bundle.model_file(NATIVE)), load_external_data=False)
    return Counter(node.op_type for node in nodes(model.graph))


def distance(bundle: Bundle, **options: Any) -> float:
    """How far the kernel's logits are from the reference's, which computes without rounding activations."""
    require_kernel()
    rows = np.arange(len(TOKENS))
    given = ForwardInput(TOKENS, rows, rows, **options)
    wanted = ReferenceBackend(bundle, CAPACITY).forward(given).logits
    found = PagedBackend(bundle, CAPACITY).forward(given).logits
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("arch", ["llama-tied", "llama-biases", "qwen3"])
@pytest.mark.parametrize(
    "options",
    [
        {"bits": 2, "keep_small": False},
        {"bits": 8, "keep_small": False},
        {"bits": 8, "keep_small": False, "symmetric": True, "group_size": 64},
        {"bits": 8, "head_bits": 32, "keep_small": False},
        {"bits": 32, "head_bits": 4},
        {"bits": 8},
    ],
    ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()),
)
def test_every_form_computes_what_its_weights_say(arch: str, options: dict[str, Any]) -> None:
    # Wide enough that at 8 bits gate_up is quantized and the other layers stay float32.
    bundle = export(arch, ExportConfig(**options), intermediate_size=544)
    assert bundle.manifest.layout == NATIVE
    assert distance(bundle) < 0.05


def test_chosen_experts_compute_what_their_weights_say() -> None:
    # Every width and format among the experts of one layer.
    widths = (("layers.*.mlp.experts.1.*", 2), ("*.experts.[24].*", 8), ("*.experts.3.down", 8))
    bundle = export("qwen2-moe", ExportConfig(bits=4, keep_small=False, bits_for=widths))
    assert {t.bits for t in bundle.manifest.tensors if ".experts." in t.name} == {2, 4, 8}
    allowed = np.zeros((3, 6), np.float32)
    allowed[:, [0, 3]] = -1e9
    for choice in (None, ExpertChoice(1), ExpertChoice(2, allowed), ExpertChoice(3, allowed)):
        for planes in (1, 2):
            assert distance(bundle, experts=choice, planes=planes) < 0.1


def test_everything_around_a_product_is_fused() -> None:
    layers = 3
    assert kinds(export("qwen3", ExportConfig(bits=4, keep_small=False)))["RMSNormalization"] == 0
    assert kinds(export("llama-biases", ExportConfig(bits=4, keep_small=False))) == {
        "LinearLowBit": 4 * layers + 1,
        "EmbeddingLowBit": 1,
        "Attention": layers,
        "If": 1,
        "Identity": 1,
        "Squeeze": 1,
        "Gather": 1,
    }
    # Floats next to quantized matrices have an operator of ours, too, and nothing needs an `If` around it.
    kept = kinds(export("llama-tied", ExportConfig(bits=8), intermediate_size=544))
    assert kept["LinearFloat"] == 3 * layers and kept["If"] == 1 and not kept["MatMul"] + kept["Gemm"] + kept["Add"]


def test_what_a_model_has_of_attention_reaches_the_operator() -> None:
    bundle = export("qwen2-windows", ExportConfig(bits=4, keep_small=False))
    spec, tensors = bundle.manifest.decoder, {t.name: t for t in bundle.manifest.tensors}
    assert spec is not None
    sinks = TensorEntry("layers.0.attn.sinks", (spec.num_heads,), 32, Blob(0, "float32", (spec.num_heads,)))
    made = build_decoder_graph(spec, tensors | {sinks.name: sinks}, "weights.bin", NATIVE)
    first, *_, last = (node for node in nodes(made.graph) if node.op_type == "Attention")
    assert [*first.input[9:]] == ["", "", sinks.name, graph.LAYER_MASK]
    assert [*last.input[9:]] == ["", "", "", graph.LAYER_MASK]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in last.attribute}
    assert attributes == pytest.approx(asdict(PagedLayer.of(spec, spec.num_layers - 1)))
    assert (attributes["window"], attributes["layer"]) == (5, spec.num_layers - 1)


def test_a_tied_head_reads_the_embeddings_bytes() -> None:
    bundle = export("llama-tied", ExportConfig(bits=8))
    model = onnx.load(str(bundle.model_file(NATIVE)), load_external_data=False)
    users = {node.op_type: list(node.input) for node in nodes(model.graph) if "embed" in node.input}
    assert users["LinearLowBit"][1:4] == users["EmbeddingLowBit"][1:4] == ["embed", "embed.low", "embed.scales"]
    assert all(len(i.dims) == 1 for i in model.graph.initializer if i.name.startswith("embed"))


def test_planes_are_read_by_the_layers_alone() -> None:
    bundle = export("llama-tied", ExportConfig(bits=8, keep_small=False))
    model = onnx.load(str(bundle.model_file(NATIVE)), load_external_data=False)
    readers = {node.output[0] for node in nodes(model.graph) if graph.PLANES in node.input}
    assert len(readers) == 4 * 3 and graph.LOGITS not in readers


def test_the_graph_passes_the_checker() -> None:
    for arch in ("llama-tied", "qwen2-windows"):
        bundle = export(arch, ExportConfig(bits=8, keep_small=False))
        onnx.checker.check_model(str(bundle.model_file(NATIVE)), full_check=False)
        model = onnx.load(str(bundle.model_file(NATIVE)), load_external_data=False)
        assert {o.domain: o.version for o in model.opset_import} == {"": 23, "edgeinfer": 1}
