"""The names and meanings of the ONNX graphs' inputs and outputs, shared by who writes a graph and who runs it.

A bundle has a native graph, whose attention (`edgeinfer.Attention`) reads and writes pages of a pool, and a portable
one, whose attention is `GroupQueryAttention` over one buffer per layer.

Symbols: S new tokens of a pass, T tokens including the past, C KV capacity, P rotary rows (>= T), R logit rows,
D hidden size, V vocabulary, L layers, H key/value heads, h head dimension, E experts of a layer, K of a token;
of the paged cache B bytes of the pool, N sequences of a pass, G pages of the longest of them, X path slots (>= 1).

inputs of every graph
  input_ids              int64   (1, S)
  position_ids           int64   (1, S)          rotary position of each new token
  cos_cache, sin_cache   float32 (P, rope.dim/2) rotary tables; made by the runtime for the context it planned. Further
                                                 rotations of the decoder have cos_cache.1, sin_cache.1 and so on
  query_factors          float32 (P, 1)          what queries are multiplied by at each position, an input only of
                                                 decoders that have such factors (RopeSpec.query_beta)
  layer_mask             bool    (2 L,)          [2i] attention of layer i runs, [2i+1] its MLP runs
  hidden_in              float32 (1, Sh, D)      enters the first layer instead of the embeddings when use_hidden
  use_hidden             bool    (1,)            Sh = S when true; Sh is free when false
  logit_rows             int64   (R,)            rows of the S new tokens that go through the LM head
  planes                 int32   (1,)            4-bit planes read of the layers' 8-bit matrices: 1 the high one alone,
                                                 2 both; an input only of native graphs that have such matrices
                                                 (Capabilities.high_planes). Embedding and head are always read whole.
  expert_count           int64   (1,)            K, experts that each token uses; any from 1 on, of which those of
                                                 Capabilities.expert_counts are worth asking for. This and the next are
                                                 inputs only of models with a mixture of experts
  expert_bias            float32 (L, E)          added to what a router chooses by: 0, or -1e9 for an expert that may
                                                 not be chosen; weights are those of the chosen as DecoderSpec says
inputs of a paged graph; a slot is the index of a row in its sequence and lies in page slot // PAGE_SLOTS of it. A row
attends to its path: the first n slots of its sequence, then some further ones, the last of all its own. A row of -1
further slots attends to the first n alone, and names its own slot, which may be any, in place of where they begin
  kv_pool                uint8   (B,)            all pages, at a multiple of 64 bytes; written in place before any row
                                                 of a layer attends
  kv_layout              int64   (3 + L,)        type of keys, type of values (edgeinfer.bundle.geometry.PAGED_KV),
                                                 bytes of a page, where each layer begins in it
  kv_pages               int32   (N, G)          page of the pool that holds each PAGE_SLOTS slots of each sequence; -1
                                                 where there is none yet
  rows                   int32   (S, 4)          of each new token: sequence, n, where its further slots begin in
                                                 path_slots, and how many they are
  path_slots             int32   (X,)            further slots, ascending for each row and none below its n
inputs of a paged graph whose decoder has states (Geometry.states); a state slot holds those of one sequence
  state_pool             uint8   (Bs,)           all state slots, at a multiple of 64 bytes; written in place
  state_layout           int64   (2 + L,)        bytes of a state slot, rows of a ring, where each layer begins in one
  state_rows             int64   (N, 2)          of each sequence its state slot, and after how many tokens the states
                                                 stand at most when the pass is done
inputs of a draft module
  tapped                 float32 (1, St, W)      what it reads of the target, DraftModule.width wide; read unless
                                                 use_hidden is true, when hidden_in has its own states of rows before.
                                                 Of a module that drafts in blocks St <= S: the first St rows are the
                                                 text's, of which it keeps keys and values, the others the block's
inputs that a paged graph gets where it is loaded with adapters, for its operators edgeinfer.Adapter
  adapter_rows           int32   (S,)            adapter of each new token; -1 where it has none
  adapter_weights        float32 (W,)            factors of all adapters
  adapter_table          int64   (M, A, Q, 5)    of each of M matrices, A adapters and Q parts of a matrix: where both
                                                 factors begin, their rank, the first output and how many they are
inputs of a graph that is not paged
  attention_bias         float32 (1, 1, S, T)    added to the scores; 0 for a chain, a large negative number hides
  window_bias            float32 (1, 1, S, T)    the same for layers with a sliding window, which it cuts by position;
                                                 an input only of models that have such layers
  seqlens_k              int32   (1,)            T - 1
  total_sequence_length  int32   ()              T
  past_key.{i}, past_value.{i}        float32 (1, H, C, h)
outputs
  logits                 float32 (R, V)
  hidden_out             float32 (1, S, D)       after the last layer that ran, before the final norm
  tapped                 float32 (1, S, W)       hidden states that enter each of Manifest.taps, side by side; an output
                                                 only of bundles with a draft module inside
  expert_ids             int64   (L, S, K)       experts of each token by falling score; -1 in layers that have none
                                                 or are masked, and for weights of zero; an output only of models
                                                 with a mixture of experts
  present_key.{i}, present_value.{i}  as the past        bound to the buffer of the past; not of a paged graph

An encoder's graph reads B texts of S tokens, the shorter ones padded, and keeps nothing: input_ids, position_ids and
token_types int64 (B, S), attention_bias float32 (B, 1, 1, S), window_bias (B, 1, S, S), the rotary tables, and
  pooling                float32 (B, 1, S)       what hidden states are multiplied by and summed: a text's pooled vector
and gives `pooled` float32 (B, 1, D), the vector or the scores after the products behind the pooling.

A masked attention block leaves the hidden states, and pool or KV buffer, as they are; a masked MLP the hidden states.
"""

from __future__ import annotations

INPUT_IDS = "input_ids"
POSITION_IDS = "position_ids"
COS_CACHE = "cos_cache"
SIN_CACHE = "sin_cache"
QUERY_FACTORS = "query_factors"
ATTENTION_BIAS = "attention_bias"
WINDOW_BIAS = "window_bias"
SEQLENS_K = "seqlens_k"
TOTAL_LENGTH = "total_sequence_length"
LAYER_MASK = "layer_mask"
HIDDEN_IN = "hidden_in"
USE_HIDDEN = "use_hidden"
LOGIT_ROWS = "logit_rows"
KV_POOL = "kv_pool"
KV_LAYOUT = "kv_layout"
KV_PAGES = "kv_pages"
ROWS = "rows"
PATH_SLOTS = "path_slots"
STATE_POOL = "state_pool"
STATE_LAYOUT = "state_layout"
STATE_ROWS = "state_rows"
ADAPTER_ROWS = "adapter_rows"
ADAPTER_WEIGHTS = "adapter_weights"
ADAPTER_TABLE = "adapter_table"
# Inside the graph: the `adapter_rows` of `logit_rows`.
HEAD_ADAPTERS = "adapter_rows.head"
PLANES = "planes"
EXPERT_COUNT = "expert_count"
EXPERT_BIAS = "expert_bias"
EXPERT_IDS = "expert_ids"
LOGITS = "logits"
HIDDEN_OUT = "hidden_out"
TAPPED = "tapped"
TOKEN_TYPES = "token_types"
POOLING = "pooling"
POOLED = "pooled"
# Operators of the native layout, version 1.
NATIVE_DOMAIN = "edgeinfer"
# Slots of a page.
PAGE_SLOTS = 64
# Rows of the cache and positions differ by the rows that a draft tree has next to a path. The operator's own window,
# counted in rows, is wider than the model's by this much, so that `window_bias` alone decides.
TREE_ROWS = 256


def rotary_names(index: int) -> tuple[str, str]:
    """Names of the tables of a rotation, by its index in DecoderSpec.ropes."""
    suffix = f".{index}" if index else ""
    return f"{COS_CACHE}{suffix}", f"{SIN_CACHE}{suffix}"


def past_names(layer: int) -> tuple[str, str]:
    return f"past_key.{layer}", f"past_value.{layer}"


def present_names(layer: int) -> tuple[str, str]:
    return f"present_key.{layer}", f"present_value.{layer}"
