"""The parts of a decoder that families of today have, planned from a checkpoint and computed, against transformers."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import HunYuanDenseV1Config
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.hunyuan_v1_dense import modeling_hunyuan_v1_dense

from edgeinfer.bundle.arithmetic import attend, inverse_frequencies
from edgeinfer.bundle.layouts import NATIVE
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.store import Bundle
from edgeinfer.errors import UnsupportedArchitectureError
from edgeinfer.export.architectures.base import Architecture, Naming, common_spec
from edgeinfer.export.architectures.described import describe, read_spec, require_graphs, require_plain
from edgeinfer.export.architectures.planned_tensors import PlannedTensors
from edgeinfer.export.architectures.tensors import TensorPlan
from edgeinfer.export.source.checkpoint import Checkpoint
from edgeinfer.export.source.hf_config import HFConfig, read_config
from edgeinfer.runtime.backends.contract import ForwardInput
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from tests.export.passes import TOKENS, expected_logits
from tests.factories import make_checkpoint
from tests.tables import each_row

TOLERANCE = 1e-4
Refine = Any


def _olmo2(config: HFConfig, tied: bool) -> DecoderSpec:
    return common_spec(config, tied, pre_norm=False, post_norm=True, qk_norm=True, whole_norm=True)


def _cohere2(config: HFConfig, tied: bool) -> DecoderSpec:
    slides = [kind == "sliding_attention" for kind in config.get("layer_types")]
    window = config.integer("sliding_window")
    return common_spec(
        config,
        tied,
        norm_eps="layer_norm_eps",
        norm="layer",
        parallel=True,
        rope=dataclasses.replace(config.rope(config.head_dim()), interleaved=True),
        rope_layers=tuple(0 if s else -1 for s in slides),
        windows=tuple(window if s else 0 for s in slides),
    )


def _gemma2(config: HFConfig, tied: bool) -> DecoderSpec:
    slides = [kind == "sliding_attention" for kind in config.get("layer_types")]
    window = config.integer("sliding_window")
    return common_spec(
        config,
        tied,
        activation=config.activation("hidden_activation"),
        post_norm=True,
        attention_scale=config.number("query_pre_attn_scalar") ** -0.5,
        attention_softcap=config.number("attn_logit_softcapping"),
        logit_softcap=config.number("final_logit_softcapping"),
        windows=tuple(window if s else 0 for s in slides),
    )


def _phi(config: HFConfig, tied: bool) -> DecoderSpec:
    return common_spec(
        config,
        tied,
        norm_eps="layer_norm_eps",
        norm="layer",
        norm_bias=True,
        parallel=True,
        gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
    )


def _scale_logits(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> TensorPlan:
    """Cohere's: the last norm has no bias, so that its weight scales the logits."""
    return _changed(plan, scale=config.number("logit_scale")) if plan.name == "final_norm" else plan


def _one_more(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> TensorPlan:
    """Gemma's: norms are stored without their one, and embeddings are multiplied by the root of their width."""
    root = math.sqrt(spec.hidden_size)
    if plan.name == "embed":
        return _changed(plan, scale=root)
    if plan.name == "final_norm":
        return _changed(plan, offset=1.0, scale=1 / root if spec.tied else 1.0)
    return _changed(plan, offset=1.0) if plan.name.endswith("norm") else plan


def _changed(plan: TensorPlan, **changes: float) -> TensorPlan:
    return TensorPlan(plan.name, tuple(dataclasses.replace(s, **cast(Any, changes)) for s in plan.sources))


FAMILIES: dict[str, tuple[Any, Naming, Refine]] = {
    "Olmo2": (_olmo2, Naming(), None),
    "Cohere2": (_cohere2, Naming(), _scale_logits),
    "Gemma2": (_gemma2, Naming(mlp_norm="pre_feedforward_layernorm.weight"), _one_more),
    "Phi": (
        _phi,
        Naming(final_norm="model.final_layernorm.weight", out="self_attn.dense", up="mlp.fc1", down="mlp.fc2"),
        None,
    ),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "Olmo2": {},
    "Cohere2": {
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "tie_word_embeddings": True,
    },
    "Gemma2": {"sliding_window": 6, "head_dim": 32, "query_pre_attn_scalar": 24, "tie_word_embeddings": True},
    "Phi": {"partial_rotary_factor": 0.5},
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


def _family(name: str) -> Architecture:
    read, naming, refine = FAMILIES[name]
    return Architecture((f"{name}ForCausalLM",), (name.lower(),), read, naming=naming, refine=refine)


def _backend(folder: Path, name: str) -> ReferenceBackend:
    """The reference backend over what is planned of a checkpoint, with no file between them."""
    config, family = read_config(folder), _family(name)
    with Checkpoint(folder) as checkpoint:
        spec = family.read(config, config.flag("tie_word_embeddings"))
        plans = describe(spec, config, family, checkpoint).plans
        planned = PlannedTensors(checkpoint, plans)
        values = {plan.name: planned.tensor(plan.name) for plan in plans}
    if spec.tied:
        values["head"] = values["embed"]
    entries = [SimpleNamespace(name=each, bits=32) for each in values]
    bundle = SimpleNamespace(path=folder, manifest=SimpleNamespace(decoder=spec, tensors=entries), tensor=values.get)
    return ReferenceBackend(cast(Bundle, bundle), 32)


def _run(backend: ReferenceBackend, tokens: Any) -> Any:
    start = backend.cache.length
    positions, rows = np.arange(start, start + len(tokens)), np.arange(len(tokens))
    return backend.forward(ForwardInput(np.asarray(tokens, np.int64), positions, rows)).logits


@each_row("name", FAMILIES)
def test_logits_match_transformers_however_a_text_is_split(name: str, tmp_path: Path) -> None:
    expected = expected_logits(make_checkpoint(tmp_path, name, **SETTINGS[name]), TOKENS)
    backend = _backend(tmp_path, name)
    logits = [_run(backend, part) for part in (TOKENS[:7], TOKENS[7:8], TOKENS[8:])]
    assert np.abs(np.concatenate(logits) - expected).max() <= TOLERANCE


@each_row("more", [{}, {"truncate": False}, {"mscale": 1.0, "mscale_all_dim": 0.8}])
def test_yarn_matches_transformers(more: dict[str, Any], tmp_path: Path) -> None:
    expected = expected_logits(make_checkpoint(tmp_path, "Olmo2", rope_parameters=YARN | more), TOKENS)
    assert np.abs(_run(_backend(tmp_path, "Olmo2"), TOKENS) - expected).max() <= TOLERANCE


def test_a_base_stretched_by_alpha_matches_transformers(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0}
    config = HFConfig({"rope_parameters": rope, "max_position_embeddings": 128})
    class_ = modeling_hunyuan_v1_dense.HunYuanDenseV1RotaryEmbedding
    theirs: Any = class_(HunYuanDenseV1Config(rope_parameters=rope, head_dim=32, max_position_embeddings=128))
    np.testing.assert_allclose(inverse_frequencies(config.rope(32), 128), theirs.inv_freq.numpy(), rtol=1e-6)


@each_row("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu2"])
def test_activations_match_transformers(activation: str, tmp_path: Path) -> None:
    expected = expected_logits(make_checkpoint(tmp_path, "Phi", hidden_act=activation), TOKENS)
    assert np.abs(_run(_backend(tmp_path, "Phi"), TOKENS) - expected).max() <= TOLERANCE


def test_sinks_take_their_share_of_the_softmax() -> None:
    generator = np.random.default_rng(0)
    queries, keys, values = (generator.standard_normal((h, 5, 8), np.float32) for h in (4, 2, 2))
    sinks, visible = generator.standard_normal(4, np.float32), np.tri(5, dtype=np.bool_)
    module = SimpleNamespace(sinks=torch.from_numpy(sinks), num_key_value_groups=2, training=False)
    given = [torch.from_numpy(each)[None] for each in (queries, keys, values)]
    mask = torch.from_numpy(np.where(visible, 0, -np.inf).astype(np.float32))[None, None]
    attention: Any = modeling_gpt_oss.eager_attention_forward
    expected = attention(module, *given, mask, scaling=8**-0.5)[0][0]
    ours = attend(queries.reshape(2, 2, 5, 8), keys, values, visible, sinks=sinks.reshape(2, 2))
    np.testing.assert_allclose(ours.reshape(4, 5, 8).swapaxes(0, 1), expected.numpy(), atol=1e-6)


@each_row(("name", "part"), [("Olmo2", "pre_norm=False"), ("Cohere2", "norm='layer'")])
def test_parts_that_are_not_written_are_refused_by_name(name: str, part: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, name, **SETTINGS[name])
    with Checkpoint(tmp_path) as checkpoint:
        spec = read_spec(read_config(tmp_path), _family(name), checkpoint)
    require_graphs(spec, NATIVE)
    with pytest.raises(UnsupportedArchitectureError, match=f"Static bundles of a decoder with {part}"):
        require_plain(spec, "Static bundles", "Leave out --static.")
