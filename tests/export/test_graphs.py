"""Graphs of the native layout and of mixtures of experts: their nodes, and what they compute."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray

from edgeinfer.bundle import graph
from edgeinfer.bundle.conversion import convert_weights
from edgeinfer.bundle.layouts import NATIVE, PORTABLE, Layout
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import UnsupportedArchitectureError, UsageError
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from edgeinfer.nn.arithmetic import rope_tables
from edgeinfer.runtime.backends.contract import ExpertChoice, Pass, PassResult
from edgeinfer.runtime.backends.onnx.paged_backend import PagedBackend
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from tests.alone import Alone
from tests.cache import made
from tests.export.passes import TOKENS, feeds, pool
from tests.factories import MIXTURES, make_block_ffn_checkpoint, make_checkpoint
from tests.kernel import require_kernel
from tests.tables import each_row

Array = NDArray[Any]
CAPACITY = 64
ROWS = np.arange(len(TOKENS))
# Mixtures that only the graphs of this file are tried with.
FURTHER: dict[str, dict[str, Any]] = {
    "Phimoe": {"num_local_experts": 6, "router_jitter_noise": 0.4},
    "GptOss": {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 32},
}


def make_model(folder: Path, arch: str, settings: dict[str, Any]) -> Any:
    if arch.startswith("block-ffn"):
        return make_block_ffn_checkpoint(folder, joined=arch.endswith("joined"))
    return make_checkpoint(folder, arch, **FURTHER.get(arch, {}) | settings)


def make(folder: Path, arch: str, config: ExportConfig, settings: dict[str, Any]) -> None:
    make_model(folder / "checkpoint", arch, settings)
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
    given = Pass(TOKENS, ROWS, ROWS, **options)
    wanted = Alone(ReferenceBackend(bundle, CAPACITY), CAPACITY).forward(given).logits
    found = Alone(PagedBackend(bundle, CAPACITY), CAPACITY).forward(given).logits
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
    bundle = export(arch, ExportConfig(**options, calibration="none"), intermediate_size=544)
    assert bundle.manifest.layout == NATIVE
    assert distance(bundle) < 0.05


def test_chosen_experts_compute_what_their_weights_say() -> None:
    # Every width and format among the experts of one layer.
    widths = (("layers.*.mlp.experts.1.*", 2), ("*.experts.[24].*", 8), ("*.experts.3.down", 8))
    bundle = export("qwen2-moe", ExportConfig(bits=4, keep_small=False, bits_for=widths, calibration="none"))
    assert {t.bits for t in bundle.manifest.tensors if ".experts." in t.name} == {2, 4, 8}
    allowed = np.zeros((3, 6), np.float32)
    allowed[:, [0, 3]] = -1e9
    for choice in (None, ExpertChoice(1), ExpertChoice(2, allowed), ExpertChoice(3, allowed)):
        for planes in (1, 2):
            assert distance(bundle, experts=choice, planes=planes) < 0.1


def test_everything_around_a_product_is_fused() -> None:
    layers = 3
    assert kinds(export("qwen3", ExportConfig(bits=4, keep_small=False, calibration="none")))["RMSNormalization"] == 0
    assert kinds(export("llama-biases", ExportConfig(bits=4, keep_small=False, calibration="none"))) == {
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


def export_copy(folder: Path, arch: str, config: ExportConfig, **settings: Any) -> Bundle:
    """A copy, as running it in the other layout adds weights to it."""
    return open_bundle(made(make, arch, config, settings, copy_to=folder / "made") / "bundle")


class Graph:
    """A bundle's graph in one layout, run over the tokens in one pass."""

    def __init__(self, bundle: Bundle, layout: Layout) -> None:
        assert bundle.manifest.decoder is not None
        self.spec = bundle.manifest.decoder
        if layout != bundle.manifest.layout:
            convert_weights(bundle, layout, bundle.weights_file(layout))
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        if layout == NATIVE:
            options.register_custom_ops_library(str(require_kernel().path))
        self.session = ort.InferenceSession(bundle.model_file(layout), options, providers=["CPUExecutionProvider"])

    def run(self, *, mask: Array | None = None, experts: ExpertChoice | None = None) -> tuple[Array, Array]:
        """Logits (S, V) and experts (L, S, K)."""
        spec = self.spec
        given = feeds(spec, TOKENS, rope_tables(spec.rope, CAPACITY, CAPACITY), mask=mask, experts=experts)
        cache = np.zeros((1, spec.num_kv_heads, CAPACITY, spec.head_dim), np.float32)
        given |= {name: cache for layer in range(spec.num_layers) for name in graph.past_names(layer)}
        given |= pool(spec)
        names = {i.name for i in self.session.get_inputs()}
        wanted = [graph.LOGITS, graph.EXPERT_IDS]
        logits, ids = self.session.run(wanted, {name: given[name] for name in names})
        return logits, ids


def reference(bundle: Bundle, **options: Any) -> PassResult:
    return Alone(ReferenceBackend(bundle, CAPACITY), CAPACITY).forward(Pass(TOKENS, ROWS, ROWS, **options))


def distance_of(actual: Array, wanted: Array) -> float:
    return float(np.linalg.norm(actual - wanted) / np.linalg.norm(wanted))


def choices(layers: int, experts: int, top_k: int) -> Iterator[dict[str, Any]]:
    """The whole model, fewer experts, some forbidden, and more asked for than are left."""
    some, most = np.zeros((2, layers, experts), np.float32)
    some[:, [0, 2]] = -1e9
    most[:, 1:] = -1e9
    yield {}
    yield from ({"experts": ExpertChoice(count)} for count in range(1, top_k + 1))
    yield from ({"experts": ExpertChoice(top_k, bias)} for bias in (some, most))
    yield {"experts": ExpertChoice(1, some)}
    for part in (1, 3):
        yield {"layer_mask": np.arange(2 * layers) != part}


def test_every_mixture_is_the_checkpoints_own_model(mixture: tuple[Any, Bundle]) -> None:
    model, bundle = mixture
    with torch.no_grad():
        expected = model(torch.from_numpy(TOKENS)[None]).logits[0].numpy()
    assert np.abs(reference(bundle).logits - expected).max() <= 1e-4
    assert np.abs(Graph(bundle, PORTABLE).run()[0] - expected).max() <= 1e-4


@pytest.fixture(scope="module", params=[*MIXTURES, *FURTHER, "block-ffn", "block-ffn-joined"])
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Bundle]:
    """Every mixture's model and float32 bundle."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(folder / "checkpoint", request.param, {})
    path = export_checkpoint(folder / "checkpoint", folder / "bundle", ExportConfig(bits=32))
    return model, open_bundle(path)


def test_choosing_experts_is_the_references(mixture: tuple[Any, Bundle]) -> None:
    bundle = mixture[1]
    spec = bundle.manifest.decoder
    assert spec is not None and spec.moe is not None
    runner = Graph(bundle, PORTABLE)
    for options in choices(spec.num_layers, spec.moe.experts, spec.moe.top_k):
        wanted = reference(bundle, **options)
        logits, ids = runner.run(mask=options.get("layer_mask"), experts=options.get("experts"))
        assert np.abs(logits - wanted.logits).max() <= 1e-4
        np.testing.assert_array_equal(ids, wanted.experts)


@pytest.mark.parametrize("layout", [NATIVE, PORTABLE])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("arch", ["qwen3-moe", "qwen2-moe-dense-layers", "olmoe"])
def test_quantized_mixtures_compute_what_their_weights_say(
    arch: str, bits: int, layout: Layout, tmp_path: Path
) -> None:
    config = ExportConfig(bits=bits, head_bits=8, keep_small=False, calibration="none")
    bundle = export_copy(tmp_path, arch, config)
    logits, _ = Graph(bundle, layout).run()
    # Activations are rounded to int8 before every product, which is all that may differ. It counts for more where
    # weights have lost most; that the operators compute what weights of 2 bits say is held without rounding elsewhere.
    assert distance_of(logits, reference(bundle).logits) < (0.08 if bits == 2 else 0.05)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("layout", [NATIVE, PORTABLE])
def test_ungated_experts_that_are_quantized(layout: Layout, joined: bool, tmp_path: Path) -> None:
    bundle = export_copy(
        tmp_path,
        "block-ffn-joined" if joined else "block-ffn",
        ExportConfig(bits=4, keep_small=False, calibration="none"),
    )
    runner = Graph(bundle, layout)
    for choice in (None, ExpertChoice(3)):
        wanted = reference(bundle, experts=choice)
        logits, ids = runner.run(experts=choice)
        assert distance_of(logits, wanted.logits) < 0.05
        # About half of a rectified router's experts are not used, and which are is seldom changed by rounding.
        assert wanted.experts is not None and (ids >= 0).mean() < 1 and (ids == wanted.experts).mean() > 0.7


MIXED = (("layers.*.mlp.experts.1.*", 2), ("*.experts.[24].*", 8), ("*.experts.3.down", 8))


def test_experts_of_mixed_widths(tmp_path: Path) -> None:
    config = ExportConfig(bits=4, keep_small=False, bits_for=MIXED, calibration="none")
    bundle = export_copy(tmp_path, "qwen3-moe", config, hidden_size=128, moe_intermediate_size=96)
    assert {t.bits for t in bundle.manifest.tensors if ".experts." in t.name} == {2, 4, 8}
    assert bundle.manifest.capabilities_in(NATIVE).expert_counts == (1, 2, 3)
    assert bundle.manifest.capabilities_in(PORTABLE).expert_counts == (1, 3)
    wanted = reference(bundle).logits
    native, portable = (Graph(bundle, layout).run()[0] for layout in (NATIVE, PORTABLE))
    assert distance_of(native, wanted) < 0.05 and distance_of(portable, wanted) < 0.05
    assert distance_of(native, portable) < 0.05


def test_a_layer_partly_of_float_experts_is_refused(tmp_path: Path) -> None:
    config = ExportConfig(bits=4, keep_small=False, bits_for=(("*.experts.3.down", 32),), calibration="none")
    with pytest.raises(UsageError, match="Some experts of layer 0 are quantized and others are not"):
        make(tmp_path, "qwen3-moe", config, {})


@each_row("field", [{"attention_type": "other"}, {"norm_after_router": "sum"}, {"ffn_type": "vanilla"}])
def test_other_models_of_blockffns_class_are_refused(field: dict[str, str], tmp_path: Path) -> None:
    make_block_ffn_checkpoint(tmp_path, joined=False)
    described = json.loads((tmp_path / "config.json").read_text()) | field
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(UnsupportedArchitectureError, match="MiniCPM with"):
        export_checkpoint(tmp_path, tmp_path / "bundle", ExportConfig(bits=4, calibration="none"))


def test_cut_values_of_olmoe_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "olmoe", clip_qkv=8.0)
    with pytest.raises(UnsupportedArchitectureError, match="clip_qkv"):
        export_checkpoint(tmp_path, tmp_path / "bundle", ExportConfig(bits=4, calibration="none"))


def test_stacked_checkpoints_are_the_same_model(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "checkpoint", "qwen3-moe")
    single = export_checkpoint(tmp_path / "checkpoint", tmp_path / "single", ExportConfig(bits=32))
    model.save_pretrained(tmp_path / "checkpoint", save_original_format=False)
    stacked = export_checkpoint(tmp_path / "checkpoint", tmp_path / "stacked", ExportConfig(bits=32))
    assert (single / "weights.bin").read_bytes() == (stacked / "weights.bin").read_bytes()
