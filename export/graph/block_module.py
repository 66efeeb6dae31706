"""The graph of a draft module that drafts in blocks: the text's rows are keys and values, the block's see them and it.

Vectors and matrices beside a decoder's: fc (D, W) · module.taps_norm (D,), behind it. What they give of the target's
rows enters each layer's products beside the block's normed hidden states, and nothing else.
"""

from __future__ import annotations

from edgeinfer.bundle import graph as io
from edgeinfer.export.graph.builder import GraphBuilder
from edgeinfer.export.graph.decoder import BlockInput
from edgeinfer.export.graph.draft_module import ModuleGraph

_GIVEN = "given"
# Of the text's rows, of which the block's come behind.
_COUNT = "given.count"
# Paths of layers in which a block's rows see none of those behind them.
_CAUSAL = "rows.causal"
_TO_THE_END = 2**31 - 1


class BlockGraph(ModuleGraph):
    """A module that drafts a block at once."""

    def _enter(self) -> str:
        """What is kept of the target's rows, and the embeddings of the block's tokens."""
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
        """Paths that end with each row's own slot, which is the third of what `rows` says of it."""
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
        """The rows of the block of a value of all rows. (1, S, ...) -> (1, S - St, ...)"""
        inputs = [value, _COUNT, graph.constant([_TO_THE_END]), graph.constant([1])]
        return graph.op("Slice", inputs, result)
