"""The Gemmas 1 and 2, the text of 3, VaultGemma: norms are stored without their one, embeddings grow by sqrt(D)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.export.architectures.base import SEEING_IGNORABLE, SEEING_ROOTS, Architecture, Naming, common_spec
from edgeinfer.export.architectures.plans import TensorPlan
from edgeinfer.export.source.hf_config import HFConfig

# Every second layer of Gemma 2 and every sixth of Gemma 3 sees everything.
_GEMMA2_PATTERN, _GEMMA3_PATTERN = 2, 6
_NAMING = Naming(mlp_norm="pre_feedforward_layernorm.weight")


def _read_gemma(config: HFConfig, tied: bool) -> DecoderSpec:
    """Gemma: Llama with the tanh approximation of GELU, whatever name old configurations have for it."""
    return common_spec(config, tied, activation="gelu_tanh", qkv_bias=config.flag("attention_bias"))


def _read_gemma2(config: HFConfig, tied: bool) -> DecoderSpec:
    """Gemma 2: norms before and after, soft caps, a scale of its own, windows on every other layer."""
    return _with_norms(config, tied, config.slides(_GEMMA2_PATTERN))


def _read_vault(config: HFConfig, tied: bool) -> DecoderSpec:
    """VaultGemma: Gemma 2 without norms after attention and MLP."""
    return dataclasses.replace(_read_gemma2(config, tied), post_norm=False)


def _read_gemma3(config: HFConfig, tied: bool) -> DecoderSpec:
    """Gemma 3: Gemma 2 with norms of queries and keys instead of caps, and two rotations."""
    slides, head_dim = config.slides(_GEMMA3_PATTERN), config.head_dim()
    whole, local = config.rope(head_dim, "full_attention"), config.local_rope(head_dim)
    layers = tuple(map(int, slides)) if any(slides) else ()
    ropes: dict[str, Any] = {"rope": whole, "more_ropes": (local,) if layers else (), "rope_layers": layers}
    spec = _with_norms(config, tied, slides, qk_norm=True, **ropes)
    return dataclasses.replace(spec, attention_softcap=0.0)


def _with_norms(config: HFConfig, tied: bool, slides: list[bool], **parts: Any) -> DecoderSpec:
    def cap(name: str) -> float:
        return 0.0 if config.get(name) is None else config.number(name)

    return common_spec(
        config,
        tied,
        activation=config.activation("hidden_activation"),
        post_norm=True,
        qkv_bias=config.flag("attention_bias"),
        output_bias=config.flag("attention_bias"),
        attention_scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_softcap=cap("attn_logit_softcapping"),
        logit_softcap=cap("final_logit_softcapping"),
        windows=config.windows_of(slides),
        **parts,
    )


def _refine(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> TensorPlan:
    root = math.sqrt(spec.hidden_size)
    if plan.name == "embed":
        return plan.changed(scale=root)
    if plan.name == "final_norm":
        # A tied head has grown with the embedding.
        return plan.changed(offset=1.0, scale=1 / root if spec.tied else 1.0)
    return plan.changed(offset=1.0) if plan.name.endswith("norm") else plan


GEMMA = Architecture(classes=("GemmaForCausalLM",), model_types=("gemma",), read=_read_gemma, refine=_refine)
GEMMA2 = Architecture(
    classes=("Gemma2ForCausalLM",), model_types=("gemma2",), read=_read_gemma2, naming=_NAMING, refine=_refine
)
VAULT_GEMMA = Architecture(
    classes=("VaultGemmaForCausalLM",), model_types=("vaultgemma",), read=_read_vault, naming=_NAMING, refine=_refine
)
GEMMA3 = Architecture(
    classes=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    model_types=("gemma3_text", "gemma3"),
    read=_read_gemma3,
    naming=_NAMING,
    refine=_refine,
    roots=SEEING_ROOTS,
    ignorable=SEEING_IGNORABLE,
)
