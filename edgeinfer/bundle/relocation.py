"""Renames the weights file that an ONNX graph reads, in the graph's bytes; knows no more of ONNX than that.

The names lie at one known place of the message, and everything else is copied as it is.
"""

from __future__ import annotations

from edgeinfer.bundle.protobuf import fields, length_delimited
from edgeinfer.errors import BundleError

__all__ = ["relocate"]

# Field numbers of onnx.proto: ModelProto.graph, GraphProto.initializer, TensorProto.external_data.
_TO_ENTRIES = (7, 5, 13)
# StringStringEntryProto: key and value.
_KEY, _VALUE = 1, 2
_LOCATION = b"location"


def relocate(model: bytes, old: str, new: str) -> bytes:
    """The same model with its initializers in the file `new` instead of `old`.

    Raises:
        BundleError: the bytes are not an ONNX model.
    """
    try:
        return _rewrite(model, _TO_ENTRIES, old.encode(), new.encode())
    except IndexError as error:
        raise BundleError("The model file is not an ONNX graph.", "Export or download the bundle again.") from error


def _rewrite(message: bytes, path: tuple[int, ...], old: bytes, new: bytes) -> bytes:
    """Rewrites the entries that lie at `path` of a message; an empty path says that the message is an entry."""
    if not path:
        return _rewrite_entry(message, old, new)
    pieces = []
    for field in fields(message):
        if field.number == path[0] and field.body is not None:
            pieces.append(length_delimited(field.number, _rewrite(field.body, path[1:], old, new)))
        else:
            pieces.append(field.whole)
    return b"".join(pieces)


def _rewrite_entry(entry: bytes, old: bytes, new: bytes) -> bytes:
    parts = {field.number: field.body for field in fields(entry)}
    if parts.get(_KEY) != _LOCATION or parts.get(_VALUE) != old:
        return entry
    return length_delimited(_KEY, _LOCATION) + length_delimited(_VALUE, new)
