"""Modules for multi-token prediction from a model's own checkpoint to its replies."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from edgeinfer.bundle.opening import open_bundle
from edgeinfer.export.exporter import export_checkpoint as export_anew
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.speculation.drafters.contract import DraftContext
from edgeinfer.runtime.speculation.drafters.eagle import MtpDrafter
from tests.cache import made
from tests.factories import make_checkpoint
from tests.mtp_modules import NextLayerReference, ReferenceModule, add_module, add_next_layer
from tests.speculation import load_eager

_MIXED = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3}
_SIZES = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "head_dim": 32}
_SHAPE: dict[str, Any] = _MIXED | _SIZES | {"linear_value_head_dim": 24, "max_position_embeddings": 512}
_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_EXPERTS["shared_expert_intermediate_size"] = 64
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3_5": _SHAPE,
    "Qwen3Next": _SHAPE | _EXPERTS | {"mlp_only_layers": [1]},
    "Qwen3_5Moe": _SHAPE | _EXPERTS | {"tie_word_embeddings": True},
}
_ROUTED = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 1}
_ROUTED |= {
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 512,
}
_LATENT = {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
_LATENT |= {"num_key_value_heads": 4}
# Of which the layer behind the last predicts.
NEXT_LAYERS: dict[str, dict[str, Any]] = {
    "DeepseekV3": _ROUTED | _LATENT | {"n_group": 3, "topk_group": 2},
    "Glm4Moe": _ROUTED | {"attention_bias": True, "use_qk_norm": True},
    "Glm4MoeLite": _ROUTED | _LATENT | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
}
# Tensors of their modules, without which these run as well.
INCOMPLETE = {
    "Qwen3_5": ("mtp.norm.weight", "mtp.layers.0.self_attn.k_proj.weight"),
    "DeepseekV3": ("model.layers.3.eh_proj.weight", "model.layers.3.mlp.experts.2.up_proj.weight"),
}
PROMPT = [5 + i % 7 for i in range(90)]


def make_bundle(folder: Path, name: str, bits: int) -> None:
    """A checkpoint with a module, and its bundle."""
    make_checkpoint(folder / "target", name, seed=2, **(FAMILIES | NEXT_LAYERS)[name])
    if name in FAMILIES:
        add_module(folder / "target")
    else:
        add_next_layer(folder / "target", folder / "layer")
    export_anew(folder / "target", folder / "bundle", ExportConfig(bits=bits, keep_small=False))


def reference_of(folder: Path, name: str) -> ReferenceModule:
    """What transformers makes of the module of `make_bundle`."""
    if name in FAMILIES:
        return ReferenceModule(folder / "target")
    return NextLayerReference(folder / "target", folder / "layer")


_SLOWER = [pytest.param(name, marks=pytest.mark.slow) for name in ("Qwen3Next", "Qwen3_5Moe", *NEXT_LAYERS)]


@pytest.mark.parametrize("name", ["Qwen3_5", *_SLOWER])
def test_it_drafts_what_the_published_code_drafts(name: str) -> None:
    """Behind a prompt and a reply of many rounds, of chains and of trees, along paths that part."""
    folder = made(make_bundle, name, 32)
    reference = reference_of(folder, name)
    # Some tokens are likelier, so that copies of them are accepted, but not all that is drafted is a copy.
    ways = ((1, "copy,recycle,mtp", 30.0), (3, "copy,recycle,mtp", 30.0))
    if name in NEXT_LAYERS:
        ways = ((1, "mtp", 30.0), (3, "copy,recycle,mtp", 2.0))
    for width, who, likelier in ways:
        with load_eager(folder / "bundle", context=256, speculation=who, remember=False) as model:
            options: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "draft_width": width}
            options["logit_bias"] = dict.fromkeys((7, 9, 11), likelier)
            reply = model.generate(PROMPT, speculation=who, **options)
            assert reply.speculation.per_drafter["mtp"].drafted > 0 < reply.speculation.accepted
            text, drafter = [*PROMPT, *reply.token_ids], model._parts.speculator._drafter("mtp")
            assert isinstance(drafter, MtpDrafter)
            drafter.begin(text)
            context = DraftContext(text, lambda logits, drafted: (int(logits.argmax()), None), lambda drafted: ())
            for path in ([], [7], [7, 9], [7, 9, 11], [7, 12], [5, 6, 7, 8]):
                found = drafter._logits(context, path)
                assert found is not None
                np.testing.assert_allclose(found, reference.logits(text, path), atol=1e-4)


@pytest.mark.parametrize("name", ["Qwen3_5", pytest.param("DeepseekV3", marks=pytest.mark.slow)])
def test_a_model_runs_without_an_incomplete_module(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In one line, and everything else is as it was; embedding and head are stored once."""
    source = made(make_bundle, name, 4)
    inside = open_bundle(source / "bundle" / "drafter").manifest
    assert not {"embed", "head"} & {tensor.name for tensor in inside.tensors}
    for lacking in INCOMPLETE[name]:
        folder = Path(shutil.copytree(source / "target", tmp_path / lacking))
        tensors = load_file(folder / "model.safetensors")
        del tensors[lacking]
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        with caplog.at_level(logging.WARNING, "edgeinfer"):
            bundle = export_anew(folder, tmp_path / "out" / lacking, ExportConfig(bits=4, keep_small=False))
        assert caplog.messages[-1].startswith("The model is exported without its module") and lacking in caplog.text
        assert not open_bundle(bundle).manifest.drafters
        assert (bundle / "weights.bin").read_bytes() == (source / "bundle" / "weights.bin").read_bytes()
        caplog.clear()
