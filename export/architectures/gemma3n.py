"""Gemma 3n's language models: hidden states in streams, augmented residuals, sparse MLPs, and what Gemma 4 has too."""

from __future__ import annotations

from edgeinfer.bundle.parts import StreamsSpec
from edgeinfer.bundle.rope import RopeSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.errors import CheckpointError, UnsupportedArchitectureError
from edgeinfer.export.architectures.base import SEEING_ROOTS, Architecture, Naming, common_spec
from edgeinfer.export.architectures.gemma4 import (
    HEARING_IGNORABLE,
    SHARED_IGNORABLE,
    refine_gemma4,
    shared_fields,
)
from edgeinfer.export.architectures.plans import TensorPlan
from edgeinfer.export.source.hf_config import OPTIMUM_HINT, HFConfig

# Where config.json does not say: layers of which the last sees everything, and how many of those first are sparse, and
# how much, in models that have more.
_PATTERN, _SPARSE_LAYERS, _SPARSITY = 5, 10, 0.95
_THETA, _LOCAL_THETA = 1e6, 1e4
_HINT = "Check that config.json is complete and belongs to this model."


def _for_each_layer(config: HFConfig, name: str, usual: list[float]) -> list[float]:
    """A field that has a number for every layer, or one for all."""
    given = config.get(name)
    if given is None:
        return usual
    numbers = given if isinstance(given, list) else [given] * len(usual)
    right = all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers)
    if len(numbers) != len(usual) or not right:
        message = f"config.json: {name}={given!r} must have a number for each of {len(usual)} layers."
        raise CheckpointError(message, _HINT)
    return numbers


def _ropes(config: HFConfig) -> tuple[RopeSpec, RopeSpec]:
    """The rotation of the layers that see everything, and that of the others."""
    size = config.head_dim()
    if config.get("rope_parameters") is not None:
        return config.rope(size, "full_attention"), config.rope(size, "sliding_attention")
    whole = HFConfig({"rope_theta": _THETA, **config.values}).rope(size)
    return whole, RopeSpec("default", config.number("rope_local_base_freq", _LOCAL_THETA), size)


def _read(config: HFConfig, tied: bool) -> DecoderSpec:
    if config.get("altup_active_idx"):
        message = f"A Gemma 3n with altup_active_idx={config.get('altup_active_idx')} is not supported."
        raise UnsupportedArchitectureError(message, OPTIMUM_HINT)
    slides, layers = config.slides(_PATTERN), config.integer("num_hidden_layers")
    sparse = _SPARSE_LAYERS if layers > _SPARSE_LAYERS else 0
    usual = [_SPARSITY] * sparse + [0.0] * (layers - sparse)
    sparsity = tuple(map(float, _for_each_layer(config, "activation_sparsity_pattern", usual)))
    listed = isinstance(config.get("intermediate_size"), list)
    wide = [int(size) for size in _for_each_layer(config, "intermediate_size", [0.0] * layers)]
    whole, local = _ropes(config)
    scaled = config.get("altup_correct_scale")
    return common_spec(
        config,
        tied,
        intermediate_size=wide[0] if listed else config.integer("intermediate_size"),
        mlp_sizes=tuple(wide) if listed and len(set(wide)) > 1 else (),
        windows=config.windows_of(slides),
        rope=whole,
        more_ropes=(local,) if any(slides) else (),
        rope_layers=tuple(map(int, slides)) if any(slides) else (),
        streams=StreamsSpec(
            config.integer("altup_num_inputs", 4),
            config.integer("laurel_rank", 64),
            scaled is None or config.flag("altup_correct_scale"),
        ),
        sparsity=sparsity if any(sparsity) else (),
        **shared_fields(config, slides),
    )


def _refine(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> TensorPlan:
    """The router reads hidden states divided by their width."""
    if plan.name.endswith(".streams.router_norm"):
        return plan.changed(scale=1 / spec.hidden_size)
    return refine_gemma4(config, spec, plan)


GEMMA3N = Architecture(
    classes=("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
    model_types=("gemma3n_text", "gemma3n"),
    read=_read,
    naming=Naming(mlp_norm="pre_feedforward_layernorm.weight"),
    refine=_refine,
    roots=SEEING_ROOTS,
    # The scale is not used by every configuration that stores it.
    ignorable=(*HEARING_IGNORABLE, *SHARED_IGNORABLE, "*.altup.correct_output_scale"),
)
