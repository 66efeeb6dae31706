"""The graph of a draft module with heads over a prefix layer (Hydra++): one head for each place of a draft.

Vectors and matrices beside a decoder's: module.state_norm, module.own_norm, module.embed_norm (D,) · of head i
heads.{i}.joined (2 D, (2 + i) D) and heads.{i}.further (D, D), each with a bias. The prefix layer reads the target's
normed states. A head reads what the layer gives in the row before the root, the root's normed embedding and those of i
tokens behind it. Half of its product `joined` is kept, SiLU of the other half is added; then SiLU of `further` is added
once for each further layer. A pass that goes on in a draft runs no layer: its rows are the tokens, whose number says
which head is meant, and each of them is given the state of that one row.
"""

from __future__ import annotations

from edgeinfer.bundle import graph as io
from edgeinfer.export.graph.builder import GraphBuilder
from edgeinfer.export.graph.draft_module import ModuleGraph

_PREFIX, _TOKENS, _COUNT = "prefix", "tokens", "tokens.count"


class HeadsGraph(ModuleGraph):
    """A module that drafts by heads."""

    def _enter(self) -> str:
        """The target's states, or the one that heads read."""
        graph = self._graph
        own, given = graph.branch(), graph.branch()
        own.output(own.op("Identity", [io.HIDDEN_IN], "state.own"), "float32", self._hidden_shape)
        given.output(self._ops.norm(given, io.TAPPED, "module.state_norm"), "float32", self._hidden_shape)
        graph.choose(io.USE_HIDDEN, own, given, ["hidden"])
        return "hidden"

    def _head(self, hidden: str) -> None:
        graph, ops = self._graph, self._ops
        states = graph.op("Squeeze", [hidden, graph.constant([0])], "flat")
        wanted = graph.op("Gather", [states, io.LOGIT_ROWS], "wanted", axis=0)
        graph.op("Identity", [ops.norm(graph, wanted, "module.own_norm")], _PREFIX)
        embedded, scale = ops.embed(graph), self.module.embed_scale
        if scale != 1:
            # Of rows that are stored grown the norm's epsilon would be too small a part.
            embedded = graph.op("Mul", [embedded, graph.scalar("embed.scale", scale)], "embed.scaled")
        normed = ops.norm(graph, embedded, "module.embed_norm")
        embedded = graph.op("Squeeze", [normed, graph.constant([0])], "embedded.flat")
        every, root, shape = graph.branch(), graph.branch(), ("T", self._spec.hidden_size)
        every.output(every.op("Identity", [embedded], "tokens.every"), "float32", shape)
        root.output(root.op("Gather", [embedded, io.LOGIT_ROWS], "tokens.root", axis=0), "float32", shape)
        graph.choose(io.USE_HIDDEN, every, root, [_TOKENS])
        graph.op("Shape", [_TOKENS], _COUNT, start=0, end=1)
        ops.linear(graph, self._chosen(graph, self.module.heads - 1), "head", io.LOGITS)

    def _chosen(self, graph: GraphBuilder, head: int) -> str:
        """What the head for as many tokens as there are gives, if it is none behind this one. (R, D)"""
        if head == 0:
            return self._run(graph, 0)
        this, before = graph.branch(), graph.branch()
        for branch, value in ((this, self._run(this, head)), (before, self._chosen(before, head - 1))):
            branch.output(value, "float32", ("R", self._spec.hidden_size))
        asked = graph.op("Equal", [_COUNT, graph.constant([head + 1])], f"heads.{head}.asked")
        graph.choose(asked, this, before, [f"heads.{head}.chosen"])
        return f"heads.{head}.chosen"

    def _run(self, graph: GraphBuilder, head: int) -> str:
        ops, name, tokens = self._ops, f"heads.{head}", _TOKENS
        if head:
            row = graph.constant([1, (head + 1) * self._spec.hidden_size])
            tokens = graph.op("Reshape", [_TOKENS, row], f"{name}.tokens")
        entering = graph.op("Concat", [_PREFIX, tokens], f"{name}.entering", axis=-1)
        both = ops.linear(graph, entering, f"{name}.joined", f"{name}.joined.result")
        value, inner = f"{name}.projected", f"{name}.inner"
        graph.ops("Split", [both], [value, inner], axis=-1, num_outputs=2)
        value = graph.op("Add", [value, ops.activation(graph, "silu", inner, f"{inner}.silu")], f"{name}.0")
        for layer in range(1, self.module.head_layers):
            inner = ops.linear(graph, value, f"{name}.further", f"{name}.further.{layer}")
            inner = ops.activation(graph, "silu", inner, f"{name}.further.{layer}.silu")
            value = graph.op("Add", [value, inner], f"{name}.{layer}")
        return value
