"""Inputs and outputs of graphs whose cache grows by concatenation, shared by who exports them and who runs them.

These are the names that Hugging Face Optimum gives a decoder exported for text generation with past. Symbols: S new
tokens of a pass, P tokens of the past, V vocabulary, H key/value heads, h head dimension.

inputs
  input_ids              int64   (1, S)
  attention_mask         int64   (1, P + S)      ones; not every graph has it
  position_ids           int64   (1, S)          not every graph has it
  past_key_values.{i}.key, past_key_values.{i}.value    float32 (1, H, P, h)
outputs
  logits                 float32 (1, S, V)
  present.{i}.key, present.{i}.value                    float32 (1, H, P + S, h)
"""

from __future__ import annotations

# The file next to model.onnx that holds the weights; Manifest.weight_bytes counts what begins with "model.".
WEIGHTS = "model.onnx_data"

INPUT_IDS = "input_ids"
ATTENTION_MASK = "attention_mask"
POSITION_IDS = "position_ids"
LOGITS = "logits"


def past_names(num_layers: int) -> list[str]:
    """Names of the past keys of all layers, then of the values."""
    return [f"past_key_values.{layer}.{kind}" for kind in ("key", "value") for layer in range(num_layers)]


def present_names(num_layers: int) -> list[str]:
    """Names of the present keys and values, in the order of `past_names`."""
    return [f"present.{layer}.{kind}" for kind in ("key", "value") for layer in range(num_layers)]
