"""Quantizes the linear layers of a finished ONNX graph; knows nothing of where the graph came from.

Only matrices that are multiplied become smaller: a gathered embedding stays float32, and is read row by row from its
file. The numbers are those of edgeinfer.quant, as for a native export.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from edgeinfer.quant import QuantPolicy, QuantScheme, quantize

__all__ = ["quantize_graph"]

_CONTRIB = "com.microsoft"
# int8 activations: the fast path of MatMulNBits on every CPU.
_ACCURACY_LEVEL = 4


def quantize_graph(model: onnx.ModelProto, policy: QuantPolicy, vocab_size: int) -> None:
    """Replaces MatMul and Gemm with a constant matrix by MatMulNBits, in place.

    Args:
        policy: bits of each matrix; the one that gives `vocab_size` outputs is the head.
    """
    graph = model.graph
    rewriter = _Rewriter(policy, vocab_size, {t.name: t for t in graph.initializer}, _transposed(graph.node))
    nodes = [new for node in graph.node for new in rewriter.rewrite(node)]
    used = {name for node in nodes for name in node.input} | {o.name for o in graph.output}
    nodes = [node for node in nodes if node.op_type != "Transpose" or used.intersection(node.output)]
    used = {name for node in nodes for name in node.input}
    kept = [t for t in graph.initializer if t.name in used] + rewriter.added
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(kept)
    if all(o.domain != _CONTRIB for o in model.opset_import):
        model.opset_import.append(helper.make_opsetid(_CONTRIB, 1))


def _transposed(nodes: Iterable[onnx.NodeProto]) -> dict[str, str]:
    """Transposed matrices by name, and what they are the transpose of: how a tied head reads the embedding."""
    return {
        node.output[0]: node.input[0]
        for node in nodes
        if node.op_type == "Transpose" and _attribute(node, "perm", [1, 0]) == [1, 0]
    }


def _attribute(node: onnx.NodeProto, name: str, default: object) -> object:
    return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


@dataclass
class _Rewriter:
    """Rewrites node by node; `added` are the new constants, `done` their names by matrix."""

    policy: QuantPolicy
    vocab_size: int
    constants: dict[str, onnx.TensorProto]
    transposed: dict[str, str]
    added: list[onnx.TensorProto] = field(default_factory=list)
    done: dict[str, list[str]] = field(default_factory=dict)

    def rewrite(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """What stands in for a node."""
        if node.op_type == "MatMul":
            turned = False
        elif node.op_type == "Gemm" and self._plain(node):
            turned = bool(_attribute(node, "transB", 0))
        else:
            return [node]
        name = node.input[1]
        if name in self.transposed and not turned:
            name, turned = self.transposed[name], True
        tensor = self.constants.get(name)
        if tensor is None or tensor.data_type != onnx.TensorProto.FLOAT or len(tensor.dims) != 2:
            return [node]
        n, k = tensor.dims if turned else tensor.dims[::-1]
        scheme = self.policy.scheme("head" if n == self.vocab_size else node.name, (n, k))
        if scheme is None:
            return [node]
        stored = self._stored(name, turned, scheme)
        bias = [i for i in node.input[2:] if i]
        product = f"{node.output[0]}.product" if bias else node.output[0]
        attributes = {"K": k, "N": n, "bits": scheme.bits, "block_size": scheme.block_size}
        matmul = helper.make_node(
            "MatMulNBits",
            [node.input[0], *stored],
            [product],
            name=node.name,
            domain=_CONTRIB,
            accuracy_level=_ACCURACY_LEVEL,
            **attributes,
        )
        return [matmul] + ([helper.make_node("Add", [product, *bias], [node.output[0]])] if bias else [])

    def _stored(self, name: str, turned: bool, scheme: QuantScheme) -> list[str]:
        """Names of a matrix's quantized values, scales and zero points; quantizes it when it is first met."""
        key = f"{name}.rows" if turned else f"{name}.columns"
        if key not in self.done:
            values: NDArray[np.float32] = numpy_helper.to_array(self.constants[name])
            matrix = quantize(values if turned else np.ascontiguousarray(values.T), scheme)
            arrays: dict[str, NDArray[Any]] = {f"{key}.data": matrix.data, f"{key}.scales": matrix.scales}
            if matrix.zero_points is not None:
                arrays[f"{key}.zero_points"] = matrix.zero_points
            self.added += [numpy_helper.from_array(array, part) for part, array in arrays.items()]
            self.done[key] = list(arrays)
        return self.done[key]

    @staticmethod
    def _plain(node: onnx.NodeProto) -> bool:
        factors = (_attribute(node, "alpha", 1.0), _attribute(node, "beta", 1.0))
        return factors == (1.0, 1.0) and not _attribute(node, "transA", 0)
