"""The architectures that have their own builder, found by a checkpoint's config.json."""

from __future__ import annotations

from edgeinfer.export.architectures.base import Architecture, HeadPadding, Source, TensorPlan
from edgeinfer.export.architectures.block_ffn import BLOCK_FFN
from edgeinfer.export.architectures.llama import LLAMA, MISTRAL, PHI3
from edgeinfer.export.architectures.mixtures import GRANITE_MOE, MIXTRAL, OLMOE
from edgeinfer.export.architectures.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from edgeinfer.export.architectures.refused import refusal
from edgeinfer.export.source.hf_config import HFConfig

__all__ = ["ARCHITECTURES", "Architecture", "HeadPadding", "Source", "TensorPlan", "find_architecture"]

_DENSE = (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3)
_MIXTURES = (MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GRANITE_MOE, BLOCK_FFN)
ARCHITECTURES = (*_DENSE, *_MIXTURES)


def find_architecture(config: HFConfig) -> Architecture:
    """Finds the family of a config by its model class, or by its model type where no class is named.

    Raises:
        UnsupportedArchitectureError: there is no builder for it.
    """
    for family in ARCHITECTURES:
        if config.architecture in family.classes:
            return family
        if not config.architecture and config.model_type in family.model_types:
            return family
    raise refusal(config)
