"""A model's weights with what onnxruntime packs of them, in one file that is mapped and read in place.

onnxruntime packs weights for the processor it runs on, so the file is made on the device
and kept in the user's cache, one folder for each combination of weights, graph, onnxruntime and processor: the weights,
the packed copies behind them, and a table of both. It may be removed at any time, and what is damaged is made again.
Making it packs one weight after the other, so it needs no more memory than loading the result does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnxruntime as ort

from edgeinfer.bundle.layouts import LAYOUT_VERSIONS, PORTABLE, WEIGHTS, model_name
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.writing import digest_of, storage_errors, write_file
from edgeinfer.errors import StorageError
from edgeinfer.records import dataclass
from edgeinfer.runtime.backends.onnx.packed_graph import Copy, products, weights_in, with_copies
from edgeinfer.runtime.backends.onnx.packed_room import make_room, private_folder, processor_key, used
from edgeinfer.runtime.backends.onnx.packing import PACKED, SAVED, append_copy, pack_weights, remove_scratch
from edgeinfer.runtime.weights.layouts import Progress, RunnableGraph, prepare
from edgeinfer.user_files import user_cache

_log = logging.getLogger("edgeinfer")

# Raised when what is in a folder changes.
_VERSION = 1
_TABLE = "packed.json"
# Linux may keep what is written at once as one piece and map it whole at a touch. Of the weights themselves only rows
# of the embedding are read, and the rest of what is mapped with them is waste.
_WEIGHT_BYTES = 1 << 16
# Of the weights, what is needed to make a folder: they, their packed copies, and what one takes while it is packed.
_ROOM = 3


@dataclass(frozen=True)
class _Table:
    """What is in a packed file.

    Attributes:
        size, changed: of the file when it was last found whole, and its time of change in nanoseconds.
        sha256: of the file.
        copies: packed copies by the name of the weight.
    """

    size: int
    changed: int
    sha256: str
    copies: dict[str, tuple[Copy, ...]]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self)) + "\n"

    @classmethod
    def from_json(cls, text: str) -> _Table:
        """Reads a table; whatever it raises says that the file is damaged."""
        data = json.loads(text)
        copies = {name: tuple(map(_read_copy, entries)) for name, entries in data["copies"].items()}
        return cls(int(data["size"]), int(data["changed"]), str(data["sha256"]), copies)


def _read_copy(data: Mapping[str, Any]) -> Copy:
    return Copy(str(data["key"]), tuple((int(offset), int(length)) for offset, length in data["blobs"]))


def prepare_packed(bundle: Bundle, progress: Progress | None = None) -> RunnableGraph:
    """The portable graph of a bundle beside a file of its packed weights, which is made if it is not there yet.

    Args:
        progress: called while weights are converted and packed, with what is done and how much there is.
    """
    folder = _folder(bundle)
    table = _whole(folder)
    if table is None:
        with storage_errors(folder.parent):
            folder.parent.mkdir(parents=True, exist_ok=True)
        _build(bundle, folder, progress)
        table = _whole(folder)
        if table is None:
            raise StorageError(f"{folder} was removed while it was being written.", "Try again.")
    used(folder)
    graph = with_copies(bundle.model_file(PORTABLE).read_bytes(), PACKED, table.copies)
    model = folder / model_name(bundle.manifest.layout, PORTABLE)
    if not _holds(model, graph):
        write_file(model, graph)
    copies = tuple(blob for packed in table.copies.values() for copy in packed for blob in copy.blobs)
    return RunnableGraph(PORTABLE, model, folder / PACKED, reads=_reads(graph, table), copies=copies)


def is_packed(bundle: Bundle) -> bool:
    """Whether the file of a bundle's packed weights is there; one that turns out damaged is made again."""
    place = packed_place(bundle)
    return place is not None and place.is_file()


def packed_place(bundle: Bundle) -> Path | None:
    """Where the packed weights of a bundle belong on this device, made or not; None where there is no place, or nothing
    to pack."""
    try:
        return _folder(bundle) / PACKED
    except (StorageError, KeyError):
        return None


def _holds(path: Path, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except OSError:
        return False


def _reads(graph: bytes, table: _Table) -> dict[str, tuple[tuple[int, int], ...]]:
    """The runs of bytes that running reads, by weight: packed copies where there are, else the weight itself."""
    reads = {}
    for name, place in weights_in(graph).items():
        blobs = tuple(blob for packed in table.copies.get(name, ()) for blob in packed.blobs)
        reads[name] = blobs or (place,)
    return reads


def _folder(bundle: Bundle) -> Path:
    """Where the packed weights of a bundle belong on this device; it need not exist."""
    graph = bundle.manifest.files[model_name(bundle.manifest.layout, PORTABLE)].sha256
    made_of = [bundle.manifest.files[WEIGHTS].sha256, graph, LAYOUT_VERSIONS[PORTABLE], _VERSION]
    key = json.dumps([made_of, ort.__version__, processor_key()])
    return user_cache() / "edgeinfer" / "packed" / hashlib.sha256(key.encode()).hexdigest()


def _whole(folder: Path) -> _Table | None:
    """The table of a folder whose packed file is what it was when it was made; None where it is not, or not there."""
    packed = folder / PACKED
    try:
        if not private_folder(folder):
            return None
        table = _Table.from_json((folder / _TABLE).read_text("utf-8"))
        status = packed.stat()
        if (status.st_size, status.st_mtime_ns) == (table.size, table.changed):
            return table
        # Restored from a backup, perhaps: then it is the same, and only its time is new.
        if status.st_size == table.size and digest_of(packed) == table.sha256:
            table = dataclasses.replace(table, changed=status.st_mtime_ns)
            write_file(folder / _TABLE, table.to_json().encode())
            return table
    except FileNotFoundError:
        return None
    # What damage makes the parser raise is many things, and none of it may keep a model from loading.
    except Exception as error:
        _log.warning("%s cannot be read: %s.", folder, str(error).rstrip(".") or type(error).__name__)
    _log.warning("%s is damaged and will be rebuilt.", packed)
    return None


def _build(bundle: Bundle, folder: Path, progress: Progress | None) -> None:
    """Makes the folder beside its place and puts it there; who comes second leaves what is there, if it is whole."""
    if bundle.manifest.layout == PORTABLE:
        # Of converted weights this was done before.
        bundle.check(WEIGHTS)
    source = prepare(bundle, PORTABLE, progress)
    try:
        make_room(folder, _ROOM * source.weights.stat().st_size)
        _log.info("Packing the weights of %s for this processor, which is done once: %s", bundle.manifest.name, folder)
        with storage_errors(folder), _beside(folder) as work:
            _fill(source, work, progress)
            if _whole(folder) is None:
                _replace(work, folder)
    finally:
        source.close()


@contextlib.contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """A temporary folder, removed if it is still there afterwards."""
    work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".new-"))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _replace(work: Path, folder: Path) -> None:
    """Puts a finished folder in its place, and what was there away."""
    old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".old-"))
    try:
        with contextlib.suppress(FileNotFoundError):
            folder.rename(old / folder.name)
        try:
            work.rename(folder)
        except OSError:
            # Another process put its own there in this moment.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _fill(source: RunnableGraph, work: Path, progress: Progress | None) -> None:
    """Writes the weights and their packed copies, and then the table of them."""
    graph = source.model.read_bytes()
    alone = list(products(with_copies(graph, PACKED, {})))
    copies: dict[str, tuple[Copy, ...]] = {}
    with (work / PACKED).open("w+b") as file:
        with source.weights.open("rb") as weights:
            shutil.copyfileobj(weights, file, _WEIGHT_BYTES)
        for index, product in enumerate(alone):
            if progress is not None:
                progress("packing", index, len(alone))
            # onnxruntime opens the file by its name.
            file.flush()
            for name, made in pack_weights(product, work).items():
                known = {copy.key for copy in copies.get(name, ())}
                new = [append_copy(copy, work / SAVED, file) for copy in made if copy.key not in known]
                copies[name] = (*copies.get(name, ()), *new)
            remove_scratch(work)
        file.flush()
        os.fsync(file.fileno())
    if progress is not None:
        progress("packing", len(alone), len(alone))
    status = (work / PACKED).stat()
    table = _Table(status.st_size, status.st_mtime_ns, digest_of(work / PACKED), copies)
    write_file(work / _TABLE, table.to_json().encode())
