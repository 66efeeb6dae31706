"""A GGUF model file, or the parts one was split into, as one table of metadata and tensors."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

from edgeinfer.bundle.gguf.header import GgufTensor, Part, read_part
from edgeinfer.bundle.gguf.metadata import Metadata, damaged
from edgeinfer.errors import BundleError
from edgeinfer.records import dataclass

_SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_MAX_SPLITS = 1024
# Of the data of each file, evenly spaced, so that gigabytes take some milliseconds.
_SAMPLES, _SAMPLE_BYTES = 64, 16_384
_CHUNK = 1 << 20
_MAPPED_ALIGNMENT = 32  # ggml's TENSOR_ALIGNMENT


@dataclass(frozen=True)
class GgufFile:
    """What the header of a model file says, checked against the file.

    Attributes:
        metadata: of the first file; strings and numbers are Python's, arrays are read when their values are taken.
        tensors: of all files, in their order.
        splits: the files that hold it, most often one.
    """

    metadata: Metadata
    tensors: tuple[GgufTensor, ...]
    splits: tuple[Part, ...]

    @property
    def path(self) -> Path:
        """The file, or the first of its parts, which stands for all."""
        return self.splits[0].path

    @property
    def version(self) -> int:
        """Of the format."""
        return self.splits[0].version

    @property
    def alignment(self) -> int:
        """What tensors' offsets are multiples of, from the first one's on."""
        return self.splits[0].alignment

    @property
    def header_bytes(self) -> int:
        """Up to the end of the (first) file's tensor table."""
        return self.splits[0].header_bytes

    @property
    def data_offset(self) -> int:
        """Where the (first) file's tensors begin."""
        return self.splits[0].data_offset

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(split.size for split in self.splits)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @functools.cached_property
    def mappable(self) -> bool:
        """Whether llama.cpp can use all tensors where they lie in the mapped files, which it insists begin aligned.

        The format allows alignments of 8 and 16, with which some may not.
        """
        return not any(tensor.offset % _MAPPED_ALIGNMENT for tensor in self.tensors)

    @functools.cached_property
    def by_name(self) -> dict[str, GgufTensor]:
        """Tensors by their names."""
        return {tensor.name: tensor for tensor in self.tensors}

    @functools.cached_property
    def fingerprint(self) -> str:
        """64 hexadecimal digits that differ where headers, sizes or samples of the data do; no digest of the whole."""
        digest = hashlib.sha256()
        for split in self.splits:
            digest.update(f"{split.size} {split.header_bytes} ".encode())
            try:
                _sample(split, digest)
            except OSError as error:
                raise BundleError(f"Cannot read {split.path}: {error.strerror}.", "Check the file.") from error
        return digest.hexdigest()


def _sample(split: Part, digest: hashlib._Hash) -> None:
    with split.path.open("rb") as file:
        left = split.header_bytes
        while chunk := file.read(min(left, _CHUNK)):
            digest.update(chunk)
            left -= len(chunk)
        span = max(0, split.size - split.data_offset - _SAMPLE_BYTES)
        for start in sorted({split.data_offset + span * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))


def read_gguf(path: Path) -> GgufFile:
    """Reads the header of a model file; of one that was split into parts, the headers of all, given the first."""
    first = read_part(path)
    metadata = Metadata(path, first.metadata)
    count = metadata.integer("split.count", 1)
    if count <= 1:
        return GgufFile(metadata, first.tensors, (first,))
    parts = [first]
    for number, sibling in enumerate(_siblings(path, metadata, count)):
        if number:
            parts.append(read_part(sibling, number))
            _check_part(parts[-1], metadata, number)
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    if len(tensors) != metadata.integer("split.tensors.count", len(tensors)):
        raise damaged(path, f"its parts have {len(tensors)} tensors, not as many as it says")
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise damaged(path, "a tensor is in two of its parts")
    return GgufFile(metadata, tensors, tuple(parts))


def _siblings(path: Path, metadata: Metadata, count: int) -> list[Path]:
    """The files of all parts, the given first one's among them."""
    name = _SPLIT_NAME.fullmatch(path.name)
    if name is None or int(name[3]) != count:
        hint = "Keep the names that the parts were published with: NAME-00001-of-00003.gguf and so on."
        raise BundleError(f"{path} is one of {count} parts, and its name does not say so.", hint)
    if count > _MAX_SPLITS:
        raise damaged(path, f"it claims to be one of {count} parts, more than the {_MAX_SPLITS} that are read")
    paths = [path.with_name(f"{name[1]}-{number:05}-of-{name[3]}.gguf") for number in range(1, count + 1)]
    if metadata.integer("split.no", 0) or int(name[2]) != 1:
        raise BundleError(f"{path} is not the first of its {count} parts.", f"Give {paths[0]}.")
    missing = [part for part in paths if not part.is_file()]
    if missing:
        raise BundleError(f"{path} is one of {count} parts: {missing[0]} is missing.", "Put all parts into one folder.")
    return paths


def _check_part(part: Part, metadata: Metadata, number: int) -> None:
    """Raises where a file is not the part it should be."""
    own = Metadata(part.path, part.metadata)
    for key, expected in (("split.no", number), ("split.count", metadata.integer("split.count"))):
        if own.integer(key) != expected:
            raise damaged(part.path, f"its {key} is {own.integer(key)}, not {expected}")
    total = metadata.get("split.tensors.count")
    if own.get("split.tensors.count", total) != total:
        raise damaged(part.path, "it counts other tensors than the first part")
