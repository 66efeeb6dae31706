"""What the graph files of a static bundle declare, read without the onnx package; knows nothing of running them."""

from __future__ import annotations

from collections.abc import Iterator

from edgeinfer.bundle import Bundle, DecoderSpec
from edgeinfer.bundle.protobuf import Field, fields
from edgeinfer.bundle.static_graph import StaticGraph, Value
from edgeinfer.errors import BundleError

__all__ = ["check_graph_file"]

# Numbers of fields in onnx.proto, and of types in TensorProto.DataType.
_MODEL_GRAPH, _GRAPH_INPUT, _GRAPH_OUTPUT = 7, 11, 12
_VALUE_NAME, _VALUE_TYPE, _TYPE_TENSOR = 1, 2, 1
_TENSOR_TYPE, _TENSOR_SHAPE, _SHAPE_DIM, _DIM_VALUE = 1, 2, 1, 1
_DTYPES = {1: "float32", 6: "int32", 7: "int64"}


def check_graph_file(bundle: Bundle, graph: StaticGraph, spec: DecoderSpec) -> str:
    """The path of a graph, once its inputs and outputs are those that the runtime drives.

    Raises:
        BundleError: the file is damaged, or declares others.
    """
    path = bundle.file(graph.file)
    try:
        found = _values(path.read_bytes())
    except (IndexError, UnicodeDecodeError) as error:
        raise BundleError(f"{path} is not an ONNX graph: {error}.", "Export or download the bundle again.") from error
    except OSError as error:
        raise BundleError(f"Cannot read {path}: {error.strerror}.", "Check the file and its permissions.") from error
    for wanted, held in zip((graph.inputs(spec), graph.outputs(spec)), found, strict=True):
        expected = {value.name: value for value in wanted}
        wrong = sorted(name for name in {*expected, *held} if expected.get(name) != held.get(name))
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
