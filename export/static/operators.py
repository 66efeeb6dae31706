"""The weighted pieces of a static graph, in ONNX's standard operators alone; knows nothing of whole decoders.

Quantized matrices are DequantizeLinear followed by MatMul, the pattern that providers turn into their own kernels.
Norms and activations are spelled out, as operator set 21 has them and all providers take them.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgeinfer.bundle import Blob, DecoderSpec, TensorEntry
from edgeinfer.bundle import static_graph as io
from edgeinfer.bundle.packing import midpoint
from edgeinfer.bundle.static_layout import values_dtype
from edgeinfer.export.graph_builder import GraphBuilder

__all__ = ["StaticOperators"]


class StaticOperators:
    """Adds nodes to a graph whose hidden states are (1, S, D).

    Of three dimensions, as ONNX Runtime makes Gemm of a MatMul of two with a sum behind it, which takes floats alone:
    the matrix would be multiplied out in every pass.

    Args:
        tensors: the tensor table by canonical name; complete for the spec.
        rows: S.
    """

    def __init__(self, graph: GraphBuilder, spec: DecoderSpec, tensors: Mapping[str, TensorEntry], rows: int) -> None:
        self._graph, self._spec, self._tensors, self._rows = graph, spec, tensors, rows

    def embed(self) -> str:
        """Looks up the input tokens' rows of the embedding, and multiplies them out."""
        entry, graph = self._tensors["embed"], self._graph
        if entry.bits == 32:
            found = graph.op("Gather", [graph.weight("embed", entry.data), io.INPUT_IDS], "embed.rows", axis=0)
            return self._reshape(found, "embedded", [1, self._rows, self._spec.hidden_size])
        blocks, zeros = entry.quantized.blocks, self._embedding_zeros(entry)
        values = self._looked_up("embed", entry.data, entry.bits, [self._rows, blocks, entry.block_size])
        assert entry.scales is not None
        scales = graph.op("Gather", [graph.weight("embed.scales", entry.scales), io.INPUT_IDS], "embed.scale", axis=0)
        scale = self._reshape(scales, "embed.scale_rows", [self._rows, blocks, 1])
        centred = graph.op("Sub", [values, zeros], "embed.centred")
        scaled = graph.op("Mul", [centred, scale], "embed.scaled")
        width, hidden = blocks * entry.block_size, self._spec.hidden_size
        if width == hidden:
            return self._reshape(scaled, "embedded", [1, self._rows, hidden])
        padded = self._reshape(scaled, "embed.padded", [1, self._rows, width])
        return self._first(padded, "embedded", hidden)

    def _embedding_zeros(self, entry: TensorEntry) -> str:
        if entry.zero_points is None:
            return self._graph.scalar("embed.middle", midpoint(entry.bits))
        held = entry.zero_points.shape[-1] * 8 // entry.bits
        points = self._looked_up("embed.zeros", entry.zero_points, entry.bits, [self._rows, held])
        blocks = entry.quantized.blocks
        points = points if held == blocks else self._first(points, "embed.zeros.blocks", blocks)
        return self._reshape(points, "embed.zeros.rows", [self._rows, blocks, 1])

    def _looked_up(self, name: str, blob: Blob, bits: int, shape: list[int]) -> str:
        """The input tokens' rows of packed values, as floats; arithmetic on floats is what every provider has."""
        graph = self._graph
        width = blob.nbytes // blob.shape[0]
        packed = graph.weight(name, blob, (blob.shape[0], width))
        found = graph.op("Gather", [packed, io.INPUT_IDS], f"{name}.packed", axis=0)
        floats = graph.op("Cast", [found], f"{name}.floats", to=graph.type("float32"))
        if bits == 8:
            return self._reshape(floats, f"{name}.values", shape)
        sixteenth = graph.op("Mul", [floats, graph.scalar("sixteenth", 1 / 16)], f"{name}.sixteenth")
        high = graph.op("Floor", [sixteenth], f"{name}.high")
        shifted = graph.op("Mul", [high, graph.scalar("sixteen", 16.0)], f"{name}.shifted")
        low = graph.op("Sub", [floats, shifted], f"{name}.low")
        halves = [self._reshape(half, f"{half}.column", [self._rows, width, 1]) for half in (low, high)]
        return self._reshape(graph.op("Concat", halves, f"{name}.pairs", axis=2), f"{name}.values", shape)

    def norm(self, value: str, name: str) -> str:
        """Root-mean-square normalisation over the last axis."""
        graph = self._graph
        squared = graph.op("Pow", [value, graph.scalar("two", 2.0)], f"{name}.squared")
        mean = graph.op("ReduceMean", [squared, graph.constant([-1])], f"{name}.mean", keepdims=1)
        shifted = graph.op("Add", [mean, graph.scalar("norm_eps", self._spec.norm_eps)], f"{name}.shifted")
        root = graph.op("Sqrt", [shifted], f"{name}.root")
        divided = graph.op("Div", [value, root], f"{name}.divided")
        return graph.op("Mul", [divided, graph.weight(name, self._tensors[name].data)], f"{name}.out")

    def linear(self, value: str, name: str, result: str) -> str:
        """Multiplies by a matrix and adds its bias where the model has one, by rows then: (S, N)."""
        graph, entry = self._graph, self._tensors[name]
        bias = self._tensors.get(f"{name}_bias")
        product = result if bias is None else f"{name}.product"
        if entry.bits == 32 and not entry.transposed:
            table = "embed" if name == "head" and entry.data == self._tensors["embed"].data else name
            graph.op("Gemm", [value, graph.weight(table, entry.data)], product, transB=1)
        else:
            graph.op("MatMul", [value, self._matrix(entry)], product)
        if bias is None:
            return result
        rows = self._reshape(product, f"{name}.rows", [self._rows, entry.shape[0]])
        return graph.op("Add", [rows, graph.weight(bias.name, bias.data)], result)

    def _matrix(self, entry: TensorEntry) -> str:
        """A matrix as MatMul takes it, (K, N)."""
        graph, (n, k) = self._graph, entry.shape
        if entry.bits == 32:
            return graph.weight(entry.name, entry.data)
        assert entry.scales is not None
        dtype, blocks = values_dtype(entry.quantized), entry.quantized.blocks
        inputs = [
            graph.weight(entry.name, entry.data, (k, n), dtype),
            graph.weight(f"{entry.name}.scales", entry.scales),
        ]
        if entry.zero_points is not None:
            inputs.append(graph.weight(f"{entry.name}.zero_points", entry.zero_points, (blocks, n), dtype))
        return graph.op("DequantizeLinear", inputs, f"{entry.name}.matrix", axis=0, block_size=entry.block_size)

    def gated(self, value: str, prefix: str) -> str:
        """The first half of a gated MLP: silu(gate) * up."""
        graph, size = self._graph, self._spec.intermediate_size
        joined = self.linear(value, f"{prefix}.gate_up", f"{prefix}.gate_up.result")
        gate, up = f"{prefix}.gate", f"{prefix}.up"
        graph.ops("Split", [joined, graph.constant([size, size])], [gate, up], axis=-1)
        sigmoid = graph.op("Sigmoid", [gate], f"{prefix}.sigmoid")
        activated = graph.op("Mul", [gate, sigmoid], f"{prefix}.activated")
        return graph.op("Mul", [activated, up], f"{prefix}.product")

    def _first(self, value: str, result: str, count: int) -> str:
        """The first columns."""
        bounds = [self._graph.constant([number]) for number in (0, count, -1)]
        return self._graph.op("Slice", [value, *bounds], result)

    def _reshape(self, value: str, result: str, shape: list[int]) -> str:
        return self._graph.op("Reshape", [value, self._graph.constant(shape)], result)
