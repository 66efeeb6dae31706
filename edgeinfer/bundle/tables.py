"""Where each tensor lies in a weights file: one rule for whoever writes, converts or reads one; knows no file.

The exporter writes the graph of the layout that it does not store, and a device makes that layout's weights later: both
go by `lay_out`, so that they agree on every offset.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from edgeinfer.bundle.layouts import Layout
from edgeinfer.bundle.manifest import PARTS, Blob, Manifest, TensorEntry
from edgeinfer.bundle.packing import Parts, QuantizedShape

__all__ = ["Outline", "convert_table", "file_bytes", "lay_out", "stored_tensors", "tensors_in"]

# A blob that fills pages starts on one, so that mapping it touches no neighbour; small ones align to a cache line.
_PAGE_BYTES = 4096
_LINE_BYTES = 64


@dataclass(frozen=True)
class Outline:
    """A tensor before it has a place.

    Attributes:
        quantized: None keeps it float32.
        transposed: float32 matrices only: stored as (K, N).
        shares: name of an earlier tensor whose bytes it is, and nothing else of which matters then.
    """

    name: str
    shape: tuple[int, ...]
    quantized: QuantizedShape | None = None
    transposed: bool = False
    shares: str = ""

    def parts(self, layout: Layout) -> Parts:
        """The arrays it is stored as."""
        if self.quantized is not None:
            return PARTS[layout](self.quantized)
        return {"data": ("float32", self.shape[::-1] if self.transposed else self.shape)}


def lay_out(outlines: Iterable[Outline], layout: Layout) -> tuple[TensorEntry, ...]:
    """Gives every tensor its place in a weights file, in the order given."""
    entries: dict[str, TensorEntry] = {}
    end = 0
    for outline in outlines:
        if outline.shares:
            entries[outline.name] = dataclasses.replace(entries[outline.shares], name=outline.name)
            continue
        blobs: dict[str, Blob] = {}
        for part, (dtype, shape) in outline.parts(layout).items():
            blob = Blob(end, dtype, shape)
            offset = end + -end % (_PAGE_BYTES if blob.nbytes >= _PAGE_BYTES else _LINE_BYTES)
            blobs[part] = Blob(offset, dtype, shape)
            end = offset + blob.nbytes
        entries[outline.name] = _entry(outline, blobs)
    return tuple(entries.values())


def _entry(outline: Outline, blobs: dict[str, Blob]) -> TensorEntry:
    quantized = outline.quantized
    if quantized is None:
        return TensorEntry(outline.name, outline.shape, 32, blobs["data"], transposed=outline.transposed)
    return TensorEntry(
        outline.name,
        outline.shape,
        quantized.bits,
        blobs["data"],
        quantized.block_size,
        blobs["scales"],
        blobs.get("zero_points"),
        blobs.get("low"),
        quantized.paired,
    )


def convert_table(tensors: Iterable[TensorEntry], layout: Layout) -> tuple[TensorEntry, ...]:
    """The table of the same tensors in another layout, as `lay_out` would have made it."""
    return lay_out(_outlines(tensors), layout)


def tensors_in(manifest: Manifest, layout: Layout) -> tuple[TensorEntry, ...]:
    """The table of a bundle's weights in the layout that runs, whether stored or converted to."""
    return manifest.tensors if layout == manifest.layout else convert_table(manifest.tensors, layout)


def _outlines(tensors: Iterable[TensorEntry]) -> Iterator[Outline]:
    owners: dict[TensorEntry, str] = {}
    for tensor in tensors:
        owner = owners.setdefault(_unnamed(tensor), tensor.name)
        quantized = tensor.quantized if tensor.bits < 32 else None
        shares = owner if owner != tensor.name else ""
        yield Outline(tensor.name, tensor.shape, quantized, tensor.transposed, shares)


def stored_tensors(tensors: Iterable[TensorEntry]) -> list[TensorEntry]:
    """Those that bring bytes of their own: not a head that is the embedding."""
    owners: dict[TensorEntry, TensorEntry] = {}
    for tensor in tensors:
        owners.setdefault(_unnamed(tensor), tensor)
    return list(owners.values())


def _unnamed(tensor: TensorEntry) -> TensorEntry:
    """What two tensors of the same bytes have in common."""
    return dataclasses.replace(tensor, name="")


def file_bytes(tensors: Iterable[TensorEntry]) -> int:
    """Length of the weights file."""
    return max((blob.offset + blob.nbytes for tensor in tensors for blob in tensor.blobs), default=0)
