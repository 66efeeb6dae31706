"""The native graph, run by onnx's own evaluator with the kernel's operators written out in numpy, against the reference
backend: what the graph means, whatever kernel runs it."""

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
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from edgeinfer.bundle import graph
from edgeinfer.bundle.arithmetic import rms_norm, rope_tables, rotate, silu, softmax
from edgeinfer.bundle.layouts import NATIVE, NativeTiles, native_parts, unpack_tiles
from edgeinfer.bundle.manifest import Blob, TensorEntry
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.packing import QuantizedShape, dequantize
from edgeinfer.bundle.store import Bundle
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.graph.attention import PagedLayer
from edgeinfer.export.graph.decoder import build_decoder_graph
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.backends.contract import ExpertChoice, ForwardInput
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from tests.cache import made
from tests.export.passes import TOKENS, feeds, pool
from tests.factories import MIXTURES, VARIANTS, make_checkpoint

Array = NDArray[Any]
CAPACITY = 64


def matrix(
    data: Array, low: Array | None, scales: Array | None, zeros: Array | None, shape: QuantizedShape, planes: int = 2
) -> Array:
    """The float matrix that flat constants stand for, in the order of its rows."""
    parts = native_parts(shape)
    arrays = {"data": data, "low": low, "scales": scales, "zero_points": zeros}
    for name, array in arrays.items():
        assert (array is None) == (name not in parts)
        if array is not None:
            assert (array.ndim, array.dtype.name) == (1, parts[name][0])
            arrays[name] = array.reshape(parts[name][1])
    if planes == 1 and low is not None:
        # The middle of the sixteen values that have the high plane's bits.
        below, above = (matrix(data, np.full_like(low, byte), scales, zeros, shape) for byte in (0x77, 0x88))
        middle: Array = (below + above) / 2
        return middle
    rows = unpack_tiles(NativeTiles(**arrays), shape, 0)  # type: ignore[arg-type]
    sizes: dict[str, Any] = {"bits": shape.bits, "block_size": shape.block_size, "k": shape.k}
    return dequantize(rows.data, rows.scales, rows.zero_points, **sizes, vectors=shape.vectors)


class EmbeddingLowBit(OpRun):
    op_domain = graph.NATIVE_DOMAIN

    def _run(self, ids: Array, data: Array, low: Any, scales: Any, zeros: Any = None, **a: int) -> tuple[Array]:
        later = {name: bool(a.pop(name, 0)) for name in ("inline_scales", "vectors")}
        assert set(a) == {"N", "K", "bits", "block_size"}
        shape = QuantizedShape(a["N"], a["K"], a["bits"], a["block_size"], zeros is not None, **later)
        return (matrix(data, low, scales, zeros, shape)[ids],)


class LinearLowBit(OpRun):
    op_domain = graph.NATIVE_DOMAIN

    def _run(
        self,
        x: Array,
        data: Array,
        low: Any,
        scales: Any,
        zeros: Any = None,
        bias: Any = None,
        norm: Any = None,
        residual: Any = None,
        planes: Any = None,
        mask: Any = None,
        **a: Any,
    ) -> tuple[Array]:
        later = {name: bool(a.pop(name, 0)) for name in ("inline_scales", "vectors")}
        assert set(a) == {"N", "K", "bits", "block_size", "paired", "swiglu", "norm_epsilon", "part"}
        if mask is not None and not mask[a["part"]]:
            return (
                np.zeros((*x.shape[:-1], a["N"] // (1 + a["swiglu"])), np.float32) if residual is None else residual,
            )
        sizes = (a["N"], a["K"], a["bits"], a["block_size"])
        shape = QuantizedShape(*sizes, zeros is not None, bool(a["paired"]), **later)
        weight = matrix(data, low, scales, zeros, shape, 2 if planes is None else int(planes[0]))
        assert planes is None or planes.shape == (1,)
        y = (x if norm is None else rms_norm(x, norm, a["norm_epsilon"])) @ weight.T
        y = y if bias is None else y + bias
        if a["swiglu"]:
            gate, up = np.split(y, 2, axis=-1)
            y = silu(gate) * up
        return (y.astype(np.float32) if residual is None else (y + residual).astype(np.float32),)


class LinearFloat(OpRun):
    op_domain = graph.NATIVE_DOMAIN

    def _run(
        self,
        x: Array,
        weight: Array,
        bias: Any = None,
        norm: Any = None,
        residual: Any = None,
        mask: Any = None,
        **a: Any,
    ) -> tuple[Array]:
        assert set(a) == {"N", "K", "by_output", "norm_epsilon", "part"}
        if mask is not None and not mask[a["part"]]:
            return (np.zeros((*x.shape[:-1], a["N"]), np.float32) if residual is None else residual,)
        assert weight.shape == ((a["N"], a["K"]) if a["by_output"] else (a["K"], a["N"]))
        y = (x if norm is None else rms_norm(x, norm, a["norm_epsilon"])) @ (weight.T if a["by_output"] else weight)
        y = y if bias is None else y + bias
        return (y if residual is None else y + residual,)


class MoELowBit(OpRun):
    op_domain = graph.NATIVE_DOMAIN

    def _run(
        self,
        x: Array,
        ids: Array,
        weights: Array,
        experts: Array,
        directory: Array,
        residual: Any = None,
        planes: Any = None,
        **a: int,
    ) -> tuple[Array]:
        assert set(a) == {"D", "ungated"}
        y = np.zeros_like(x) if residual is None else residual.copy()
        for place in np.ndindex(ids.shape):
            if weights[place] == 0:
                continue
            inner, *columns = directory[ids[place]].tolist()
            halves = 1 if a["ungated"] else 2
            into = expert_matrix(experts, columns[:6], (halves * inner, a["D"]), halves == 2, planes)
            out = expert_matrix(experts, columns[6:], (a["D"], inner), False, planes)
            products = np.split(into @ x[place[:-1]], halves)
            hidden = silu(products[0]) * (products[1] if halves == 2 else 1)
            y[place[:-1]] += weights[place] * (out @ hidden)
        return (y,)


def expert_matrix(experts: Array, columns: list[int], size: tuple[int, int], paired: bool, planes: Any) -> Array:
    """The float matrix that six columns of a directory describe."""
    bits, block, *offsets = columns
    shape = QuantizedShape(*size, abs(bits), block, offsets[3] >= 0, paired, vectors=bits == -2)
    parts = {}
    for (name, (dtype, sizes)), offset in zip(native_parts(shape).items(), [o for o in offsets if o >= 0], strict=True):
        count = int(np.prod(sizes)) * np.dtype(dtype).itemsize
        parts[name] = experts[offset : offset + count].view(dtype)
    low, zeros = parts.get("low"), parts.get("zero_points")
    return matrix(parts["data"], low, parts["scales"], zeros, shape, 2 if planes is None else int(planes[0]))


class QuickGelu(OpRun):
    op_domain = "com.microsoft"

    def _run(self, x: Array, alpha: float) -> tuple[Array]:
        assert alpha == 1
        return (silu(x),)


class Activation(OpRun):
    op_domain = graph.NATIVE_DOMAIN

    def _run(self, x: Array, times: Any = None, constants: Any = None, **a: Any) -> tuple[Array]:
        assert (a["kind"], a["paired"], times, constants) == (0, 1, None, None)
        gate, up = np.split(x, 2, axis=-1)
        return (silu(gate) * up,)


class Attention(OpRun):
    """Over float32 pages, which it alone reads and writes: in a layer's part keys and values by slot, head, channel."""

    op_domain = graph.NATIVE_DOMAIN

    def _run(self, *inputs: Any, **a: Any) -> tuple[Array]:
        qkv, pool, layout, pages, rows, extras, ids, cos, sin, q_norm, k_norm, sinks, mask = inputs
        heads, groups, width, size = a["num_heads"], a["kv_num_heads"], a["key_size"], qkv.shape[1]
        if not mask[a["part"]]:
            return (np.zeros((1, size, heads * width), np.float32),)
        assert (a["value_size"], a["interleaved"], a["softcap"], sinks) == (width, 0, 0, None)
        assert cos.shape[1] * 2 == a["rotary_dim"] and len(layout) > 3 + a["layer"]
        q, k, v = np.split(qkv[0], [heads * width, (heads + groups) * width], axis=-1)
        if q_norm is not None:
            q, k = (normed(x, norm, a["norm_epsilon"]) for x, norm in ((q, q_norm), (k, k_norm)))
        q, k, v = (x.reshape(size, -1, width) for x in (q, k, v))
        q, k = (rotate(x, cos[ids[0]], sin[ids[0]]) for x in (q, k))
        kept = stored(pool, layout, a["layer"], groups, width)
        paths = [[*range(n), *extras[first : first + count]] for _, n, first, count in rows.tolist()]
        places = [[divmod(slot, graph.PAGE_SLOTS) for slot in path] for path in paths]
        for row, path in enumerate(places):
            page, slot = path[-1]
            kept[pages[rows[row, 0], page], :, slot] = k[row], v[row]
        mixed = np.empty((size, heads, width), np.float32)
        for row, path in enumerate(places):
            window = a["window"] or len(path)
            seen = [kept[pages[rows[row, 0], page], :, slot] for page, slot in path[-window:]]
            keys, values = np.stack(seen, axis=1)  # (T, H, h) each
            for head in range(heads):
                group = head * groups // heads
                scores = keys[:, group] @ q[row, head] * np.float32(a["scale"] or 1 / np.sqrt(width))
                mixed[row, head] = softmax(scores) @ values[:, group]
        return (mixed.reshape(1, size, -1),)


def normed(x: Array, norm: Array, epsilon: float) -> Array:
    """Every head, or all of them together, as the weights' number says."""
    return rms_norm(x.reshape(len(x), -1, len(norm)), norm, epsilon).reshape(x.shape)


def stored(pool: Array, layout: Array, layer: int, heads: int, width: int) -> Array:
    """A view of the pool: (pages, 2, slots, H, h)."""
    first, floats = layout[3 + layer] // 4, 2 * graph.PAGE_SLOTS * heads * width
    part = pool.reshape(-1, layout[2]).view(np.float32)[:, first : first + floats]
    return part.reshape(-1, 2, graph.PAGE_SLOTS, heads, width)


OPERATORS = [EmbeddingLowBit, LinearLowBit, LinearFloat, MoELowBit, QuickGelu, Activation, Attention]


def make(folder: Path, arch: str, config: ExportConfig, settings: dict[str, Any]) -> None:
    make_checkpoint(folder / "checkpoint", arch, **settings)
    export_checkpoint(folder / "checkpoint", folder / "bundle", config)


def export(arch: str, config: ExportConfig, **settings: Any) -> Bundle:
    return open_bundle(made(make, arch, config, settings) / "bundle")


def run(bundle: Bundle, *, planes: int = 2, mask: Array | None = None, experts: ExpertChoice | None = None) -> Array:
    """Logits of the tokens, in two passes over the native graph."""
    evaluator = ReferenceEvaluator(str(bundle.model_file(NATIVE)), new_ops=OPERATORS)
    spec = bundle.manifest.decoder
    assert spec is not None
    rotary = rope_tables(spec.rope, CAPACITY, CAPACITY)
    cache, parts, start = pool(spec), [], 0
    for end in (7, len(TOKENS)):
        inputs = feeds(spec, TOKENS[start:end], rotary, start=start, mask=mask, experts=experts, planes=planes)
        given = {name: (inputs | cache)[name] for name in evaluator.input_names}
        outputs: list[Any] = list(evaluator.run(None, given))
        parts.append(outputs[0])
        start = end
    return np.concatenate(parts)


def expected(bundle: Bundle, **options: Any) -> Array:
    backend = ReferenceBackend(bundle, CAPACITY)
    rows = np.arange(len(TOKENS))
    return backend.forward(ForwardInput(TOKENS, rows, rows, **options)).logits


def nodes(model_graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in model_graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes(attribute.g)


def kinds(bundle: Bundle) -> Counter[str]:
    model = onnx.load(str(bundle.model_file(NATIVE)), load_external_data=False)
    return Counter(node.op_type for node in nodes(model.graph))


# Experts of odd sizes stay float32, and are ONNX Runtime's to compute (test_moe_graph.py).
@pytest.mark.parametrize("arch", [*VARIANTS, *(arch for arch in MIXTURES if not arch.endswith("-odd"))])
def test_every_variant_computes_what_its_weights_say(arch: str) -> None:
    bundle = export(arch, ExportConfig(bits=4, keep_small=False))
    assert bundle.manifest.layout == NATIVE
    wanted = expected(bundle)
    assert np.abs(run(bundle) - wanted).max() <= 1e-4 * np.abs(wanted).max()


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
    wanted = expected(bundle)
    assert np.abs(run(bundle) - wanted).max() <= 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize(
    "arch", ["qwen2-moe", *(pytest.param(a, marks=pytest.mark.slow) for a in ("qwen3-moe", "olmoe"))]
)
def test_chosen_experts_compute_what_their_weights_say(arch: str) -> None:
    # Every width and format among the experts of one layer.
    widths = (("layers.*.mlp.experts.1.*", 2), ("*.experts.[24].*", 8), ("*.experts.3.down", 8))
    bundle = export(arch, ExportConfig(bits=4, keep_small=False, bits_for=widths))
    assert {t.bits for t in bundle.manifest.tensors if ".experts." in t.name} == {2, 4, 8}
    allowed = np.zeros((3, 6), np.float32)
    allowed[:, [0, 3]] = -1e9
    for choice in (None, ExpertChoice(1), ExpertChoice(2, allowed), ExpertChoice(3, allowed)):
        for planes in (1, 2):
            wanted = expected(bundle, experts=choice, planes=planes)
            assert np.abs(run(bundle, experts=choice, planes=planes) - wanted).max() <= 1e-4 * np.abs(wanted).max()


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
    both, high = run(bundle), run(bundle, planes=1)
    error = np.linalg.norm(both - high) / np.linalg.norm(both)
    assert 0.01 < error < 0.5
    # Without any layer, only embedding and head are left.
    nothing = np.zeros(6, np.bool_)
    np.testing.assert_array_equal(run(bundle, mask=nothing), run(bundle, planes=1, mask=nothing))


def test_the_graph_passes_the_checker() -> None:
    for arch in ("llama-tied", "qwen2-windows"):
        bundle = export(arch, ExportConfig(bits=8, keep_small=False))
        onnx.checker.check_model(str(bundle.model_file(NATIVE)), full_check=False)
        model = onnx.load(str(bundle.model_file(NATIVE)), load_external_data=False)
        assert {o.domain: o.version for o in model.opset_import} == {"": 23, "edgeinfer": 1}
