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

__all__ = ["GGUF_ARCHITECTURES", "find_gguf_architecture"]

# Phi-3.5-MoE is missing, as llama.cpp weights its experts otherwise, and BlockFFN, as it has no rectified router.
GGUF_ARCHITECTURES = DENSE | GEMMAS | SHARED_MIXTURES | LATENT | HYBRID | MAMBA


def find_gguf_architecture(family: Architecture, config: HFConfig, spec: DecoderSpec) -> GgufArchitecture:
    """The architecture of llama.cpp that a family's checkpoint is written as.

    Raises:
        UnsupportedArchitectureError: there is none, or its graph cannot express this decoder.
    """
    found = GGUF_ARCHITECTURES.get(family.model_types[0])
    if found is None:
        raise UnsupportedArchitectureError(f"llama.cpp has no architecture for {family.classes[0]}.", ONNX_HINT)
    found = (found.instead and found.instead(spec)) or found
    require_plain(spec, "GGUF files", ONNX_HINT, found.known)
    found.check(config, spec)
    return found
