"""The architectures of llama.cpp that families of checkpoints are written as, by transformers' names."""

from __future__ import annotations

from edgeinfer.bundle import DecoderSpec
from edgeinfer.errors import UnsupportedArchitectureError
from edgeinfer.export.architectures import Architecture
from edgeinfer.export.architectures.described import require_plain
from edgeinfer.export.gguf.architectures import ONNX_HINT, GgufArchitecture
from edgeinfer.export.gguf.dense import DENSE
from edgeinfer.export.gguf.gemma import GEMMAS
from edgeinfer.export.gguf.hybrid import HYBRID
from edgeinfer.export.gguf.latent import LATENT
from edgeinfer.export.gguf.mamba import MAMBA
from edgeinfer.export.gguf.shared_mixtures import SHARED_MIXTURES
from edgeinfer.export.source.hf_config import HFConfig

__all__ = ["GGUF_ARCHITECTURES", "WITHOUT_GGUF", "find_gguf_architecture"]

GGUF_ARCHITECTURES = DENSE | GEMMAS | SHARED_MIXTURES | LATENT | HYBRID | MAMBA
# Families that no graph of llama.cpp computes, and what it lacks of them.
WITHOUT_GGUF = {
    "flex_olmo": "a mixture of experts whose norms stand behind attention and experts",
    "lfm3": "convolutions beside attention with windows and gates",
    "minicpm": "a router that chooses by a ReLU",
    "vaultgemma": "soft caps without norms after attention and MLP",
    "phimoe": "the weights of Phi-3.5-MoE's experts, each a softmax over those near it",
}


def find_gguf_architecture(family: Architecture, config: HFConfig, spec: DecoderSpec) -> GgufArchitecture:
    """The architecture of llama.cpp that a family's checkpoint is written as.

    Raises:
        UnsupportedArchitectureError: there is none, or its graph cannot express this decoder.
    """
    found = GGUF_ARCHITECTURES.get(family.model_types[0])
    if found is None:
        lacking = WITHOUT_GGUF[family.model_types[0]]
        raise UnsupportedArchitectureError(
            f"There are no GGUF files of {family.classes[0]}: llama.cpp has no graph with {lacking}.", ONNX_HINT
        )
    found = (found.instead and found.instead(spec)) or found
    require_plain(spec, "GGUF files", ONNX_HINT, found.known)
    found.check(config, spec)
    return found
