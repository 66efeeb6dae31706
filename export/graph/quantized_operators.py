"""Quantized weights in both layouts: read in place by our kernel, or by the operators of ONNX Runtime.

Domain `edgeinfer`, version 1, float32 values. The constants of a matrix are vectors of the bytes that
edgeinfer.bundle.layouts describes, scales of bfloat16 bits; the attributes say what matrix they are. Of rows in
GGUF's types `data` is all, and the attributes are N, K, kind (the type's number), rows, kind_1, rows_1, kind_2 and
rows_2 of up to three types, and factor, which multiplies products and rows of an embedding.

EmbeddingLowBit, attributes N, K, bits, block_size, vectors, inline_scales (they are part of data, without input 3)
  0 ids int64 · 1 data · 2 low (8 bits) · 3 scales · 4 zero points (optional)
LinearLowBit, the same attributes, paired, swiglu (silu(gate) * up, N / 2 wide), norm_epsilon, part, heads
(above 1: the matrix is one of (N / heads, K) for each head, X is (..., heads K), without bias, norm and residual)
  0 X (..., K) · 1 data · 2 low (8 bits) · 3 scales · 4 zero points (optional) · 5 bias (N) (optional)
  6 norm (K) (optional): X is first normalised by its root mean square and multiplied by this
  7 residual (optional): added to the result · 8 planes int32 (1,) (optional): planes read of an 8-bit matrix
  9 layer_mask (optional): where it is false at `part`, the operator does nothing but pass on the residual, or zeros
LinearFloat, attributes N, K, by_output (the weight is (N, K), otherwise (K, N)), norm_epsilon, part, heads; a row's
bits do not depend on other rows, as those of MatMul and Gemm do
  0 X (..., K) · 1 weight · 2 bias (N) · 3 norm (K) · 4 residual · 5 layer_mask, as of LinearLowBit, all optional
  6 instead of the weight its bytes as F16 or BF16 by GGUF's number `kind`, (N, K) with whole tiles of rows; factor is
  that of LinearLowBit then
Activation, attributes kind (an index into _KINDS), paired (X is (..., 2 F): F values that go through the function, and
F that they multiply), cap (of softcap), cut and deviations (what is that many of a row's standard deviations above its
mean goes through the function, and 0 for the rest); a row's bits do not depend on other rows
  0 X (..., F) · 1 times (..., F r) (optional): each result multiplies r of these · 2 constants (2) of xielu (optional)
MoELowBit, attributes D, ungated: down(silu(up(x))), squared: with relu2, clamped: gpt-oss's SwiGLU, gelu: with GELU by
tanh in the place of silu, otherwise down(silu(gate(x)) * up(x))
  0 X (..., D) · 1 expert_ids int64 (..., K) · 2 expert_weights (..., K); pairs of weight zero are skipped
  3 experts: bytes that hold all experts · 4 directory int64 (E, 13): F, and of gate_up and down each bits, block and
  offsets of data, low, scales, zero points, -1 for what a matrix does not have; bits are -4 for codes of
  E2M1, -2 for vectors, -100 - t for GGUF's type t
  5 residual (optional) · 6 planes (optional), for the experts of 8 bits
  7 biases of gate_up (E, 2 F), or of up (E, F) · 8 of down (E, D), both optional
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeinfer.bundle import graph as io
from edgeinfer.bundle.kinds import KINDS
from edgeinfer.bundle.manifest import Blob, TensorEntry
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.export.graph.builder import MICROSOFT, GraphBuilder
from edgeinfer.export.graph.operators import Experts, Mixing, Operators, quantized_experts
from edgeinfer.nn.arithmetic import deviations

# MatMulNBits: activations are quantized to int8 per block, the only level with fast kernels for all widths.
_INT8_ACTIVATIONS = 4
# Bits in the directory of experts, less the number of a GGUF type.
_KIND_BITS = -100
# Attribute `kind` of Activation.
_KINDS = ("silu", "gelu", "gelu_tanh", "relu2", "xielu", "swiglu_oai", "sigmoid", "softcap")


class NativeOperators(Operators):
    """LinearLowBit, with operations around a product fused into it, MoELowBit and EmbeddingLowBit."""

    def __init__(self, spec: DecoderSpec, tensors: Mapping[str, TensorEntry]) -> None:
        super().__init__(spec, tensors)
        # Floats alone are ONNX Runtime's, which blocks for the caches of large matrices.
        self._mixed = any(t.bits < 32 for t in tensors.values())
        # Embedding and head are read whole even by a draft pass: they decide between similar tokens.
        self._with_planes = {t.name for t in tensors.values() if t.bits == 8 and t.name.startswith("layers.")}

    def declare_inputs(self, graph: GraphBuilder) -> None:
        if self._with_planes:
            graph.input(io.PLANES, "int32", (1,))

    def rows(self, graph: GraphBuilder, table: str, ids: str, result: str) -> str:
        entry = self._tensors[table]
        if entry.bits == 32:
            return super().rows(graph, table, ids, result)
        inputs = [ids, *self._bytes(graph, entry)]
        return graph.op("EmbeddingLowBit", inputs, result, domain=io.NATIVE_DOMAIN, **_matrix(entry))

    @property
    def masked(self) -> bool:
        return self._mixed

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
        if not self._mixed:
            return super().linear(graph, value, name, result, norm=norm, residual=residual)
        value, norm = self._entering(graph, value, norm)
        linear = self._floats if self._tensors[name].floats else self._fused
        return linear(graph, value, name, result, norm=norm, residual=residual, part=part)

    def heads(self, graph: GraphBuilder, value: str, name: str, result: str, heads: int, part: int | None) -> str:
        linear = self._floats if self._tensors[name].floats else self._fused
        return linear(graph, value, name, result, part=part, heads=heads)

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
        """SwiGLU of a quantized matrix is part of its product."""
        name = f"{prefix}.gate_up"
        entry = self._tensors.get(name)
        pair = entry is not None and entry.paired and entry.factor == 1
        fuses = pair and self._spec.activation == "silu" and not cut
        if not fuses:
            return super().inner(graph, value, prefix, norm, part, gated=gated, cut=cut)
        value, norm = self._entering(graph, value, norm)
        return self._fused(graph, value, name, f"{prefix}.product", norm=norm, swiglu=True, part=part)

    def activation(self, graph: GraphBuilder, name: str, value: str, result: str, times: str = "") -> str:
        return self._activation(graph, name, [value, times], result)

    def gate(self, graph: GraphBuilder, gate: str, value: str, result: str) -> str:
        return self._activation(graph, "sigmoid", [gate, value], result)

    def softcap(self, graph: GraphBuilder, value: str, cap: float, result: str) -> str:
        return self._activation(graph, "softcap", [value], result, cap=cap)

    def _activated(self, graph: GraphBuilder, product: str, prefix: str, *, gated: bool, cut: float) -> str:
        constants, result = self.vector(graph, f"{prefix}.xielu"), f"{prefix}.product"
        return self._activation(graph, self._spec.activation, [product, "", constants], result, gated=gated, cut=cut)

    def _activation(
        self,
        graph: GraphBuilder,
        name: str,
        inputs: list[str],
        result: str,
        *,
        gated: bool = False,
        cap: float = 0.0,
        cut: float = 0.0,
    ) -> str:
        attributes: dict[str, Any] = {"kind": _KINDS.index(name), "paired": int(gated), "cap": cap}
        if cut:
            attributes |= {"cut": 1, "deviations": deviations(cut)}
        return graph.op("Activation", inputs, result, domain=io.NATIVE_DOMAIN, **attributes)

    def _entering(self, graph: GraphBuilder, value: str, norm: str) -> tuple[str, str]:
        """Input of a product, and the norm that is left to the product's own operator."""
        fuses = self._spec.norm == "rms" and not self._spec.norm_bias
        return (value, norm) if fuses or not norm else (self.norm(graph, value, norm), "")

    def expert_counts(self, experts: Experts) -> tuple[int, ...]:
        """Our operator takes any number."""
        return (experts.moe.top_k,) if experts.quantized else super().expert_counts(experts)

    def experts(self, graph: GraphBuilder, mixing: Mixing) -> str:
        experts, routing = mixing.experts, mixing.routing
        if not experts.quantized:
            return super().experts(graph, mixing)
        moe, prefix = experts.moe, f"layers.{experts.layer}.mlp.experts"
        table = [(experts.entry(e, experts.into), experts.entry(e, "down")) for e in range(moe.experts)]
        entries = [entry for pair in table for entry in pair]
        blobs = [blob for entry in entries for blob in entry.blobs]
        start, stop = min(b.offset for b in blobs), max(b.offset + b.nbytes for b in blobs)
        data = graph.weight(prefix, Blob(start, "uint8", (stop - start,)))
        rows = [[moe.expert_size, *_format(into, start), *_format(out, start)] for into, out in table]
        factor, weights = table[0][1].factor, routing.weights
        if factor != 1:
            weights = graph.op("Mul", [weights, graph.scalar(f"factor_{factor:g}", factor)], f"{prefix}.weights")
        directory = graph.table(f"{prefix}.directory", rows)
        planes = io.PLANES if any(entry.name in self._with_planes for entry in entries) else ""
        biases = [experts.biases(graph, part) for part in (experts.into, "down")]
        inputs = [mixing.value, routing.ids, weights, data, directory, mixing.residual, planes, *biases]
        attributes = {"D": self._spec.hidden_size, "ungated": int(not moe.gated)}
        named = {"swiglu_oai": "clamped", "relu2": "squared", "gelu_tanh": "gelu"}
        attributes |= {named[self._spec.activation]: 1} if self._spec.activation in named else {}
        return graph.op("MoELowBit", inputs, mixing.result, domain=io.NATIVE_DOMAIN, **attributes)

    def _fused(
        self,
        graph: GraphBuilder,
        value: str,
        name: str,
        result: str,
        *,
        norm: str = "",
        residual: str = "",
        swiglu: bool = False,
        part: int | None = None,
        heads: int = 1,
    ) -> str:
        entry = self._tensors[name]
        weight = graph.weight(norm, self._tensors[norm].data) if norm else ""
        planes = io.PLANES if name in self._with_planes else ""
        return graph.op(
            "LinearLowBit",
            [value, *self._bytes(graph, entry), self._bias(graph, name), weight, residual, planes, _mask(part)],
            result,
            domain=io.NATIVE_DOMAIN,
            **_matrix(entry),
            paired=int(entry.paired),
            swiglu=int(swiglu),
            norm_epsilon=self._spec.norm_eps,
            part=part or 0,
            **_of_heads(heads),
        )

    def _floats(
        self,
        graph: GraphBuilder,
        value: str,
        name: str,
        result: str,
        *,
        norm: str = "",
        residual: str = "",
        part: int | None = None,
        heads: int = 1,
    ) -> str:
        entry, (n, k) = self._tensors[name], self._tensors[name].shape
        matrix = graph.weight(self._table(entry), entry.data)
        halves = {"kind": KINDS[entry.segments[0].kind].number, "factor": entry.factor} if entry.segments else {}
        given = ("", matrix) if halves else (matrix,)
        weight = graph.weight(norm, self._tensors[norm].data) if norm else ""
        return graph.op(
            "LinearFloat",
            [value, *given[:1], self._bias(graph, name), weight, residual, _mask(part), *given[1:]],
            result,
            domain=io.NATIVE_DOMAIN,
            N=n,
            K=k,
            by_output=int(not entry.transposed),
            norm_epsilon=self._spec.norm_eps,
            part=part or 0,
            **_of_heads(heads),
            **halves,
        )

    def _bytes(self, graph: GraphBuilder, entry: TensorEntry) -> list[str]:
        """Data, low plane, scales and zero points as vectors; empty names for absent ones."""
        table = self._table(entry)
        blobs = {"": entry.data, ".low": entry.low, ".scales": entry.scales, ".zero_points": entry.zero_points}
        return [
            graph.weight(f"{table}{part}", blob, (blob.size,)) if blob is not None else ""
            for part, blob in blobs.items()
        ]


def _format(entry: TensorEntry, start: int) -> list[int]:
    """Six columns of the directory: a matrix's format and where its parts lie, counted from `start`."""
    blobs = (entry.data, entry.low, entry.scales, entry.zero_points)
    bits = -entry.bits if entry.e2m1 or entry.vectors else entry.bits
    if entry.segments:
        bits = _KIND_BITS - KINDS[entry.segments[0].kind].number
    return [bits, entry.block_size, *(-1 if blob is None else blob.offset - start for blob in blobs)]


def _mask(part: int | None) -> str:
    """The input by which an operator of that part of the model skips itself."""
    return "" if part is None else io.LAYER_MASK


def _of_heads(heads: int) -> dict[str, int]:
    """The attribute of products by head."""
    return {"heads": heads} if heads > 1 else {}


def _kinds(entry: TensorEntry) -> dict[str, Any]:
    """The attributes of rows in GGUF's types."""
    attributes: dict[str, Any] = {} if entry.factor == 1 else {"factor": entry.factor}
    for index, segment in enumerate(entry.segments):
        suffix = f"_{index}" if index else ""
        attributes |= {f"kind{suffix}": KINDS[segment.kind].number, f"rows{suffix}": segment.rows}
    return attributes


def _matrix(entry: TensorEntry) -> dict[str, Any]:
    n, k = entry.shape
    if entry.segments:
        return {"N": n, "K": k} | _kinds(entry)
    special = {"inline_scales": 1} if entry.inline_scales else {}
    special |= {"vectors": 1} if entry.vectors else {}
    return {"N": n, "K": k, "bits": entry.bits, "block_size": entry.block_size} | special


class PortableOperators(Operators):
    """MatMulNBits, QMoE and GatherBlockQuantized where a weight is quantized."""

    def rows(self, graph: GraphBuilder, table: str, ids: str, result: str) -> str:
        entry = self._tensors[table]
        if entry.bits == 32:
            return super().rows(graph, table, ids, result)
        count, blocks, width = entry.data.shape
        inputs = [graph.weight(table, entry.data, (count, blocks * width)), ids, *self._blocks(graph, entry)]
        padded = entry.shape[1] % entry.block_size != 0
        name = f"{result}.padded" if padded else result
        attributes = {"bits": entry.bits, "block_size": entry.block_size, "gather_axis": 0, "quantize_axis": 1}
        graph.op("GatherBlockQuantized", inputs, name, domain=MICROSOFT, **attributes)
        if not padded:
            return name
        bounds = [graph.constant([0]), graph.constant([entry.shape[1]]), graph.constant([-1])]
        return graph.op("Slice", [name, *bounds], result)

    def experts(self, graph: GraphBuilder, mixing: Mixing) -> str:
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
