"""The ONNX graph of a decoder as edgeinfer.bundle.graph describes it. Weights are initializers of the main graph even
where only an `If` branch uses them: ONNX Runtime then packs them once and drops the raw pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import onnx

from edgeinfer.bundle import graph as io
from edgeinfer.bundle.layouts import LAYOUTS, NATIVE, PORTABLE, Layout, model_name, weights_name
from edgeinfer.bundle.manifest import TensorEntry
from edgeinfer.bundle.parts import Mixer
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.tables import convert_table
from edgeinfer.export.graph.attention import ATTENTIONS, Attention
from edgeinfer.export.graph.builder import GraphBuilder
from edgeinfer.export.graph.mixture import NO_EXPERTS, Entering, declare_choice, mixture, runs_few, runs_many
from edgeinfer.export.graph.operators import Experts, Operators
from edgeinfer.export.graph.quantized_operators import NativeOperators, PortableOperators
from edgeinfer.export.graph.streams import LayerEnds, Streams

OPERATORS: dict[Layout, type[Operators]] = {NATIVE: NativeOperators, PORTABLE: PortableOperators}


def build_decoder_graph(
    spec: DecoderSpec, tensors: Mapping[str, TensorEntry], weights: str, layout: Layout, taps: tuple[int, ...] = ()
) -> onnx.ModelProto:
    operators = OPERATORS[layout](spec, tensors)
    attention = ATTENTIONS[layout](spec, tensors, operators)
    return DecoderGraph(spec, GraphBuilder(weights), tensors, operators, attention, taps).build()


def decoder_graphs(
    spec: DecoderSpec, tensors: tuple[TensorEntry, ...], stored: Layout, taps: tuple[int, ...] = ()
) -> dict[str, bytes]:
    """The graphs of a bundle as files by name: one for each layout."""
    graphs, quantized = {}, any(t.bits < 32 for t in tensors)
    native_only = spec.native_only or any(tensor.segments for tensor in tensors)
    for layout in (NATIVE,) if native_only else LAYOUTS:
        table = tensors if layout == stored else convert_table(tensors, layout)
        weights = weights_name(stored, layout, quantized=quantized)
        graph = build_decoder_graph(spec, {t.name: t for t in table}, weights, layout, taps)
        graphs[model_name(stored, layout)] = graph.SerializeToString(deterministic=True)
    return graphs


class BlockInput(NamedTuple):
    """Input of a block's products, and the norm that each of them applies to it; empty for none."""

    name: str
    norm: str


class DecoderGraph:
    """The graph of a decoder while it is built, part by part; `edgeinfer.export.graph.draft_module` overrides parts."""

    def __init__(
        self,
        spec: DecoderSpec,
        graph: GraphBuilder,
        tensors: Mapping[str, TensorEntry],
        operators: Operators,
        attention: Attention,
        taps: tuple[int, ...] = (),
    ) -> None:
        self._spec = spec
        self._graph = graph
        self._tensors = tensors
        self._ops = operators
        self._attend = attention
        self._ends = LayerEnds(spec, operators)
        self._streams = None if spec.streams is None else Streams(spec, operators)
        self._taps = taps
        self._ids: list[str] = []
        self._last_norm = "final_norm"

    def build(self) -> onnx.ModelProto:
        spec, graph = self._spec, self._graph
        self._declare_inputs()
        runs = [f"runs.{i}" for i in range(2 * spec.num_layers)]
        if not self._ops.masked or spec.moe is not None:
            graph.ops("Split", [io.LAYER_MASK], runs, axis=0, num_outputs=len(runs))
        if spec.moe is not None:
            several = any(len(self._ops.expert_counts(e)) > 1 for e in self._experts())
            declare_choice(graph, spec, spec.moe, by_count=several)
        hidden = self._enter()
        states = [hidden]
        for layer in range(spec.num_layers):
            last, parts = layer == spec.num_layers - 1, (runs[2 * layer], runs[2 * layer + 1])
            add = self._layer if self._streams is None else self._layer_of_streams
            hidden = add(layer, hidden, parts, io.HIDDEN_OUT if last else f"layers.{layer}.hidden")
            states.append(hidden)
        if self._taps:
            graph.op("Concat", [states[tap] for tap in self._taps], io.TAPPED, axis=-1)
        self._head(hidden)
        if spec.moe is not None:
            graph.op("Concat", self._ids, io.EXPERT_IDS, axis=0)
        self._declare_outputs()
        return graph.model("decoder")

    def _experts(self) -> Iterator[Experts]:
        for layer in range(self._spec.num_layers):
            moe = self._spec.experts_of(layer)
            if moe is not None:
                yield Experts(layer, moe, self._tensors, self._spec.activation)

    def _declare_inputs(self) -> None:
        spec, graph = self._spec, self._graph
        graph.input(io.INPUT_IDS, "int64", (1, "S"))
        graph.input(io.POSITION_IDS, "int64", (1, "S"))
        for index, rope in enumerate(spec.ropes):
            for name in io.rotary_names(index):
                graph.input(name, "float32", ("P", rope.dim // 2))
        graph.input(io.LAYER_MASK, "bool", (2 * spec.num_layers,))
        graph.input(io.HIDDEN_IN, "float32", (1, "Sh", spec.carried_size))
        graph.input(io.USE_HIDDEN, "bool", (1,))
        graph.input(io.LOGIT_ROWS, "int64", ("R",))
        if any(rope.query_beta for rope in spec.ropes):
            graph.input(io.QUERY_FACTORS, "float32", ("P", 1))
        self._attend.declare_inputs(graph)
        self._ops.declare_inputs(graph)

    def _declare_outputs(self) -> None:
        spec, graph = self._spec, self._graph
        graph.output(io.LOGITS, "float32", ("R", self._tensors["head"].shape[0]))
        graph.output(io.HIDDEN_OUT, "float32", (1, "S", spec.carried_size))
        if self._taps:
            graph.output(io.TAPPED, "float32", (1, "S", len(self._taps) * spec.hidden_size))
        for layer in range(spec.num_layers):
            for each in self._attend.carried(layer):
                graph.output(each.name, each.dtype, each.shape)
        if spec.moe is not None:
            # Last: bundles made before it, and those without it, have the other outputs in the same places.
            graph.output(io.EXPERT_IDS, "int64", (spec.num_layers, "S", "K"))

    @property
    def _hidden_shape(self) -> tuple[int | str, ...]:
        return (1, "S", self._spec.hidden_size)

    def _enter(self) -> str:
        """Embeds the tokens, or takes the given hidden states."""
        resume, embed, carried = self._graph.branch(), self._graph.branch(), (1, "S", self._spec.carried_size)
        resume.output(resume.op("Identity", [io.HIDDEN_IN], "resumed"), "float32", carried)
        if self._spec.per_layer is None:
            entered = self._ops.embed(embed)
        else:
            # Layers need the embeddings wherever a pass begins.
            entered = embed.op("Identity", [self._ops.embed(self._graph)], "entered")
        if self._streams is not None:
            self._streams.declare(self._graph)
            entered = self._streams.enter(embed, entered)
        embed.output(entered, "float32", carried)
        self._ends.enter(self._graph, "embedded")
        self._graph.choose(io.USE_HIDDEN, resume, embed, ["hidden"])
        return "hidden"

    def _layer(self, layer: int, hidden: str, runs: tuple[str, str], result: str) -> str:
        """A layer's blocks in sequence, or in parallel after one norm."""
        entering, mixed = self._entering(layer, hidden), hidden
        if self._shares_norm(layer):
            entering = BlockInput(self._ops.norm(self._graph, hidden, entering.norm), "")
        parts = self._spec.parts_of(layer)
        for part in parts:
            last = part == parts[-1] and layer in self._spec.no_mlp
            named = f"layers.{layer}.{'attn' if part == 'attention' else 'mixer'}"
            mixed = self._mixer(layer, part, mixed, entering, runs[0], result if last else f"{named}.hidden")
        if layer in self._spec.no_mlp:
            self._ids.append(NO_EXPERTS)
            return mixed
        if self._spec.parallel:
            into = Entering(entering.name, "", mixed, self._norm(layer, "mlp", after=True))
        else:
            into = Entering(mixed, self._norm(layer, "mlp"), mixed, self._norm(layer, "mlp", after=True))
        if not self._ends.there:
            return self._mlp(layer, into, runs[1], result)
        return self._end(layer, self._mlp(layer, into, runs[1], f"layers.{layer}.mlp.hidden"), runs[1], result)

    def _layer_of_streams(self, layer: int, hidden: str, runs: tuple[str, str], result: str) -> str:
        """A layer that computes with its first stream, between prediction and correction."""
        assert self._streams is not None, "only such decoders have streams"
        graph, prefix = self._graph, f"layers.{layer}"
        entered = self._streams.predict(graph, layer, hidden)
        normed = self._ops.norm(graph, entered.first, self._norm(layer, "attn"))
        mixed = self._mixer(layer, "attention", entered.first, BlockInput(normed, ""), runs[0], f"{prefix}.attn.hidden")
        mixed = self._streams.augment(graph, layer, normed, mixed)
        into = Entering(mixed, self._norm(layer, "mlp"), mixed, self._norm(layer, "mlp", after=True))
        made = self._mlp(layer, into, runs[1], f"{prefix}.mlp.hidden")
        return self._streams.correct(graph, layer, entered, made, self._ends, result)

    def _entering(self, layer: int, hidden: str) -> BlockInput:
        """Input of a layer's mixers."""
        return BlockInput(hidden, self._norm(layer, "attn"))

    def _end(self, layer: int, hidden: str, runs: str, result: str) -> str:
        if self._ops.masked:
            return self._ends.leave(self._graph, layer, hidden, result, 2 * layer + 1)
        graph, skip = self._graph.branch(), self._graph.branch()
        ended = self._ends.leave(graph, layer, hidden, f"layers.{layer}.ended")
        graph.output(ended, "float32", self._hidden_shape)
        skip.output(skip.op("Identity", [hidden], f"layers.{layer}.unended"), "float32", self._hidden_shape)
        self._graph.choose(runs, graph, skip, [result])
        return result

    def _shares_norm(self, layer: int) -> bool:
        """Whether several products read a layer's first norm."""
        spec = self._spec
        several_parts = spec.delta is not None or spec.latent is not None or len(spec.parts_of(layer)) > 1
        return spec.pre_norm and (spec.parallel or bool(spec.output_gate) or several_parts)

    def _norm(self, layer: int, part: str, *, after: bool = False) -> str:
        """The norm before or after a block; empty for none."""
        there = self._spec.post_norm if after else self._spec.pre_norm
        return f"layers.{layer}.{part}{'_post' if after else ''}_norm" if there else ""

    def _mixer(self, layer: int, part: Mixer, hidden: str, entering: BlockInput, runs: str, result: str) -> str:
        """Adds attention or a recurrence to the hidden states."""
        carried = self._attend.carried(layer)
        blocks = {"attention": self._attention_block, "conv": self._conv_block}
        block = blocks.get(part, self._recurrent_block)
        if self._ops.masked:
            return block(self._graph, layer, hidden, entering, result, 2 * layer)
        graph, skip = self._graph.branch(), self._graph.branch()
        added = block(graph, layer, hidden, entering, f"{result}.added")
        graph.output(added, "float32", self._hidden_shape)
        skip.output(skip.op("Identity", [hidden], f"{result}.skipped"), "float32", self._hidden_shape)
        for each in carried:
            graph.output(each.inside, each.dtype, each.shape)
            skip.output(skip.op("Identity", [each.source], f"{each.inside}.kept"), each.dtype, each.shape)
        self._graph.choose(runs, graph, skip, [result, *(each.name for each in carried)])
        return result

    def _attention_block(
        self, graph: GraphBuilder, layer: int, hidden: str, entering: BlockInput, result: str, part: int | None = None
    ) -> str:
        prefix, ops = f"layers.{layer}.attn", self._ops
        value, norm = entering.name, entering.norm
        if self._spec.latent is not None:
            heads = self._attend.attend_latent(graph, layer, self._spec.latent, value, part)
        else:
            qkv = ops.linear(graph, value, f"{prefix}.qkv", f"{prefix}.qkv.result", norm=norm, part=part)
            heads = self._attend.attend(graph, layer, qkv)
        if self._spec.output_gate:
            gate = ops.linear(graph, value, f"{prefix}.gate", f"{prefix}.gate.result", norm=norm, part=part)
            heads = ops.gate(graph, gate, heads, f"{prefix}.gated")
        if self._spec.inner_norms:
            heads = ops.norm(graph, heads, f"{prefix}.inner_norm")
        return self._leave(graph, heads, f"{prefix}.out", hidden, self._norm(layer, "attn", after=True), result, part)

    def _conv_block(
        self, graph: GraphBuilder, layer: int, hidden: str, entering: BlockInput, result: str, part: int | None = None
    ) -> str:
        prefix, ops = f"layers.{layer}.mixer", self._ops
        read = ops.linear(graph, entering.name, f"{prefix}.in", f"{prefix}.in.result", norm=entering.norm, part=part)
        mixed = self._attend.convolve(graph, layer, read)
        return self._leave(graph, mixed, f"{prefix}.out", hidden, self._norm(layer, "attn", after=True), result, part)

    def _recurrent_block(
        self, graph: GraphBuilder, layer: int, hidden: str, entering: BlockInput, result: str, part: int | None = None
    ) -> str:
        prefix, ops = f"layers.{layer}.mixer", self._ops
        names = [f"{prefix}.{name}" for name in ("in", "gates") if f"{prefix}.{name}" in self._tensors]
        reads = [ops.linear(graph, entering.name, n, f"{n}.result", norm=entering.norm, part=part) for n in names]
        mixed = self._attend.recur(graph, layer, *reads)
        return self._leave(graph, mixed, f"{prefix}.out", hidden, self._norm(layer, "attn", after=True), result, part)

    def _leave(
        self, graph: GraphBuilder, value: str, name: str, residual: str, norm: str, result: str, part: int | None
    ) -> str:
        """A block's last product, normed where a norm is named, added to the residual."""
        if not norm:
            return self._ops.linear(graph, value, name, result, residual=residual, part=part)
        # A norm of the zeros that a masked operator gives is zeros, as it has no bias.
        product = self._ops.linear(graph, value, name, f"{name}.given", part=part)
        return self._ops.add_normed(graph, residual, product, norm, result)

    def _mlp(self, layer: int, entering: Entering, runs: str, result: str) -> str:
        moe = self._spec.experts_of(layer)
        if moe is not None:
            return self._mixture(Experts(layer, moe, self._tensors, self._spec.activation), entering, runs, result)
        self._ids.append(NO_EXPERTS)
        prefix = f"layers.{layer}.mlp"
        if self._ops.masked:
            return self._mlp_block(self._graph, layer, entering, result, 2 * layer + 1)
        graph, skip = self._graph.branch(), self._graph.branch()
        added = self._mlp_block(graph, layer, entering, f"{prefix}.added")
        graph.output(added, "float32", self._hidden_shape)
        skip.output(skip.op("Identity", [entering.residual], f"{prefix}.skipped"), "float32", self._hidden_shape)
        self._graph.choose(runs, graph, skip, [result])
        return result

    def _mlp_block(
        self, graph: GraphBuilder, layer: int, entering: Entering, result: str, part: int | None = None
    ) -> str:
        prefix = f"layers.{layer}.mlp"
        cut = self._spec.cut(layer)
        product = self._ops.inner(graph, entering.value, prefix, entering.norm, part, cut=cut)
        if self._spec.inner_norms:
            product = self._ops.norm(graph, product, f"{prefix}.inner_norm")
        return self._leave(graph, product, f"{prefix}.down", entering.residual, entering.post_norm, result, part)

    def _mixture(self, experts: Experts, entering: Entering, runs: str, result: str) -> str:
        """One `If` for each operator of experts; at most one of them runs, and the others pass on their input."""
        prefix, layer, ids = f"layers.{experts.layer}.mlp", experts.layer, NO_EXPERTS
        counts = self._ops.expert_counts(experts)
        hidden = entering.residual
        conditions = [runs] if len(counts) == 1 else [runs_few(layer), runs_many(layer)]
        for count, condition in zip(counts, conditions, strict=True):
            graph, skip = self._graph.branch(), self._graph.branch()
            for branch, values in (
                (graph, mixture(self._ops, graph, experts, count, self._again(entering, hidden))),
                (skip, [skip.op("Identity", [v], f"{prefix}.kept_{i}") for i, v in enumerate((hidden, ids))]),
            ):
                branch.output(values[0], "float32", self._hidden_shape)
                branch.output(values[1], "int64", (1, "S", "K"))
            last = count == counts[-1]
            results = [result if last else f"{prefix}.few", f"{prefix}.expert_ids" if last else f"{prefix}.few_ids"]
            self._graph.choose(condition, graph, skip, results)
            hidden, ids = results
        self._ids.append(ids)
        return hidden

    def _again(self, entering: Entering, hidden: str) -> Entering:
        """The input again, where the hidden states passed an operator that did not run."""
        value = entering.value if self._spec.parallel else hidden
        return dataclasses.replace(entering, value=value, residual=hidden)

    def _head(self, hidden: str) -> None:
        """Norms the wanted rows only and multiplies them by the head; no rows give no logits."""
        graph = self._graph
        flat = graph.op("Squeeze", [hidden, graph.constant([0])], "flat")
        wanted = graph.op("Gather", [flat, io.LOGIT_ROWS], "wanted", axis=0)
        if self._streams is not None:
            wanted = self._streams.leave(graph, wanted)
        cap = self._spec.logit_softcap
        logits = self._ops.linear(graph, wanted, "head", "uncapped" if cap else io.LOGITS, norm=self._last_norm)
        if cap:
            self._ops.softcap(graph, logits, cap, io.LOGITS)
