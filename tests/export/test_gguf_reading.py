"""GGUF files of all families, written from checkpoints and read back: descriptions, tensors and logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")

from edgeinfer.bundle.arithmetic import inverse_frequencies
from edgeinfer.bundle.gguf.reader import read_gguf
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.parts import RopeSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.export.architectures.planned_tensors import PlannedTensors
from edgeinfer.export.gguf.reading import GgufTensors, convert_model, read_model, refusal
from edgeinfer.export.gguf.writer import open_gguf_source, write_gguf
from edgeinfer.export.source.checkpoint import Checkpoint
from edgeinfer.export.source.hf_config import read_config
from edgeinfer.export.source.sidecar import read_sidecar
from tests.export.gguf_cases import GGUF_CASES, PLAIN
from tests.export.passes import TOKENS, expected_logits
from tests.factories import make_checkpoint
from tests.runtime.models import make_graph_backend
from tests.runtime.test_parity import feed

# Families whose files are not read yet: the key or tensor that says so.
UNREAD = {
    "Gemma3n": "gemma3n.activation_sparsity_scale is not known",
    "Gemma4": "gemma4.attention.key_length_swa is not known",
    "Apertus": "layers.0.mlp.xielu is made of several tensors that change",
    "DeepseekV2": "deepseek2.attention.key_length_mla is not known",
    "DeepseekV3": "deepseek2.attention.key_length_mla is not known",
    "Glm4MoeLite": "deepseek2.attention.key_length_mla is not known",
    "Mistral4": "mistral4.attention.key_length_mla is not known",
    "Youtu": "deepseek2.attention.key_length_mla is not known",
    "MiniCPM3": "minicpm3.attention.kv_lora_rank is not known",
    "Lfm2": "lfm2.shortconv.l_cache is not known",
    "Lfm2Moe": "lfm2moe.shortconv.l_cache is not known",
    "Qwen3Next": "qwen3next.attention.recurrent_layers is not known",
    "Qwen3_5": "qwen35.attention.recurrent_layers is not known",
    "Qwen3_5Moe": "qwen35moe.attention.recurrent_layers is not known",
    "Mamba2": "mamba2.attention.head_count is not known",
    "Bamba": "granitehybrid.",
    "GraniteMoeHybrid": "granitehybrid.",
    "FalconH1": "falcon-h1.ssm.conv_kernel is not known",
    "NemotronH": "nemotron_h",
}
# What the fast tier runs: the families of the files that most people have.
FAST = ("Llama", "Qwen2", "Qwen3", "Gemma3", "Qwen3Moe")
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
READ = [case for case in GGUF_CASES if case[0] not in UNREAD]
READ += [
    ("Llama", {"rope_parameters": LLAMA3}),
    ("Qwen2", {"rope_parameters": PLAIN | {"rope_type": "linear", "factor": 2.0}}),
]
# Fields that a file cannot say as the checkpoint did: a window that is its whole context, a head stored again, a factor
# of scores that the checkpoint's export has in its queries, pairs of channels that are neighbours in both.
OTHERWISE = {
    "Ministral": ("windows", "max_positions"),
    "Starcoder2": ("windows", "max_positions"),
    "Helium": ("rope",),
    "GraniteMoe": ("attention_scale",),
    "GraniteMoeShared": ("attention_scale",),
    "GraniteMoeSWA": ("attention_scale",),
    "Qwen2Moe": ("tied",),
    "Olmoe": ("tied",),
    "Dots1": ("tied",),
}


@contextmanager
def written(folder: Path, name: str, settings: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    model = make_checkpoint(folder / "checkpoint", name, **settings)
    write_gguf(folder / "checkpoint", folder / "model.gguf", vocabulary=False)
    yield folder / "model.gguf", model


def plain(spec: DecoderSpec, name: str) -> DecoderSpec:
    """A description without what files say otherwise; Llama 3's rotation as the divisors that its constants give."""
    usual: dict[str, Any] = {"windows": (), "max_positions": 1, "attention_scale": 0.5, "tied": False}
    usual["rope"] = dataclasses.replace(spec.rope, interleaved=False)
    if spec.rope.type in ("llama3", "longrope"):
        speeds = tuple(np.round(inverse_frequencies(spec.rope, 0), 7).tolist())
        spec = dataclasses.replace(
            spec,
            rope=RopeSpec(
                "longrope", 1.0, spec.rope.dim, original_max_positions=1, short_factors=speeds, long_factors=speeds
            ),
        )
    return dataclasses.replace(spec, **{field: usual[field] for field in OTHERWISE.get(name, ())})


@pytest.mark.parametrize(
    ("name", "settings"),
    [pytest.param(*case, marks=() if case[0] in FAST else pytest.mark.slow, id=case[0]) for case in READ],
)
def test_a_file_read_back_is_the_checkpoint(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    with written(tmp_path, name, settings) as (file, torch_model), Checkpoint(tmp_path / "checkpoint") as checkpoint:
        source, model = open_gguf_source(checkpoint), read_model(read_gguf(file))
        assert plain(model.spec, name) == plain(source.spec, name)
        with GgufTensors(model.gguf, model.shapes) as tensors:
            found, computing = (
                PlannedTensors(*each) for each in ((tensors, model.plans), (checkpoint, source.computing))
            )
            for plan in model.plans:
                if plan.name in computing and not (name in OTHERWISE and plan.name.endswith("qkv")):
                    np.testing.assert_allclose(found.tensor(plan.name), computing.tensor(plan.name), atol=1e-6)
        config = read_config(tmp_path / "checkpoint")
        convert_model(model, read_sidecar(tmp_path / "checkpoint", config), tmp_path / "bundle", "read")
        bundle = open_bundle(tmp_path / "bundle")
        backend = make_graph_backend(bundle, 64)
        tokens = TOKENS[: bundle.manifest.geometry.max_positions]
        difference = np.abs(feed(backend, tokens.tolist()) - expected_logits(torch_model, tokens)).max()
        backend.close()
        print(f"{name}: {difference:.1e}")
        assert difference <= 1e-4


@pytest.mark.slow
def test_a_family_that_is_not_read_says_so_in_a_line(tmp_path: Path) -> None:
    for index, (name, settings) in enumerate(GGUF_CASES):
        if name in UNREAD and settings.get("layer_types") != ["full_attention"] * 3:
            with written(tmp_path / str(index), name, settings) as (file, _):
                said = refusal(file)
            assert said is not None and UNREAD[name] in said and "\n" not in said, name
