"""Linear layers of any ONNX graph become MatMulNBits and still compute the same, to the precision of their bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgeinfer.export.optimum_route import quantize_graph
from edgeinfer.quant.policy import QuantPolicy
from tests.tables import each_row

K, N, V = 64, 96, 40
RNG = np.random.default_rng(0)
MATRICES = {"down": (K, N), "up": (N, K), "embed": (V, K)}


def policy(bits: int, head_bits: int, *, symmetric: bool = False) -> QuantPolicy:
    return QuantPolicy(bits, head_bits, 32, symmetric, keep_small=False)


def make_model(nodes: list[onnx.NodeProto]) -> onnx.ModelProto:
    weights = [numpy_helper.from_array(RNG.normal(size=s).astype(np.float32), n) for n, s in MATRICES.items()]
    weights.append(numpy_helper.from_array(RNG.normal(size=N).astype(np.float32), "bias"))
    used = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes,
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["R", K])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["R", None])],
        [w for w in weights if w.name in used],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def run(model: onnx.ModelProto, x: NDArray[np.float32]) -> NDArray[np.float32]:
    onnx.checker.check_model(model)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    result: NDArray[np.float32] = session.run(None, {"x": x})[0]
    return result


def gemm(*inputs: str, **attributes: Any) -> list[onnx.NodeProto]:
    return [helper.make_node("Gemm", ["x", *inputs], ["y"], **attributes)]


def tied(**attributes: Any) -> list[onnx.NodeProto]:
    return [
        helper.make_node("Transpose", ["embed"], ["turned"], **attributes),
        helper.make_node("MatMul", ["x", "turned"], ["y"]),
    ]


LINEAR = {
    "matmul": [helper.make_node("MatMul", ["x", "down"], ["y"])],
    "gemm": gemm("down"),
    "gemm-bias": gemm("down", "bias", alpha=1.0, beta=1.0),
    "gemm-transposed": gemm("up", "bias", transB=1),
    "tied-head": tied(perm=[1, 0]),
    "tied-head-default-order": tied(),
}
LEFT = {
    "scaled": gemm("down", "bias", alpha=0.5),
    "no-constant": [helper.make_node("Neg", ["down"], ["w"]), helper.make_node("MatMul", ["x", "w"], ["y"])],
}


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", LINEAR)
def test_linear_layers_are_replaced(kind: str, symmetric: bool) -> None:
    model, x = make_model(LINEAR[kind]), RNG.normal(size=(5, K)).astype(np.float32)
    expected = run(model, x)
    quantize_graph(model, policy(8, 8, symmetric=symmetric), V)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds == (["MatMulNBits", "Add"] if "bias" in kind or kind == "gemm-transposed" else ["MatMulNBits"])
    assert not {t.name for t in model.graph.initializer} & set(MATRICES)
    # 8-bit weights and 8-bit activations: about a percent of the spread.
    assert np.abs(run(model, x) - expected).max() < 0.03 * expected.std()


@each_row("kind", LEFT)
def test_what_is_not_a_linear_layer_stays(kind: str) -> None:
    model, x = make_model(LEFT[kind]), RNG.normal(size=(5, K)).astype(np.float32)
    expected, kinds = run(model, x), [node.op_type for node in model.graph.node]
    quantize_graph(model, policy(4, 4), V)
    assert [node.op_type for node in model.graph.node] == kinds
    assert np.array_equal(run(model, x), expected)


def test_float_bits_change_nothing() -> None:
    for nodes in LINEAR.values():
        model, x = make_model(nodes), RNG.normal(size=(5, K)).astype(np.float32)
        expected = run(model, x)
        quantize_graph(model, policy(32, 32), V)
        assert np.array_equal(run(model, x), expected)


def test_the_head_has_its_own_bits_and_the_embedding_stays() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "down"], ["wide"]),
        helper.make_node("MatMul", ["wide", "up"], ["narrow"]),
        helper.make_node("ArgMax", ["narrow"], ["ids"], axis=1, keepdims=0),
        helper.make_node("Mod", ["ids", "forty"], ["tokens"]),
        helper.make_node("Gather", ["embed", "tokens"], ["rows"]),
        helper.make_node("Transpose", ["embed"], ["turned"]),
        helper.make_node("MatMul", ["rows", "turned"], ["y"]),
    ]
    model = make_model(nodes)
    model.graph.initializer.append(numpy_helper.from_array(np.array(V), "forty"))
    quantize_graph(model, policy(4, 8), V)
    bits = [a.i for n in model.graph.node if n.op_type == "MatMulNBits" for a in n.attribute if a.name == "bits"]
    assert bits == [4, 4, 8]
    assert "embed" in {t.name for t in model.graph.initializer}
    run(model, RNG.normal(size=(5, K)).astype(np.float32))


def test_a_matrix_used_twice_is_stored_once() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "down"], ["a"]),
        helper.make_node("MatMul", ["x", "down"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    model = make_model(nodes)
    quantize_graph(model, policy(4, 4), V)
    assert len(model.graph.initializer) == 3
