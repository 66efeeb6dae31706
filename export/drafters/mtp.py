"""The modules for multi-token prediction that models ship with: one layer like the target's behind a product.

The product is of the normed embedding and the normed state, which is the target's last after its final norm, or the
module's own after its final norm; embedding and head are the target's. Where they lie:

- Hybrid Qwens: `mtp.*` with a layer of full attention, from vLLM (models/qwen3_next_mtp.py) and llama.cpp
  (models/qwen35.cpp).
- DeepSeek-V3 and GLM since 4.5: the layer behind the last, with `enorm`, `hnorm`, `eh_proj` and `shared_head`, from
  SGLang (models/deepseek_nextn.py) and llama.cpp (models/deepseek2.cpp, glm4-moe.cpp). vLLM (models/deepseek_mtp.py)
  feeds the module's own states as they are before its norm; they are one where a single token is drafted. The copies
  of embedding and head that such a layer is stored with are not read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgeinfer.bundle.spec import DraftModule
from edgeinfer.core.errors import CheckpointError
from edgeinfer.export.architectures.base import MTP, NEXT_LAYER, Architecture
from edgeinfer.export.architectures.described import stored_tensors
from edgeinfer.export.architectures.tensors import TensorPlan, plan
from edgeinfer.export.drafters.described import DescribedModule, ModuleSource, module_spec, own_plans
from edgeinfer.export.source.hf_config import HFConfig


@dataclass(frozen=True)
class _Layout:
    """Where a module lies in its model's checkpoint."""

    count: str  # the field of config.json with the number of its layers
    own: Mapping[str, Any]  # kind of its only layer, in the words of the target's config.json
    layer: str  # prefix of the layer's tensors, after the module's root
    joined: str  # the product of the inputs, with norms embed_norm and hidden_norm; final_norm: of the layer's result
    embed_norm: str
    hidden_norm: str
    final_norm: str


_LAYOUTS = {
    MTP: _Layout(
        count="mtp_num_hidden_layers",
        own={"layer_types": ["full_attention"], "mlp_only_layers": [], "decoder_sparse_step": 1},
        layer="layers.0.",
        joined="fc.weight",
        embed_norm="pre_fc_norm_embedding.weight",
        hidden_norm="pre_fc_norm_hidden.weight",
        final_norm="norm.weight",
    ),
    NEXT_LAYER: _Layout(
        count="num_nextn_predict_layers",
        own={"first_k_dense_replace": 0, "mlp_layer_types": None},
        layer="",
        joined="eh_proj.weight",
        embed_norm="enorm.weight",
        hidden_norm="hnorm.weight",
        final_norm="shared_head.norm.weight",
    ),
}


def describe_mtp(source: ModuleSource, family: Architecture) -> DescribedModule | None:
    """The module in a target's own checkpoint; None where it has none."""
    layout = _LAYOUTS.get(family.predicts)
    root = family.module_root(source.target.num_layers)
    if layout is None or not any(name.startswith(root) for name in source.checkpoint.names):
        return None
    layers = source.config.get(layout.count)
    if layers not in (None, 1):
        raise CheckpointError(f"Multi-token prediction of {layers!r} layers is not supported.", "")
    own = dataclasses.replace(
        source, config=HFConfig(source.config.values | {"num_hidden_layers": 1} | dict(layout.own))
    )
    naming = dataclasses.replace(family.naming, layer=root + layout.layer, final_norm=root + layout.final_norm)
    family = dataclasses.replace(family, naming=naming)
    spec = module_spec(own, family, tied=source.target.tied)
    size = spec.hidden_size
    plans = [
        *own_plans(own, family, spec, ("embed", "head"), size),
        plan("fc", (root + layout.joined, (size, 2 * size))),
    ]
    names = {"embed": layout.embed_norm, "hidden": layout.hidden_norm, "own": layout.final_norm}
    for name, stored in names.items():
        norm = plan(f"module.{name}_norm", (root + stored, (size,)))
        plans.append(norm if family.refine is None else family.refine(own.config, spec, norm))
    _require(source, plans)
    module = DraftModule(
        width=size, drafter="mtp", shares=("embed", "head"), parts_normed=True, state_normed=True, feeds_normed=True
    )
    return DescribedModule(spec, module, tuple(plans), borrowed={"module.state_norm": "final_norm"})


def _require(source: ModuleSource, plans: list[TensorPlan]) -> None:
    for each in plans:
        for part in each.sources:
            for name, shape, types in stored_tensors(part):
                source.checkpoint.require(name, shape, types)
