"""ONNX models of single operators of the kernel, and sessions that run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgeinfer.runtime.native.binding import PackedMatrix
from edgeinfer.runtime.native.library import NativeKernel

DOMAIN = "edgeinfer"
Arrays = Mapping[str, NDArray[Any]]
_TYPES = {"float32": TensorProto.FLOAT, "uint8": TensorProto.UINT8}
_TYPES |= {"int64": TensorProto.INT64, "int32": TensorProto.INT32, "bool": TensorProto.BOOL}


def constants(matrix: PackedMatrix, prefix: str = "") -> dict[str, NDArray[Any]]:
    """The arrays of a matrix by the names of the operator's inputs."""
    arrays = {"data": matrix.data, "low": matrix.low, "scales": matrix.scales, "zeros": matrix.zeros}
    return {prefix + name: array for name, array in arrays.items() if array is not None}


def attributes(matrix: PackedMatrix) -> dict[str, Any]:
    """The attributes that describe a matrix."""
    sizes = {"N": matrix.n, "K": matrix.k, "bits": matrix.bits, "block_size": matrix.block}
    sizes |= {"vectors": 1} if matrix.vectors else {}
    return sizes | {"paired": int(matrix.paired), "inline_scales": int(matrix.scales is None)}


def make_model(
    op: str,
    names: Sequence[str],
    given: Arrays,
    known: Arrays,
    *,
    gated: str = "",
    **values: Any,  # of the node's attributes
) -> onnx.ModelProto:
    """A model of one node.

    Args:
        op: the operator.
        names: of its inputs in order; those that are neither given nor known are absent.
        given: inputs of the model, for their types.
        known: constants.
        gated: "" puts the node into the main graph, "inner" and "outer" into a branch of an `If` that the input
            `runs` chooses, with the constants in the same or in the main graph.
        values: attributes.
    """
    inputs = [name if name in given or name in known else "" for name in names]
    while not inputs[-1]:
        inputs.pop()
    node = helper.make_node(op, inputs, ["y"], domain=DOMAIN, **values)
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    arguments = [_value(name, array) for name, array in given.items()]
    weights = [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in known.items()]
    nodes = [node]
    if gated:
        inner = weights if gated == "inner" else []
        weights = [] if gated == "inner" else weights
        branch = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
        node.output[0] = "z"
        then = helper.make_graph([node], "then", [], [branch], initializer=inner)
        skip = helper.make_node("Identity", [names[0]], ["z"])
        nodes = [helper.make_node("If", ["runs"], ["y"], then_branch=then, else_branch=_graph([skip], [], [branch]))]
        arguments.append(helper.make_tensor_value_info("runs", TensorProto.BOOL, [1]))
    graph = helper.make_graph(nodes, "main", arguments, [result], initializer=weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _graph(nodes: list[onnx.NodeProto], inputs: list[Any], outputs: list[Any]) -> onnx.GraphProto:
    return helper.make_graph(nodes, "else", inputs, outputs)


def _value(name: str, array: NDArray[Any]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, _TYPES[array.dtype.name], [None] * array.ndim)


def open_session(kernel: NativeKernel, model: onnx.ModelProto | Path, threads: int = 1) -> ort.InferenceSession:
    """A session with the kernel's operators."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.enable_cpu_mem_arena = False
    options.register_custom_ops_library(str(kernel.path))
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run(session: ort.InferenceSession, **given: NDArray[Any]) -> NDArray[np.float32]:
    """The only output for these inputs."""
    (y,) = session.run(None, given)
    values: NDArray[np.float32] = y
    return values


def run_in_place(session: ort.InferenceSession, **given: NDArray[Any]) -> NDArray[np.float32]:
    """The only output, without its first axis, of a graph whose operators also write to some of these inputs."""
    binding = session.io_binding()
    for name, array in given.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array)))
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    result: NDArray[np.float32] = binding.get_outputs()[0].numpy()[0]
    return result
