"""The weighted pieces of a decoder's graph, in standard operators on float32 weights.

Each layout of quantized weights has a subclass, which takes over where a weight is quantized: `PortableOperators` and
`NativeOperators`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeinfer.bundle import graph as io
from edgeinfer.bundle.manifest import TensorEntry
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.export.graph.activations import add_activation, add_gated_oai, add_softcap
from edgeinfer.export.graph.builder import GraphBuilder
from edgeinfer.export.graph.experts import Experts, Mixing, float_experts


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
        return self.rows(graph, "embed", io.INPUT_IDS, "embedded")

    def rows(self, graph: GraphBuilder, table: str, ids: str, result: str) -> str:
        """Looks up rows of a table."""
        return graph.op("Gather", [graph.weight(table, self._tensors[table].data), ids], result)

    def vector(self, graph: GraphBuilder, name: str) -> str:
        """The initializer of a vector; empty where the model has none."""
        entry = self._tensors.get(name)
        return "" if entry is None else graph.weight(name, entry.data)

    def norm(self, graph: GraphBuilder, value: str, name: str, result: str = "") -> str:
        """Normalisation over the last axis, of the kind that the decoder has.

        Args:
            result: name of the outcome, where a norm is there more than once.
        """
        inputs, result = [value, self.vector(graph, name)], result or f"{name}.out"
        attributes: dict[str, Any] = {"axis": -1, "epsilon": self._spec.norm_eps, "stash_type": 1}
        if self._spec.norm == "layer":
            return graph.op("LayerNormalization", [*inputs, self.vector(graph, f"{name}_bias")], result, **attributes)
        bias = self.vector(graph, f"{name}_bias")
        if not bias:
            return graph.op("RMSNormalization", inputs, result, **attributes)
        scaled = graph.op("RMSNormalization", inputs, f"{name}.scaled", **attributes)
        return graph.op("Add", [scaled, bias], result)

    def add_normed(self, graph: GraphBuilder, residual: str, value: str, norm: str, result: str) -> str:
        """Normalises a value and adds it to the residual."""
        return graph.op("Add", [residual, self.norm(graph, value, norm)], result)

    @property
    def masked(self) -> bool:
        """Whether operators leave themselves out where the layer mask says so, and need no `If` around them."""
        return False

    def linear(
        self,
        graph: GraphBuilder,
        value: str,
        name: str,
        result: str,
        *,
        norm: str = "",
        residual: str = "",
        part: int | None = None,
    ) -> str:
        """Multiplies by a matrix and adds its bias where the model has one.

        Args:
            part: place in the layer mask, for operators that are masked; None always runs.
        """
        if norm:
            value = self.norm(graph, value, norm)
        product = self._product(graph, value, name, f"{name}.result" if residual else result)
        return graph.op("Add", [residual, product], result) if residual else product

    def heads(self, graph: GraphBuilder, value: str, name: str, result: str, heads: int, part: int | None) -> str:
        """Multiplies what each head has by a matrix of its own: (1, S, heads K) by (heads N, K) to (1, S, heads N)."""
        raise NotImplementedError("Products of heads are computed by our own operators.")

    def inner(
        self,
        graph: GraphBuilder,
        value: str,
        prefix: str,
        norm: str = "",
        part: int | None = None,
        *,
        gated: bool | None = None,
        cut: float = 0.0,
    ) -> str:
        """The first half of an MLP: act(gate) * up of the value, or act(up), normalised before where a norm is named.

        Args:
            gated: None is what the decoder's own MLPs are.
        """
        gated = self._spec.gated if gated is None else gated
        name = f"{prefix}.gate_up" if gated else f"{prefix}.up"
        product = self.linear(graph, value, name, f"{name}.result", norm=norm, part=part)
        return self._activated(graph, product, prefix, gated=gated, cut=cut)

    def activation(self, graph: GraphBuilder, name: str, value: str, result: str, times: str = "") -> str:
        """An activation function of all values, "sigmoid" is one, and what its results multiply."""
        activated = add_activation(graph, name, value, f"{result}.activated" if times else result)
        return graph.op("Mul", [activated, times], result) if times else activated

    def gate(self, graph: GraphBuilder, gate: str, value: str, result: str) -> str:
        """A value times the logistic function of a gate, of each channel or of each head."""
        share = add_activation(graph, "sigmoid", gate, f"{result}.share")
        if self._spec.output_gate == "channel":
            return graph.op("Mul", [value, share], result)
        heads = graph.op("Reshape", [value, graph.constant([0, 0, self._spec.num_heads, -1])], f"{result}.heads")
        each = graph.op("Unsqueeze", [share, graph.constant([-1])], f"{result}.each")
        gated = graph.op("Mul", [heads, each], f"{result}.gated")
        return graph.op("Reshape", [gated, graph.constant([0, 0, self._spec.q_size])], result)

    def softcap(self, graph: GraphBuilder, value: str, cap: float, result: str) -> str:
        """cap * tanh(value / cap)."""
        return add_softcap(graph, value, cap, result)

    def _activated(self, graph: GraphBuilder, product: str, prefix: str, *, gated: bool, cut: float) -> str:
        """The activation of what the first matrix of an MLP gives."""
        assert not cut, "rows are cut by our own operators"
        activation, constants = self._spec.activation, self.vector(graph, f"{prefix}.xielu")
        if not gated:
            return add_activation(graph, activation, product, f"{prefix}.product", constants)
        gate, up = f"{prefix}.gate_up.gate", f"{prefix}.gate_up.up"
        graph.ops("Split", [product], [gate, up], axis=-1, num_outputs=2)
        if activation == "swiglu_oai":
            return add_gated_oai(graph, gate, up, f"{prefix}.product")
        activated = add_activation(graph, activation, gate, f"{prefix}.activated", constants)
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
        product = graph.op("MatMul", [value, weight], f"{result}.product")
        return graph.op("Add", [product, bias], result)

    def _bias(self, graph: GraphBuilder, name: str) -> str:
        """The initializer of a matrix's bias; empty where it has none."""
        return self.vector(graph, f"{name}_bias")

    def _table(self, entry: TensorEntry) -> str:
        """Name of a matrix's initializers: a tied head shares the embedding's, so that its bytes are mapped once."""
        return "embed" if entry.name == "head" and self._spec.tied else entry.name
