"""Published EAGLE heads: EAGLE-3, and EAGLE-1 with which EAGLE-2 drafts.

Their layouts, from SafeAILab/EAGLE (eagle/model/cnets.py, cnets1.py) and those who run them (vLLM, SGLang, llama.cpp).
EAGLE-3: `fc` over the states that enter three layers of the target, one decoder layer (`midlayer` or `layers.0`) whose
attention reads the normed embedding and the normed state, `norm`, `lm_head` over a vocabulary of its own; `d2t` is
added to each of its tokens' ids, `t2d` says which of the target's it can draft. EAGLE-1: `fc` over embedding and
the target's last state after its final norm, one layer without a first norm, the target's head.
"""

from __future__ import annotations

import dataclasses

from edgeinfer.bundle.spec import DraftModule
from edgeinfer.core.errors import CheckpointError
from edgeinfer.export.architectures.base import Architecture, Naming, common_spec
from edgeinfer.export.architectures.llama import LLAMA
from edgeinfer.export.architectures.tensors import plan
from edgeinfer.export.drafters.described import (
    DescribedModule,
    ModuleSource,
    drafted_by,
    joined_plans,
    module_spec,
    own_plans,
)
from edgeinfer.export.source.hf_config import HFConfig

_LAYERS = ("midlayer.", "layers.0.", "model.layers.0.")
# Of which layers EAGLE-3 reads the entering states where config.json does not say: eagle/model/modeling_llama_kv.py.
_FIRST_TAP, _LAST_TAP = 2, 3


def describe_eagle(source: ModuleSource) -> DescribedModule:
    nested = source.config.get("transformer_layer_config")
    if isinstance(nested, dict):
        source = dataclasses.replace(source, config=HFConfig(source.config.values | nested))
    layer = next((name for name in _LAYERS if f"{name}self_attn.q_proj.weight" in source.checkpoint), None)
    if layer is None or "fc.weight" not in source.checkpoint:
        message = f"{source.checkpoint.folder} has no EAGLE head: there is no fc, or no layer next to it."
        raise CheckpointError(message, "Choose a drafter that was published as EAGLE-1, EAGLE-2 or EAGLE-3.")
    layers = source.config.integer("num_hidden_layers")
    if layers != 1:
        raise CheckpointError(f"An EAGLE head of {layers} layers is not supported.", "Choose one of a single layer.")
    if f"{layer}hidden_norm.weight" in source.checkpoint:
        return _describe_third(source, layer)
    return _describe_first(source, layer)


def _family(source: ModuleSource, layer: str, attn_norm: str) -> Architecture:
    bias = f"{layer}self_attn.q_proj.bias" in source.checkpoint
    naming = Naming(
        embed="embed_tokens.weight", final_norm="norm.weight", head="lm_head.weight", layer=layer, attn_norm=attn_norm
    )
    return dataclasses.replace(LLAMA, naming=naming, read=lambda config, tied: common_spec(config, tied, qkv_bias=bias))


def _describe_third(source: ModuleSource, layer: str) -> DescribedModule:
    config, target = source.config, source.target
    family = _family(source, layer, "hidden_norm.weight")
    spec = module_spec(source, family, tied=False)
    size, taps = spec.hidden_size, _taps(source)
    width, drafted = len(taps) * target.hidden_size, config.integer("draft_vocab_size", spec.vocab_size)
    tokens = drafted_by(source, drafted)
    taps_normed = config.flag("norm_before_fc")
    plans = own_plans(source, family, spec, ("embed", "head"), 2 * size)
    plans += joined_plans(source, (size, width))
    plans += [
        plan("module.embed_norm", (f"{layer}input_layernorm.weight", (size,))),
        plan("head", ("lm_head.weight", (drafted, size))),
    ]
    if taps_normed:
        plans.append(plan("module.taps_norm", ("input_norm.weight", (width,))))
    module = DraftModule(
        width=width,
        drafter="eagle",
        vocab_size=0 if tokens is None else drafted,
        shares=("embed",),
        concatenated=True,
        residual_normed=config.flag("norm_before_residual"),
        taps_normed=taps_normed,
    )
    return DescribedModule(spec, module, tuple(plans), taps, tokens=tokens)


def _describe_first(source: ModuleSource, layer: str) -> DescribedModule:
    family = _family(source, layer, "input_layernorm.weight")
    spec = module_spec(source, family, tied=source.target.tied)
    size = spec.hidden_size
    plans = own_plans(source, family, spec, ("embed", "head", "final_norm", "layers.0.attn_norm"), size)
    plans += joined_plans(source, (size, 2 * size))
    module = DraftModule(
        width=size, drafter="eagle", shares=("embed", "head"), first_normed=False, last_normed=False, state_normed=True
    )
    return DescribedModule(spec, module, tuple(plans), borrowed={"module.state_norm": "final_norm"})


def _taps(source: ModuleSource) -> tuple[int, ...]:
    """The layers of the target whose input states are read."""
    layers, said = source.target.num_layers, source.config.get("eagle_aux_hidden_state_layer_ids")
    nested = source.config.get("eagle_config")
    if said is None and isinstance(nested, dict):
        said = nested.get("eagle_aux_hidden_state_layer_ids")
    if said is None:
        said = [_FIRST_TAP, layers // 2, layers - _LAST_TAP]
    known = isinstance(said, list) and bool(said) and all(type(tap) is int and 0 <= tap <= layers for tap in said)
    if not known:
        message = f"The drafter {source.checkpoint.folder} reads the layers {said!r} of a model that has {layers}."
        raise CheckpointError(message, "Choose a drafter that was made for this model.")
    return tuple(said)
