"""An opened bundle: its files, texts and tensors, each compared with its digest where it is read."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.codecs import CODECS, read_rows, segment_places
from edgeinfer.bundle.geometry import FLOAT32, PAGED_KV
from edgeinfer.bundle.layouts import LAYOUTS, NATIVE, WEIGHTS, Layout, model_name, weights_name
from edgeinfer.bundle.manifest import FileEntry, Manifest, TensorEntry
from edgeinfer.bundle.packing import QuantizedMatrix, dense_rows
from edgeinfer.bundle.writing import digest_of
from edgeinfer.core.errors import BundleError, UsageError
from edgeinfer.core.records import dataclass

if TYPE_CHECKING:
    from edgeinfer.bundle.gguf.reader import GgufFile


# The model file of a GGUF bundle, and the suffix of plain GGUF files.
GGUF_MODEL, GGUF_SUFFIX = "model.gguf", ".gguf"
# Larger files hold weights, which are verified while they are loaded: hashing this much takes some 50 ms.
_MOST_HASHED_BYTES = 64 * 1000**2
_AGAIN = "Export or download the bundle again."


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its manifest is valid and every file is there with the right size."""

    path: Path  # the folder that its files lie in
    manifest: Manifest
    texts: Mapping[str, str] = field(default_factory=dict)  # contents of small files that are not there, by their names
    header: GgufFile | None = field(default=None, repr=False, compare=False)  # of a GGUF model file
    digests: bool = True  # the manifest has the sha256 of every file; of a plain GGUF file it has a fingerprint only

    def file(self, name: str) -> Path:
        """Path of a listed file, compared with its digest; weights are verified by their loader."""
        entry = self._entry(name)
        if self.digests and name != WEIGHTS and entry.bytes <= _MOST_HASHED_BYTES:
            self.check(name)
        return self.path / name

    @property
    def gguf(self) -> GgufFile:
        if self.header is None:
            raise BundleError(f"{self.path} contains no GGUF file.", f"Its backend is {self.manifest.backend}.")
        return self.header

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Layouts that the bundle has a graph for, the stored one first."""
        stored = self.manifest.layout
        return (stored, *(other for other in LAYOUTS if other != stored and self.has(model_name(stored, other))))

    def kv_types(self, layout: Layout) -> tuple[str, ...]:
        """Types of cache that the graph of a layout can have, float32 first."""
        return PAGED_KV if layout == NATIVE else (FLOAT32,)

    @property
    def graphs(self) -> dict[str, Layout]:
        """Names of the graphs, with the layout that each reads."""
        return {model_name(self.manifest.layout, layout): layout for layout in self.layouts}

    def model_file(self, layout: Layout) -> Path:
        return self.file(model_name(self.manifest.layout, layout))

    def weights_file(self, layout: Layout) -> Path:
        """Path of the weights in a layout, where its graph looks for them once they are converted to it."""
        return self.path / weights_name(self.manifest.layout, layout, quantized=self.quantized)

    @property
    def quantized(self) -> bool:
        """Whether any weight is quantized, so that layouts differ."""
        return any(t.bits < 32 for t in self.manifest.tensors)

    def has(self, name: str) -> bool:
        """Whether the bundle lists a file or has its text."""
        return name in self.texts or name in self.manifest.files

    def read_text(self, name: str) -> str:
        """Contents of a small text file, checked against its digest."""
        if name in self.texts:
            return self.texts[name]
        self._entry(name)
        with reading(self.path / name):
            data = (self.path / name).read_bytes()
            self._compare(name, hashlib.sha256(data).hexdigest())
            return data.decode("utf-8")

    def read_object(self, name: str) -> dict[str, Any]:
        """The JSON object in a small file, checked against its digest."""
        try:
            value = json.loads(self.read_text(name))
        except (ValueError, RecursionError) as error:
            raise BundleError(f"{name} is not valid JSON: {error}.", _AGAIN) from error
        if not isinstance(value, dict):
            raise BundleError(f"{name} is not a JSON object.", _AGAIN)
        return value

    def check(self, name: str) -> None:
        if not self.digests:
            hint = "Compare its sha256 with the one that its publisher lists."
            raise UsageError(f"{self.path / name} is not an edgeinfer bundle and comes without a digest.", hint)
        with reading(self.path / name):
            self._compare(name, digest_of(self.path / name))

    def verify(self) -> None:
        for name in self.manifest.files:
            self.check(name)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A weight as float32, in its logical shape."""
        entry = self.manifest.tensor(name)
        if entry.bits == 32:
            data = read_rows(self.path / WEIGHTS, entry, entry.data, 0, entry.data.shape[0])
            return data.T if entry.transposed else data
        return self.dense(entry, 0, entry.shape[0])

    def dense(self, entry: TensorEntry, start: int, stop: int) -> NDArray[np.float32]:  # (stop - start, K)
        """Rows start..stop-1 of a quantized matrix as float32."""
        if not entry.segments:
            return dense_rows(self.rows(entry, start, stop), entry.quantized)
        parts = []
        for row, _, part in segment_places(entry.quantized):
            first, last = max(start, row), min(stop, row + part.n)
            if first < last:
                parts.append(dense_rows(self.rows(entry, first, last), part))
        return np.concatenate(parts) * np.float32(entry.factor)

    def rows(self, entry: TensorEntry, start: int, stop: int) -> QuantizedMatrix:
        return CODECS[entry.layout].read(self.path / WEIGHTS, entry, start, stop)

    def _entry(self, name: str) -> FileEntry:
        if name not in self.manifest.files:
            raise BundleError(f"{self.path} has no {name}.", _AGAIN)
        return self.manifest.files[name]

    def _compare(self, name: str, digest: str) -> None:
        if digest != self.manifest.files[name].sha256:
            raise BundleError(f"{name} does not match its sha256 in the manifest.", _AGAIN)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns errors of reading a file of a bundle into a BundleError, except refused memory."""
    try:
        yield
    except UnicodeError as error:
        raise BundleError(f"{path} is not UTF-8 text.", _AGAIN) from error
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError(str(error)) from error
        raise BundleError(f"Cannot read {path}: {error.strerror}.", "Check the file and its permissions.") from error
