"""Adapters of a bundle: packed into two arrays, and graphs with an operator where they change a layer.

The operator edgeinfer.Adapter stands behind the product of a layer that any adapter changes. It is in no bundle: graphs
get it when they are loaded with adapters, so that without any nothing is different. What one pass has of each adapter
is a row of numbers, so that rows of different adapters, and of none, share it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import graph
from edgeinfer.bundle.manifest import Manifest, TensorEntry
from edgeinfer.bundle.peft import AdapterFile, LowRank, Module, module_key, open_adapter
from edgeinfer.bundle.protobuf import fields, length_delimited, number
from edgeinfer.core.errors import AdapterError, BundleError
from edgeinfer.core.records import dataclass

# A place in the weights of both factors, rank, first output and number of outputs: a part of the operator's table.
_ENTRY = 5
# Numbers of fields: onnx/onnx.proto.
_MODEL_GRAPH, _NODE, _GRAPH_INPUT = 7, 1, 11
_INPUT, _OUTPUT, _NAME, _TYPE, _ATTRIBUTE, _DOMAIN = 1, 2, 3, 4, 5, 7
_ATTRIBUTE_NAME, _ATTRIBUTE_INT, _ATTRIBUTE_GRAPH, _ATTRIBUTE_KIND = 1, 3, 6, 20
_INT = 2
_FLOAT32, _INT32, _INT64 = 1, 6, 7
# Of each operator that multiplies, the inputs that are the norm before it and the layer mask.
_FUSED = {"LinearLowBit": (6, 9), "LinearFloat": (3, 5)}
_PLAIN = ("Gemm", "MatMul")
_HEAD = "head"
_EXPERTS = ".experts."  # in the names of their modules


@dataclass(frozen=True, eq=False)
class PackedAdapters:
    digests: Mapping[str, str]  # digest of each adapter by its name in requests, in the order that rows number them
    sites: tuple[str, ...]  # tensors of the bundle that any of them changes
    weights: NDArray[np.float32]  # all factors, A as (rank, K) and B times its scale as (rank, outputs). (W,)
    table: NDArray[np.int64]  # the operator's. (sites, adapters, parts, 5)

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes + self.table.nbytes


@dataclass(frozen=True)
class _Place:
    """Where the change of a module, or of some of its rows, goes."""

    entry: TensorEntry
    part: int
    first: int  # output
    module: Module


def pack_adapters(manifest: Manifest, adapters: Mapping[str, str]) -> PackedAdapters:
    places = _places(manifest)
    files = [open_adapter(Path(path)) for path in adapters.values()]
    for file in files:
        _check(manifest, file, places)
    changed = [place for file in files for key in file.changes for place in places[key]]
    sites = tuple(dict.fromkeys(place.entry.name for place in changed))
    parts = max((place.part + 1 for place in changed), default=1)
    table: NDArray[np.int64] = np.zeros((len(sites), len(files), parts, _ENTRY), np.int64)
    weights: NDArray[np.float32] = np.empty(sum(file.nbytes for file in files) // 4, np.float32)
    at = 0
    for index, adapter in enumerate(files):
        with adapter.reading() as data:
            for key, change in adapter.changes.items():
                a, b = (adapter.factor(data, factor) for factor in (change.a, change.b))
                a_at, at = at, at + a.size
                weights[a_at:at] = a.reshape(-1)
                for place in places[key]:
                    b_at, at = at, at + change.rank * place.module.rows
                    scaled = b[place.module.taken].T * np.float32(change.scale * place.module.scale)
                    weights[b_at:at] = scaled.reshape(-1)
                    entry = (a_at, b_at, change.rank, place.first, place.module.rows)
                    table[sites.index(place.entry.name), index, place.part] = entry
    digests = {name: file.digest() for name, file in zip(adapters, files, strict=True)}
    return PackedAdapters(digests, sites, weights, table)


def _places(manifest: Manifest) -> dict[str, list[_Place]]:
    found = dict[str, list[_Place]]()
    for entry in manifest.tensors:
        first, rows = 0, sum(module.rows for module in entry.modules)
        if entry.modules and entry.shape[0] != rows:
            raise BundleError(f"{entry.name} has {entry.shape[0]} rows, its modules {rows}.", "Export it again.")
        for part, module in enumerate(entry.modules):
            found.setdefault(module_key(module.name), []).append(_Place(entry, part, first, module))
            first += module.rows
    if not found:
        message = f"{manifest.name} does not say which modules its matrices are made of, which adapters need."
        hint = "Export it again, from a checkpoint in Hugging Face's layout."
        raise AdapterError(message, hint)
    return found


def _check(manifest: Manifest, adapter: AdapterFile, places: Mapping[str, list[_Place]]) -> None:
    for key, change in adapter.changes.items():
        of_module = places.get(key, [])
        # Some rows may be of a matrix that no adapter can change.
        if not of_module or sum(place.module.rows for place in of_module) != of_module[0].module.outputs:
            message = (
                f"{adapter.path} changes {change.module}, which is no linear module of {manifest.name} that can be."
            )
            if _EXPERTS in key:
                message = f"{adapter.path} changes {change.module}, and adapters of experts are not supported."
            raise AdapterError(message, "Load the model that the adapter was trained on, or train it on other modules.")
        _check_shapes(manifest, adapter, change, of_module[0])


def _check_shapes(manifest: Manifest, adapter: AdapterFile, change: LowRank, place: _Place) -> None:
    inputs, outputs = change.a.shape[1], change.b.shape[0]
    if (inputs, outputs) != (place.entry.shape[1], place.module.outputs):
        own = f"{place.entry.shape[1]} inputs and {place.module.outputs} outputs"
        message = (
            f"{adapter.path}: {change.module} has {inputs} inputs and {outputs} outputs, in {manifest.name} {own}."
        )
        raise AdapterError(message, "Load the model that the adapter was trained on.")


def adapted_graph(model: bytes, manifest: Manifest, adapters: PackedAdapters) -> bytes:
    """A paged graph with the operator behind every layer that an adapter changes."""
    rewriter = _Rewriter(manifest, adapters)
    try:
        parts = [
            length_delimited(_MODEL_GRAPH, rewriter.graph(field.body or b"", whole=True))
            if field.number == _MODEL_GRAPH
            else field.whole
            for field in fields(model)
        ]
    except (IndexError, UnicodeDecodeError) as error:
        raise BundleError(f"{manifest.name} has a damaged graph: {error}.", "Export it again.") from error
    missing = rewriter.missing
    if missing:
        message = f"The graph of {manifest.name} multiplies by {missing[0]} in a way that adapters cannot change."
        raise AdapterError(message, "Leave the adapter out, or train it on other modules.")
    return b"".join(parts)


@dataclass(frozen=True)
class _Node:
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, bytes]  # whole fields

    @classmethod
    def read(cls, body: bytes) -> _Node:
        texts: dict[int, list[str]] = {_INPUT: [], _OUTPUT: [], _TYPE: []}
        attributes: dict[str, bytes] = {}
        for field in fields(body):
            if field.number in texts:
                texts[field.number].append((field.body or b"").decode())
            elif field.number == _ATTRIBUTE:
                name = next(f.body for f in fields(field.body or b"") if f.number == _ATTRIBUTE_NAME)
                attributes[(name or b"").decode()] = field.whole
        return cls("".join(texts[_TYPE]), tuple(texts[_INPUT]), tuple(texts[_OUTPUT]), attributes)

    def input(self, place: int) -> str:
        return self.inputs[place] if place < len(self.inputs) else ""


class _Rewriter:
    def __init__(self, manifest: Manifest, adapters: PackedAdapters) -> None:
        self._entries = {entry.name: entry for entry in manifest.tensors}
        self._adapters = adapters
        self._done: set[str] = set()

    @property
    def missing(self) -> list[str]:
        return [site for site in self._adapters.sites if site not in self._done]

    def graph(self, body: bytes, *, whole: bool = False) -> bytes:
        """The graph, or a branch of it, with further nodes and inputs."""
        parts = list[bytes]()
        if whole and _HEAD in self._adapters.sites:
            parts.append(write_node("Gather", [graph.ADAPTER_ROWS, graph.LOGIT_ROWS], [graph.HEAD_ADAPTERS]))
        for field in fields(body):
            parts += self._nodes(field.body or b"") if field.number == _NODE else [field.whole]
        if whole:
            parts += [length_delimited(_GRAPH_INPUT, each) for each in _inputs()]
        return b"".join(parts)

    def _nodes(self, body: bytes) -> Iterator[bytes]:
        node = _Node.read(body)
        site = self._site(node)
        if site is None:
            parts = [self._branch(f.body or b"") if f.number == _ATTRIBUTE else f.whole for f in fields(body)]
            yield length_delimited(_NODE, b"".join(parts))
            return
        self._done.add(site)
        result = node.outputs[0]
        product = f"{result}.unadapted"
        fused = b"swiglu" if _integer(node, "swiglu") else b""
        yield length_delimited(_NODE, _renamed(body, product, without=fused))
        adapted = f"{result}.adapted" if fused else result
        yield self._adapter(node, site, product, adapted)
        if fused:
            attributes = {"kind": 0, "paired": 1}
            written = [write_attribute(name, value) for name, value in attributes.items()]
            yield write_node("Activation", [adapted], [result], written, graph.NATIVE_DOMAIN)

    def _site(self, node: _Node) -> str | None:
        """The tensor by which a node multiplies, if an adapter changes that."""
        if node.kind not in (*_FUSED, *_PLAIN):
            return None
        # A head that shares the embedding's matrix has its name.
        name = _HEAD if node.input(1) == "embed" else node.input(1)
        return name if name in self._adapters.sites else None

    def _adapter(self, node: _Node, site: str, product: str, result: str) -> bytes:
        n, k = self._entries[site].shape
        norm, mask = _FUSED.get(node.kind, (len(node.inputs), len(node.inputs)))
        rows = graph.HEAD_ADAPTERS if site == _HEAD else graph.ADAPTER_ROWS
        inputs = [node.input(0), product, rows, graph.ADAPTER_WEIGHTS, graph.ADAPTER_TABLE]
        inputs += [node.input(norm), node.input(mask)]
        numbers = {"N": n, "K": k, "site": self._adapters.sites.index(site)}
        attributes = [write_attribute(name, value) for name, value in numbers.items()]
        attributes += [node.attributes[name] for name in ("norm_epsilon", "part") if name in node.attributes]
        return write_node("Adapter", inputs, [result], attributes, graph.NATIVE_DOMAIN)

    def _branch(self, attribute: bytes) -> bytes:
        parts = [
            length_delimited(_ATTRIBUTE_GRAPH, self.graph(f.body or b"")) if f.number == _ATTRIBUTE_GRAPH else f.whole
            for f in fields(attribute)
        ]
        return length_delimited(_ATTRIBUTE, b"".join(parts))


def _renamed(body: bytes, output: str, *, without: bytes) -> bytes:
    """A node with another output, and without an attribute."""
    kept = list[bytes]()
    for field in fields(body):
        if field.number == _OUTPUT:
            kept.append(length_delimited(_OUTPUT, output.encode()))
        elif field.number == _NAME:
            kept.append(length_delimited(_NAME, f"{output}/product".encode()))
        elif not (without and field.number == _ATTRIBUTE and _name_of(field.body or b"") == without):
            kept.append(field.whole)
    return b"".join(kept)


def _name_of(attribute: bytes) -> bytes | None:
    return next((f.body for f in fields(attribute) if f.number == _ATTRIBUTE_NAME), None)


def _integer(node: _Node, name: str) -> int:
    """An attribute that is an integer; 0 where it is absent."""
    whole = node.attributes.get(name)
    body = b"" if whole is None else next(fields(whole)).body or b""
    return next((f.integer for f in fields(body) if f.number == _ATTRIBUTE_INT), 0)


def write_attribute(name: str, value: int) -> bytes:
    """An integer attribute as a field of its node."""
    parts = [length_delimited(_ATTRIBUTE_NAME, name.encode()), number(_ATTRIBUTE_INT, value)]
    return length_delimited(_ATTRIBUTE, b"".join([*parts, number(_ATTRIBUTE_KIND, _INT)]))


def write_node(
    kind: str, inputs: Sequence[str], outputs: Sequence[str], attributes: Sequence[bytes] = (), domain: str = ""
) -> bytes:
    """A node as a field of its graph."""
    present = list(inputs)
    while not present[-1]:
        present.pop()
    parts = [length_delimited(_INPUT, each.encode()) for each in present]
    parts += [length_delimited(_OUTPUT, each.encode()) for each in outputs]
    parts += [length_delimited(_NAME, f"{outputs[0]}/{kind}".encode())]
    parts += [length_delimited(_TYPE, kind.encode()), *attributes]
    if domain:
        parts.append(length_delimited(_DOMAIN, domain.encode()))
    return length_delimited(_NODE, b"".join(parts))


def _inputs() -> Iterator[bytes]:
    """Declarations (ValueInfoProto) of the inputs that adapters add, of any sizes."""
    kinds = {graph.ADAPTER_ROWS: (_INT32, 1), graph.ADAPTER_WEIGHTS: (_FLOAT32, 1), graph.ADAPTER_TABLE: (_INT64, 4)}
    for name, (kind, rank) in kinds.items():
        sizes = b"".join(length_delimited(1, length_delimited(2, f"{name}.{d}".encode())) for d in range(rank))
        tensor = number(1, kind) + length_delimited(2, sizes)
        yield length_delimited(1, name.encode()) + length_delimited(2, length_delimited(1, tensor))
