"""The modules for multi-token prediction that the hybrid Qwens ship with: one layer of attention behind a product.

Their layout, from vLLM (models/qwen3_next_mtp.py) and llama.cpp (models/qwen35.cpp): `mtp.fc` over the normed embedding
and the normed state, which is the target's last after its final norm, or the module's own after `mtp.norm`; a layer of
full attention like the target's; embedding and head are the target's.
"""

from __future__ import annotations

import dataclasses

from edgeinfer.bundle.draft_module import DraftModule
from edgeinfer.errors import CheckpointError
from edgeinfer.export.architectures import Architecture
from edgeinfer.export.architectures.described import stored_tensors
from edgeinfer.export.architectures.plans import TensorPlan, plan
from edgeinfer.export.drafters.described import DescribedModule, ModuleSource, module_spec, own_plans
from edgeinfer.export.source.hf_config import HFConfig

__all__ = ["describe_mtp"]

_ROOT = "mtp."
# What the module's only layer is, in the words of the target's config.json.
_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_only_layers": [], "decoder_sparse_step": 1}


def describe_mtp(source: ModuleSource, family: Architecture) -> DescribedModule | None:
    """Reads the module in a target's own checkpoint; None where it has none.

    Args:
        source: the target's checkpoint.
        family: of the target, by the names that its tensors have.

    Raises:
        CheckpointError: tensors of it are missing or of other shapes, or it has several layers.
    """
    if not family.predicts or not any(name.startswith(_ROOT) for name in source.checkpoint.names):
        return None
    layers = source.config.get("mtp_num_hidden_layers")
    if layers not in (None, 1):
        raise CheckpointError(f"Multi-token prediction of {layers!r} layers is not supported.", "")
    own = dataclasses.replace(source, config=HFConfig(source.config.values | _LAYER))
    naming = dataclasses.replace(family.naming, layer=f"{_ROOT}layers.{{layer}}.", final_norm=f"{_ROOT}norm.weight")
    family = dataclasses.replace(family, naming=naming)
    spec = module_spec(own, family, tied=source.target.tied)
    size = spec.hidden_size
    plans = [
        *own_plans(own, family, spec, ("embed", "head"), size),
        plan("fc", (f"{_ROOT}fc.weight", (size, 2 * size))),
    ]
    names = {"embed": "pre_fc_norm_embedding", "hidden": "pre_fc_norm_hidden", "own": "norm"}
    for name, stored in names.items():
        norm = plan(f"module.{name}_norm", (f"{_ROOT}{stored}.weight", (size,)))
        plans.append(norm if family.refine is None else family.refine(own.config, spec, norm))
    _require(source, plans)
    module = DraftModule(
        width=size,
        drafter="mtp",
        shares=("embed", "head"),
        parts_normed=True,
        state_normed=True,
        feeds_normed=True,
    )
    return DescribedModule(spec, module, tuple(plans), borrowed={"module.state_norm": "final_norm"})


def _require(source: ModuleSource, plans: list[TensorPlan]) -> None:
    for each in plans:
        for part in each.sources:
            for name, shape, types in stored_tensors(part):
                source.checkpoint.require(name, shape, types)
