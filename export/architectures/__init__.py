"""The architectures that have their own builder, found by a checkpoint's config.json."""

from __future__ import annotations

import re
from collections.abc import Iterator

from edgeinfer.export.architectures.base import Architecture
from edgeinfer.export.architectures.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA3N, GEMMA4, VAULT_GEMMA
from edgeinfer.export.architectures.latent import DEEPSEEK2, DEEPSEEK3, GLM4_MOE_LITE, MISTRAL4, YOUTU
from edgeinfer.export.architectures.layer_norm import COHERE, COHERE2, NEMOTRON, PHI, STABLELM, STARCODER2
from edgeinfer.export.architectures.lfm import LFM2, LFM2_MOE, LFM3
from edgeinfer.export.architectures.llama import (
    APERTUS,
    ARCEE,
    BITNET,
    ERNIE4_5,
    EXAONE4,
    GLM,
    GLM4,
    GRANITE,
    GRANITE_MOE_SWA,
    GRANITE_SWA,
    HELIUM,
    HUNYUAN,
    LLAMA,
    MINISTRAL,
    MINISTRAL3,
    MISTRAL,
    OLMO2,
    OLMO3,
    PHI3,
    SEED_OSS,
    SMOLLM3,
)
from edgeinfer.export.architectures.mamba import BAMBA, FALCON_H1, GRANITE_HYBRID, MAMBA2, NEMOTRON_H
from edgeinfer.export.architectures.mixtures import (
    BLOCK_FFN,
    COHERE2_MOE,
    GPT_OSS,
    GRANITE_MOE,
    MINICPM3,
    MIXTRAL,
    OLMOE,
    PHIMOE,
)
from edgeinfer.export.architectures.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_5, QWEN3_5_MOE, QWEN3_MOE, QWEN3_NEXT
from edgeinfer.export.architectures.refused import refusal
from edgeinfer.export.architectures.shared_mixtures import AFMOE, DOTS1, ERNIE4_5_MOE, FLEX_OLMO, GLM4_MOE, HUNYUAN_MOE
from edgeinfer.export.source.hf_config import HFConfig

_DENSE = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    PHI3,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GEMMA3N,
    GEMMA4,
    VAULT_GEMMA,
    OLMO2,
    OLMO3,
    EXAONE4,
)
_NEAR_LLAMA = (SMOLLM3, MINISTRAL, MINISTRAL3, GRANITE, GLM, GLM4, ERNIE4_5, HELIUM, ARCEE, SEED_OSS, HUNYUAN)
_WINDOWED = (GRANITE_SWA, GRANITE_MOE_SWA)
_ACTIVATED = (APERTUS, BITNET)
_LAYER_NORM = (PHI, STABLELM, STARCODER2, NEMOTRON, COHERE, COHERE2)
_MIXTURES = (MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GRANITE_MOE, BLOCK_FFN, GPT_OSS, PHIMOE, COHERE2_MOE)
_SHARED_MIXTURES = (GLM4_MOE, DOTS1, ERNIE4_5_MOE, HUNYUAN_MOE, FLEX_OLMO, AFMOE)
_LATENT = (DEEPSEEK2, DEEPSEEK3, GLM4_MOE_LITE, MINICPM3, MISTRAL4, YOUTU)
_HYBRID = (LFM2, LFM2_MOE, LFM3, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE)
_MAMBA = (MAMBA2, BAMBA, FALCON_H1, NEMOTRON_H, GRANITE_HYBRID)
_PLAIN = (*_DENSE, *_NEAR_LLAMA, *_ACTIVATED, *_LAYER_NORM)
ARCHITECTURES = (*_PLAIN, *_WINDOWED, *_MIXTURES, *_SHARED_MIXTURES, *_LATENT, *_HYBRID, *_MAMBA)


def find_architecture(config: HFConfig) -> Architecture:
    """Finds a config's family by its model class, or by its model type if it names no class or the base model's."""
    for family in ARCHITECTURES:
        if config.architecture in family.classes:
            return family
        if config.model_type in family.model_types and config.architecture in ("", *_base_models(family)):
            return family
    raise refusal(config)


def _base_models(family: Architecture) -> Iterator[str]:
    """The classes without a head, which transformers' AutoModel loads and saves."""
    for name in family.classes:
        root = re.sub("For(CausalLM|ConditionalGeneration)$", "", name)
        yield from (f"{root}Model", f"{root}TextModel")
