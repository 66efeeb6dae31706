"""Where each tensor lies in a weights file: one rule for whoever writes, converts or reads one.

The exporter writes the graph of the layout that it does not store, and a device makes that layout's weights later: both
go by `lay_out`, so that they agree on every offset.

Where one operator reads all experts of a layer, in the portable layout and where they are float32, the same part of all
of them lies together: data of the first to the last expert, then scales, then zero points, with the rows of gate and up
taking turns. In the native layout every expert is a tensor like any other, on pages of its own.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Iterator

from edgeinfer.bundle.layouts import NATIVE, PORTABLE, STATIC, WEIGHTS, Layout, tensor_layout
from edgeinfer.bundle.manifest import PARTS, Blob, Manifest, TensorEntry
from edgeinfer.bundle.packing import (
    Expert,
    Parts,
    QuantizedShape,
    common_format,
    expert_biases,
    expert_tensor,
    find_expert,
    plain_shape,
)
from edgeinfer.bundle.spec import DecoderSpec, DraftModule
from edgeinfer.core.errors import BundleError, UsageError
from edgeinfer.core.records import dataclass

# The table of per-layer embeddings: a row for each token and layer, all rows of a token in sequence.
PER_LAYER_TABLE = "embed.per_layer"
# The tables that an encoder adds to its embeddings.
POSITIONS, TOKEN_TYPES = "embed.positions", "embed.token_types"
# A blob that fills pages starts on one, so that mapping it touches no neighbour; small ones align to a cache line.
PAGE_BYTES = 4096
LINE_BYTES = 64


# Everything that two tensors of the same bytes share.
_own = {"name", "modules", "factor"}
_of_bytes = operator.attrgetter(*({each.name for each in dataclasses.fields(TensorEntry)} - _own))


@dataclass(frozen=True)
class Outline:
    """A tensor before it has a place."""

    name: str
    shape: tuple[int, ...]
    quantized: QuantizedShape | None = None  # None keeps it float32
    transposed: bool = False  # float32 matrices only: stored as (K, N)
    shares: str = ""  # name of an earlier tensor whose bytes it is; nothing else but the factor matters then
    factor: float = 1.0  # of TensorEntry

    def parts(self, layout: Layout) -> Parts:
        if self.quantized is not None:
            return PARTS[tensor_layout(self.name, layout)](self.quantized)
        return {"data": ("float32", self.shape[::-1] if self.transposed else self.shape)}


def lay_out(outlines: Iterable[Outline], layout: Layout) -> tuple[TensorEntry, ...]:
    """Gives every tensor its place in a weights file, in the order given; experts that lie together, by the first."""
    listed = [outline if layout == NATIVE else _widened(outline) for outline in outlines]
    stacks = _stacks(listed, layout)
    entries: dict[str, TensorEntry] = {}
    end = 0
    for outline in listed:
        if outline.shares:
            entries[outline.name] = dataclasses.replace(
                entries[outline.shares], name=outline.name, factor=outline.factor
            )
        elif outline.name not in entries:
            together = stacks.get(outline.name, [outline])
            placed, end = _place(together, layout, end)
            interleaved = outline.name in stacks and _halves(outline) == 2
            entries |= {o.name: _entry(o, b, layout, interleaved) for o, b in zip(together, placed, strict=True)}
    return tuple(entries[outline.name] for outline in listed)


def _place(outlines: list[Outline], layout: Layout, end: int) -> tuple[list[dict[str, Blob]], int]:
    """The places of tensors of one format after `end`, by part, and the new end."""
    placed: list[dict[str, Blob]] = [{} for _ in outlines]
    for part, (dtype, shape) in outlines[0].parts(layout).items():
        size = Blob(0, dtype, shape).nbytes
        whole = size * len(outlines)
        offset = end + -end % (PAGE_BYTES if whole >= PAGE_BYTES else LINE_BYTES)
        for index, blobs in enumerate(placed):
            blobs[part] = Blob(offset + index * size, dtype, shape)
        end = offset + whole
    return placed, end


def _stacks(outlines: list[Outline], layout: Layout) -> dict[str, list[Outline]]:
    """The tensors that lie together with each expert's tensor, in one format, by its name."""
    layers: dict[int, list[tuple[Expert, Outline]]] = {}
    for outline in outlines:
        expert = find_expert(outline.name)
        if expert is not None:
            layers.setdefault(expert.layer, []).append((expert, outline))
    stacks: dict[str, list[Outline]] = {}
    for layer, members in layers.items():
        quantized = [o.quantized for _, o in members if o.quantized is not None]
        if quantized and len(quantized) < len(members):
            hint = "Give all experts of a layer 2 to 8 bits, or 32 to all."
            raise UsageError(f"Some experts of layer {layer} are quantized and others are not.", hint)
        if quantized and layout != PORTABLE:
            continue
        bits, block, zeros = common_format(quantized) if quantized else (32, 0, False)
        for part in {expert.part for expert, _ in members}:
            # Experts by number, whatever the order of the table.
            numbered = {expert.expert: outline for expert, outline in members if expert.part == part}
            ordered = [numbered[number] for number in sorted(numbered)]
            if len({o.shape for o in ordered}) > 1:
                hint = "The bundle is damaged or made by another program."
                raise BundleError(f"The experts of layer {layer} have different shapes.", hint)
            together = [_formatted(outline, bits, block, zeros) for outline in ordered]
            stacks |= {outline.name: together for outline in together}
    return stacks


def _formatted(outline: Outline, bits: int, block: int, zeros: bool) -> Outline:
    if outline.quantized is None:
        return dataclasses.replace(outline, transposed=False)
    wide = dataclasses.replace(outline.quantized, bits=bits, block_size=block, zero_points=zeros, e2m1=False)
    return dataclasses.replace(outline, quantized=wide)


def _widened(outline: Outline) -> Outline:
    shape = outline.quantized
    return outline if shape is None else dataclasses.replace(outline, quantized=plain_shape(shape))


def _halves(outline: Outline) -> int:
    return 2 if outline.name.endswith(".gate_up") else 1


def _entry(outline: Outline, blobs: dict[str, Blob], layout: Layout, interleaved: bool) -> TensorEntry:
    quantized = outline.quantized
    if quantized is None:
        data, transposed = blobs["data"], outline.transposed
        return TensorEntry(outline.name, outline.shape, 32, data, transposed=transposed, interleaved=interleaved)
    return TensorEntry(
        outline.name,
        outline.shape,
        quantized.bits,
        blobs["data"],
        quantized.block_size,
        blobs.get("scales"),
        blobs.get("zero_points"),
        blobs.get("low"),
        quantized.paired,
        tensor_layout(outline.name, layout) == STATIC,
        interleaved,
        quantized.e2m1,
        quantized.inline_scales,
        vectors=quantized.vectors,
        segments=quantized.segments,
        factor=outline.factor,
    )


def convert_table(tensors: Iterable[TensorEntry], layout: Layout) -> tuple[TensorEntry, ...]:
    """The table of the same tensors in another layout, as an export would have made it."""
    tensors = tuple(tensors)
    laid_out = lay_out(_outlines(tensors), layout)
    return tuple(dataclasses.replace(to, modules=of.modules) for of, to in zip(tensors, laid_out, strict=True))


def tensors_in(manifest: Manifest, layout: Layout) -> tuple[TensorEntry, ...]:
    """The table of a bundle's weights in the layout that runs, whether stored or converted to."""
    return manifest.tensors if layout == manifest.layout else convert_table(manifest.tensors, layout)


def _outlines(tensors: Iterable[TensorEntry]) -> Iterator[Outline]:
    owners: dict[tuple[object, ...], str] = {}
    for tensor in tensors:
        owner = owners.setdefault(_of_bytes(tensor), tensor.name)
        quantized = tensor.quantized if tensor.bits < 32 else None
        shares = owner if owner != tensor.name else ""
        yield Outline(tensor.name, tensor.shape, quantized, tensor.transposed, shares, tensor.factor)


def stored_tensors(tensors: Iterable[TensorEntry]) -> list[TensorEntry]:
    """The tensors with bytes of their own: not a head that is the embedding."""
    owners: dict[tuple[object, ...], TensorEntry] = {}
    for tensor in tensors:
        owners.setdefault(_of_bytes(tensor), tensor)
    return list(owners.values())


def is_looked_up(name: str) -> bool:
    """Whether a tensor is an embedding, of which a pass reads only the rows of its tokens."""
    return name in ("embed", PER_LAYER_TABLE, POSITIONS, TOKEN_TYPES)


def file_bytes(tensors: Iterable[TensorEntry]) -> int:
    return max((blob.offset + blob.nbytes for tensor in tensors for blob in tensor.blobs), default=0)


_AGAIN = "Export or download the bundle again."


def check_tensors(manifest: Manifest) -> None:
    """Refuses weights outside the weights file, and decoders with larger shapes than their weights."""
    if not manifest.tensors:
        return
    if WEIGHTS not in manifest.files:
        raise BundleError(f"The manifest lists tensors but no {WEIGHTS}.", _AGAIN)
    size = manifest.files[WEIGHTS].bytes
    for tensor in manifest.tensors:
        if file_bytes([tensor]) > size:
            raise BundleError(f"{tensor.name} reaches past the end of {WEIGHTS}.", _AGAIN)
    decoder = manifest.decoder
    if decoder is None:
        raise BundleError("The manifest lists tensors but describes no decoder.", _AGAIN)
    shapes = {tensor.name: tensor.shape for tensor in manifest.tensors}
    for name, shape in _needed_shapes(decoder, manifest.module):
        if shapes.get(name) != shape:
            raise BundleError(f"{name} has shape {shapes.get(name)}, the decoder needs {shape}.", _AGAIN)


def check_graphs(manifest: Manifest) -> None:
    """Refuses static bundles without a graph, or with graphs of another decoder."""
    static, decoder = manifest.static, manifest.decoder
    if static is None:
        return
    if decoder is None or not manifest.tensors:
        raise BundleError("The static bundle describes no decoder, or lists no tensors.", _AGAIN)
    if decoder.moe is not None:
        raise BundleError("The static bundle describes a mixture of experts, which has no static graphs.", _AGAIN)
    for graph in static.all:
        if graph.file not in manifest.files:
            raise BundleError(f"The static bundle has no {graph.file}.", _AGAIN)
    if (len(static.layers), static.context) != (decoder.num_layers, decoder.max_positions):
        message = f"The static graphs have {len(static.layers)} layers and a context of {static.context} tokens"
        raise BundleError(f"{message}; the decoder has {decoder.num_layers} and {decoder.max_positions}.", _AGAIN)


def _needed_shapes(decoder: DecoderSpec, module: DraftModule | None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors that the sizes of graphs and caches follow from."""
    hidden, shared = decoder.hidden_size, () if module is None else module.shares
    drafted = decoder.vocab_size if module is None else module.vocab_size or decoder.vocab_size
    for name, tokens in (("embed", decoder.vocab_size), ("head", drafted)):
        if name not in shared:
            yield name, (tokens, hidden)
    for head in range(0 if module is None else module.heads):
        yield f"heads.{head}.joined", (2 * hidden, (2 + head) * hidden)
        if module is not None and module.head_layers > 1:
            yield f"heads.{head}.further", (hidden, hidden)
    if (per_layer := decoder.per_layer) is not None:
        yield PER_LAYER_TABLE, (per_layer.vocab_size * decoder.num_layers, per_layer.size)
    if (streams := decoder.streams) is not None:
        yield "streams.enter", ((streams.count - 1) * hidden, hidden)
        yield "streams.leave", ((streams.count - 1) * hidden, hidden)
    if (encoder := decoder.encoder) is not None:
        tables = ((POSITIONS, encoder.positions), (TOKEN_TYPES, encoder.token_types))
        yield from ((name, (rows, hidden)) for name, rows in tables if rows)
        sizes = (hidden, *(each.size for each in encoder.dense))
        yield from ((f"dense.{place}", (sizes[place + 1], size)) for place, size in enumerate(sizes[:-1]))
    for layer in range(decoder.num_layers):
        doubled = layer == 0 and module is not None and module.concatenated
        yield from _mixer_shapes(decoder, layer, 2 * hidden if doubled else hidden)
        yield from _expert_shapes(decoder, layer)


def _mixer_shapes(decoder: DecoderSpec, layer: int, entering: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a mixer's first product and of a recurrence's other weights."""
    hidden, mixer = decoder.hidden_size, decoder.mixer(layer)
    conv, delta, scan = decoder.conv, decoder.delta, decoder.mamba2
    if (latent := decoder.latent) is not None:
        yield f"layers.{layer}.attn.kv_a", (latent.met_size, hidden)
        yield f"layers.{layer}.attn.k_b", (decoder.num_heads * latent.rank, latent.plain_size)
        yield f"layers.{layer}.attn.v_b", (decoder.heads_size, latent.rank)
    elif decoder.attends(layer):
        yield f"layers.{layer}.attn.qkv", (sum(decoder.heads(layer).products), entering)
    if conv is not None and mixer == "conv":
        yield f"layers.{layer}.mixer.in", (3 * hidden, hidden)
        yield f"layers.{layer}.mixer.conv", (hidden, 1, conv.width)
    if delta is not None and mixer == "delta":
        yield f"layers.{layer}.mixer.in", (delta.state.channels + delta.values, hidden)
        yield f"layers.{layer}.mixer.conv", (delta.state.channels, 1, delta.width)
    if scan is not None and "mamba2" in decoder.parts_of(layer):
        yield f"layers.{layer}.mixer.in", (scan.read_size, hidden)
        yield f"layers.{layer}.mixer.conv", (scan.conv_size, 1, scan.width)
        yield f"layers.{layer}.mixer.out", (hidden, scan.inner_size)


def _expert_shapes(decoder: DecoderSpec, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    moe, hidden = decoder.experts_of(layer), decoder.hidden_size
    if moe is None:
        return
    yield f"layers.{layer}.mlp.router", (moe.experts, hidden)
    part, rows = ("gate_up", 2 * moe.expert_size) if moe.gated else ("up", moe.expert_size)
    for expert in range(moe.experts):
        yield expert_tensor(layer, expert, part), (rows, hidden)
        yield expert_tensor(layer, expert, "down"), (hidden, moe.expert_size)
    if moe.expert_bias:
        yield expert_biases(layer, part), (moe.experts * rows,)
        yield expert_biases(layer, "down"), (moe.experts * hidden,)
