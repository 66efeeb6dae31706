"""One way to run a model; knows nothing of bytes, of speeds and of what a model has to choose from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["TOKENIZER", "Configuration", "Keeping"]

TOKENIZER = "tokenizer.json"
# Of the tokenizer: in memory as the library has it, made anew for every prompt, or part of the model's own file.
Keeping = Literal["kept", "transient", "model"]


@dataclass(frozen=True)
class Configuration:
    """One way to run a model.

    Attributes:
        context: tokens of prompt plus reply the cache may hold.
        prefill_chunk: prompt tokens per pass.
        kv: how the cache stores numbers, one of KV_TYPES.
        weights: where the weights are, one of WEIGHTS_MODES.
        window_layers: layers resident together where the weights are streamed; 0 where all are.
        drafters: names of those that may draft.
        draft_max: tokens in a draft at most; 0 is no speculation.
        tokenizer: one of `Keeping`.
        expert_bytes: of experts that are resident at once; 0 where all are, or the weights are streamed.
        expert_count: of experts that every token uses; None leaves it to the model.
    """

    context: int
    prefill_chunk: int
    kv: str
    weights: str
    window_layers: int
    drafters: tuple[str, ...]
    draft_max: int
    tokenizer: Keeping
    expert_bytes: int = 0
    expert_count: int | None = None
