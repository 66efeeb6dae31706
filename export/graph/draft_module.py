"""The graph of a draft module: what is otherwise in it than in a decoder's, at its beginning and at its end.

Vectors and matrices beside a decoder's: fc · module.embed_norm, module.hidden_norm, module.own_norm (D,) ·
module.taps_norm (W,) · module.state_norm (D,), the target's final norm. Its layers' norms and matrices have the names
that a decoder's have; layers.0.attn_norm is the norm of the state where that is read beside the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgeinfer.bundle import graph as io
from edgeinfer.bundle.draft_module import DraftModule
from edgeinfer.bundle.layouts import NATIVE
from edgeinfer.bundle.manifest import TensorEntry
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.export.graph.attention import ATTENTIONS
from edgeinfer.export.graph.builder import GraphBuilder
from edgeinfer.export.graph.decoder import OPERATORS, BlockInput, DecoderGraph


class ModuleGraph(DecoderGraph):
    """What all draft modules have: they read states of the target."""

    module: DraftModule

    def _declare_inputs(self) -> None:
        super()._declare_inputs()
        self._graph.input(io.TAPPED, "float32", (1, "St", self.module.width))


def module_graph(
    kind: type[ModuleGraph],
    spec: DecoderSpec,
    module: DraftModule,
    tensors: Mapping[str, TensorEntry],
    weights: str,
    elsewhere: Mapping[str, str],
) -> bytes:
    """The native graph of a draft module as a file."""
    operators = OPERATORS[NATIVE](spec, tensors)
    attention = ATTENTIONS[NATIVE](spec, tensors, operators)
    graph = kind(spec, GraphBuilder(weights, elsewhere=elsewhere), tensors, operators, attention)
    graph.module = module
    data: bytes = graph.build().SerializeToString(deterministic=True)
    return data


class StepGraph(ModuleGraph):
    """A module that drafts token by token."""

    def _enter(self) -> str:
        """The state that predicted each token, of the target or its own, joined with the token's embedding."""
        graph, ops, module = self._graph, self._ops, self.module
        self._last_norm = "final_norm" if module.last_normed else ""
        own, given = graph.branch(), graph.branch()
        normed = ops.norm(own, io.HIDDEN_IN, "module.own_norm") if module.feeds_normed else io.HIDDEN_IN
        own.output(own.op("Identity", [normed], "state.own"), "float32", self._hidden_shape)
        given.output(self._given(given), "float32", self._hidden_shape)
        graph.choose(io.USE_HIDDEN, own, given, ["state"])
        embedded = ops.embed(graph)
        if module.beside:
            parts = [ops.norm(graph, embedded, "module.embed_norm"), ops.norm(graph, "state", "layers.0.attn_norm")]
            graph.op("Concat", parts, "layers.0.attn.entering", axis=-1)
            return parts[1] if module.residual_normed else "state"
        parts = [embedded, "state"]
        if module.parts_normed:
            norms = zip(parts, ("module.embed_norm", "module.hidden_norm"), strict=True)
            parts = [ops.norm(graph, part, norm) for part, norm in norms]
        return ops.linear(graph, graph.op("Concat", parts, "joined", axis=-1), "fc", "hidden")

    def _given(self, graph: GraphBuilder) -> str:
        """The state of the target, in a branch."""
        value, module = io.TAPPED, self.module
        if module.taps_normed:
            value = self._ops.norm(graph, value, "module.taps_norm")
        if module.state_normed:
            value = self._ops.norm(graph, value, "module.state_norm")
        if module.beside:
            value = self._ops.linear(graph, value, "fc", "state.product")
        return graph.op("Identity", [value], "state.given")

    def _entering(self, layer: int, hidden: str) -> BlockInput:
        if layer:
            return super()._entering(layer, hidden)
        if self.module.beside:
            return BlockInput("layers.0.attn.entering", "")
        return super()._entering(layer, hidden) if self.module.first_normed else BlockInput(hidden, "")
