"""A GGUF file as the weights of a bundle: which rows of its tensors make up each of ours, and its conversion.

The tensors that a checkpoint's export would write are planned, and the plans inverted: one table of names serves both
directions, and a tensor that is missing or left over refuses the file.
"""

from __future__ import annotations

import fnmatch
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.array_file import ArrayFileError, read_into
from edgeinfer.bundle.gguf.metadata import damaged
from edgeinfer.bundle.gguf.reader import GgufFile, GgufTensor, read_gguf
from edgeinfer.bundle.gguf_bundle import geometry_of, manifest_of
from edgeinfer.bundle.kinds import KINDS
from edgeinfer.bundle.layouts import LAYOUT_VERSIONS, NATIVE, PORTABLE, WEIGHTS, Layout
from edgeinfer.bundle.manifest import Capabilities, Manifest, TensorEntry, capabilities_in
from edgeinfer.bundle.packing import find_expert
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.tables import Outline, file_bytes, lay_out
from edgeinfer.bundle.writing import seal, write_bundle
from edgeinfer.core.errors import BundleError, EdgeInferError, StorageError
from edgeinfer.core.results import Progress
from edgeinfer.export.architectures import ARCHITECTURES
from edgeinfer.export.architectures.base import Architecture
from edgeinfer.export.architectures.described import Described, pad_heads
from edgeinfer.export.architectures.mixtures import refine_granite, refine_granite_moe
from edgeinfer.export.architectures.planned_tensors import PlannedTensors, places_of
from edgeinfer.export.architectures.tensors import Shape, Source, TensorPlan, adaptable_modules
from edgeinfer.export.gguf.architectures import GgufArchitecture
from edgeinfer.export.gguf.dense import XIELU_KEYS
from edgeinfer.export.gguf.description import read_decoder
from edgeinfer.export.gguf.keys import unread, written
from edgeinfer.export.gguf.mamba import decayed
from edgeinfer.export.gguf.reading_tokenizer import read_tokenizer, tokenizer_refusal
from edgeinfer.export.gguf.rest import Planned, restore, write_rest
from edgeinfer.export.gguf.tensors import ROPE_TENSORS, PlannedGgufTensor, gguf_tensors
from edgeinfer.export.gguf.writer import GGUF_ARCHITECTURES
from edgeinfer.export.graph.decoder import decoder_graphs
from edgeinfer.export.source.checkpoint import OpenFiles
from edgeinfer.export.source.hf_config import HFConfig
from edgeinfer.export.source.sidecar import Sidecar
from edgeinfer.export.weights.calibrated import write_plain
from edgeinfer.export.weights.planning import outline
from edgeinfer.quant.policy import QuantPlan, QuantScheme, is_quantizable

# What `TensorPlan.kept` is asked for; a file's types have bits of their own.
_BITS = 4
FLOAT_TYPES = frozenset({"F32", "F16", "BF16"})
# Tensors of what sees or hears, whose weights a text needs not.
_IGNORED_TENSORS = ("v.*", "mm.*", "a.*", *ROPE_TENSORS)
# Values that are read at a time.
_RUN_VALUES = 1 << 20


@dataclass(frozen=True)
class GgufModel:
    """A file that the native engine reads."""

    gguf: GgufFile
    spec: DecoderSpec
    plans: tuple[TensorPlan, ...]  # the tensors of a bundle, of the file's
    shapes: Mapping[str, Shape]  # of the file's tensors, with rows as wide as ours
    table: _Table

    @property
    def nbytes(self) -> int:
        """Bytes of the weights of its bundle."""
        return file_bytes(self.table.entries)


def read_model(gguf: GgufFile) -> GgufModel:
    """Reads the header; raises EdgeInferError for a file that is damaged or that the native engine does not read."""
    family, arch = _find(gguf)
    geometry_of(gguf)
    arch = _fused(gguf, arch)
    spec = read_decoder(gguf, arch)
    config = HFConfig({**arch.facts, **dict(_multipliers(gguf, arch))})
    for what in arch.missing(config, spec):
        raise unread(f"{arch.name} with {what}")
    return _planned(gguf, family, arch, config, spec)


def look(source: GgufFile | Path) -> GgufModel | str:
    """Reads the header of a file; says why the native engine does not read one, naming the key or tensor."""
    try:
        gguf = source if isinstance(source, GgufFile) else read_gguf(source)
        model = read_model(gguf)
        return tokenizer_refusal(gguf) or model
    except EdgeInferError as error:
        path = source if isinstance(source, Path) else source.path
        return error.message.removeprefix(f"{path}: ").rstrip(".")


def convert_gguf(
    source: GgufModel | Path,
    out: Path,
    name: str = "",
    progress: Progress | None = None,
    *,
    replace_existing: bool = False,
) -> None:
    """Writes a bundle of a file, whose weights keep their types, to `out`, whole or not at all.

    Args:
        progress: called with what is being written, how many weights are done and how many there are.
    """
    model = read_model(read_gguf(source)) if isinstance(source, Path) else source
    convert_model(model, read_tokenizer(model.gguf), out, name, progress, replace_existing=replace_existing)


def _require_types(gguf: GgufFile, plans: Iterable[TensorPlan]) -> None:
    """Refuses types of tensors that the kernel has no product for, or that are not kept in vectors."""
    for source in (source for plan in plans for source in plan.sources):
        stored = gguf.by_name.get(source.name)
        if stored is not None and not source.packing and stored.type.name not in _DTYPES:
            raise unread(f"{stored.name} is {stored.type.name}")


def _find(gguf: GgufFile) -> tuple[Architecture, GgufArchitecture]:
    name = gguf.metadata.text("general.architecture")
    every = ((kind, each) for kind, arch in GGUF_ARCHITECTURES.items() for each in (arch, *arch.others))
    kind, arch = next((found for found in every if found[1].name == name), ("", None))
    if arch is None:
        raise unread(f"its architecture is {name}")
    family = next(family for family in ARCHITECTURES if family.model_types[0] == kind)
    if family.refine is refine_granite_moe:
        # The description has the scale of scores, which export keeps out of it.
        family = replace(family, refine=refine_granite)
    return family, arch


def _fused(gguf: GgufFile, arch: GgufArchitecture) -> GgufArchitecture:
    """The architecture with one tensor for queries, keys and values, where the file has them so."""
    if "blk.0.attn_qkv.weight" not in gguf.by_name or "attn.qkv" in arch.tensors or arch.neighbours:
        return arch
    fused = {"attn.qkv": ("attn_qkv.weight",), "attn.qkv_bias": ("attn_qkv.bias",)}
    return replace(arch, tensors={**arch.tensors, **fused})


def _multipliers(gguf: GgufFile, arch: GgufArchitecture) -> Iterator[tuple[str, float]]:
    """Factors that are fields of config.json."""
    for name, key, usual in arch.multipliers:
        whole = f"{arch.name}.{key}"
        yield name, written(gguf.metadata.number(whole)) if whole in gguf.metadata else usual


def _planned(
    gguf: GgufFile, family: Architecture, arch: GgufArchitecture, config: HFConfig, spec: DecoderSpec
) -> GgufModel:
    """Plans our tensors by the file's.

    Both directions are known: how ours are made of a checkpoint's tensors, and how those of a file are. Rows of the
    checkpoint's that ours need are looked for in the file.
    """
    named = family.tensors(config, spec)
    stored = named if arch.refined else replace(family, refine=None).tensors(config, spec)
    there = _Stored(gguf, spec)
    written = arch.planned(config, spec, stored)
    plans = {plan.name: plan for plan in written}
    for tensor in gguf_tensors(spec, written, arch):
        there.add(tensor, plans)
    there.require_all()
    plans = {plan.name: there.plan(plan) for plan in named}
    grown = plans["embed"].sources[0]
    if spec.tied and grown.packing:
        # The factor is of the rows that are looked up alone: the head has the file's own numbers.
        [norm] = plans["final_norm"].sources
        plans["final_norm"] = TensorPlan("final_norm", (replace(norm, scale=norm.scale * grown.scale),))
    _require_types(gguf, plans.values())
    table = _Table.of(arch, spec, named, tuple(plans.values()))
    return GgufModel(gguf, spec, tuple(plans.values()), there.shapes, table)


@dataclass(frozen=True)
class _Place:
    """Rows of a checkpoint's tensor in one of the file's."""

    tensor: PlannedGgufTensor
    source: Source  # as it is written
    start: int  # of the rows, in the source
    first: int  # row in the file's tensor, whose rows are as wide as ours
    count: int


class _Stored:
    """Where the rows of a checkpoint's tensors lie in a file."""

    def __init__(self, gguf: GgufFile, spec: DecoderSpec) -> None:
        self.shapes: dict[str, Shape] = {}  # of the file's tensors, with rows as wide as ours
        self._gguf, self._spec = gguf, spec
        self._places: dict[Source, list[_Place]] = {}

    def add(self, tensor: PlannedGgufTensor, plans: Mapping[str, TensorPlan]) -> None:
        stored = self._gguf.by_name.get(tensor.name)
        if stored is None:
            raise unread(f"{tensor.name} is missing")
        if _plain(stored.shape) != _plain(tensor.shape):
            raise unread(f"{tensor.name} has shape {stored.shape} instead of {tensor.shape}")
        first = 0
        for part in tensor.parts:
            before = 0
            for source in plans[part.plan].sources:
                start, stop = max(part.start - before, 0), min(part.stop - before, source.padded_shape[0])
                if start < stop:
                    place = _Place(tensor, source, start, first, stop - start)
                    self._places.setdefault(_origin(source), []).append(place)
                    first += stop - start
                before += source.padded_shape[0]
        width = plans[tensor.parts[0].plan].shape[1:]
        self.shapes[tensor.name] = (first, *width)

    def require_all(self) -> None:
        """Refuses tensors that are not known."""
        left = sorted(name for name in self._gguf.by_name.keys() - self.shapes if not _ignored(self._spec, name))
        if left:
            raise unread(f"{left[0]} is not known")

    def plan(self, named: TensorPlan) -> TensorPlan:
        """One of our tensors, of the file's rows."""
        if named.name.endswith(".mlp.xielu"):
            return self._from_keys(named)
        return TensorPlan(named.name, tuple(found for source in named.sources for found in self._find(named, source)))

    def _from_keys(self, named: TensorPlan) -> TensorPlan:
        """One that the file has as metadata: a number of each of its sources for every layer."""
        layer = int(named.name.split(".")[1])
        keys = [replace(each, name=key) for each, key in zip(named.sources, XIELU_KEYS, strict=True)]
        self.shapes |= {each.name: (self._spec.num_layers,) for each in keys}
        return TensorPlan(named.name, tuple(replace(each, runs=((layer, layer + 1),)) for each in keys))

    def _find(self, named: TensorPlan, source: Source) -> Iterator[Source]:
        places, count = self._places.get(_origin(source), []), source.padded_shape[0]
        if not places:
            raise unread(f"{named.name} is not in it row by row")
        whole = places[0]
        if whole.start == 0 and (whole.count, whole.source.pieces) == (count, source.pieces):
            yield self._taken(source, whole, ((whole.first, whole.first + count),))
            return
        wanted = _rows(source, 0, count)
        for place in places:
            if place.tensor.rows > 1:
                raise unread(f"{place.tensor.name} has its rows in another order")
        where = np.full(
            (2, max(wanted.max(), *(_rows(p.source, p.start, p.start + p.count).max() for p in places)) + 1), -1
        )
        for index, place in enumerate(places):
            rows = _rows(place.source, place.start, place.start + place.count)
            where[:, rows] = np.full(place.count, index), np.arange(place.first, place.first + place.count)
        which, rows = where[:, wanted]
        if which.min() < 0:
            raise unread(f"{named.name} is not in it row by row")
        names = np.array([places[index].tensor.name for index in which])
        for part in np.split(np.arange(count), np.flatnonzero(names[1:] != names[:-1]) + 1):
            steps = np.flatnonzero(np.diff(rows[part]) != 1) + 1
            runs = tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(rows[part], steps))
            yield self._taken(source, places[which[part[0]]], runs)

    def _taken(self, source: Source, place: _Place, runs: tuple[tuple[int, int], ...]) -> Source:
        """Rows of a file's tensor, with what turns its values into ours."""
        tensor, there = place.tensor, place.source
        count, (total, *_) = sum(stop - start for start, stop in runs), self.shapes[tensor.name]
        paired = (tensor.rows, self._spec.rope.dim) if tensor.rows > 1 else ()
        logged = tensor.change is decayed
        if tensor.change is not None and not (paired or logged):
            raise unread(f"{tensor.name} has its columns in another order")
        if (paired and count != total) or there.softplus != source.softplus:
            raise unread(f"{tensor.name} has its values in another form")
        kind = self._gguf.by_name[tensor.name].type.name
        return Source(
            tensor.name,
            (count, *source.padded_shape[1:]),
            # Matrices alone are kept, in 16 bits too.
            packing=kind if kind in KINDS and len(source.padded_shape) == 2 else "",
            paired=paired,
            runs=() if count == total and len(runs) == 1 else runs,
            logged=logged,
            softplus=source.softplus,
            offset=(source.offset - there.offset) * there.scale,
            scale=source.scale / there.scale,
        )


def _origin(source: Source) -> Source:
    """A checkpoint's tensor, or one of several in it, whichever of its rows are taken."""
    plain = replace(source, scale=1.0, offset=0.0, softplus=False)
    return plain if source.heads else replace(plain, shape=source.shape[1:], pieces=())


def _rows(source: Source, start: int, stop: int) -> NDArray[np.int64]:  # (stop - start,)
    """The rows of a checkpoint's tensor that are these of a source."""
    return np.arange(start, stop) if source.heads else places_of(source, start, stop)


def _plain(shape: Shape) -> Shape:
    """A shape without axes of one."""
    return tuple(size for size in shape if size != 1)


def _ignored(spec: DecoderSpec, name: str) -> bool:
    """Whether a tensor is none of the decoder's: a module for drafts, or of another sense."""
    layer = name.split(".")[1] if name.startswith("blk.") else ""
    return (layer.isdecimal() and int(layer) >= spec.num_layers) or any(
        fnmatch.fnmatchcase(name, pattern) for pattern in _IGNORED_TENSORS
    )


@dataclass(frozen=True)
class _Table:
    """The tensors of the bundle that a file becomes."""

    described: Described
    entries: tuple[TensorEntry, ...]
    layout: Layout
    quant: QuantPlan

    @classmethod
    def of(
        cls,
        arch: GgufArchitecture,
        spec: DecoderSpec,
        named: Iterable[TensorPlan],
        plans: tuple[TensorPlan, ...],
    ) -> _Table:
        """Makes it of plans of the file's tensors; `named` are of a checkpoint's, whose names say what they are."""
        described = pad_heads(Described(spec, plans))
        packed = any(source.padding and source.packing for plan in described.plans for source in plan.sources)
        if packed:
            raise unread(f"{arch.name}.attention.key_length is {spec.head_dim}")
        matrices = (plan for plan in described.plans if is_quantizable(plan.name, plan.shape))
        schemes = {plan.name: scheme for plan in matrices if (scheme := plan.kept(_BITS)) is not None}
        for plan in described.plans:
            _require_alike(plan, schemes.get(plan.name))
        layout = NATIVE if spec.native_only or schemes else PORTABLE
        outlines = [outline(plan, schemes.get(plan.name)) for plan in described.plans]
        if spec.tied:
            outlines.append(Outline("head", outlines[0].shape, shares="embed"))
        modules = {plan.name: adaptable_modules(plan) for plan in named}
        entries = (replace(entry, modules=modules.get(entry.name, ())) for entry in lay_out(outlines, layout))
        return cls(described, tuple(entries), layout, QuantPlan(schemes, "gguf", kept=frozenset(schemes)))

    @property
    def planned(self) -> Planned:
        return self.described.plans, self.entries[: len(self.described.plans)]


def _require_alike(plan: TensorPlan, scheme: QuantScheme | None) -> None:
    """Refuses an expert's matrix of two types, of which no operator has products, or with types in part."""
    if find_expert(plan.name) is None or (scheme is not None and len(scheme.segments) == 1):
        return
    kinds = {source.packing or "F32": source.name for source in plan.sources}
    if kinds.keys() - FLOAT_TYPES:
        raise unread(" and ".join(f"{name} is {kind}" for kind, name in sorted(kinds.items())))


def convert_model(
    model: GgufModel,
    sidecar: Sidecar,
    out: Path,
    name: str = "",
    progress: Progress | None = None,
    *,
    replace_existing: bool = False,
) -> None:
    """Writes a bundle of a file's weights and of texts that were read before; memory is a few MB."""
    table, gguf = model.table, model.gguf
    with GgufTensors(gguf, model.shapes) as tensors, write_bundle(out, replace_existing=replace_existing) as work:
        _require_room(work, model.nbytes)
        with (work / WEIGHTS).open("wb") as file:
            planned = PlannedTensors(tensors, table.described.plans)
            write_plain(file, planned, table.planned[1], table.quant, progress)
        write_rest(work, gguf, table.planned)
        _write_around(work, model, sidecar, name)


def write_sketch(model: GgufModel, folder: Path) -> None:
    """Writes what a plan is made by: the bundle of a file, with a hole in place of its weights."""
    with (folder / WEIGHTS).open("wb") as file:
        file.truncate(model.nbytes)
    _write_around(folder, model, read_tokenizer(model.gguf), digests={WEIGHTS: "0" * 64})


def _write_around(
    work: Path, model: GgufModel, sidecar: Sidecar, name: str = "", digests: Mapping[str, str] | None = None
) -> None:
    """Writes everything but the weights of a bundle."""
    table = model.table
    described, entries = table.described, table.entries
    spec, named = described.spec, manifest_of(model.gguf)
    manifest = Manifest(
        name=name or named.name,
        architecture=named.architecture,
        backend="onnx",
        geometry=spec.geometry,
        parameters=described.parameters,
        capabilities=capabilities_in(Capabilities(True, True, True), entries, table.layout, spec.moe),
        decoder=spec,
        tensors=entries,
        layout=table.layout,
        layout_version=LAYOUT_VERSIONS[table.layout],
        plan=table.quant.record(),
        exits=tuple(range(1, spec.num_layers + 1)),
        export={"format": "gguf", "fingerprint": model.gguf.fingerprint, **named.export},
    )
    sidecar.write(work)
    for graph, data in decoder_graphs(spec, entries, table.layout).items():
        (work / graph).write_bytes(data)
    seal(work, manifest, digests)


def restore_gguf(
    bundle: Bundle, out: Path, progress: Progress | None = None, *, replace_existing: bool = False
) -> None:
    """Writes the file again that a bundle was made of, byte for byte, whole or not at all."""
    restore(bundle, out, lambda gguf: read_model(gguf).table.planned, progress, replace_existing=replace_existing)


def _require_room(work: Path, needed: int) -> None:
    free = shutil.disk_usage(work).free
    if free < needed:
        message = f"Its weights take {needed / 1e9:.1f} GB of disk space, and only {free / 1e9:.1f} GB are free."
        raise StorageError(message, "Free some space or choose another place.")


class GgufTensors(OpenFiles):
    """The tensors of a file as rows: floats as float32, other types as the bytes of their blocks.

    Args:
        shapes: of the tensors, which the file may store with further axes of one.
    """

    def __init__(self, gguf: GgufFile, shapes: Mapping[str, Shape]) -> None:
        super().__init__()
        self._gguf, self._shapes = gguf, shapes

    def read(
        self, name: str, start: int = 0, stop: int | None = None, *, within: int | None = None
    ) -> NDArray[np.float32]:
        shape = self._shapes[name] if within is None else self._shapes[name][1:]
        stop = shape[0] if stop is None else stop
        if name not in self._gguf.by_name:
            return self._gguf.metadata.array(name, "float32").numbers()[start:stop].astype(np.float32)
        tensor = self._gguf.by_name[name]
        raw = self._bytes(tensor, shape, start, stop, within).view(_DTYPES[tensor.type.name])
        values = raw.astype(np.uint32) << np.uint32(16) if tensor.type.name == "BF16" else raw
        floats = values.view(np.float32) if tensor.type.name == "BF16" else values.astype(np.float32, copy=False)
        return floats.reshape(stop - start, *shape[1:])

    def read_packed(self, name: str, start: int, stop: int, *, within: int | None = None) -> NDArray[np.uint8]:
        """Rows of a matrix as bytes, (rows, bytes of a row)."""
        tensor, shape = self._gguf.by_name[name], self._shapes[name]
        shape = shape if within is None else shape[1:]
        return self._bytes(tensor, shape, start, stop, within).reshape(stop - start, -1)

    def _bytes(
        self, tensor: GgufTensor, shape: Shape, start: int, stop: int, within: int | None
    ) -> NDArray[np.uint8]:  # (bytes,)
        row = tensor.type.row_bytes(math.prod(shape[1:]))
        data = np.empty((stop - start) * row, np.uint8)
        split = self._gguf.splits[tensor.split]
        try:
            file = self._open(split.path)
            file.seek(tensor.offset + ((within or 0) * shape[0] + start) * row)
            read_into(file, data)
        except ArrayFileError as error:
            raise damaged(split.path, "it changed while it was read") from error
        except OSError as error:
            raise BundleError(f"Cannot read {split.path}: {error.strerror}.", "Check the file.") from error
        return data


_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
