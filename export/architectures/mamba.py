"""Families of Mamba-2 layers: Mamba-2 itself, Bamba, Falcon-H1, Nemotron-H and Granite 4."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from edgeinfer.bundle.parts import Mamba2Spec, Mixer, MoESpec, RopeSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.errors import CheckpointError, UnsupportedArchitectureError
from edgeinfer.export.architectures.base import Architecture, Naming, common_spec
from edgeinfer.export.architectures.mixtures import GRANITE_MOE, refine_granite
from edgeinfer.export.architectures.tensors import MixtureNaming, TensorPlan
from edgeinfer.export.source.hf_config import CONFIG_HINT, OPTIMUM_HINT, HFConfig

# Transformers' names of layers, of today and of version 4.
_MIXERS: dict[str, Mixer] = {
    "linear_attention": "mamba2",
    "mamba": "mamba2",
    "full_attention": "attention",
    "attention": "attention",
}
# A largest time step that clips none.
ANY_STEP = 1e30


def _steps(config: HFConfig) -> dict[str, Any]:
    """Limits of time steps, from `time_step_limit`."""
    limit = config.get("time_step_limit")
    if limit is None:
        return {}
    values = [float(each.get("__float__", "nan")) if isinstance(each, dict) else each for each in limit]
    if len(values) != 2 or not all(isinstance(each, int | float) and each >= 0 for each in values):
        raise CheckpointError(f"config.json: time_step_limit={limit!r} must be two numbers.", CONFIG_HINT)
    least, most = map(float, values)
    # One without a least and a largest step clips nothing; of one with a least alone the largest is any.
    unbounded = most == float("inf")
    return {"least_step": least, "most_step": 0.0 if unbounded and not least else min(most, ANY_STEP)}


def _require_silu(config: HFConfig, field: str) -> None:
    if config.activation(field) != "silu":
        message = f"Mamba-2 layers with the activation {config.get(field)} are not supported."
        raise UnsupportedArchitectureError(message, OPTIMUM_HINT)


def _scan(config: HFConfig, inner: int, **parts: Any) -> Mamba2Spec:
    """The recurrence of families that name its fields as Bamba does."""
    _require_silu(config, "hidden_act")
    heads, given = config.integer("mamba_n_heads"), config.get("mamba_d_head")
    size = inner // heads if given in (None, "auto") else config.integer("mamba_d_head")
    if heads * size != inner:
        message = f"config.json: mamba_n_heads={heads} heads of {size} channels are not the {inner} of all."
        raise CheckpointError(message, CONFIG_HINT)
    return Mamba2Spec(
        heads=heads,
        head_size=size,
        groups=config.integer("mamba_n_groups", 1),
        state_size=config.integer("mamba_d_state", 256),
        width=config.integer("mamba_d_conv", 4),
        bias=config.flag("mamba_proj_bias"),
        conv_bias=config.flag("mamba_conv_bias", True),
        **_steps(config),
        **parts,
    )


def _expanded(config: HFConfig) -> int:
    return int(config.number("mamba_expand", 2.0) * config.integer("hidden_size"))


def _mixers(kinds: Any, layers: int, known: dict[str, Mixer] = _MIXERS) -> tuple[Mixer, ...]:
    right = isinstance(kinds, list) and all(isinstance(each, str) and each in known for each in kinds)
    if not right or len(kinds) != layers:
        message = f"config.json: the layers {kinds!r} are not {layers} of {', '.join(known)}."
        raise CheckpointError(message, CONFIG_HINT)
    return tuple(known[each] for each in kinds)


def _own_scan(config: HFConfig, heads: int, head_size: int, state_size: int, **steps: Any) -> Mamba2Spec:
    """The recurrence of families that name its other fields as Mamba-2 does."""
    return Mamba2Spec(
        heads=heads,
        head_size=head_size,
        groups=config.integer("n_groups", 8),
        state_size=state_size,
        width=config.integer("conv_kernel", 4),
        bias=config.flag("use_bias"),
        conv_bias=config.flag("use_conv_bias", True),
        **(steps or _steps(config)),
    )


def _nemotron_steps(config: HFConfig) -> dict[str, Any]:
    """The limits of Nemotron-H's time steps, as the checkpoint's own code computes them. Transformers' class lets no
    step be smaller than `time_step_min`. The code in published checkpoints uses `time_step_limit`, and with that floor
    their text is worse (huggingface/transformers#48989)."""
    if config.get("auto_map") is not None or config.get("hybrid_override_pattern") is not None:
        return _steps(config)
    return {"least_step": config.number("time_step_min", 1e-3), "most_step": ANY_STEP}


def _read_mamba2(config: HFConfig, tied: bool) -> DecoderSpec:
    """Mamba-2: only recurrences, and no limit of positions; sizes of attention are those of the recurrence."""
    _require_silu(config, "hidden_act")
    layers, heads, size = config.integer("num_hidden_layers"), config.integer("num_heads"), config.integer("head_dim")
    if int(config.number("expand", 2.0) * config.integer("hidden_size")) != heads * size:
        message = f"config.json: num_heads={heads} heads of {size} channels are not expand times hidden_size."
        raise CheckpointError(message, CONFIG_HINT)
    scan = _own_scan(config, heads, size, config.integer("state_size", 128))
    return DecoderSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        intermediate_size=scan.inner_size,
        num_layers=layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_positions=1 << 20,
        norm_eps=config.number("layer_norm_epsilon"),
        rope=RopeSpec("default", 1e4, 8),
        tied=tied,
        mixers=_mixers(["mamba"] * layers, layers),
        mamba2=scan,
        no_mlp=tuple(range(layers)),
    )


MAMBA2 = Architecture(
    classes=("Mamba2ForCausalLM",),
    model_types=("mamba2",),
    read=_read_mamba2,
    naming=Naming(
        embed="model.embeddings.weight", final_norm="model.norm_f.weight", attn_norm="norm.weight", mixer="mixer"
    ),
    roots=(("backbone.", ""),),
)


def _read_bamba(config: HFConfig, tied: bool) -> DecoderSpec:
    """Bamba: attention in some layers, with half of each head's channels rotated."""
    layers, indices = config.integer("num_hidden_layers"), config.get("attn_layer_indices") or []
    if not isinstance(indices, list) or not all(each in range(layers) for each in indices):
        raise CheckpointError(f"config.json: attn_layer_indices={indices!r} is not a list of layers.", CONFIG_HINT)
    mixers = _mixers(["attention" if layer in indices else "mamba" for layer in range(layers)], layers)
    recurrent: dict[str, Any] = {}
    if "mamba2" in mixers:
        recurrent = {"mixers": mixers, "mamba2": _scan(config, _expanded(config))}
    return common_spec(
        config,
        tied,
        rope=config.rope(config.head_dim(), partial=0.5),
        qkv_bias=config.flag("attention_bias"),
        output_bias=config.flag("attention_bias"),
        mlp_bias=config.flag("mlp_bias"),
        **recurrent,
    )


_BAMBA_NAMES = Naming(
    final_norm="model.final_layernorm.weight",
    mlp_norm="pre_ff_layernorm.weight",
    mixer="mamba",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)
BAMBA = Architecture(classes=("BambaForCausalLM",), model_types=("bamba",), read=_read_bamba, naming=_BAMBA_NAMES)


def _read_falcon_h1(config: HFConfig, tied: bool) -> DecoderSpec:
    """Falcon-H1: attention and a recurrence in parallel in every layer, and multipliers that go into the weights."""
    layers = config.integer("num_hidden_layers")
    inner = _expanded(config) if config.get("mamba_d_ssm") is None else config.integer("mamba_d_ssm")
    if config.flag("projectors_bias") != config.flag("mamba_proj_bias"):
        message = "Mamba-2 layers of which one product alone has a bias are not supported."
        raise UnsupportedArchitectureError(message, OPTIMUM_HINT)
    normed = config.flag("mamba_rms_norm")
    first = normed and config.flag("mamba_norm_before_gate", True)
    return common_spec(
        config,
        tied,
        qkv_bias=config.flag("attention_bias"),
        output_bias=config.flag("attention_bias"),
        mlp_bias=config.flag("mlp_bias"),
        mixers=_mixers(["hybrid"] * layers, layers, {"hybrid": "attention+mamba2"}),
        mamba2=_scan(config, inner, normed=normed, norm_first=first),
    )


def _factors(config: HFConfig, name: str, count: int) -> Sequence[float]:
    given = config.get(name) or [1.0] * count
    if not isinstance(given, list) or len(given) != count or not all(isinstance(m, int | float) for m in given):
        raise CheckpointError(f"config.json: {name}={given!r} must be {count} numbers.", CONFIG_HINT)
    return given


def _refine_falcon_h1(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> TensorPlan:
    """Puts multipliers of inputs and results into weights, and those of results into biases."""
    name = plan.name.partition(".mlp.")[2] or plan.name.rpartition(".")[2]
    part = name.removesuffix("_bias")
    embedding, biases = config.number("embedding_multiplier", 1.0), name != part
    if plan.name == "embed":
        return plan.changed(scale=embedding)
    if plan.name == "final_norm":
        return plan.changed(scale=config.number("lm_head_multiplier", 1.0) / (embedding if spec.tied else 1.0))
    if ".mixer.in" in plan.name:
        entering = 1.0 if biases else config.number("ssm_in_multiplier", 1.0)
        return _sections(spec, plan, [entering * each for each in _factors(config, "ssm_multipliers", 5)])
    gate, down = _factors(config, "mlp_multipliers", 2)
    entering = 1.0 if biases else config.number("attention_in_multiplier", 1.0)
    scales = {
        "qkv": (entering, entering * config.number("key_multiplier", 1.0), entering),
        "gate_up": (gate, 1.0),
        "down": (down,),
        "out": (config.number(f"{'ssm' if '.mixer.' in plan.name else 'attention'}_out_multiplier", 1.0),),
    }.get(part)
    if scales is None:
        return plan
    pairs = zip(plan.sources, scales, strict=True)
    return TensorPlan(plan.name, tuple(dataclasses.replace(source, scale=scale) for source, scale in pairs))


def _sections(spec: DecoderSpec, plan: TensorPlan, scales: Sequence[float]) -> TensorPlan:
    """The first product of a recurrence, with factors for gate, x, B, C and time steps."""
    scan, [whole] = spec.mamba2, plan.sources
    assert scan is not None, "who has such a product has a recurrence"
    shared = scan.groups * scan.state_size
    sizes = (scan.inner_size, scan.inner_size, shared, shared, scan.heads)
    starts = accumulate(sizes, initial=0)
    return TensorPlan(
        plan.name,
        tuple(
            dataclasses.replace(
                whole, shape=(size, *whole.shape[1:]), pieces=(whole.shape[0], first, size), scale=scale
            )
            for size, first, scale in zip(sizes, starts, scales, strict=False)
        ),
    )


FALCON_H1 = Architecture(
    classes=("FalconH1ForCausalLM",),
    model_types=("falcon_h1",),
    read=_read_falcon_h1,
    naming=_BAMBA_NAMES,
    refine=_refine_falcon_h1,
)


_NEMOTRON_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _nemotron_experts(config: HFConfig, dense_layers: tuple[int, ...]) -> MoESpec:
    """DeepSeek-V3's routing of experts without gates, plus a shared expert."""
    if config.get("moe_latent_size") is not None:
        raise UnsupportedArchitectureError("Experts of a smaller latent state are not supported.", OPTIMUM_HINT)
    return MoESpec(
        experts=config.integer("n_routed_experts"),
        top_k=config.integer("num_experts_per_tok"),
        expert_size=config.integer("moe_intermediate_size"),
        shared_size=config.integer("moe_shared_expert_intermediate_size"),
        router="sigmoid",
        renormalize=config.flag("norm_topk_prob", True),
        gated=False,
        dense_layers=dense_layers,
        choice_bias=True,
        groups=config.integer("n_group", 1),
        group_top_k=config.integer("topk_group", 1),
        scale=config.number("routed_scaling_factor", 1.0),
    )


def _read_nemotron_h(config: HFConfig, tied: bool) -> DecoderSpec:
    """Nemotron-H: each layer is a recurrence, attention without rotation, an MLP of squared ReLU, or experts."""
    _require_silu(config, "mamba_hidden_act")
    pattern, kinds = config.get("hybrid_override_pattern"), config.get("layers_block_type")
    kinds = config.get("layer_types") if kinds is None else kinds
    if kinds is None and isinstance(pattern, str):
        kinds = [_NEMOTRON_PATTERN.get(each, each) for each in pattern]
    layers = len(kinds) if isinstance(kinds, list) else config.integer("num_hidden_layers")
    mixers = _mixers(kinds, layers, _MIXERS | {"mlp": "none", "moe": "none"})
    dense = tuple(layer for layer, kind in enumerate(kinds) if kind == "mlp")
    heads, size = config.integer("mamba_num_heads"), config.integer("mamba_head_dim")
    scan = _own_scan(config, heads, size, config.integer("ssm_state_size", 128), **_nemotron_steps(config))
    return common_spec(
        config,
        tied,
        norm_eps="layer_norm_epsilon",
        activation=config.activation("mlp_hidden_act"),
        gated=False,
        mlp_bias=config.flag("mlp_bias"),
        mixers=mixers,
        rope_layers=(-1,) * layers,
        moe=_nemotron_experts(config, dense) if "moe" in kinds else None,
        mamba2=scan if "mamba2" in mixers else None,
        no_mlp=tuple(layer for layer, mixer in enumerate(mixers) if mixer != "none"),
    )


NEMOTRON_H = Architecture(
    classes=("NemotronHForCausalLM",),
    model_types=("nemotron_h",),
    read=_read_nemotron_h,
    naming=Naming(
        embed="model.embeddings.weight",
        final_norm="model.norm_f.weight",
        attn_norm="norm.weight",
        mlp_norm="norm.weight",
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        out="mixer.o_proj",
        mixer="mixer",
        up="mixer.up_proj",
        down="mixer.down_proj",
        mixture=MixtureNaming(
            router="mixer.gate.weight",
            choice_bias="mixer.gate.e_score_correction_bias",
            gate_up=("mixer.experts.{expert}.up_proj.weight",),
            down="mixer.experts.{expert}.down_proj.weight",
            stacked_gate_up="mixer.experts.up_proj",
            stacked_down="mixer.experts.down_proj",
            shared_gate_up=("mixer.shared_experts.up_proj.weight",),
            shared_down="mixer.shared_experts.down_proj.weight",
        ),
    ),
    roots=(("backbone.", ""), ("model.", "")),
    # Heads that predict further tokens.
    ignorable=("*.rotary_emb.inv_freq", "mtp.*"),
)


def _read_granite_hybrid(config: HFConfig, tied: bool) -> DecoderSpec:
    """Granite 4: recurrences and attention, each before an MLP, or before experts and a shared one."""
    layers, kinds = config.integer("num_hidden_layers"), config.get("layer_types")
    mixers = _mixers(["mamba"] * layers if kinds is None else kinds, layers)
    wide, moe = config.integer("shared_intermediate_size"), None
    if config.get("num_local_experts") != 0:
        moe = MoESpec(
            experts=config.integer("num_local_experts", 8),
            top_k=config.integer("num_experts_per_tok", 2),
            expert_size=config.integer("intermediate_size"),
            shared_size=wide,
        )
    bias = config.flag("attention_bias")
    spec = common_spec(
        config,
        tied,
        moe=moe,
        qkv_bias=bias,
        output_bias=bias,
        attention_scale=config.number("attention_multiplier", 1.0),
        rope_layers=() if config.get("position_embedding_type") == "rope" else (-1,) * layers,
    )
    recurrent: dict[str, Any] = {}
    if "mamba2" in mixers:
        recurrent = {"mixers": mixers, "mamba2": _scan(config, _expanded(config))}
    return dataclasses.replace(spec, intermediate_size=wide, **recurrent)


GRANITE_HYBRID = Architecture(
    classes=("GraniteMoeHybridForCausalLM",),
    model_types=("granitemoehybrid",),
    read=_read_granite_hybrid,
    naming=dataclasses.replace(
        GRANITE_MOE.naming, mixer="mamba", gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear"
    ),
    refine=refine_granite,
)
