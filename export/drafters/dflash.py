"""Published DFlash drafters (Chen et al. 2026, arXiv 2602.06036): a few layers that fill a block of masks at once.

Their layout, from z-lab/dflash (dflash/model.py) and those who run them (vLLM, SGLang, llama.cpp): the layers of a
Qwen3 without embedding and head, `norm`, `fc` over the states after several layers of the target, `hidden_norm` after
it. config.json has `block_size` and, in `dflash_config`, `mask_token_id` and `target_layer_ids`, and may have
factors of the target's embedding and of the logits. In layers with windows a place sees none of the later places.
"""

from __future__ import annotations

import dataclasses
import math

from edgeinfer.bundle.spec import MOST_BLOCK, DraftModule
from edgeinfer.core.errors import CheckpointError
from edgeinfer.export.architectures.base import Naming
from edgeinfer.export.architectures.qwen import QWEN3
from edgeinfer.export.architectures.tensors import TensorPlan, plan
from edgeinfer.export.drafters.described import DescribedModule, ModuleSource, module_spec, own_plans
from edgeinfer.export.source.hf_config import HFConfig

_OWN = "dflash_config"
_AGAIN = "Download the drafter again, or choose another one."
_MADE_FOR = "Choose a drafter that was made for this model."
# Of Qwen3, by the names of a model without its outer module.
_NAMING = Naming(embed="embed_tokens.weight", final_norm="norm.weight", head="lm_head.weight", layer="layers.{layer}.")


def is_dflash(config: HFConfig) -> bool:
    return isinstance(config.get(_OWN), dict)


def spread_layers(layers: int, count: int) -> list[int]:
    """Default layers of the target whose states are read: z-lab/dflash, dflash/model.py."""
    if count == 1:
        return [layers // 2]
    return [round(1 + place * (layers - 4) / (count - 1)) for place in range(count)]


def describe_dflash(source: ModuleSource) -> DescribedModule:
    if _own(source, "conv_kernel_size") is not None:
        message = f"The drafter {source.checkpoint.folder} is one of DFlash 2, which is not supported."
        raise CheckpointError(message, "Choose one of DFlash, whose config.json has no conv_kernel_size.")
    family = dataclasses.replace(QWEN3, naming=_NAMING)
    spec = module_spec(source, family, tied=source.target.tied)
    spec = dataclasses.replace(spec, logit_softcap=_number(source, "final_logit_softcapping", 0.0))
    size, taps = spec.hidden_size, _taps(source, spec.num_layers)
    width = len(taps) * size
    plans = [
        *(_unscaled(each, source) for each in own_plans(source, family, spec, ("embed", "head"), size)),
        plan("fc", ("fc.weight", (size, width))),
        plan("module.taps_norm", ("hidden_norm.weight", (size,))),
    ]
    module = DraftModule(
        width=width,
        drafter="dflash",
        shares=("embed", "head"),
        block=_block(source),
        mask=_mask(source),
        embed_scale=_number(source, "input_embedding_scale", 1.0) / source.embed_scale,
        causal=_causal(source),
    )
    return DescribedModule(spec, module, tuple(plans), taps)


def _unscaled(planned: TensorPlan, source: ModuleSource) -> TensorPlan:
    """Divides the final norm by the factor of the target's embedding where that is the head (Gemma, Granite)."""
    if planned.name != "final_norm":
        return planned
    grown = source.embed_scale if source.target.tied else 1.0
    return planned.changed(scale=_number(source, "output_multiplier", 1.0) / grown)


def _number(source: ModuleSource, name: str, default: float) -> float:
    said = _own(source, name)
    if said is None:
        return default
    if isinstance(said, bool) or not isinstance(said, int | float) or not 0 <= said < math.inf:
        message = f"The drafter {source.checkpoint.folder} has {name} = {said!r}, which is no number from 0 on."
        raise CheckpointError(message, _AGAIN)
    return float(said)


def _causal(source: ModuleSource) -> tuple[int, ...]:
    """Layers in which a place sees none after it: those with windows, unless config.json says otherwise."""
    slides, said = source.config.slides(), source.config.get("is_causal")
    if said is None:
        return tuple(layer for layer, slide in enumerate(slides) if slide)
    if not said and any(slides):
        message = f"The drafter {source.checkpoint.folder} has windows that reach ahead, which is not supported."
        raise CheckpointError(message, "Choose one without is_causal in its config.json.")
    return tuple(range(len(slides))) if said else ()


def _own(source: ModuleSource, name: str) -> object:
    """A field of config.json, at the top or under `dflash_config`."""
    nested = source.config.get(_OWN)
    given = nested.get(name) if isinstance(nested, dict) else None
    return source.config.get(name) if given is None else given


def _taps(source: ModuleSource, count: int) -> tuple[int, ...]:
    """As `Manifest.taps`: the layer after each whose state is read."""
    layers, said = source.target.num_layers, _own(source, "target_layer_ids")
    if said is None:
        said = spread_layers(layers, count)
    # Behind the last layer transformers gives the normed state, others do not: no published drafter reads it.
    if not isinstance(said, list) or not said or not all(type(tap) is int and 0 <= tap < layers - 1 for tap in said):
        message = f"The drafter {source.checkpoint.folder} reads the layers {said!r} of a model that has {layers}."
        raise CheckpointError(message, _MADE_FOR)
    return tuple(tap + 1 for tap in said)


def _mask(source: ModuleSource) -> int:
    mask, vocabulary = _own(source, "mask_token_id"), source.target.vocab_size
    if type(mask) is not int or not 0 <= mask < vocabulary:
        message = f"The drafter {source.checkpoint.folder} has the mask token {mask!r}, the model {vocabulary} tokens."
        raise CheckpointError(message, _MADE_FOR)
    return mask


def _block(source: ModuleSource) -> int:
    block = _own(source, "block_size")
    if type(block) is not int or not 2 <= block <= MOST_BLOCK:
        message = f"The drafter {source.checkpoint.folder} drafts blocks of {block!r} tokens."
        raise CheckpointError(message, f"Choose one whose block_size is between 2 and {MOST_BLOCK}.")
    return block
