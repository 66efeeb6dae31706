"""A bundle's weights in the layout it does not store: the file a device makes, and a whole bundle that stores it. Exact
both ways, though experts of mixed bits come out in the widest of them (edgeinfer.bundle.packing), and codes of vectors
as 4 bits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from edgeinfer.bundle.codecs import CODECS, read_blob
from edgeinfer.bundle.layouts import LAYOUT_VERSIONS, WEIGHTS, Layout, model_name, weights_name
from edgeinfer.bundle.manifest import TensorEntry
from edgeinfer.bundle.opening import nested_drafter
from edgeinfer.bundle.packing import QuantizedMatrix, widen
from edgeinfer.bundle.protobuf import fields, length_delimited
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.tables import convert_table, file_bytes, stored_tensors
from edgeinfer.bundle.writing import new_file, seal, write_bundle
from edgeinfer.core.errors import BundleError, UsageError

Progress = Callable[[str, int, int], None]  # a tensor's name, how many tensors are done and how many there are
_COPY_VALUES = 1 << 18


def convert_weights(bundle: Bundle, layout: Layout, target: Path, progress: Progress | None = None) -> None:
    """Writes the bundle's weights in another layout to the file `target`, whole or not at all. The file ends in a stamp
    that says what it was made of, for `is_converted`. Memory is a few MB."""
    _require_other(bundle, layout)
    bundle.check(WEIGHTS)
    with new_file(target) as file:
        _write(bundle, layout, file, progress)
        file.seek(0, 2)
        file.write(_stamp(bundle, layout))
    # Only its owner may read a new file; this one is for everybody who may read the bundle.
    shutil.copymode(bundle.path / WEIGHTS, target)


def is_converted(bundle: Bundle, layout: Layout, path: Path) -> bool:
    """Whether `path` is the file that `convert_weights` makes of this bundle. Reads its last bytes only."""
    stamp = _stamp(bundle, layout)
    expected = file_bytes(convert_table(bundle.manifest.tensors, layout)) + len(stamp)
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) != expected:
                return False
            file.seek(-len(stamp), 2)
            return file.read() == stamp
    except OSError:
        return False


def convert_bundle(
    bundle: Bundle, layout: Layout, out: Path, progress: Progress | None = None, *, replace_existing: bool = False
) -> None:
    """Writes a bundle of the same model that stores another layout; arguments and errors as `convert_weights`. It is
    byte for byte the bundle that an export in that layout makes, except 2 bits: those are vectors in the native layout
    alone."""
    _require_other(bundle, layout)
    inside = nested_drafter(bundle)
    if inside is not None and inside.manifest.module is not None:
        message = f"The draft module in {bundle.path} reads the {bundle.manifest.layout} layout of its weights."
        raise UsageError(message, f"Export the model again without it, in the {layout} layout.")
    bundle.verify()
    manifest, stored = bundle.manifest, bundle.manifest.layout
    graphs = bundle.graphs
    changed = {WEIGHTS, *graphs}
    with write_bundle(out, replace_existing=replace_existing) as work:
        for name in manifest.files.keys() - changed:
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle.path / name, work / name)
        for name, reads in graphs.items():
            graph = bundle.file(name).read_bytes()
            moved = relocate(graph, weights_name(stored, reads), weights_name(layout, reads))
            (work / model_name(layout, reads)).write_bytes(moved)
        with (work / WEIGHTS).open("wb") as file:
            _write(bundle, layout, file, progress)
        converted = replace(
            manifest,
            tensors=convert_table(manifest.tensors, layout),
            layout=layout,
            layout_version=LAYOUT_VERSIONS[layout],
            capabilities=manifest.capabilities_in(layout),
        )
        seal(work, converted)


def _require_other(bundle: Bundle, layout: Layout) -> None:
    if layout == bundle.manifest.layout:
        raise UsageError(f"{bundle.path} already has the {layout} layout.", "Use it as it is.")
    if layout not in bundle.layouts:
        raise UsageError(f"{bundle.path} has no graph for the {layout} layout.", "Use it as it is.")
    if not bundle.quantized:
        message = f"{bundle.path} has no quantized weights whose layout could change."
        raise UsageError(message, "Use it as it is, or export it again with fewer bits.")


def _write(bundle: Bundle, layout: Layout, file: BinaryIO, progress: Progress | None) -> None:
    sources = stored_tensors(bundle.manifest.tensors)
    targets = stored_tensors(convert_table(bundle.manifest.tensors, layout))
    for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if progress is not None:
            progress(source.name, index, len(sources))
        if source.bits == 32:
            _copy(bundle, source, target, file)
        else:
            CODECS[layout].write(file, target, partial(_widened_rows, bundle, source, target))
    if progress is not None:
        progress("done", len(sources), len(sources))


def _widened_rows(bundle: Bundle, source: TensorEntry, target: TensorEntry, start: int, stop: int) -> QuantizedMatrix:
    return widen(bundle.rows(source, start, stop), source.quantized, target.quantized)


def _copy(bundle: Bundle, source: TensorEntry, target: TensorEntry, file: BinaryIO) -> None:
    file.seek(target.data.offset)
    values = read_blob(bundle.path / WEIGHTS, source.data).reshape(-1)
    for start in range(0, len(values), _COPY_VALUES):
        file.write(values[start : start + _COPY_VALUES].data)


def _stamp(bundle: Bundle, layout: Layout) -> bytes:
    """The line at the end of a converted file, as a file of another model may have the same length."""
    made_of = bundle.manifest.files[WEIGHTS].sha256
    return f"edgeinfer {layout} {LAYOUT_VERSIONS[layout]} {made_of}\n".encode()


# Field numbers of onnx.proto: ModelProto.graph, GraphProto.initializer, TensorProto.external_data.
_TO_ENTRIES = (7, 5, 13)
# StringStringEntryProto: key and value.
_KEY, _VALUE = 1, 2
_LOCATION = b"location"


def relocate(model: bytes, old: str, new: str) -> bytes:
    """A copy of a model whose initializers lie in the file `new` instead of `old`."""
    try:
        return _rewrite(model, _TO_ENTRIES, old.encode(), new.encode())
    except IndexError as error:
        raise BundleError("The model file is not an ONNX graph.", "Export or download the bundle again.") from error


def _rewrite(message: bytes, path: tuple[int, ...], old: bytes, new: bytes) -> bytes:
    """Rewrites the entries that lie at `path` of a message; an empty path says that the message is an entry."""
    if not path:
        parts = {field.number: field.body for field in fields(message)}
        if parts.get(_KEY) != _LOCATION or parts.get(_VALUE) != old:
            return message
        return length_delimited(_KEY, _LOCATION) + length_delimited(_VALUE, new)
    return b"".join(
        length_delimited(field.number, _rewrite(field.body, path[1:], old, new))
        if field.number == path[0] and field.body is not None
        else field.whole
        for field in fields(message)
    )
