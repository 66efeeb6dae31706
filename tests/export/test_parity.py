"""Logits of exported graphs, and parts of a decoder that configurations choose, against transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import HunYuanDenseV1Config
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.hunyuan_v1_dense import modeling_hunyuan_v1_dense

from edgeinfer.bundle.arithmetic import attend, inverse_frequencies
from edgeinfer.bundle.layouts import NATIVE, PORTABLE, Layout
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.errors import UnsupportedArchitectureError
from edgeinfer.export.architectures import find_architecture
from edgeinfer.export.architectures.described import read_spec, require_graphs, require_plain
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from edgeinfer.export.source.checkpoint import Checkpoint
from edgeinfer.export.source.hf_config import HFConfig, read_config
from edgeinfer.runtime.backends.contract import ForwardInput
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from tests.export.passes import TOKENS, Runner, expected_logits, rotary_tables
from tests.factories import make_checkpoint
from tests.tables import each_row

TOLERANCE = 1e-4


def export_random(
    folder: Path, arch: str, config: ExportConfig, layouts: tuple[Layout, ...] = (PORTABLE,), **settings: Any
) -> tuple[Any, list[Runner]]:
    model = make_checkpoint(folder / "checkpoint", arch, **settings)
    bundle = export_checkpoint(folder / "checkpoint", folder / "bundle", config)
    return model, [Runner(bundle, rotary_tables(model, len(TOKENS)), layout) for layout in layouts]


@each_row("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_sharded_sources_match_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    model, (runner,) = export_random(tmp_path, "Qwen2", ExportConfig(bits=32), dtype=dtype, max_shard_size="60KB")
    assert len(list((tmp_path / "checkpoint").glob("*.safetensors"))) > 1
    logits, _ = runner.run(TOKENS, list(range(len(TOKENS))))
    assert np.abs(logits - expected_logits(model, TOKENS)).max() <= TOLERANCE


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


def difference(folder: Path, name: str, **settings: Any) -> float:
    """The largest difference of the reference's logits from transformers'."""
    model = make_checkpoint(folder / "checkpoint", name, **settings)
    bundle = open_bundle(export_checkpoint(folder / "checkpoint", folder / "bundle", ExportConfig(bits=32)))
    rows = np.arange(len(TOKENS))
    found = ReferenceBackend(bundle, 32).forward(ForwardInput(TOKENS, rows, rows)).logits
    return float(np.abs(found - expected_logits(model, TOKENS)).max())


@each_row("more", [{}, {"truncate": False}, {"mscale": 1.0, "mscale_all_dim": 0.8}])
def test_yarn_matches_transformers(more: dict[str, Any], tmp_path: Path) -> None:
    assert difference(tmp_path, "Olmo2", rope_parameters=YARN | more) <= TOLERANCE


@each_row("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu2"])
def test_activations_match_transformers(activation: str, tmp_path: Path) -> None:
    assert difference(tmp_path, "Phi", hidden_act=activation) <= TOLERANCE


@each_row(("name", "part"), [("Olmo2", "pre_norm=False"), ("Cohere2", "norm='layer'")])
def test_parts_that_are_not_written_are_refused_by_name(name: str, part: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, name)
    config = read_config(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        spec = read_spec(config, find_architecture(config), checkpoint)
    require_graphs(spec, NATIVE)
    with pytest.raises(UnsupportedArchitectureError, match=f"Static bundles of a decoder with {part}"):
        require_plain(spec, "Static bundles", "Leave out --static.")


def test_a_base_stretched_by_alpha_matches_transformers(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0}
    config = HFConfig({"rope_parameters": rope, "max_position_embeddings": 128})
    class_ = modeling_hunyuan_v1_dense.HunYuanDenseV1RotaryEmbedding
    theirs: Any = class_(HunYuanDenseV1Config(rope_parameters=rope, head_dim=32, max_position_embeddings=128))
    np.testing.assert_allclose(inverse_frequencies(config.rope(32), 128), theirs.inv_freq.numpy(), rtol=1e-6)


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
