"""Where an ONNX graph names its weights, and how it names packed copies of them.

onnxruntime writes into the entry of a weight what its packed copies are: `prepacked_<i>` is "<operator>+<digest of the
packed bytes>|<offset>;<length>;<checksum>", with more of the last where there are more blobs. On loading it packs the
weight, and if the digest is the same, maps those bytes instead of keeping its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from edgeinfer.bundle.protobuf import fields, length_delimited, number
from edgeinfer.errors import BundleError
from edgeinfer.records import dataclass

# Operators whose constants onnxruntime packs; all else that goes into them is float32.
_PACKING = (b"MatMulNBits", b"MatMul", b"Gemm")
# Field numbers of onnx.proto, by message.
_MODEL_GRAPH = 7
_NODE, _GRAPH_NAME, _INITIALIZER, _GRAPH_INPUT, _GRAPH_OUTPUT = 1, 2, 5, 11, 12
_NODE_INPUT, _NODE_OUTPUT, _OPERATOR, _ATTRIBUTE = 1, 2, 4, 5
_ATTRIBUTE_GRAPH = 6
_TENSOR_NAME, _EXTERNAL_DATA = 8, 13
_KEY, _VALUE = 1, 2
# A ValueInfoProto's name and type; in the type the tensor's, in that the element's, which is float32.
_VALUE_NAME, _VALUE_TYPE, _TENSOR_TYPE, _ELEMENT_TYPE, _FLOAT32 = 1, 2, 1, 1, 1
_PACKED_KEY = "prepacked_"


@dataclass(frozen=True)
class Copy:
    """A packed copy of a weight.

    Attributes:
        key: operator and digest, as onnxruntime wrote it.
        blobs: offset and length of each run of bytes in the weights file.
    """

    key: str
    blobs: tuple[tuple[int, int], ...]


def weights_in(model: bytes) -> dict[str, tuple[int, int]]:
    """Offset and length of each weight of the main graph in its file, by name."""
    with _onnx():
        entries = {name: _entries(tensor) for name, tensor in _initializers(_graph(model)).items()}
        return {name: (int(e["offset"]), int(e["length"])) for name, e in entries.items() if "length" in e}


def products(model: bytes) -> Iterator[bytes]:
    """For each operator whose constants onnxruntime packs, a model of it alone that reads the same weights."""
    with _onnx():
        rest = b"".join(f.whole for f in fields(model) if f.number != _MODEL_GRAPH)
        graph = _graph(model)
        initializers = _initializers(graph)
        external = {name for name, tensor in initializers.items() if _entries(tensor)}
        for node in _nodes(graph):
            reads = _texts(node, _NODE_INPUT)
            if _bodies(node, _OPERATOR)[0] in _PACKING and not external.isdisjoint(reads):
                yield rest + length_delimited(_MODEL_GRAPH, _alone(node, reads, initializers))


def copies_in(model: bytes) -> dict[str, tuple[Copy, ...]]:
    """The packed copies of each weight that a model which onnxruntime saved lists."""
    with _onnx():
        found = {}
        for name, tensor in _initializers(_graph(model)).items():
            packed = (value for key, value in _entries(tensor).items() if key.startswith(_PACKED_KEY))
            found[name] = tuple(map(_read_copy, packed))
        return {name: copies for name, copies in found.items() if copies}


def with_copies(model: bytes, location: str, copies: Mapping[str, tuple[Copy, ...]]) -> bytes:
    """The same model with its weights in the file `location`, where they have these packed copies."""
    with _onnx():
        pieces = [f.whole for f in fields(model) if f.number != _MODEL_GRAPH]
        graph = []
        for field in fields(_graph(model)):
            if field.number == _INITIALIZER and field.body is not None and _entries(field.body):
                tensor = _moved(field.body, location, copies.get(_name(field.body), ()))
                graph.append(length_delimited(_INITIALIZER, tensor))
            else:
                graph.append(field.whole)
        return b"".join([*pieces, length_delimited(_MODEL_GRAPH, b"".join(graph))])


def _moved(tensor: bytes, location: str, copies: tuple[Copy, ...]) -> bytes:
    entries = _entries(tensor) | {"location": location}
    for index, copy in enumerate(copies):
        entries[f"{_PACKED_KEY}{index}"] = "|".join([copy.key, *(f"{at};{size};0" for at, size in copy.blobs)])
    kept = [f.whole for f in fields(tensor) if f.number != _EXTERNAL_DATA]
    pairs = ((_pair(key, value)) for key, value in entries.items())
    return b"".join([*kept, *(length_delimited(_EXTERNAL_DATA, pair) for pair in pairs)])


def _alone(node: bytes, reads: list[str], initializers: Mapping[str, bytes]) -> bytes:
    """A graph of one node."""
    pieces = [length_delimited(_NODE, node), length_delimited(_GRAPH_NAME, b"product")]
    for name in dict.fromkeys(filter(None, reads)):
        if name in initializers:
            pieces.append(length_delimited(_INITIALIZER, initializers[name]))
        else:
            pieces.append(length_delimited(_GRAPH_INPUT, _float_value(name)))
    pieces += [length_delimited(_GRAPH_OUTPUT, _float_value(name)) for name in _texts(node, _NODE_OUTPUT)]
    return b"".join(pieces)


def _float_value(name: str) -> bytes:
    of_tensor = length_delimited(_TENSOR_TYPE, number(_ELEMENT_TYPE, _FLOAT32))
    return length_delimited(_VALUE_NAME, name.encode()) + length_delimited(_VALUE_TYPE, of_tensor)


def _read_copy(value: str) -> Copy:
    key, *blobs = value.split("|")
    numbers = (blob.split(";") for blob in blobs)
    return Copy(key, tuple((int(offset), int(length)) for offset, length, _ in numbers))


def _nodes(graph: bytes) -> Iterator[bytes]:
    """All nodes of a graph and of the branches in it."""
    for node in _bodies(graph, _NODE):
        yield node
        for attribute in _bodies(node, _ATTRIBUTE):
            for branch in _bodies(attribute, _ATTRIBUTE_GRAPH):
                yield from _nodes(branch)


def _graph(model: bytes) -> bytes:
    return _bodies(model, _MODEL_GRAPH)[0]


def _initializers(graph: bytes) -> dict[str, bytes]:
    return {_name(tensor): tensor for tensor in _bodies(graph, _INITIALIZER)}


def _name(tensor: bytes) -> str:
    return _texts(tensor, _TENSOR_NAME)[0]


def _entries(tensor: bytes) -> dict[str, str]:
    """Where the bytes of a tensor lie; empty where it holds them itself."""
    pairs = _bodies(tensor, _EXTERNAL_DATA)
    return {_texts(pair, _KEY)[0]: _texts(pair, _VALUE)[0] for pair in pairs}


def _pair(key: str, value: str) -> bytes:
    return length_delimited(_KEY, key.encode()) + length_delimited(_VALUE, value.encode())


def _bodies(message: bytes, field: int) -> list[bytes]:
    return [f.body for f in fields(message) if f.number == field and f.body is not None]


def _texts(message: bytes, field: int) -> list[str]:
    return [body.decode() for body in _bodies(message, field)]


@contextlib.contextmanager
def _onnx() -> Iterator[None]:
    """Turns what goes wrong in reading bytes that are no ONNX model into a BundleError."""
    try:
        yield
    except (IndexError, KeyError, ValueError) as error:
        raise BundleError("The model file is not an ONNX graph.", "Export or download the bundle again.") from error
