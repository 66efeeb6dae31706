"""Fields of other servers' requests that change nothing here: requests with them are answered, with a warning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["OTHERS_FIELDS", "changes_nothing"]

# By field, the values that ask for nothing, which need no warning: a sampler's value for "off", or what is done
# here anyway. None in a tuple's place is any value.
OTHERS_FIELDS: Mapping[str, tuple[Any, ...] | None] = {
    # Samplers of llama.cpp's server and of front ends for it.
    "adaptive_decay": (),
    "adaptive_target": (-1,),
    "dry_allowed_length": None,
    "dry_base": None,
    "dry_multiplier": (0,),
    "dry_penalty_last_n": None,
    "dry_sequence_breakers": None,
    "dynatemp_exponent": None,
    "dynatemp_range": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "min_keep": (0,),
    "mirostat": (0,),
    "mirostat_eta": None,
    "mirostat_mode": (0,),
    "mirostat_tau": None,
    "n_discard": (0,),
    "n_indent": (0,),
    "n_keep": (0,),
    "num_keep": (0,),
    "penalize_newline": (False,),
    "penalize_nl": (False,),
    "penalty_prompt": (),
    "repeat_last_n": (-1,),
    "sampler_order": (),
    "samplers": (),
    "smoothing_curve": None,
    "smoothing_factor": (0,),
    "t_max_predict_ms": (0,),
    "temperature_last": None,
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "typical": (0, 1),
    "typical_p": (0, 1),
    "xtc_probability": (0,),
    "xtc_threshold": None,
    # How a server goes about it.
    "cache_prompt": (True,),
    "id_slot": (-1,),
    "lora": ([],),
    "n_cache_reuse": (0,),
    "reasoning_format": None,
    "return_progress": (False,),
    "slot_id": (-1,),
    "sse_ping_interval": None,
    "timings_per_token": None,
    # vLLM's and Text Generation Inference's.
    "add_special_tokens": (True,),
    "decoder_input_details": (False,),
    "do_sample": (),
    "early_stopping": (False,),
    "include_reasoning": None,
    "include_stop_str_in_output": (False,),
    "min_tokens": (0,),
    "priority": None,
    "prompt_logprobs": (0,),
    "return_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": None,
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "watermark": (False,),
    # OpenAI's models', and what clients send along to say who they are.
    "thinking": None,
    "think": (False,),
    "keep_alive": None,
}


def changes_nothing(name: str, value: Any) -> bool:
    """Whether a field of `OTHERS_FIELDS` asks for nothing with this value."""
    neutral = OTHERS_FIELDS[name]
    return neutral is None or value in neutral
