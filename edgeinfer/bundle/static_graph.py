"""The graphs of a static bundle: which there are, their inputs and outputs, shared by who writes and who runs them.

Devices with fixed shapes run one graph per number of rows: a few narrow ones, which decode and verify drafts, and one
for prompts. All read the same weights. Symbols: S rows of the graph, C rows of the cache, R rows of logits (S, in the
graph for prompts 1), D hidden size, V vocabulary, H key/value heads, h head dimension, r rotated dimensions.

inputs
  input_ids              int64   (1, S)
  cos_rows, sin_rows     float32 (S, r/2)        rotary rows of the new tokens' positions
  attention_bias         float32 (1, 1, S, C)    added to the scores; 0, a large negative number hides
  window_bias            float32 (1, 1, S, C)    the same for layers with a sliding window; an input only of such models
  new_places             int64   (1, H, S, 3)    0, head, row of the cache where attention sees each new row; rows of
                                                 padding lie where nothing is seen, or are the last token's once more
  logit_rows             int64   (1,)            the row that goes through the head; only in the graph for prompts
  past_key.{i}, past_value.{i}   float32 (1, H, C, h)
outputs
  logits                 float32 (R, V)
  new_key.{i}, new_value.{i}     float32 (1, H, S, h)    of the new tokens, keys rotated; the runtime keeps them

New rows are put where they belong before attention sums over them, so that a row sums in the same order whichever graph
and place it is computed in. Nothing need see rows of padding, nor are they kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.errors import BundleError
from edgeinfer.core.records import dataclass

BACKEND = "onnx-static"

INPUT_IDS = "input_ids"
COS_ROWS = "cos_rows"
SIN_ROWS = "sin_rows"
ATTENTION_BIAS = "attention_bias"
WINDOW_BIAS = "window_bias"
NEW_PLACES = "new_places"
LOGIT_ROWS = "logit_rows"
LOGITS = "logits"

# No draft is wider, and no device has a longer cache.
_MOST_ROWS, _MOST_CONTEXT = 4096, 1 << 20


def past_names(layer: int) -> tuple[str, str]:
    return f"past_key.{layer}", f"past_value.{layer}"


def new_names(layer: int) -> tuple[str, str]:
    return f"new_key.{layer}", f"new_value.{layer}"


@dataclass(frozen=True)
class Value:
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StaticGraph:
    rows: int  # S
    prompts: bool  # the graph for prompts, which gives the logits of one row
    context: int  # C

    @property
    def file(self) -> str:
        return f"model.{'prompt' if self.prompts else 'rows'}-{self.rows}.onnx"

    @property
    def logit_rows(self) -> int:
        return 1 if self.prompts else self.rows

    def inputs(self, spec: DecoderSpec) -> Iterator[Value]:
        """In the order of the graph."""
        rows, context = self.rows, self.context
        yield Value(INPUT_IDS, "int64", (1, rows))
        yield from (Value(name, "float32", (rows, spec.rope.dim // 2)) for name in (COS_ROWS, SIN_ROWS))
        biases = (ATTENTION_BIAS, WINDOW_BIAS) if spec.window_size else (ATTENTION_BIAS,)
        yield from (Value(name, "float32", (1, 1, rows, context)) for name in biases)
        yield Value(NEW_PLACES, "int64", (1, spec.num_kv_heads, rows, 3))
        if self.prompts:
            yield Value(LOGIT_ROWS, "int64", (1,))
        for layer in range(spec.num_layers):
            for name in past_names(layer):
                yield Value(name, "float32", (1, spec.num_kv_heads, context, spec.head_dim))

    def outputs(self, spec: DecoderSpec) -> Iterator[Value]:
        """In the order of the graph."""
        yield Value(LOGITS, "float32", (self.logit_rows, spec.vocab_size))
        for layer in range(spec.num_layers):
            for name in new_names(layer):
                yield Value(name, "float32", (1, spec.num_kv_heads, self.rows, spec.head_dim))


@dataclass(frozen=True)
class StaticGraphs:
    context: int  # rows of the cache
    chunk: int  # rows of the graph for prompts, at least the largest width
    widths: tuple[int, ...]  # rows of the other graphs, ascending
    layers: tuple[int, ...]  # of the model that the graphs are made of, which may be fewer than it has; ascending

    def __post_init__(self) -> None:
        for what, numbers in (("widths", self.widths), ("layers", self.layers)):
            ascending = bool(numbers) and all(a < b for a, b in itertools.pairwise(numbers))
            _require(ascending, f"{what} must ascend")
        _require(self.widths[0] >= 1 and self.layers[0] >= 0, "widths and layers must be positive")
        _require(self.widths[-1] <= self.chunk <= _MOST_ROWS, f"a chunk of {self.chunk} rows is impossible")
        _require(self.chunk <= self.context <= _MOST_CONTEXT, f"a context of {self.context} tokens is impossible")

    @property
    def prompts(self) -> StaticGraph:
        return StaticGraph(self.chunk, True, self.context)

    @property
    def narrow(self) -> tuple[StaticGraph, ...]:
        """The graphs that are not for prompts, the narrowest first."""
        return tuple(StaticGraph(width, False, self.context) for width in self.widths)

    @property
    def all(self) -> tuple[StaticGraph, ...]:
        return (*self.narrow, self.prompts)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise BundleError(f"Static graphs: {what}.", "The bundle is damaged or made by another program.")
