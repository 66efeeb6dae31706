"""Session files: the tokens of a conversation, their rows of the KV cache and a text.

A safetensors file. Its tensors, in this order: `tokens` I32 (T,); `rows.{start}` (2 L, kv_heads, n, width), keys of
each layer and then values as the cache stores them, for consecutive runs of n tokens; `text` U8, UTF-8. `__metadata__`
holds "format", "version", "model" and "run" (`Origin`), "kv" and "scales" (`CacheSnapshot`), "sampling", the version of
how a seed makes text, and "sha256", of the whole file with the digits of that digest as zeros. Where layers differ in
what they keep, `rows.{start}` is U8 (n, bytes of a token), the arrays one behind the other, and "layers" has the type,
heads and width of each, as JSON. Where an engine's own bytes stand for rows (`OpaqueRows`), `rows.{start}` is U8
(bytes,). A few megabytes at a time are copied, whatever the size of the cache. `state` U8 (bytes,), before the text,
holds the state of recurrent layers.
Its size is checked before any allocation, its digest before any use; what an engine stored is for that engine to check.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.array_file import (
    LENGTH_BYTES,
    NUMPY_TYPES,
    ArrayFileError,
    ArrayIndex,
    StoredArray,
    encode_header,
    read_index,
    read_into,
    type_name,
)
from edgeinfer.bundle.geometry import LLAMA_KV
from edgeinfer.bundle.layouts import WEIGHTS, Layout
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.writing import new_file
from edgeinfer.core.errors import UsageError
from edgeinfer.core.records import dataclass
from edgeinfer.core.version import SAMPLING, VERSION
from edgeinfer.runtime.backends.cache import CacheSnapshot, CopiedRows, OpaqueRows, RowBlob
from edgeinfer.runtime.paging.codecs import ROW_CODECS, ROW_SCALES

_FORMAT = "edgeinfer-session"
_VERSION = "2"
_SAMPLING = "sampling"
_FIELDS = ("format", "version", "model", "run", "kv", "scales", _SAMPLING, "sha256")
# A million tokens of the smallest pieces that make sense take less; a header is parsed as a whole.
_MOST_HEADER_BYTES = 4 << 20
_PIECE_BYTES = 4 << 20
_BLANK = "0" * 64
_LAYERS = "layers"
_STATE = "state"  # of recurrent layers
_ELSE = "Give a file written by Chat.save or Model.save_session."
_COPY = "Use another copy of it, or start the conversation again."


@dataclass(frozen=True)
class Origin:
    """Where rows come from."""

    model: str  # digest of the weights and the decoder
    run: str  # digest of what else their bits depend on

    def with_adapter(self, digest: str) -> Origin:
        """The origin of rows made with an adapter of this digest; "" is none."""
        run = hashlib.sha256(f"{self.run} {digest}".encode()).hexdigest() if digest else self.run
        return Origin(self.model, run)


def origin_of(bundle: Bundle, layout: Layout, engine: str, exact: bool) -> Origin:
    """The origin of what a bundle makes as it runs here."""
    manifest = bundle.manifest
    opaque = [name for name in manifest.files if name.startswith("model") or name in manifest.gguf_files]
    weights = [WEIGHTS] if manifest.tensors else opaque
    spec = dataclasses.asdict(manifest.decoder or manifest.geometry)
    model = [{name: manifest.files[name].sha256 for name in weights}, spec]
    run = [layout, engine, exact, VERSION]
    return Origin(*(hashlib.sha256(json.dumps(each, sort_keys=True).encode()).hexdigest() for each in (model, run)))


def write_session(
    path: Path, origin: Origin, tokens: Sequence[int], copy: Callable[[int, int], CacheSnapshot], text: str = ""
) -> None:
    """Writes a session file whole or not at all, readable by its owner alone."""
    kind = copy(0, 0)
    ids, letters = np.array(tokens, "<i4"), np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {"tokens": (type_name(ids.dtype), ids.shape)}
    further: dict[str, str] = {}
    if isinstance(kind, OpaqueRows):
        # What stands for all rows of a recurrence cannot be parted.
        size = len(ids) if kind.state_bytes else max(1, _PIECE_BYTES // kind.row_bytes)
        spans = _spans(len(ids), size)
        shapes |= {f"rows.{start}": ("U8", data.shape) for span in spans for start, data in _stored(copy(*span))}
    else:
        layers = [_LayerRows(str(a.dtype), a.shape[0], a.shape[2]) for a in (*kind.keys, *kind.values)]
        row_bytes = sum(layer.bytes for layer in layers)
        spans = _spans(len(ids), max(1, _PIECE_BYTES // max(row_bytes, 1)))
        # Of recurrences alone nothing is kept of a token.
        (dtype, heads, width), alike = layers[0], len(set(layers)) == 1 and row_bytes > 0
        for start, stop in spans:
            apart = (len(layers), heads, stop - start, width)
            rows = (type_name(np.dtype(dtype)), apart) if alike else ("U8", (stop - start, row_bytes))
            shapes[f"rows.{start}"] = rows
        further = {} if alike else {_LAYERS: json.dumps(layers)}
    state = copy(*spans[-1]).state if spans else None
    if state is not None:
        shapes[_STATE] = ("U8", state.shape)
    shapes |= {"text": (type_name(letters.dtype), letters.shape)}
    fields = (_FORMAT, _VERSION, origin.model, origin.run, kind.kv, kind.scales, str(SAMPLING), _BLANK)
    header = encode_header(shapes, dict(zip(_FIELDS, fields, strict=True)) | further)
    digest = hashlib.sha256(header)
    with new_file(path) as file:
        file.write(header)

        def add(array: NDArray[Any]) -> None:
            data = np.ascontiguousarray(array).data.cast("B") if array.size else b""
            digest.update(data)
            file.write(data)

        add(ids)
        for start, stop in spans:
            for _, array in _stored(copy(start, stop)):
                add(array)
        if state is not None:
            add(state)
        add(letters)
        file.seek(header.index(_BLANK.encode()))
        file.write(digest.hexdigest().encode())


def _spans(rows: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def _stored(rows: CacheSnapshot) -> Iterator[tuple[int, NDArray[Any]]]:
    """The arrays that stand for rows, each with the first row of an engine's own bytes."""
    if isinstance(rows, OpaqueRows):
        yield from ((blob.start, blob.data) for blob in rows.blobs)
    else:
        yield from ((0, array) for array in itertools.chain(rows.keys, rows.values))


class Stamp(NamedTuple):
    """Identity of a file, and when it was last written."""

    device: int
    inode: int
    bytes: int
    written_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class SessionFile:
    """An open session file, whose digest is right."""

    def __init__(self, path: Path, file: BufferedReader, known: Stamp | None = None) -> None:
        self.path = path
        self._file = file
        self.stamp = Stamp.of(os.fstat(file.fileno()))  # while it stays, the digest need not be checked again
        index = self._read_index(os.fstat(file.fileno()).st_size)
        metadata, self._tensors = self._checked(index)
        self.origin = Origin(metadata["model"], metadata["run"])
        self.kv, self.scales = metadata["kv"], metadata["scales"]  # as `CacheSnapshot` names them
        self._opaque = self.scales not in ("", ROW_SCALES)
        sampling = metadata[_SAMPLING]
        self._require(sampling.isdecimal() and len(sampling) < 5, "it does not tell how it was sampled")
        self.sampling = int(sampling)  # version of how a seed made text when it was written
        self._state = self._tensors[-2] if self._tensors[-2].name == _STATE else None
        self._rows = self._tensors[1 : -1 if self._state is None else -2]
        self._layers = self._listed_layers(metadata)
        if self.stamp != known:
            self._check_digest(index.header, metadata["sha256"])
        ids = self._array(self._tensors[0])
        self._require(ids.size == 0 or int(ids.min()) >= 0, "it holds negative token ids")
        self.tokens: tuple[int, ...] = tuple(ids.tolist())
        self.text = self._decoded(self._array(self._tensors[-1]).tobytes())

    def pieces(self) -> Iterator[CacheSnapshot]:
        """The rows of all tokens, a few megabytes at a time."""
        state = None if self._state is None else self._array(self._state)
        state_bytes = 0 if state is None else state.nbytes
        if self._opaque:
            starts = [int(tensor.name.removeprefix("rows.")) for tensor in self._rows]
            for tensor, (start, stop) in zip(self._rows, itertools.pairwise([*starts, len(self.tokens)]), strict=True):
                last = state if stop == len(self.tokens) else None
                blob = RowBlob(start, stop, self._array(tensor))
                yield OpaqueRows(start, stop - start, [blob], self.kv, self.scales, 1, last, state_bytes)
            return
        for tensor in self._rows:
            stored = self._array(tensor)
            arrays = tuple(stored) if self._layers is None else _apart(stored, self._layers)
            half, length = len(arrays) // 2, tensor.shape[2 if self._layers is None else 0]
            last = state if tensor is self._rows[-1] else None
            yield CopiedRows(length, arrays[:half], arrays[half:], self.kv, self.scales, last, state_bytes)

    def _decoded(self, text: bytes) -> str:
        try:
            return text.decode("utf-8", "surrogatepass")
        except UnicodeError as error:
            raise UsageError(f"{self.path} is damaged: its text is not UTF-8.", _COPY) from error

    def _listed_layers(self, metadata: Mapping[str, str]) -> list[_LayerRows] | None:
        """The entry "layers", which must fit the rows; None if all layers keep the same."""
        if _LAYERS not in metadata:
            return None
        try:
            listed = [_LayerRows(*layer) for layer in json.loads(metadata[_LAYERS])]
            fit = all(layer.sound for layer in listed) and len(listed) % 2 == 0
            size = sum(layer.bytes for layer in listed) if fit else 0
        except (ValueError, TypeError, RecursionError):
            listed, fit, size = [], False, 0
        self._require(fit and all(t.shape[1] == size for t in self._rows), "its rows are not of these layers")
        return listed

    def _require(self, condition: bool, what: str) -> None:
        if not condition:
            raise UsageError(f"{self.path} is damaged: {what}.", _COPY)

    def _read_index(self, size: int) -> ArrayIndex:
        start = self._file.read(LENGTH_BYTES + 1)
        if not _begins_session(start, size):
            raise UsageError(f"{self.path} is not a session file.", _ELSE)
        self._file.seek(0)
        try:
            return read_index(self._file, size, _MOST_HEADER_BYTES)
        except ArrayFileError as error:
            raise UsageError(f"{self.path} is damaged: it {error}.", _COPY) from error

    def _checked(self, index: ArrayIndex) -> tuple[Mapping[str, str], tuple[StoredArray, ...]]:
        """The header's texts and tensors, which must be the ones that belong here."""
        metadata = index.notes
        if metadata.get("format") != _FORMAT:
            raise UsageError(f"{self.path} is not a session file.", _ELSE)
        version = metadata.get("version")
        if version != _VERSION:
            hint = f"This edgeinfer reads version {_VERSION}: update it, or start the conversation again."
            raise UsageError(f"{self.path} has version {version!r}.", hint)
        named = metadata.keys() - {_LAYERS} == set(_FIELDS)
        strings = named and all(isinstance(value, str) for value in metadata.values())
        dtype = _row_type(metadata["kv"], metadata["scales"]) if strings else None
        self._require(dtype is not None, "its header lacks fields")
        rank = 1 if metadata["scales"] not in ("", ROW_SCALES) else 2 if _LAYERS in metadata else 4
        self._check_tensors(index.arrays, dtype if rank == 4 else "uint8", rank)
        return metadata, index.arrays

    def _check_tensors(self, tensors: tuple[StoredArray, ...], dtype: str | None, rank: int) -> None:
        ends = [(t.name, t.dtype, len(t.shape)) for t in (tensors[0], tensors[-1])] if tensors else []
        self._require(ends == [("tokens", "I32", 1), ("text", "U8", 1)], "it holds other tensors")
        at, state = 0, tensors[-2]
        stateful = (state.name, state.dtype, len(state.shape)) == (_STATE, "U8", 1)
        if rank == 1:
            self._check_opaque(tensors[1 : -2 if stateful else -1], tensors[0].shape[0])
            return
        for tensor in tensors[1 : -2 if stateful else -1]:
            same = len(tensor.shape) == rank and min(tensor.shape[: 4 if rank == 4 else 1]) > 0
            tokens = rank - 2 if rank == 4 else 0  # axis
            others, first = (t.shape[:tokens] + t.shape[tokens + 1 :] for t in (tensor, tensors[1]))
            same = same and others == first and (rank == 2 or tensor.shape[0] % 2 == 0)
            named = tensor.name == f"rows.{at}" and NUMPY_TYPES.get(tensor.dtype) == dtype
            self._require(same and named, f"{tensor.name!r} does not belong here")
            at += tensor.shape[tokens]
        self._require(at == tensors[0].shape[0], "it has not one row for each token")

    def _check_opaque(self, tensors: Sequence[StoredArray], tokens: int) -> None:
        """The names of bytes must be the places of their first rows, in order."""
        starts = [t.name.removeprefix("rows.") for t in tensors if (t.dtype, len(t.shape)) == ("U8", 1)]
        sound = len(starts) == len(tensors) and all(each.isdecimal() and len(each) < 10 for each in starts)
        places = [int(each) for each in starts] if sound else []
        ordered = all(a < b for a, b in itertools.pairwise([*places, tokens])) and (places[:1] == [0] or not tokens)
        self._require(sound and ordered, "its rows do not follow each other")

    def _check_digest(self, header: bytes, claimed: str) -> None:
        place = header.find(claimed.encode())
        self._require(len(claimed) == len(_BLANK) and place >= 0, "it has no digest")
        digest = hashlib.sha256(header[:place] + _BLANK.encode() + header[place + len(_BLANK) :])
        while chunk := self._file.read(_PIECE_BYTES):
            digest.update(chunk)
        self._require(digest.hexdigest() == claimed, "its contents do not match their digest")

    def _array(self, tensor: StoredArray) -> NDArray[Any]:
        array: NDArray[Any] = np.empty(tensor.shape, NUMPY_TYPES[tensor.dtype])
        self._file.seek(tensor.offset)
        try:
            read_into(self._file, array)
        except ArrayFileError as error:
            raise UsageError(f"{self.path} is damaged: it {error}.", _COPY) from error
        return array


class _LayerRows(NamedTuple):
    """Type and size of the stored keys, or values, of a layer."""

    dtype: str
    heads: int
    width: int

    @property
    def sound(self) -> bool:
        """Whether there can be such rows, which is to be asked before anything else."""
        sizes = all(type(size) is int and 0 <= size < 1 << 32 for size in (self.heads, self.width))
        return sizes and self.dtype in {str(each) for each in NUMPY_TYPES.values()}

    @property
    def bytes(self) -> int:
        return int(np.dtype(self.dtype).itemsize) * self.heads * self.width


def _apart(stored: NDArray[np.uint8], layers: Sequence[_LayerRows]) -> tuple[NDArray[Any], ...]:  # -> (H, n, w) each
    """The arrays that lie one behind the other."""
    ends = np.cumsum([len(stored) * layer.bytes for layer in layers])[:-1]
    pieces = zip(np.split(stored.reshape(-1), ends), layers, strict=True)
    return tuple(piece.view(layer.dtype).reshape(layer.heads, len(stored), layer.width) for piece, layer in pieces)


def _row_type(kv: str, scales: str) -> str | None:
    """The type of the stored rows of a cache; None where there is no such cache."""
    if scales == ROW_SCALES:
        return ROW_CODECS[kv].dtype if kv in ROW_CODECS else None
    if scales:  # names an engine, whose bytes they are
        return "uint8" if kv in LLAMA_KV else None
    return LLAMA_KV[kv].dtype if kv in LLAMA_KV else None


def _begins_session(start: bytes, size: int) -> bool:
    """Whether these nine bytes begin a file of this many bytes in the safetensors format."""
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    return start[LENGTH_BYTES:] == b"{" and length <= min(_MOST_HEADER_BYTES, size - LENGTH_BYTES)


def is_session(path: Path) -> bool:
    """Whether the file looks like a session file, whatever its name."""
    with _reading(path) as file:
        return _begins_session(file.read(LENGTH_BYTES + 1), os.fstat(file.fileno()).st_size)


@contextmanager
def open_session(path: Path, known: Stamp | None = None) -> Iterator[SessionFile]:
    """Opens and checks a session file, whose digest was checked before if its stamp is still the one `known`."""
    with _reading(path) as file:
        yield SessionFile(path, file, known)


@contextmanager
def _reading(path: Path) -> Iterator[BufferedReader]:
    try:
        # Opening a pipe would wait for its writer.
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"{path} is not a file.", _ELSE)
        file = path.open("rb")
    # A path with a zero byte in it is a ValueError.
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', error)}.", _ELSE) from error
    with file:
        yield file
