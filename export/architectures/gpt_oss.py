"""gpt-oss: mixtures of experts with biases behind attention with sinks, in layers that have windows by turns."""

from __future__ import annotations

from edgeinfer.bundle.mixture import MoESpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.errors import CheckpointError, UnsupportedArchitectureError
from edgeinfer.export.architectures.base import Architecture, Naming, common_spec
from edgeinfer.export.architectures.mixture_plans import MixtureNaming
from edgeinfer.export.source.hf_config import OPTIMUM_HINT, HFConfig

# The constants of its activation, which transformers reads of the config and the kernel has of its own.
_ALPHA, _LIMIT = 1.702, 7.0
# Every second layer sees everything.
_PATTERN = 2


def _read_gpt_oss(config: HFConfig, tied: bool) -> DecoderSpec:
    """gpt-oss: experts are chosen by their scores, and weighed by the softmax of the chosen ones' alone."""
    for name, value in (("swiglu_alpha", _ALPHA), ("swiglu_limit", _LIMIT)):
        if config.number(name, value) != value:
            raise UnsupportedArchitectureError(
                f"Experts with {name}={config.get(name)} are not supported.", OPTIMUM_HINT
            )
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        hint = "Check that config.json is complete and belongs to this model."
        raise CheckpointError("config.json: rope_parameters is missing.", hint)
    moe = MoESpec(
        experts=config.experts(),
        top_k=config.integer("num_experts_per_tok"),
        expert_size=config.integer("intermediate_size"),
        router_bias=True,
        expert_bias=True,
    )
    bias = config.get("attention_bias") is None or config.flag("attention_bias")
    windows = config.windows_of(config.slides(_PATTERN))
    return common_spec(
        config,
        tied,
        qkv_bias=bias,
        output_bias=bias,
        sinks=True,
        windows=windows,
        activation="swiglu_oai",
        moe=moe,
    )


GPT_OSS = Architecture(
    classes=("GptOssForCausalLM",),
    model_types=("gpt_oss",),
    read=_read_gpt_oss,
    naming=Naming(
        mixture=MixtureNaming(
            router="mlp.router.weight", router_bias="mlp.router.bias", gate_up=(), turned=True, by_turns=True
        )
    ),
)
