"""Searches the hub for models that run here: GGUF files, bundles, and checkpoints of families that are converted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from edgeinfer.errors import UsageError
from edgeinfer.hub.cache import Kind
from edgeinfer.hub.client import hub_errors, library
from edgeinfer.records import dataclass

# Model classes that edgeinfer.export builds; a test holds the two equal.
_CAUSAL = """
Afmoe Apertus Arcee Bamba BitNet Cohere2 Cohere2Moe Cohere DeepseekV2 DeepseekV3 Dots1 Ernie4_5 Ernie4_5_Moe Exaone4
FalconH1 FlexOlmo Gemma2 Gemma3 Gemma3n Gemma4 Gemma Glm4 Glm4Moe Glm4MoeLite Glm GptOss Granite GraniteMoe
GraniteMoeHybrid GraniteMoeSWA GraniteMoeShared GraniteSWA Helium HunYuanDenseV1 HunYuanMoEV1 Lfm2 Lfm2Moe Lfm3 Llama
Mamba2 MiniCPM3 MiniCPM Ministral3 Ministral Mistral4 Mistral Mixtral Nemotron NemotronH Olmo2 Olmo3 Olmoe Phi3 Phi
PhiMoE Phimoe Qwen2 Qwen2Moe Qwen3 Qwen3Moe Qwen3Next Qwen3_5 Qwen3_5Moe SeedOss SmolLM3 StableLm Starcoder2
VaultGemma Youtu
"""
_CONDITIONAL = "Gemma3 Gemma3n Gemma4 Mistral3 Qwen2VL Qwen2_5_VL Qwen3VL Qwen3_5 Qwen3_5Moe"
CONVERTED = (
    *(f"{family}ForCausalLM" for family in _CAUSAL.split()),
    *(f"{family}ForConditionalGeneration" for family in _CONDITIONAL.split()),
)
# Architectures of GGUF files whose caches cannot be cut back, as those of recurrent layers.
_GGUF_REFUSED = frozenset(
    (
        *("falcon-h1", "granitehybrid", "jamba", "kimi-linear", "lfm2", "lfm2moe", "mamba", "mamba2", "nemotron_h"),
        *("nemotron_h_moe", "plamo2", "qwen35", "qwen35moe", "qwen3next", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"),
    )
)
# Of what the hub finds, how much is looked through for models that run.
_LOOKED_THROUGH = 10
_MOST = 100


@dataclass(frozen=True)
class FoundModel:
    """A model of the hub that a search found.

    Attributes:
        name: what loads it, ORG/NAME.
        kind: a checkpoint is converted when it is first loaded; of GGUF files a type is chosen.
        parameters: 0 where the hub does not tell.
        downloads: in the last month.
        licence: as the hub names it; "" where none is given.
        gated: whether its terms have to be accepted on the hub first.
    """

    name: str
    kind: Kind
    parameters: int
    downloads: int
    licence: str
    gated: bool


def search_hub(text: str, limit: int = 20) -> list[FoundModel]:
    """Finds text models that edgeinfer can run, the most downloaded first.

    Args:
        text: words of the name.
        limit: models at most, up to 100.

    Raises:
        HubError: the hub cannot be reached or refuses.
        UsageError: there is nothing to search for.
    """
    if not text.strip() or len(text) > 200:
        raise UsageError("The search is empty.", "Type part of a model's name, such as qwen3.")
    if not 1 <= limit <= _MOST:
        raise UsageError(f"limit={limit} is out of range.", f"Choose 1 to {_MOST}.")
    expand = ["config", "downloads", "gated", "gguf", "safetensors", "tags"]
    options: dict[str, Any] = {"search": text.strip(), "sort": "downloads", "limit": limit * _LOOKED_THROUGH}
    with hub_errors(text.strip()):
        listed = library().HfApi().list_models(**options, expand=expand)
        return list(itertools.islice(_running(listed), limit))


def _running(listed: Any) -> Iterator[FoundModel]:
    for info in listed:
        kind, parameters = _kind(info)
        if kind is None:
            continue
        licences = [tag.partition(":")[2] for tag in info.tags or () if tag.startswith("license:")]
        yield FoundModel(
            name=info.id,
            kind=kind,
            parameters=parameters,
            downloads=int(info.downloads or 0),
            licence=licences[0] if licences else "",
            gated=bool(getattr(info, "gated", False)),
        )


def _kind(info: Any) -> tuple[Kind | None, int]:
    """What runs of a repository, and its parameters."""
    tags = set(info.tags or ())
    gguf = getattr(info, "gguf", None)
    if gguf or "gguf" in tags:
        data = gguf if isinstance(gguf, dict) else {}
        refused = data.get("architecture") in _GGUF_REFUSED
        return (None if refused else "gguf"), int(data.get("total") or 0)
    config = info.config if isinstance(info.config, dict) else {}
    classes = config.get("architectures") or []
    weights = getattr(info, "safetensors", None)
    # What is quantized already cannot be converted.
    if weights is None or "quantization_config" in config or not set(classes) & set(CONVERTED):
        return None, 0
    total = weights.get("total") if isinstance(weights, dict) else getattr(weights, "total", 0)
    return "checkpoint", int(total or 0)
