"""Builds a random decoder as an OpenVINO model with 4-bit matrices; knows nothing of other engines or timing.

Run by path with an interpreter that has openvino, so it imports nothing of edgeinfer; a Shape comes as JSON.

    python openvino_model.py '{"hidden": 896, ...}' OUT.xml

The graph is that of an exported checkpoint: separate projections, the usual subgraphs of norms, rotary embedding and
attention, and int4 weights with one scale per group, which the CPU plugin runs on int8 activations by itself. Past keys
and values are inputs, the ones with the new tokens' behind them are outputs.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as op

GROUP_SIZE = 128
STANDARD_DEVIATION = 0.02
# The standard deviation of uniform values from -8 to 7 is sqrt((16**2 - 1) / 12).
SCALE = STANDARD_DEVIATION / (255 / 12) ** 0.5


class Decoder:
    """Builds the model layer by layer.

    Args:
        shape: the fields of edgeinfer.apps.bench.shapes.Shape.
    """

    def __init__(self, shape: SimpleNamespace) -> None:
        self._shape = shape
        self._random = np.random.default_rng(0)
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        # Constants of 4 bits refer to these arrays and do not keep them.
        self._packed: list[Any] = []

    def build(self) -> ov.Model:
        """input_ids (1, S), position_ids (1, S), mask (1, 1, S, T), rows (R,), past keys and values (1, H, T - S, h)
        to logits (1, R, V) and present keys and values (1, H, T, h)."""
        shape = self._shape
        ids = self._input("input_ids", [1, -1], np.int64)
        positions = self._input("position_ids", [1, -1], np.int64)
        mask = self._input("mask", [1, 1, -1, -1], np.float32)
        rows = self._input("rows", [-1], np.int64)
        table = self._random.normal(0, STANDARD_DEVIATION, (shape.vocab_size, shape.hidden)).astype(np.float16)
        x = op.gather(op.convert(op.constant(table), np.float32), ids, op.constant(0))
        tables = self._rotary(positions)
        for layer in range(shape.layers):
            x = op.add(x, self._attention(self._norm(x), layer, tables, mask))
            x = op.add(x, self._mlp(self._norm(x)))
        logits = self._linear(self._norm(op.gather(x, rows, op.constant(1))), shape.hidden, shape.vocab_size)
        return ov.Model([self._named(logits, "logits"), *self._outputs], self._inputs, "decoder")

    def _input(self, name: str, dimensions: list[int], dtype: Any) -> Any:
        node = op.parameter(ov.PartialShape(dimensions), dtype, name=name)
        node.output(0).set_names({name})
        self._inputs.append(node)
        return node

    def _named(self, node: Any, name: str) -> Any:
        node.output(0).set_names({name})
        return op.result(node, name=name)

    def _linear(self, x: Any, width: int, columns: int, *, bias: bool = False) -> Any:
        groups = width // GROUP_SIZE
        packed = self._random.integers(0, 256, columns * width // 2, np.uint8)
        self._packed.append(packed)
        weights = op.constant(ov.Tensor(packed, ov.Shape([columns, groups, GROUP_SIZE]), ov.Type.i4))
        scales = op.constant(np.full((columns, groups, 1), SCALE, np.float16))
        values = op.multiply(op.convert(weights, np.float16), scales)
        matrix = op.convert(op.reshape(values, op.constant([columns, width]), False), np.float32)
        y = op.matmul(x, matrix, False, True)
        if bias:
            y = op.add(y, op.constant(self._random.normal(0, STANDARD_DEVIATION, (1, 1, columns)).astype(np.float32)))
        return y

    def _norm(self, x: Any) -> Any:
        mean = op.reduce_mean(op.power(x, op.constant(np.float32(2))), op.constant([-1]), True)
        root = op.sqrt(op.add(mean, op.constant(np.float32(self._shape.norm_eps))))
        scaled = op.multiply(x, op.divide(op.constant(np.float32(1)), root))
        return op.multiply(op.constant(np.ones((1, 1, self._shape.hidden), np.float32)), scaled)

    def _rotary(self, positions: Any) -> tuple[Any, Any]:
        half = self._shape.head_dim // 2
        frequencies = self._shape.rope_theta ** (-np.arange(half, dtype=np.float32) / half)
        angles = op.multiply(
            op.unsqueeze(op.convert(positions, np.float32), op.constant(-1)),
            op.constant(frequencies.reshape(1, 1, half).astype(np.float32)),
        )
        angles = op.unsqueeze(op.concat([angles, angles], -1), op.constant(1))  # (1, 1, S, h)
        return op.cos(angles), op.sin(angles)

    def _rotated(self, x: Any, tables: tuple[Any, Any]) -> Any:
        half = op.constant([self._shape.head_dim // 2])
        start, end, step, axis = (op.constant([i]) for i in (0, self._shape.head_dim, 1, -1))
        first, second = op.slice(x, start, half, step, axis), op.slice(x, half, end, step, axis)
        turned = op.concat([op.multiply(second, op.constant(np.float32(-1))), first], -1)
        return op.add(op.multiply(x, tables[0]), op.multiply(turned, tables[1]))

    def _heads(self, x: Any, count: int, *, bias: bool) -> Any:  # (1, S, D) -> (1, count, S, h)
        shape = self._shape
        y = self._linear(x, shape.hidden, count * shape.head_dim, bias=bias)
        split = op.reshape(y, op.constant([0, 0, count, shape.head_dim]), True)
        return op.transpose(split, op.constant([0, 2, 1, 3]))

    def _extended(self, new: Any, kind: str, layer: int) -> Any:
        """Past and new rows, repeated for each query head: (1, heads, T, h)."""
        shape = self._shape
        past = self._input(f"past.{layer}.{kind}", [1, shape.kv_heads, -1, shape.head_dim], np.float32)
        present = op.concat([past, new], 2)
        self._outputs.append(self._named(present, f"present.{layer}.{kind}"))
        repeats = shape.heads // shape.kv_heads
        ones = op.constant(np.ones((1, 1, repeats, 1, 1), np.float32))
        repeated = op.multiply(op.unsqueeze(present, op.constant(2)), ones)
        return op.reshape(repeated, op.constant([0, shape.heads, -1, shape.head_dim]), True)

    def _attention(self, x: Any, layer: int, tables: tuple[Any, Any], mask: Any) -> Any:
        shape = self._shape
        queries = self._rotated(self._heads(x, shape.heads, bias=shape.bias), tables)
        keys = self._rotated(self._heads(x, shape.kv_heads, bias=shape.bias), tables)
        values = self._heads(x, shape.kv_heads, bias=shape.bias)
        keys, values = self._extended(keys, "key", layer), self._extended(values, "value", layer)
        mixed = op.scaled_dot_product_attention(queries, keys, values, mask, causal=False)
        width = shape.heads * shape.head_dim
        flat = op.reshape(op.transpose(mixed, op.constant([0, 2, 1, 3])), op.constant([0, 0, width]), True)
        return self._linear(flat, width, shape.hidden)

    def _mlp(self, x: Any) -> Any:
        shape = self._shape
        gate, up = (self._linear(x, shape.hidden, shape.ffn) for _ in range(2))
        return self._linear(op.multiply(op.swish(gate), up), shape.ffn, shape.hidden)


if __name__ == "__main__":
    decoder = Decoder(SimpleNamespace(**json.loads(sys.argv[1])))
    ov.save_model(decoder.build(), sys.argv[2], compress_to_fp16=False)
