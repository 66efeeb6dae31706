"""The weighted pieces of a decoder's graph, in standard operators on float32 weights; knows nothing of whole decoders.

Each layout of quantized weights has a subclass, which takes over where a weight is quantized: `PortableOperators` and
`NativeOperators`.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgeinfer.bundle import DecoderSpec, TensorEntry
from edgeinfer.bundle import graph as io
from edgeinfer.export.graph_builder import MICROSOFT, GraphBuilder
from edgeinfer.export.moe_operators import Experts, Mixing, float_experts

__all__ = ["Operators"]


class Operators:
    """Adds nodes to whatever graph or branch it is handed.

    Args:
        tensors: the tensor table by canonical name; complete for the spec.
    """

    def __init__(self, spec: DecoderSpec, tensors: Mapping[str, TensorEntry]) -> None:
        self._spec = spec
        self._tensors = tensors

    def declare_inputs(self, graph: GraphBuilder) -> None:
        """Declares the graph inputs that only these operators read."""

    def embed(self, graph: GraphBuilder) -> str:
        """Looks up the input tokens' rows of the embedding."""
        weight = graph.weight("embed", self._tensors["embed"].data)
        return graph.op("Gather", [weight, io.INPUT_IDS], "embedded")

    def norm(self, graph: GraphBuilder, value: str, name: str) -> str:
        """Root-mean-square normalisation over the last axis."""
        weight = graph.weight(name, self._tensors[name].data)
        return graph.op(
            "RMSNormalization", [value, weight], f"{name}.out", axis=-1, epsilon=self._spec.norm_eps, stash_type=1
        )

    def linear(
        self, graph: GraphBuilder, value: str, name: str, result: str, *, norm: str = "", residual: str = ""
    ) -> str:
        """Multiplies by a matrix and adds its bias where the model has one.

        Args:
            norm: name of the norm that the value goes through before.
            residual: what is added to the product.
            result: name of the outcome.
        """
        if norm:
            value = self.norm(graph, value, norm)
        product = self._product(graph, value, name, f"{name}.result" if residual else result)
        return graph.op("Add", [residual, product], result) if residual else product

    def gated(self, graph: GraphBuilder, value: str, prefix: str, norm: str = "") -> str:
        """The first half of a gated MLP: silu(gate) * up of the value, normalised before where a norm is named."""
        gate_up = self.linear(graph, value, f"{prefix}.gate_up", f"{prefix}.gate_up.result", norm=norm)
        gate, up = f"{prefix}.gate_up.gate", f"{prefix}.gate_up.up"
        graph.ops("Split", [gate_up], [gate, up], axis=-1, num_outputs=2)
        # QuickGelu is x * sigmoid(alpha * x): SiLU, the only activation of a DecoderSpec, in one pass over the data.
        activated = graph.op("QuickGelu", [gate], f"{prefix}.activated", domain=MICROSOFT, alpha=1.0)
        return graph.op("Mul", [activated, up], f"{prefix}.product")

    def expert_counts(self, experts: Experts) -> tuple[int, ...]:
        """Numbers of experts of a token that need an operator of their own, ascending."""
        return experts.counts

    def experts(self, graph: GraphBuilder, mixing: Mixing) -> str:
        """Adds the results of the chosen experts, times their weights, to the residual."""
        return float_experts(graph, mixing)

    def _product(self, graph: GraphBuilder, value: str, name: str, result: str) -> str:
        """Multiplies by a matrix and adds its bias."""
        entry, bias = self._tensors[name], self._bias(graph, name)
        weight = graph.weight(self._table(entry), entry.data)
        if not entry.transposed:
            return graph.op("Gemm", [value, weight, bias], result, transB=1)
        if not bias:
            return graph.op("MatMul", [value, weight], result)
        product = graph.op("MatMul", [value, weight], f"{name}.product")
        return graph.op("Add", [product, bias], result)

    def _bias(self, graph: GraphBuilder, name: str) -> str:
        """The initializer of a matrix's bias; empty where it has none."""
        bias = self._tensors.get(f"{name}_bias")
        return graph.weight(bias.name, bias.data) if bias is not None else ""

    def _table(self, entry: TensorEntry) -> str:
        """Name of a matrix's initializers: a tied head shares the embedding's, so that its bytes are mapped once."""
        return "embed" if entry.name == "head" and entry.data == self._tensors["embed"].data else entry.name
