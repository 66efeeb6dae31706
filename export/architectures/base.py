"""What an architecture family is: how its config reads and which checkpoint tensors make up ours; knows no files."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from edgeinfer.bundle import DecoderSpec, MoESpec
from edgeinfer.export.architectures.mixtures import MixtureNaming, mixture_plans
from edgeinfer.export.architectures.plans import TensorPlan, plan
from edgeinfer.export.hf_config import HFConfig

__all__ = ["Architecture", "Naming", "common_spec"]


@dataclass(frozen=True)
class Naming:
    """Names of a family's checkpoint tensors; the packed ones list one name for each part of the checkpoint's.

    Attributes:
        qkv: modules whose rows, in this order, are queries, keys and values.
        gate_up: modules whose rows, in this order, are gate and up.
    """

    embed: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    layer: str = "model.layers.{layer}."
    attn_norm: str = "input_layernorm.weight"
    mlp_norm: str = "post_attention_layernorm.weight"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm.weight"
    k_norm: str = "self_attn.k_norm.weight"
    out: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mixture: MixtureNaming = field(default_factory=MixtureNaming)


@dataclass(frozen=True)
class Architecture:
    """A family of checkpoints.

    Attributes:
        classes: transformers' model classes.
        model_types: transformers' family names, used where config.json names no class.
        read: turns a config into a spec; the flag says whether embedding and head are tied.
        ignorable: patterns of checkpoint tensors that carry no weights.
        refine: what else a config asks of a tensor, such as a factor.
    """

    classes: tuple[str, ...]
    model_types: tuple[str, ...]
    read: Callable[[HFConfig, bool], DecoderSpec]
    naming: Naming = field(default_factory=Naming)
    # Old checkpoints store the rotary frequencies, which the config gives.
    ignorable: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    refine: Callable[[HFConfig, DecoderSpec, TensorPlan], TensorPlan] | None = None

    def tensors(self, config: HFConfig, spec: DecoderSpec, stored: Collection[str] = ()) -> tuple[TensorPlan, ...]:
        """Every tensor of the bundle in the order it is written.

        Args:
            stored: names of the checkpoint's tensors, which tell how it stores experts.
        """
        names = self.naming
        hidden, vocab = spec.hidden_size, spec.vocab_size
        plans = [plan("embed", (names.embed, (vocab, hidden)))]
        for layer in range(spec.num_layers):
            plans += self._layer(spec, layer, stored)
        plans.append(plan("final_norm", (names.final_norm, (hidden,))))
        if not spec.tied:
            plans.append(plan("head", (names.head, (vocab, hidden))))
        refine = self.refine
        return tuple(plans if refine is None else (refine(config, spec, p) for p in plans))

    def _layer(self, spec: DecoderSpec, layer: int, stored: Collection[str]) -> list[TensorPlan]:
        names, hidden, prefix = self.naming, spec.hidden_size, f"layers.{layer}"
        root = names.layer.format(layer=layer)

        def vector(name: str, source: str, size: int) -> TensorPlan:
            return plan(f"{prefix}.{name}", (root + source, (size,)))

        def linear(name: str, modules: tuple[str, ...], rows: tuple[int, ...], inputs: int, bias: bool) -> None:
            # A family that packs its projections has one module for all of them.
            parts = rows if len(modules) == len(rows) else (sum(rows),)
            pairs = list(zip(modules, parts, strict=True))
            plans.append(plan(f"{prefix}.{name}", *((f"{root}{m}.weight", (n, inputs)) for m, n in pairs)))
            if bias:
                plans.append(plan(f"{prefix}.{name}_bias", *((f"{root}{m}.bias", (n,)) for m, n in pairs)))

        plans = [vector("attn_norm", names.attn_norm, hidden)]
        linear("attn.qkv", names.qkv, (spec.q_size, spec.kv_size, spec.kv_size), hidden, spec.qkv_bias)
        if spec.qk_norm:
            plans.append(vector("attn.q_norm", names.q_norm, spec.q_size if spec.whole_norm else spec.head_dim))
            plans.append(vector("attn.k_norm", names.k_norm, spec.kv_size if spec.whole_norm else spec.head_dim))
        linear("attn.out", (names.out,), (hidden,), spec.q_size, spec.output_bias)
        plans.append(vector("mlp_norm", names.mlp_norm, hidden))
        moe = spec.experts_of(layer)
        if moe is not None:
            return plans + mixture_plans(names.mixture, moe, hidden, layer, root, stored)
        wide = spec.intermediate_size
        linear("mlp.gate_up", names.gate_up, (wide, wide), hidden, spec.mlp_bias)
        linear("mlp.down", (names.down,), (hidden,), wide, spec.mlp_bias)
        return plans


def common_spec(
    config: HFConfig,
    tied: bool,
    *,
    windows: tuple[int, ...] = (),
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    whole_norm: bool = False,
    moe: MoESpec | None = None,
) -> DecoderSpec:
    """A spec from the config fields that all families share."""
    heads = config.integer("num_attention_heads")
    head_dim = config.head_dim()
    return DecoderSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        max_positions=config.integer("max_position_embeddings"),
        norm_eps=config.number("rms_norm_eps"),
        rope=config.rope(head_dim),
        activation=config.activation(),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        whole_norm=whole_norm,
        tied=tied,
        windows=windows,
        moe=moe,
    )
