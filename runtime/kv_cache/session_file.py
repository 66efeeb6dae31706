"""Session files: the tokens of a conversation, their rows of the KV cache and a text; knows no backend and no chat.

A safetensors file. Its tensors, in this order: `tokens` I32 (T,); `rows.{start}` (2 L, kv_heads, n, width), keys of
each layer and then values as the cache stores them, for consecutive runs of n tokens; `text` U8, UTF-8. `__metadata__`
holds "format", "version", "model" and "run" (`Origin`), "kv" and "scales" (`CacheSnapshot`), and "sha256", of the whole
file with the digits of that digest as zeros. Own code instead of the `safetensors` library, which takes all tensors at
once and maps what it reads: here a few megabytes at a time are copied, whatever the size of the cache. Nothing in a
file is trusted: its size comes before any allocation, its digest before any use.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import BufferedReader
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import Bundle, Layout
from edgeinfer.bundle.kv_types import KV, LLAMA_KV, find_kv_type
from edgeinfer.bundle.layouts import WEIGHTS
from edgeinfer.bundle.writing import new_file
from edgeinfer.errors import UsageError
from edgeinfer.runtime.backends.contract import CacheSnapshot
from edgeinfer.version import VERSION

__all__ = ["Origin", "SessionFile", "is_session", "open_session", "origin_of", "write_session"]

_FORMAT = "edgeinfer-session"
_VERSION = "1"
_FIELDS = ("format", "version", "model", "run", "kv", "scales", "sha256")
_LENGTH_BYTES = 8
# A million tokens of the smallest pieces that make sense take less; a header is parsed as a whole.
_MOST_HEADER_BYTES = 4 << 20
_PIECE_BYTES = 4 << 20
_BLANK = "0" * 64
_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I32": np.dtype("<i4"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ELSE = "Give a file written by Chat.save or Model.save_session."
_COPY = "Use another copy of it, or start the conversation again."


@dataclass(frozen=True)
class Origin:
    """Where rows come from.

    Attributes:
        model: digest of the weights and the decoder.
        run: digest of what else their bits depend on.
    """

    model: str
    run: str


def origin_of(bundle: Bundle, layout: Layout, engine: str, exact: bool) -> Origin:
    """The origin of what a bundle makes as it runs here.

    Args:
        engine: name and version of what runs it.
        exact: whether rows are independent of how passes were cut.
    """
    manifest = bundle.manifest
    opaque = [name for name in manifest.files if name.startswith("model") or name.endswith(".gguf")]
    weights = [WEIGHTS] if manifest.tensors else opaque
    spec = asdict(manifest.decoder or manifest.geometry)
    model = [{name: manifest.files[name].sha256 for name in weights}, spec]
    run = [layout, engine, exact, VERSION]
    return Origin(*(hashlib.sha256(json.dumps(each, sort_keys=True).encode()).hexdigest() for each in (model, run)))


def write_session(
    path: Path, origin: Origin, tokens: Sequence[int], copy: Callable[[int, int], CacheSnapshot], text: str = ""
) -> None:
    """Writes a session file whole or not at all, readable by its owner alone.

    Args:
        tokens: what the rows are of.
        copy: rows start..stop-1 of them.
        text: kept with them.

    Raises:
        StorageError: the place cannot be written, or the disk is full.
    """
    kind = copy(0, 0)
    arrays = (*kind.keys, *kind.values)
    heads, _, width = arrays[0].shape
    dtype = arrays[0].dtype
    size = max(1, _PIECE_BYTES // (len(arrays) * heads * width * dtype.itemsize))
    ids, letters = np.array(tokens, "<i4"), np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
    spans = [(start, min(start + size, len(ids))) for start in range(0, len(ids), size)]
    shapes = {"tokens": (ids.dtype, ids.shape)}
    shapes |= {f"rows.{start}": (dtype, (len(arrays), heads, stop - start, width)) for start, stop in spans}
    shapes |= {"text": (letters.dtype, letters.shape)}
    fields = (_FORMAT, _VERSION, origin.model, origin.run, kind.kv, kind.scales, _BLANK)
    header = _header(dict(zip(_FIELDS, fields, strict=True)), shapes)
    digest = hashlib.sha256(header)
    with new_file(path) as file:
        file.write(header)

        def add(array: NDArray[Any]) -> None:
            data = np.ascontiguousarray(array).data.cast("B") if array.size else b""
            digest.update(data)
            file.write(data)

        add(ids)
        for start, stop in spans:
            rows = copy(start, stop)
            for array in (*rows.keys, *rows.values):
                add(array)
        add(letters)
        file.seek(header.index(_BLANK.encode()))
        file.write(digest.hexdigest().encode())


def _header(metadata: dict[str, str], shapes: dict[str, tuple[np.dtype[Any], tuple[int, ...]]]) -> bytes:
    """Length and JSON of a header whose tensors follow each other, padded as the format asks."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


@dataclass(frozen=True)
class _Tensor:
    """Where a tensor lies behind the header, and what it is."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SessionFile:
    """An open session file, whose digest is right.

    Attributes:
        tokens: what the rows are of.
        kv, scales: the type of cache the rows come from, as `CacheSnapshot` names it.
        text: what was kept with them.
    """

    def __init__(self, path: Path, file: BufferedReader) -> None:
        self.path = path
        self._file = file
        size = os.fstat(file.fileno()).st_size
        header = self._read_header(size)
        self._data = len(header)
        metadata, self._tensors = self._parse(header[_LENGTH_BYTES:], size - len(header))
        self.origin = Origin(metadata["model"], metadata["run"])
        self.kv, self.scales = metadata["kv"], metadata["scales"]
        self._check_digest(header, metadata["sha256"])
        ids = self._array(self._tensors[0])
        self._require(ids.size == 0 or int(ids.min()) >= 0, "it holds negative token ids")
        self.tokens: tuple[int, ...] = tuple(ids.tolist())
        self.text = self._decoded(self._array(self._tensors[-1]).tobytes())

    def pieces(self) -> Iterator[CacheSnapshot]:
        """The rows of all tokens, a few megabytes at a time."""
        for tensor in self._tensors[1:-1]:
            arrays = self._array(tensor)
            half = len(arrays) // 2
            yield CacheSnapshot(tensor.shape[2], tuple(arrays[:half]), tuple(arrays[half:]), self.kv, self.scales)

    def _decoded(self, text: bytes) -> str:
        try:
            return text.decode("utf-8", "surrogatepass")
        except UnicodeError as error:
            raise UsageError(f"{self.path} is damaged: its text is not UTF-8.", _COPY) from error

    def _require(self, condition: bool, what: str) -> None:
        if not condition:
            raise UsageError(f"{self.path} is damaged: {what}.", _COPY)

    def _read_header(self, size: int) -> bytes:
        start = self._file.read(_LENGTH_BYTES)
        if not _begins_session(start + self._file.read(1), size):
            raise UsageError(f"{self.path} is not a session file.", _ELSE)
        length = int.from_bytes(start, "little")
        self._file.seek(0)
        return self._file.read(_LENGTH_BYTES + length)

    def _parse(self, text: bytes, size: int) -> tuple[dict[str, str], list[_Tensor]]:
        try:
            header = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{self.path} is damaged: its header is not JSON.", _COPY) from error
        metadata = header.pop("__metadata__", None) if isinstance(header, dict) else None
        if not isinstance(metadata, dict) or metadata.get("format") != _FORMAT:
            raise UsageError(f"{self.path} is not a session file.", _ELSE)
        if metadata.get("version") != _VERSION:
            hint = f"This edgeinfer reads version {_VERSION}: update edgeinfer."
            raise UsageError(f"{self.path} has version {metadata.get('version')!r}.", hint)
        strings = metadata.keys() == set(_FIELDS) and all(isinstance(value, str) for value in metadata.values())
        self._require(strings and metadata["kv"] in KV | LLAMA_KV, "its header lacks fields")
        tensors = sorted((_tensor(name, entry) for name, entry in header.items()), key=lambda t: (t.begin, t.end))
        self._check_tensors(tensors, size, find_kv_type(metadata["kv"]).dtype)
        return metadata, tensors

    def _check_tensors(self, tensors: list[_Tensor], size: int, dtype: str) -> None:
        """Tensors must lie one behind the other, fill the file and be the ones that belong here."""
        for tensor in tensors:
            fits = tensor.dtype in _DTYPES and all(0 <= d <= size for d in tensor.shape)
            self._require(fits, f"{tensor.name!r} has an impossible shape or type")
            nbytes = math.prod(tensor.shape) * _DTYPES[tensor.dtype].itemsize
            self._require(tensor.end - tensor.begin == nbytes, f"{tensor.name!r} has another size than its shape")
        joined = all(a.end == b.begin for a, b in pairwise(tensors))
        whole = len(tensors) >= 2 and joined and (tensors[0].begin, tensors[-1].end) == (0, size)
        self._require(whole, "it is truncated, or its tensors are not in their places")
        ends = [(t.name, t.dtype, len(t.shape)) for t in (tensors[0], tensors[-1])]
        self._require(ends == [("tokens", "I32", 1), ("text", "U8", 1)], "it holds other tensors")
        at = 0
        for tensor in tensors[1:-1]:
            same = len(tensor.shape) == 4 and tensor.shape[::3] == tensors[1].shape[::3] and min(tensor.shape) > 0
            same = same and tensor.shape[1] == tensors[1].shape[1] and tensor.shape[0] % 2 == 0
            named = tensor.name == f"rows.{at}" and _DTYPES[tensor.dtype] == dtype
            self._require(same and named, f"{tensor.name!r} does not belong here")
            at += tensor.shape[2]
        self._require(at == tensors[0].shape[0], "it has not one row for each token")

    def _check_digest(self, header: bytes, claimed: str) -> None:
        place = header.find(claimed.encode())
        self._require(len(claimed) == len(_BLANK) and place >= 0, "it has no digest")
        digest = hashlib.sha256(header[:place] + _BLANK.encode() + header[place + len(_BLANK) :])
        while chunk := self._file.read(_PIECE_BYTES):
            digest.update(chunk)
        self._require(digest.hexdigest() == claimed, "its contents do not match their digest")

    def _array(self, tensor: _Tensor) -> NDArray[Any]:
        array: NDArray[Any] = np.empty(tensor.shape, _DTYPES[tensor.dtype])
        self._file.seek(self._data + tensor.begin)
        read = self._file.readinto(array.data.cast("B")) if array.size else 0
        self._require(read == array.nbytes, "it became shorter while it was read")
        return array


def _tensor(name: str, entry: Any) -> _Tensor:
    """What the header says of a tensor; nonsense becomes a type that does not exist."""
    shape, offsets = (
        _numbers(entry.get(key) if isinstance(entry, dict) else None) for key in ("shape", "data_offsets")
    )
    if shape is None or offsets is None or len(offsets) != 2:
        return _Tensor(name, "", (), 0, 0)
    return _Tensor(name, str(entry.get("dtype")), shape, *offsets)


def _numbers(value: Any) -> tuple[int, ...] | None:
    """A list of whole numbers; None for anything else."""
    whole = isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in value)
    return tuple(value) if whole else None


def _begins_session(start: bytes, size: int) -> bool:
    """Whether these nine bytes begin a file of this many bytes in the safetensors format."""
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    return start[_LENGTH_BYTES:] == b"{" and length <= min(_MOST_HEADER_BYTES, size - _LENGTH_BYTES)


def is_session(path: Path) -> bool:
    """Whether the file looks like a session file, whatever its name.

    Raises:
        UsageError: there is no such file, or it cannot be read.
    """
    with _reading(path) as file:
        return _begins_session(file.read(_LENGTH_BYTES + 1), os.fstat(file.fileno()).st_size)


@contextmanager
def open_session(path: Path) -> Iterator[SessionFile]:
    """Opens and checks a session file.

    Raises:
        UsageError: it is missing, no session file, of another version, truncated or damaged.
    """
    with _reading(path) as file:
        yield SessionFile(path, file)


@contextmanager
def _reading(path: Path) -> Iterator[BufferedReader]:
    try:
        # Opening a pipe would wait for whoever writes into it.
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"{path} is not a file.", _ELSE)
        file = path.open("rb")
    # A path with a zero byte in it is a ValueError.
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', error)}.", _ELSE) from error
    with file:
        yield file
