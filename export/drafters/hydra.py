"""Hydra++ modules (Ankner et al. 2024, arXiv 2402.05109) in the layout that `edgeinfer distill hydra-plus` writes.

Published ones are pickles, which are not read. As in zankner/Hydra (hydra/model/hydra_heads/prefix_mlp_head.py) a layer
of Llama, `layers.0`, reads the target's normed states. Each of the `num_heads` of `hydra_config` begins with a block
whose residual is projected, `first.linear` and `first.res_connection`, and ends with `num_layers` - 1 runs of another,
`further.linear`. Here `embed_norm` norms the embeddings that heads read, and all heads share one `lm_head`, of whose
tokens `d2t` says which they are, as in EAGLE heads.
"""

from __future__ import annotations

import dataclasses

from edgeinfer.bundle.spec import MOST_DRAFT_HEADS, MOST_HEAD_LAYERS, DraftModule
from edgeinfer.core.errors import CheckpointError
from edgeinfer.export.architectures.base import Naming
from edgeinfer.export.architectures.llama import LLAMA
from edgeinfer.export.architectures.tensors import TensorPlan, plan
from edgeinfer.export.drafters.described import DescribedModule, ModuleSource, drafted_by, module_spec, own_plans
from edgeinfer.export.source.hf_config import HFConfig

_OWN = "hydra_config"
# `norm` stands behind the layer, and no norm before the head.
_NAMING = Naming(embed="embed_tokens.weight", final_norm="norm.weight", head="lm_head.weight", layer="layers.{layer}.")


def is_hydra(config: HFConfig) -> bool:
    return isinstance(config.get(_OWN), dict)


def describe_hydra(source: ModuleSource) -> DescribedModule:
    family = dataclasses.replace(LLAMA, naming=_NAMING)
    spec = module_spec(source, family, tied=False)
    heads, layers = _number(source, "num_heads", MOST_DRAFT_HEADS), _number(source, "num_layers", MOST_HEAD_LAYERS)
    size, drafted = spec.hidden_size, source.config.integer("draft_vocab_size", spec.vocab_size)
    tokens = drafted_by(source, drafted)
    plans = own_plans(source, family, spec, ("embed", "head", "final_norm"), size)
    for name, stored in (("state_norm", "state_norm"), ("own_norm", "norm"), ("embed_norm", "embed_norm")):
        plans.append(plan(f"module.{name}", (f"{stored}.weight", (size,))))
    for head in range(heads):
        plans += _head_plans(head, size, layers)
    plans.append(plan("head", ("lm_head.weight", (drafted, size))))
    module = DraftModule(
        width=size,
        drafter="hydra-plus",
        vocab_size=0 if tokens is None else drafted,
        shares=("embed",),
        heads=heads,
        head_layers=layers,
        embed_scale=1 / source.embed_scale,
    )
    return DescribedModule(spec, module, tuple(plans), tokens=tokens)


def _head_plans(head: int, size: int, layers: int) -> list[TensorPlan]:
    name, parts, shape = f"heads.{head}", ("res_connection", "linear"), (size, (2 + head) * size)
    plans = [
        plan(f"{name}.joined", *((f"{name}.first.{part}.weight", shape) for part in parts)),
        plan(f"{name}.joined_bias", *((f"{name}.first.{part}.bias", (size,)) for part in parts)),
    ]
    if layers > 1:
        plans.append(plan(f"{name}.further", (f"{name}.further.linear.weight", (size, size))))
        plans.append(plan(f"{name}.further_bias", (f"{name}.further.linear.bias", (size,))))
    return plans


def _number(source: ModuleSource, name: str, most: int) -> int:
    nested = source.config.get(_OWN)
    said = nested.get(name) if isinstance(nested, dict) else None
    if type(said) is not int or not 1 <= said <= most:
        message = f"The drafter {source.checkpoint.folder} has {name} = {said!r}, which is not from 1 to {most}."
        raise CheckpointError(message, "Train it again, or choose another one.")
    return said
