"""Fields that are not followed: those that are ignored, with a warning where they ask for something, and others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_EMPTY: tuple[Any, ...] = ("", [], {})

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
    "n_cache_reuse": (0,),
    "n_probs": (0,),
    "parse_tool_calls": (True,),
    "post_sampling_probs": (),
    "reasoning_format": None,
    "reasoning_in_content": (),
    "return_progress": (),
    "slot_id": (-1,),
    "sse_ping_interval": None,
    "timings_per_token": None,
    # vLLM's, SGLang's and Text Generation Inference's.
    "add_special_tokens": (True,),
    "cache_salt": None,
    "details": None,
    "guided_decoding_backend": None,
    "include_reasoning": None,
    "min_tokens": (0,),
    "priority": None,
    "prompt_logprobs": (0,),
    "request_id": None,
    "separate_reasoning": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": None,
    "stream_reasoning": (True,),
    # Services', and what clients send along to say who they are and how they are billed.
    "keep_alive": None,
    "models": (),
    "provider": None,
    "route": None,
    "session_id": None,
    "transforms": (),
    "ttl": None,
    "usage": None,
    "modalities": (["text"],),
    "verbosity": ("medium",),
}

_TEXT_ONLY = "This model writes text only."
_NOT_STORED = "Nothing is stored here: send the whole conversation."
_NO_CODE = "No code that a request names is run here."
_ADAPTER = "Name an adapter that the server was started with in adapter."
# Without what they ask for an answer would be one to another question; with what is said of them.
REFUSED_FIELDS: Mapping[str, str] = {
    "audio": _TEXT_ONLY,
    "background": "Wait for the answer, or have it streamed.",
    "chat_template": "The model's own chat template is used.",
    "contexts": "Only /v1/chat/completions reads contexts.",
    "conversation": _NOT_STORED,
    "custom_logit_processor": _NO_CODE,
    "logits_processors": _NO_CODE,
    "lora": _ADAPTER,
    "lora_path": _ADAPTER,
    "messages": "This path continues a text: send messages to the one for chats.",
    "modalities": _TEXT_ONLY,
    "moderation": "Replies are not moderated here.",
    "previous_response_id": _NOT_STORED,
    "structural_tag": "Give json, regex, choice or grammar.",
    "thread": _NOT_STORED,
    "web_search_options": "This server reads nothing from other machines.",
}


def changes_nothing(name: str, value: Any) -> bool:
    """Whether a field that is not followed asks for nothing with this value, as empty ones do, and false for a thing
    that is not done anyway."""
    neutral = OTHERS_FIELDS.get(name, ())
    return neutral is None or value in neutral or value in _EMPTY or (value is False and True not in neutral)
