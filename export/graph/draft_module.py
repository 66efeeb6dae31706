"""The graphs of draft modules: a step, a block or heads, where they differ from a decoder's at either end.

Vectors and matrices in addition to a decoder's: fc · module.embed_norm, module.hidden_norm, module.own_norm (D,) ·
module.taps_norm (W,) · module.state_norm (D,), the target's final norm. Layers have a decoder's norms and matrices;
layers.0.attn_norm is the norm of the state where the state is read together with the embedding.

A block (DFlash) has fc (D, W) · module.taps_norm (D,), applied to its result. The projected rows of the target enter
each layer's products together with the block's normed hidden states.

Heads over a prefix layer (Hydra++) have module.state_norm, module.own_norm, module.embed_norm (D,) · for head i
heads.{i}.joined (2 D, (2 + i) D) and heads.{i}.further (D, D), each with a bias. The prefix layer reads the target's
normed states. Head i reads the layer's result in the row before the root, the root's normed embedding and those of i
tokens after it. Half of its product `joined` is kept, and SiLU of the other half is added; then SiLU of `further` is
added once for each further layer. A pass that continues a draft runs no layer: its rows are the tokens, whose number
selects the head, and each of them is given the state of that one row.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgeinfer.bundle import graph as io
from edgeinfer.bundle.layouts import NATIVE
from edgeinfer.bundle.manifest import TensorEntry
from edgeinfer.bundle.spec import DecoderSpec, DraftModule
from edgeinfer.export.graph.attention import ATTENTIONS
from edgeinfer.export.graph.builder import GraphBuilder
from edgeinfer.export.graph.decoder import OPERATORS, BlockInput, DecoderGraph


class ModuleGraph(DecoderGraph):
    """Common parts of draft modules: they read states of the target."""

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
    operators = OPERATORS[NATIVE](spec, tensors)
    attention = ATTENTIONS[NATIVE](spec, tensors, operators)
    graph = kind(spec, GraphBuilder(weights, elsewhere=elsewhere), tensors, operators, attention)
    graph.module = module
    data: bytes = graph.build().SerializeToString(deterministic=True)
    return data


class StepGraph(ModuleGraph):
    def _enter(self) -> str:
        """The state that predicted each token, the target's or its own, joined with the token's embedding."""
        graph, ops, module = self._graph, self._ops, self.module
        self._last_norm = "final_norm" if module.last_normed else ""
        own, given = graph.branch(), graph.branch()
        normed = ops.norm(own, io.HIDDEN_IN, "module.own_norm") if module.feeds_normed else io.HIDDEN_IN
        own.output(own.op("Identity", [normed], "state.own"), "float32", self._hidden_shape)
        given.output(self._given(given), "float32", self._hidden_shape)
        graph.choose(io.USE_HIDDEN, own, given, ["state"])
        embedded = ops.embed(graph)
        if module.concatenated:
            parts = [ops.norm(graph, embedded, "module.embed_norm"), ops.norm(graph, "state", "layers.0.attn_norm")]
            graph.op("Concat", parts, "layers.0.attn.entering", axis=-1)
            return parts[1] if module.residual_normed else "state"
        parts = [embedded, "state"]
        if module.parts_normed:
            norms = zip(parts, ("module.embed_norm", "module.hidden_norm"), strict=True)
            parts = [ops.norm(graph, part, norm) for part, norm in norms]
        return ops.linear(graph, graph.op("Concat", parts, "joined", axis=-1), "fc", "hidden")

    def _given(self, graph: GraphBuilder) -> str:
        """The target's state, in a branch."""
        value, module = io.TAPPED, self.module
        if module.taps_normed:
            value = self._ops.norm(graph, value, "module.taps_norm")
        if module.state_normed:
            value = self._ops.norm(graph, value, "module.state_norm")
        if module.concatenated:
            value = self._ops.linear(graph, value, "fc", "state.product")
        return graph.op("Identity", [value], "state.given")

    def _entering(self, layer: int, hidden: str) -> BlockInput:
        if layer:
            return super()._entering(layer, hidden)
        if self.module.concatenated:
            return BlockInput("layers.0.attn.entering", "")
        return super()._entering(layer, hidden) if self.module.first_normed else BlockInput(hidden, "")


_GIVEN = "given"
# Of the text's rows, of which the block's come behind.
_COUNT = "given.count"
# Paths of layers in which a block's rows see none of those behind them.
_CAUSAL = "rows.causal"
_TO_THE_END = 2**31 - 1


class BlockGraph(ModuleGraph):
    """A module that drafts a whole block at once."""

    def _enter(self) -> str:
        """The projected rows of the target, and the embeddings of the block's tokens."""
        graph, ops = self._graph, self._ops
        product = ops.linear(graph, io.TAPPED, "fc", f"{_GIVEN}.product")
        graph.op("Identity", [ops.norm(graph, product, "module.taps_norm")], _GIVEN)
        graph.op("Shape", [io.TAPPED], _COUNT, start=1, end=2)
        if self.module.causal:
            self._see_before(graph)
        embedded = ops.rows(graph, "embed", self._of_block(graph, io.INPUT_IDS, "block.ids"), "embedded")
        scale = self.module.embed_scale
        return embedded if scale == 1 else graph.op("Mul", [embedded, graph.scalar("embed.scale", scale)], "scaled")

    def _see_before(self, graph: GraphBuilder) -> None:
        """Paths that end with each row's own slot, the third of its `rows`."""
        columns = [f"rows.{column}" for column in range(4)]
        graph.ops("Split", [io.ROWS], columns, axis=-1, num_outputs=4)
        one = graph.op("Cast", [graph.constant([1])], "rows.one", to=graph.type("int32"))
        ends = graph.op("Add", [columns[2], one], "rows.ends")
        columns[1] = graph.op("Min", [columns[1], ends], "rows.causal.prefix")
        graph.op("Concat", columns, _CAUSAL, axis=-1)

    def _layer(self, layer: int, hidden: str, runs: tuple[str, str], result: str) -> str:
        if result != io.HIDDEN_OUT:
            return super()._layer(layer, hidden, runs, result)
        own = super()._layer(layer, hidden, runs, "block.out")
        return self._graph.op("Concat", [_GIVEN, own], result, axis=1)

    def _attention_block(
        self, graph: GraphBuilder, layer: int, hidden: str, entering: BlockInput, result: str, part: int | None = None
    ) -> str:
        prefix, ops = f"layers.{layer}.attn", self._ops
        rows = _CAUSAL if layer in self.module.causal else io.ROWS
        normed = ops.norm(graph, entering.name, entering.norm)
        both = graph.op("Concat", [_GIVEN, normed], f"{prefix}.entering", axis=1)
        qkv = ops.linear(graph, both, f"{prefix}.qkv", f"{prefix}.qkv.result", part=part)
        heads = self._of_block(graph, self._attend.attend(graph, layer, qkv, rows), f"{prefix}.heads.block")
        return self._leave(graph, heads, f"{prefix}.out", hidden, "", result, part)

    def _of_block(self, graph: GraphBuilder, value: str, result: str) -> str:
        """The block's rows of a value of all rows. (1, S, ...) -> (1, S - St, ...)"""
        inputs = [value, _COUNT, graph.constant([_TO_THE_END]), graph.constant([1])]
        return graph.op("Slice", inputs, result)


_PREFIX, _TOKENS, _HEAD_COUNT = "prefix", "tokens", "tokens.count"


class HeadsGraph(ModuleGraph):
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
        graph.op("Shape", [_TOKENS], _HEAD_COUNT, start=0, end=1)
        ops.linear(graph, self._chosen(graph, self.module.heads - 1), "head", io.LOGITS)

    def _chosen(self, graph: GraphBuilder, head: int) -> str:
        """The result of the head for this number of tokens. (R, D)"""
        if head == 0:
            return self._run(graph, 0)
        this, before = graph.branch(), graph.branch()
        for branch, value in ((this, self._run(this, head)), (before, self._chosen(before, head - 1))):
            branch.output(value, "float32", ("R", self._spec.hidden_size))
        asked = graph.op("Equal", [_HEAD_COUNT, graph.constant([head + 1])], f"heads.{head}.asked")
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
