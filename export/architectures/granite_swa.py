"""Granite with sliding windows, dense and with experts: sinks, and rotations whose base each layer names."""

from __future__ import annotations

import dataclasses
from typing import Any

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.errors import CheckpointError
from edgeinfer.export.architectures.base import Architecture, Naming
from edgeinfer.export.architectures.mixtures import GRANITE_MOE_NAMES, read_granite_moe, refine_granite_moe
from edgeinfer.export.architectures.near_llama import read_granite, refine_granite
from edgeinfer.export.source.hf_config import HFConfig

_PATTERN = 4  # layers of which the first sees everything, where config.json does not say
_WINDOW = 128  # likewise


def _rotations(config: HFConfig, spec: DecoderSpec) -> dict[str, Any]:
    """A rotation for each base among `layer_rope_theta`, where layers with a base of 0 do not rotate."""
    given = config.get("layer_rope_theta")
    if given is None:
        return {}
    if not isinstance(given, list) or len(given) != spec.num_layers:
        message = f"config.json: layer_rope_theta={given!r} must be a number for each of {spec.num_layers} layers."
        raise CheckpointError(message, "Check that config.json is complete and belongs to this model.")
    bases = [HFConfig({"layer_rope_theta": theta}).number("layer_rope_theta") for theta in given if theta != 0]
    kinds = sorted(set(bases)) or [spec.rope.theta]
    first, *others = (dataclasses.replace(spec.rope, theta=theta) for theta in kinds)
    layers = tuple(kinds.index(theta) if theta else -1 for theta in given)
    return {"rope": first, "more_ropes": tuple(others), "rope_layers": layers if any(layers) else ()}


def _with_windows(config: HFConfig, spec: DecoderSpec) -> DecoderSpec:
    layers = range(spec.num_layers)
    slides = [bool(layer % _PATTERN) for layer in layers] if config.get("layer_types") is None else config.slides()
    window = config.integer("sliding_window", _WINDOW)
    windows = tuple(window if slide else 0 for slide in slides) if any(slides) and window < spec.max_positions else ()
    return dataclasses.replace(spec, sinks=True, windows=windows, **_rotations(config, spec))


def _read(config: HFConfig, tied: bool) -> DecoderSpec:
    return _with_windows(config, read_granite(config, tied))


def _read_moe(config: HFConfig, tied: bool) -> DecoderSpec:
    return _with_windows(config, read_granite_moe(config, tied))


GRANITE_SWA = Architecture(
    classes=("GraniteSWAForCausalLM",), model_types=("granite_swa",), read=_read, refine=refine_granite
)
GRANITE_MOE_SWA = Architecture(
    classes=("GraniteMoeSWAForCausalLM",),
    model_types=("granitemoe_swa",),
    read=_read_moe,
    naming=Naming(
        mixture=dataclasses.replace(
            GRANITE_MOE_NAMES,
            router="block_sparse_moe.router.weight",
            stacked_gate_up="block_sparse_moe.experts.gate_up_proj",
            stacked_down="block_sparse_moe.experts.down_proj",
        )
    ),
    refine=refine_granite_moe,
)
