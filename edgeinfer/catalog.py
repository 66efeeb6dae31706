"""What a model says of itself before it is loaded; knows nothing of plans, and loads nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeinfer.bundle import Bundle, open_bundle
from edgeinfer.config import GenerationConfig
from edgeinfer.errors import EdgeInferError, HubError
from edgeinfer.hub import local

__all__ = ["ModelFacts", "describe"]

# Options of generation_config.json that mean the same here; those of beam search and others do not.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class ModelFacts:
    """A model as its files describe it.

    Attributes:
        bytes: of all its files.
        context: tokens it can hold at most.
        sampling: generation options that its makers recommend.
    """

    name: str
    architecture: str
    parameters: int
    bits_per_weight: float
    backend: str
    bytes: int
    context: int
    sampling: Mapping[str, Any]


def describe(model: str | Path | None = None) -> ModelFacts:
    """The facts of a model on this machine; nothing is fetched.

    Args:
        model: as `edgeinfer.load` takes it.

    Raises:
        ModelError: it is missing or damaged.
        HubError: it would have to be fetched first.
    """
    path = local(model)
    if path is None:
        raise HubError(f"{model} is not on this machine.", f"Fetch it first: edgeinfer pull {model}")
    bundle = open_bundle(path)
    manifest = bundle.manifest
    return ModelFacts(
        name=manifest.name,
        architecture=manifest.architecture,
        parameters=manifest.parameters,
        bits_per_weight=round(manifest.bits_per_weight, 3),
        backend=manifest.backend,
        bytes=sum(entry.bytes for entry in manifest.files.values()),
        context=manifest.geometry.max_positions,
        sampling=_sampling(bundle),
    )


def _sampling(bundle: Bundle) -> dict[str, Any]:
    """What the model's makers recommend; nothing where they recommend greedy decoding or say it in another way."""
    try:
        config = bundle.read_object("generation_config.json")
        given = {name: config[name] for name in _SAMPLING if config.get(name) is not None}
        GenerationConfig().replace(**given)
    except EdgeInferError:
        return {}
    return given if config.get("do_sample", True) is True else {}
