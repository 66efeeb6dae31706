"""What was measured and learned between sessions, kept for each device, bundle and kernel as costs and arrays.

There is a folder of the user's cache for each combination, named by its digest. What lies there was made from private
conversations (n-grams of tokens), so no other user may read it. It may be damaged or forged, so nothing read from it is
trusted: arrays are plain numbers of bounded size, never pickles, and what cannot be read is dropped and made again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import mmap
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.array_file import LENGTH_BYTES, NUMPY_TYPES, encode_header, parse_index, type_name
from edgeinfer.bundle.layouts import Layout
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.writing import storage_errors, write_file
from edgeinfer.core.errors import StorageError, UsageError
from edgeinfer.core.user_files import make_private, user_cache, written
from edgeinfer.core.version import VERSION
from edgeinfer.runtime.profile.costs import Costs, DraftCosts, PassCosts
from edgeinfer.runtime.system.machine import processor_name

T = TypeVar("T")

_log = logging.getLogger("edgeinfer")

_COSTS = "costs.json"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
# Files of a profile, and the temporary siblings that a killed process leaves of them.
_OURS = re.compile(r"costs\.json|[a-z0-9_-]+\.safetensors|\.(costs\.json|[a-z0-9_-]+\.safetensors)\.\w+")
# Costs are a kilobyte. The largest table of a drafter, candidates of each of 150 thousand tokens, is 5 MB.
_MOST_COSTS_BYTES = 1 << 16
_MOST_ARRAYS_BYTES = 32 << 20
_MOST_PROFILE_BYTES = 64 << 20
# Read at once to compare.
_PIECE_BYTES = 1 << 16
# Of all profiles together: every version, bundle and number of threads makes one.
_MOST_BYTES = 256 << 20
# Written between two looks at all profiles, by which they may be larger together for a while.
_MOST_BEHIND_BYTES = 8 << 20
_MOST_ARRAYS, _MOST_HEADER_BYTES = 64, 1 << 16
_SUM = "crc32"


def profile_folder(
    bundle: Bundle,
    layout: Layout,
    kernel: str,
    threads: int,
    exact: bool,
    drafter: Bundle | None = None,
    variant: str = "",
) -> Path:
    """Where the profile of a bundle belongs as it runs here, in a way (`variant`) in which passes cost or round
    differently from the usual one; the folder need not exist."""
    files = [{n: e.sha256 for n, e in each.manifest.files.items()} for each in (bundle, drafter) if each is not None]
    key = json.dumps([files, layout, kernel, threads, exact, variant, VERSION], sort_keys=True)
    return _all_profiles() / hashlib.sha256(key.encode()).hexdigest()


def _all_profiles() -> Path:
    return user_cache() / "edgeinfer" / "speculation"


def forget(folder: Path | None = None) -> None:
    """Removes a profile, or all of them."""
    folders = [folder] if folder is not None else [f for f in _children(_all_profiles()) if _DIGEST.fullmatch(f.name)]
    for each in folders:
        with storage_errors(each):
            _remove(each)


def _remove(folder: Path) -> None:
    """Remove a profile's files, and the folder if it is empty then; links are not followed."""
    if not folder.is_dir() or folder.is_symlink():
        return
    for path in _children(folder):
        if _OURS.fullmatch(path.name):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _bytes(folder: Path, but: str = "") -> int:
    total = 0
    for path in _children(folder):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size if path.name != but else 0
    return total


def stamped(passes: PassCosts, drafts: DraftCosts) -> Costs:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Costs(passes, drafts, processor_name(), now)


class DeviceProfile:
    """A folder of measured costs and learned arrays, made at the first save; None keeps nothing. One that is damaged or
    unusable counts as empty and never raises."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._written = 0  # bytes since room was last made

    @classmethod
    def open(cls, folder: Path | None) -> Self:
        """Open the profile in a folder, which is made private if it exists."""
        profile = cls(folder)
        profile._guarded(lambda folder: make_private(folder) if os.path.lexists(folder) else None)
        return profile

    @property
    def keeps(self) -> bool:
        """Whether anything is kept; false without a usable folder."""
        return self._folder is not None

    def costs(self) -> Costs | None:
        """Costs measured earlier on this device; None where there are none."""
        costs = self._read(_COSTS, _MOST_COSTS_BYTES, lambda file: Costs.from_dict(json.loads(file.read())))
        if costs is None or costs.processor == processor_name():
            return costs
        _log.info("The costs in %s belong to another device and will be measured again.", self._folder)
        return None

    def save_costs(self, costs: Costs) -> None:
        data = json.dumps(dataclasses.asdict(costs), indent=1) + "\n"
        self._guarded(lambda folder: self._keep(folder / _COSTS, data.encode(), _MOST_COSTS_BYTES))

    def arrays(self, name: str) -> dict[str, NDArray[Any]] | None:
        """Arrays kept under a name; None where there are none. They can be written to."""
        return self._read(_file_name(name), _MOST_ARRAYS_BYTES, _read_arrays)

    def save_arrays(self, name: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keeps arrays of numbers under a name; without any, drops what was kept."""
        file_name = _file_name(name)
        for key, array in arrays.items():
            if not _plain(array.dtype) or not _KEY.fullmatch(key):
                raise UsageError(f"{key!r} of {name} cannot be kept.", "Only arrays of plain numbers with names can.")
        if arrays:
            data = _encoded(arrays)
            self._guarded(lambda folder: self._keep(folder / file_name, data, _MOST_ARRAYS_BYTES))
        else:
            self.drop(name)

    def drop(self, name: str) -> None:
        """Removes the arrays of a name, which their reader could not use."""
        file_name = _file_name(name)
        self._guarded(lambda folder: (folder / file_name).unlink(missing_ok=True))

    def _guarded(self, act: Callable[[Path], object]) -> None:
        """Use the folder; if that fails, warn once and keep nothing from then on."""
        if self._folder is None:
            return
        try:
            with storage_errors(self._folder):
                act(self._folder)
        except StorageError as error:
            _log.warning("%s What drafters learn will not be kept.", error.message)
            self._folder = None

    def _keep(self, path: Path, data: bytes | memoryview, most: int) -> None:
        """Write a file unless its contents are the same already."""
        folder = path.parent
        if len(data) > most or _bytes(folder, but=path.name) + len(data) > _MOST_PROFILE_BYTES:
            _log.warning("%s would be %d MB and is not kept.", path, len(data) >> 20)
            return
        if _says(path, data):
            os.utime(folder)  # it is in use
            return
        make_private(folder)
        # Looking at every profile takes longer than writing one, so it is done for some megabytes at a time.
        if not self._written or self._written + len(data) > _MOST_BEHIND_BYTES:
            _make_room(folder, len(data))
            self._written = 0
        self._written += len(data)
        # What a failing machine leaves half written is found damaged and made again, so nothing waits for the disk.
        write_file(path, data, durable=False)

    def _read(self, name: str, most: int, parse: Callable[[BinaryIO], T]) -> T | None:
        """Read a file of the profile; None if there is none, or it was damaged and dropped."""
        if self._folder is None:
            return None
        path = self._folder / name
        try:
            if not os.path.lexists(path):
                return None
            with path.open("rb") as file:
                if path.is_symlink() or os.fstat(file.fileno()).st_size > most:
                    raise StorageError("it is a link, or too large")
                return parse(file)
        # What damage makes json, zipfile and numpy raise is not documented, and none of it may stop a session.
        except Exception as error:
            reason = str(error).rstrip(".") or type(error).__name__
            _log.warning("%s cannot be read and is discarded: %s.", path, reason)
            with contextlib.suppress(OSError):
                path.unlink()
            return None


def _says(path: Path, data: bytes | memoryview) -> bool:
    view = memoryview(data)
    with contextlib.suppress(OSError):
        if path.is_symlink() or path.stat().st_size != len(view):
            return False
        with path.open("rb") as file:
            pieces = (view[start : start + _PIECE_BYTES] for start in range(0, len(view), _PIECE_BYTES))
            return all(file.read(_PIECE_BYTES) == piece for piece in pieces)
    return False


def _file_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot be a name in a profile.", "Use lower-case letters, digits, - and _.")
    return f"{name}.safetensors"


def _make_room(folder: Path, size: int) -> None:
    """Removes the profiles that were written longest ago until all together fit."""
    others = [f for f in _children(folder.parent) if _DIGEST.fullmatch(f.name) and f != folder]
    sizes = {other: _bytes(other) for other in others}
    total = sum(sizes.values()) + _bytes(folder) + size
    for other in sorted(others, key=written):
        if total <= _MOST_BYTES:
            return
        _remove(other)
        total -= sizes[other]


def _plain(dtype: np.dtype[Any]) -> bool:
    return dtype.isnative and dtype in NUMPY_TYPES.values()


def _encoded(arrays: Mapping[str, NDArray[Any]]) -> memoryview:
    """A file of arrays. It lies in a mapping of its own, which goes back to the system as soon as nothing refers to it.
    Blocks of the C library of this size would be left behind in the heap of every thread that ever saved, as long as
    replies keep what is freed."""
    pieces = [np.asarray(array, order="C").reshape(-1).view(np.uint8).data for array in arrays.values()]
    shapes = {key: (type_name(array.dtype), array.shape) for key, array in arrays.items()}
    header = encode_header(shapes, {_SUM: _checksum(pieces)})
    buffer = mmap.mmap(-1, len(header) + sum(map(len, pieces)))
    for piece in (header, *pieces):
        buffer.write(piece)
    return memoryview(buffer)


def _read_arrays(file: BinaryIO) -> dict[str, NDArray[Any]]:
    data = memoryview(file.read())
    index = parse_index(bytes(data[: _MOST_HEADER_BYTES + LENGTH_BYTES]), len(data), _MOST_HEADER_BYTES)
    if len(index.arrays) > _MOST_ARRAYS or index.notes != {_SUM: _checksum([data[len(index.header) :]])}:
        raise StorageError("it is damaged")
    arrays: dict[str, NDArray[Any]] = {}
    for each in index.arrays:
        if not _KEY.fullmatch(each.name) or each.dtype not in NUMPY_TYPES:
            raise StorageError(f"it holds {each.name!r}")
        found = np.frombuffer(data, NUMPY_TYPES[each.dtype], math.prod(each.shape), each.offset)
        if each.dtype == "BOOL" and (found.view(np.uint8) > 1).any():
            raise StorageError("a boolean array holds other values")
        arrays[each.name] = found.reshape(each.shape).copy()
    return arrays


def _checksum(pieces: Iterable[memoryview]) -> str:
    total = 0
    for piece in pieces:
        total = zlib.crc32(piece, total)
    return f"{total:08x}"
