"""A typed layer over `onnx.helper`: names, constants, external weights, branches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgeinfer.bundle.manifest import Blob

# Operator set 23 is the first with RMSNormalization; onnx 1.18 brought it together with IR version 11.
OPSET = 23
# By operator set.
_IR_VERSIONS = {21: 10, OPSET: 11}
# Domain of ONNX Runtime's own operators.
MICROSOFT = "com.microsoft"
_TYPES = {
    "float32": TensorProto.FLOAT,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "uint16": TensorProto.UINT16,
    "int4": TensorProto.INT4,
    "uint4": TensorProto.UINT4,
    "bool": TensorProto.BOOL,
}

Shape = Sequence[int | str]


class GraphBuilder:
    """Collects nodes in order; a branch collects its own and shares weights and constants with its parent. External
    initializers point into the file `weights`, or into the file that `elsewhere` names for a tensor."""

    def __init__(
        self,
        weights: str,
        parent: GraphBuilder | None = None,
        opset: int = OPSET,
        elsewhere: Mapping[str, str] | None = None,
    ) -> None:
        self._weights, self._opset, self._elsewhere = weights, opset, elsewhere or {}
        self._root: GraphBuilder = self if parent is None else parent._root
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._domains = {""}

    def input(self, name: str, dtype: str, shape: Shape) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, _TYPES[dtype], list(shape)))
        return name

    def output(self, name: str, dtype: str, shape: Shape) -> None:
        self._outputs.append(helper.make_tensor_value_info(name, _TYPES[dtype], list(shape)))

    def weight(self, name: str, blob: Blob, shape: tuple[int, ...] | None = None, dtype: str = "") -> str:
        """An initializer of the main graph with bytes in the weights file, optionally in another shape or type."""
        proto = TensorProto(name=name, data_type=_TYPES[dtype or blob.dtype], dims=shape or blob.shape)
        proto.data_location = TensorProto.EXTERNAL
        file = self._root._elsewhere.get(name.split(".")[0], self._weights)
        location = {"location": file, "offset": str(blob.offset), "length": str(blob.nbytes)}
        for key, value in location.items():
            proto.external_data.add(key=key, value=value)
        self._root._initializers.setdefault(name, proto)
        return name

    def constant(self, values: Sequence[int]) -> str:
        """A small int64 vector, stored once per value in the main graph."""
        array: NDArray[np.int64] = np.asarray(values, np.int64)
        name = "const_" + "_".join(str(v).replace("-", "m") for v in values)
        self._root._initializers.setdefault(name, numpy_helper.from_array(array, name))
        return name

    def scalar(self, name: str, value: float) -> str:
        """A float32 number, stored in the main graph under its name."""
        self._root._initializers.setdefault(name, numpy_helper.from_array(np.asarray(value, np.float32), name))
        return name

    def ones(self, name: str, count: int) -> str:
        """A float32 vector of ones, stored in the main graph under its name."""
        self._root._initializers.setdefault(name, numpy_helper.from_array(np.ones(count, np.float32), name))
        return name

    def column(self, name: str, values: Sequence[float]) -> str:
        """Some float32 numbers (N, 1), stored in the main graph under their name."""
        array = np.asarray(values, np.float32)[:, None]
        self._root._initializers.setdefault(name, numpy_helper.from_array(array, name))
        return name

    def table(self, name: str, rows: Sequence[Sequence[int]]) -> str:
        """A table of int64, stored in the main graph under its name."""
        self._root._initializers.setdefault(name, numpy_helper.from_array(np.asarray(rows, np.int64), name))
        return name

    @staticmethod
    def type(dtype: str) -> int:
        return int(_TYPES[dtype])

    def op(self, op_type: str, inputs: Sequence[str], output: str, *, domain: str = "", **attributes: Any) -> str:
        """Adds a node with one output and returns its name; an empty input name is an absent optional input."""
        self.ops(op_type, inputs, [output], domain=domain, **attributes)
        return output

    def ops(
        self, op_type: str, inputs: Sequence[str], outputs: Sequence[str], *, domain: str = "", **attributes: Any
    ) -> None:
        present = list(inputs)
        while present and not present[-1]:
            present.pop()
        self._root._domains.add(domain)
        name = f"{outputs[0]}/{op_type}"
        self._nodes.append(helper.make_node(op_type, present, list(outputs), name=name, domain=domain, **attributes))

    def branch(self) -> GraphBuilder:
        """A builder for one side of `choose`, which sees every value of this graph."""
        return GraphBuilder(self._weights, self)

    def choose(self, condition: str, then: GraphBuilder, otherwise: GraphBuilder, outputs: Sequence[str]) -> None:
        """Adds an `If`; the branches' declared outputs, in order, become `outputs`."""
        branches = {
            "then_branch": then._graph(f"{outputs[0]}/then"),
            "else_branch": otherwise._graph(f"{outputs[0]}/else"),
        }
        self.ops("If", [condition], outputs, **branches)

    def _graph(self, name: str) -> onnx.GraphProto:
        return helper.make_graph(
            self._nodes, name, self._inputs, self._outputs, initializer=list(self._initializers.values())
        )

    def model(self, name: str) -> onnx.ModelProto:
        return helper.make_model(
            self._graph(name),
            producer_name="edgeinfer",
            ir_version=_IR_VERSIONS[self._opset],
            opset_imports=[helper.make_opsetid(d, 1 if d else self._opset) for d in sorted(self._domains)],
        )
