"""Quantized weights in the portable layout, as ONNX Runtime's own operators read them; knows no other layout."""

from __future__ import annotations

from edgeinfer.bundle import TensorEntry
from edgeinfer.bundle import graph as io
from edgeinfer.export.graph_builder import MICROSOFT, GraphBuilder
from edgeinfer.export.moe_operators import Mixing, quantized_experts
from edgeinfer.export.operators import Operators

__all__ = ["PortableOperators"]

# MatMulNBits: activations are quantized to int8 per block, the only level with fast kernels for all widths.
_INT8_ACTIVATIONS = 4


class PortableOperators(Operators):
    """MatMulNBits, QMoE and GatherBlockQuantized where a weight is quantized."""

    def embed(self, graph: GraphBuilder) -> str:
        """See `Operators.embed`."""
        entry = self._tensors["embed"]
        if entry.bits == 32:
            return super().embed(graph)
        rows, blocks, width = entry.data.shape
        inputs = [graph.weight("embed", entry.data, (rows, blocks * width)), io.INPUT_IDS, *self._blocks(graph, entry)]
        hidden_size = self._spec.hidden_size
        padded = hidden_size % entry.block_size != 0
        name = "embedded.padded" if padded else "embedded"
        attributes = {"bits": entry.bits, "block_size": entry.block_size, "gather_axis": 0, "quantize_axis": 1}
        graph.op("GatherBlockQuantized", inputs, name, domain=MICROSOFT, **attributes)
        if not padded:
            return name
        bounds = [graph.constant([0]), graph.constant([hidden_size]), graph.constant([2])]
        return graph.op("Slice", [name, *bounds], "embedded")

    def experts(self, graph: GraphBuilder, mixing: Mixing) -> str:
        """See `Operators.experts`."""
        return quantized_experts(graph, mixing) if mixing.experts.quantized else super().experts(graph, mixing)

    def _product(self, graph: GraphBuilder, value: str, name: str, result: str) -> str:
        entry = self._tensors[name]
        if entry.bits == 32:
            return super()._product(graph, value, name, result)
        # The data keeps a name of its own: the embedding sees the same bytes as two-dimensional.
        data = graph.weight(entry.name, entry.data)
        return graph.op(
            "MatMulNBits",
            [value, data, *self._blocks(graph, entry), "", self._bias(graph, name)],
            result,
            domain=MICROSOFT,
            N=entry.shape[0],
            K=entry.shape[1],
            bits=entry.bits,
            block_size=entry.block_size,
            accuracy_level=_INT8_ACTIVATIONS,
        )

    def _blocks(self, graph: GraphBuilder, entry: TensorEntry) -> tuple[str, str]:
        """Scales and zero points of the blocks; the latter empty where there are none."""
        table = self._table(entry)
        assert entry.scales is not None
        scales = graph.weight(f"{table}.scales", entry.scales)
        zeros = entry.zero_points
        return scales, graph.weight(f"{table}.zero_points", zeros) if zeros is not None else ""
