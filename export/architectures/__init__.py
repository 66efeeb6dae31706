"""The architectures that have their own builder, found by a checkpoint's config.json."""

from __future__ import annotations

import re

from edgeinfer.export.architectures import gemma, latent, layer_norm, lfm, llama, mamba, mixtures, qwen, shared_mixtures
from edgeinfer.export.architectures.base import Architecture
from edgeinfer.export.architectures.encoders import find_encoder
from edgeinfer.export.architectures.refused import refusal
from edgeinfer.export.source.hf_config import HFConfig

_MODULES = (llama, qwen, gemma, layer_norm, mixtures, shared_mixtures, latent, lfm, mamba)
_FOUND = (value for module in _MODULES for value in vars(module).values() if isinstance(value, Architecture))
# Every family of these modules, once.
ARCHITECTURES = tuple({family.classes: family for family in _FOUND}.values())


def find_architecture(config: HFConfig) -> Architecture:
    """Finds a config's family by its model class, or by its model type if it names no class or the base model's."""
    if (encoder := find_encoder(config)) is not None:
        return encoder
    for family in ARCHITECTURES:
        if config.architecture in family.classes:
            return family
        # The classes without a head, which transformers' AutoModel loads and saves.
        roots = [re.sub("For(CausalLM|ConditionalGeneration)$", "", name) for name in family.classes]
        bases = {f"{root}{kind}" for root in roots for kind in ("Model", "TextModel")}
        if config.model_type in family.model_types and config.architecture in ("", *bases):
            return family
    raise refusal(config)
