"""One static graph: what its file must declare, its session, and the arrays it is bound to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgeinfer.bundle import static_graph as io
from edgeinfer.bundle.protobuf import Field, fields
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.static_graph import StaticGraph, Value
from edgeinfer.bundle.store import Bundle
from edgeinfer.errors import BundleError
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.onnx.session import OrtSession
from edgeinfer.runtime.backends.static.passes import Bools

# Hides a score from the softmax: exp underflows to exactly 0, and unlike -inf no row can become NaN. Half floats, which
# some devices compute in, reach 65504.
_HIDDEN = np.float32(-3e4)


class StaticSession:
    """Runs one graph; what it computes stays in its arrays until the next run.

    Attributes:
        logits: (R, V).
    """

    def __init__(self, session: OrtSession, graph: StaticGraph, spec: DecoderSpec) -> None:
        self.graph = graph
        self._session = session
        past = {name for layer in range(spec.num_layers) for name in io.past_names(layer)}
        self._inputs = {v.name: np.zeros(v.shape, v.dtype) for v in graph.inputs(spec) if v.name not in past}
        self._outputs = {v.name: np.zeros(v.shape, v.dtype) for v in graph.outputs(spec)}
        self._inputs[io.NEW_PLACES][0, :, :, 1] = np.arange(spec.num_kv_heads)[:, None]
        self.logits: Floats = self._outputs[io.LOGITS]
        self._binding = session.binding()
        for name, array in self._inputs.items():
            self._bind_input(name, array)
        for name, array in self._outputs.items():
            self._binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(a.nbytes for a in (*self._inputs.values(), *self._outputs.values()))

    def bind_cache(self, keys: Sequence[NDArray[Any]], values: Sequence[NDArray[Any]]) -> None:
        """Reads the past from these arrays from now on, (1, H, C, h) of each layer."""
        for layer, arrays in enumerate(zip(keys, values, strict=True)):
            for name, array in zip(io.past_names(layer), arrays, strict=True):
                self._bind_input(name, array)

    def run(
        self,
        tokens: Ints,  # (n,), n <= S
        tables: tuple[Floats, Floats],  # 2 x (n, r / 2)
        seen: tuple[Bools, Bools],  # 2 x (n, T)
        start: int,
        logit_row: int,
    ) -> None:
        """Runs over new tokens that will lie from row `start` on; padding repeats the last, and is seen by no token."""
        size, inputs = len(tokens), self._inputs
        ids = inputs[io.INPUT_IDS][0]
        ids[:size], ids[size:] = tokens, tokens[-1]
        for name, table in zip((io.COS_ROWS, io.SIN_ROWS), tables, strict=True):
            inputs[name][:size], inputs[name][size:] = table, table[-1]
        for name, visible in zip((io.ATTENTION_BIAS, io.WINDOW_BIAS), seen, strict=True):
            if name in inputs:
                bias = inputs[name][0, 0]
                bias[:] = _HIDDEN
                bias[:size, : visible.shape[1]][visible] = 0
                bias[size:] = bias[size - 1]
        places = start + np.arange(self.graph.rows)
        # A full cache has no row left for padding, which repeats the last token and what is computed of it.
        places[size:][places[size:] >= self.graph.context] = start + size - 1
        inputs[io.NEW_PLACES][..., 2] = places
        if self.graph.prompts:
            inputs[io.LOGIT_ROWS][0] = logit_row
        self._session.run(self._binding)

    def new(self, layer: int) -> tuple[Floats, Floats]:  # 2 x (H, S, h)
        """Keys and values of the last run."""
        key, value = io.new_names(layer)
        return self._outputs[key][0], self._outputs[value][0]

    def cancel(self) -> None:
        """Ends the running run; safe from any thread."""
        self._session.cancel()

    def _bind_input(self, name: str, array: NDArray[Any]) -> None:
        self._binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))


# Numbers of fields in onnx.proto, and of types in TensorProto.DataType.
_MODEL_GRAPH, _GRAPH_INPUT, _GRAPH_OUTPUT = 7, 11, 12
_VALUE_NAME, _VALUE_TYPE, _TYPE_TENSOR = 1, 2, 1
_TENSOR_TYPE, _TENSOR_SHAPE, _SHAPE_DIM, _DIM_VALUE = 1, 2, 1, 1
_DTYPES = {1: "float32", 6: "int32", 7: "int64"}


def check_graph_file(bundle: Bundle, graph: StaticGraph, spec: DecoderSpec) -> str:
    """The path of a graph, once its inputs and outputs are those that the runtime drives."""
    path = bundle.file(graph.file)
    try:
        found = _values(path.read_bytes())
    except (IndexError, UnicodeDecodeError) as error:
        raise BundleError(f"{path} is not an ONNX graph: {error}.", "Export or download the bundle again.") from error
    except OSError as error:
        raise BundleError(f"Cannot read {path}: {error.strerror}.", "Check the file and its permissions.") from error
    for wanted, declared in zip((graph.inputs(spec), graph.outputs(spec)), found, strict=True):
        expected = {value.name: value for value in wanted}
        wrong = sorted(name for name in {*expected, *declared} if expected.get(name) != declared.get(name))
        if wrong:
            message = f"{path} declares other inputs or outputs than the bundle describes: {', '.join(wrong[:3])}."
            raise BundleError(message, "Export or download the bundle again.")
    return str(path)


def _values(model: bytes) -> tuple[dict[str, Value], dict[str, Value]]:
    """Inputs and outputs by name."""
    inputs: dict[str, Value] = {}
    outputs: dict[str, Value] = {}
    for graph in _parts(model, _MODEL_GRAPH):
        for field in fields(graph):
            into = {_GRAPH_INPUT: inputs, _GRAPH_OUTPUT: outputs}.get(field.number)
            if into is not None and field.body is not None:
                value = _value(field.body)
                into[value.name] = value
    return inputs, outputs


def _value(body: bytes) -> Value:
    name = b"".join(_parts(body, _VALUE_NAME)).decode("utf-8")
    dtype, shape = "", list[int]()
    for kind in _parts(body, _VALUE_TYPE):
        for tensor in _parts(kind, _TYPE_TENSOR):
            dtype = _DTYPES.get(_number(tensor, _TENSOR_TYPE), "")
            for dims in _parts(tensor, _TENSOR_SHAPE):
                shape += [_number(dim, _DIM_VALUE) for dim in _parts(dims, _SHAPE_DIM)]
    return Value(name, dtype, tuple(shape))


def _parts(message: bytes, number: int) -> Iterator[bytes]:
    for field in fields(message):
        if field.number == number and field.body is not None:
            yield field.body


def _number(message: bytes, number: int) -> int:
    """An integer of a message; -1 where it is not there, as a dimension that is not fixed."""
    found: list[Field] = [field for field in fields(message) if field.number == number]
    return found[-1].integer if found else -1
