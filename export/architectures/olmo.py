"""Families with norms after attention and MLP alone: OLMo 2, OLMo 3 and EXAONE 4."""

from __future__ import annotations

from typing import Any

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.export.architectures.base import Architecture, common_spec
from edgeinfer.export.source.hf_config import HFConfig

# Every fourth layer of OLMo 3 sees everything.
_PATTERN = 4


def _read_olmo2(config: HFConfig, tied: bool, **parts: Any) -> DecoderSpec:
    """OLMo 2: no norms before, and norms of all queries and of all keys together."""
    bias = config.flag("attention_bias")
    parts |= {"pre_norm": False, "post_norm": True, "qk_norm": True, "whole_norm": True}
    return common_spec(config, tied, qkv_bias=bias, output_bias=bias, **parts)


def _read_olmo3(config: HFConfig, tied: bool) -> DecoderSpec:
    """OLMo 3: OLMo 2 with windows, and a scaled rotation in the other layers alone."""
    slides, head_dim = config.slides(_PATTERN), config.head_dim()
    whole, local = config.rope(head_dim, "full_attention"), config.local_rope(head_dim)
    apart = any(slides) and whole != local
    further = {"more_ropes": (local,), "rope_layers": tuple(map(int, slides))} if apart else {}
    return _read_olmo2(config, tied, windows=config.windows_of(slides), rope=whole, **further)


def _read_exaone4(config: HFConfig, tied: bool) -> DecoderSpec:
    """EXAONE 4: norms of each query and key head; in models with a window, layers without it do not rotate."""
    slides = config.slides() if config.get("sliding_window") is not None else []
    windows, layers = config.windows_of(slides), tuple(0 if slide else -1 for slide in slides)
    return common_spec(config, tied, pre_norm=False, post_norm=True, qk_norm=True, windows=windows, rope_layers=layers)


OLMO2 = Architecture(classes=("Olmo2ForCausalLM",), model_types=("olmo2",), read=_read_olmo2)
OLMO3 = Architecture(classes=("Olmo3ForCausalLM",), model_types=("olmo3",), read=_read_olmo3)
EXAONE4 = Architecture(classes=("Exaone4ForCausalLM",), model_types=("exaone4",), read=_read_exaone4)
