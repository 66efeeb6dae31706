"""Modules for multi-token prediction from a model's own checkpoint to its replies."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import edgeinfer
from edgeinfer.bundle import open_bundle
from edgeinfer.export import ExportConfig
from edgeinfer.export import export_checkpoint as export_anew
from edgeinfer.runtime.speculation.drafters.contract import Context
from edgeinfer.runtime.speculation.drafters.eagle import MtpDrafter
from tests.cache import made
from tests.factories import make_checkpoint
from tests.mtp_modules import ReferenceModule, add_module
from tests.speculation import load_eager, same

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
PROMPT = [5 + i % 7 for i in range(90)]


def make_bundle(folder: Path, name: str, bits: int) -> None:
    """A checkpoint with a module, and its bundle."""
    make_checkpoint(folder / "target", name, seed=2, **FAMILIES[name])
    add_module(folder / "target")
    export_anew(folder / "target", folder / "bundle", ExportConfig(bits=bits, keep_small=False))


_MIXTURES = [pytest.param(name, marks=pytest.mark.slow) for name in ("Qwen3Next", "Qwen3_5Moe")]


@pytest.mark.parametrize("name", ["Qwen3_5", *_MIXTURES])
def test_it_drafts_what_the_published_code_drafts(name: str) -> None:
    """Behind a prompt and a reply of many rounds, of chains and of trees, along paths that part."""
    folder, who = made(make_bundle, name, 32), "copy,recycle,mtp"
    reference = ReferenceModule(folder / "target")
    for width in (1, 3):
        with load_eager(folder / "bundle", context=256, speculation=who, remember=False) as model:
            options: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "draft_width": width}
            options["logit_bias"] = dict.fromkeys((7, 9, 11), 30.0)  # so that copies are accepted too
            reply = model.generate(PROMPT, speculation=who, **options)
            assert reply.speculation.per_drafter["mtp"].drafted > 0 < reply.speculation.accepted
            text, drafter = [*PROMPT, *reply.token_ids], model._parts.speculator._drafter("mtp")
            assert isinstance(drafter, MtpDrafter)
            drafter.begin(text)
            context = Context(text, lambda logits, drafted: (int(logits.argmax()), None), lambda drafted: ())
            for path in ([], [7], [7, 9], [7, 9, 11], [7, 12], [5, 6, 7, 8]):
                found = drafter._logits(context, path)
                assert found is not None
                np.testing.assert_allclose(found, reference.logits(text, path), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "threads", "kv"), [("Qwen3_5", 2, "int8"), ("Qwen3Next", 1, "float32")])
def test_text_is_that_of_plain_decoding(name: str, threads: int, kv: str) -> None:
    bundle = made(make_bundle, name, 4) / "bundle"
    with load_eager(bundle, context=256, threads=threads, kv=kv, remember=False) as model:
        for who in ("mtp", "auto"):
            for width in (1, 3):
                for way in ({}, {"temperature": 1.0, "seed": 11}):
                    edgeinfer.tools.restore_drafting(model, {})
                    found = same(model, who, prompt=PROMPT, max_tokens=32, ignore_eos=True, draft_width=width, **way)
                    assert (found.exact, found.lossless) == (True, True)
                    # "auto" may have drafters that seem better, which random weights are not asked about twice.
                    assert "mtp" in found.per_drafter or who == "auto"


def test_a_model_runs_without_an_incomplete_module(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In one line, and everything else is as it was; embedding and head are stored once."""
    source = made(make_bundle, "Qwen3_5", 4)
    inside = open_bundle(source / "bundle" / "drafter").manifest
    assert not {"embed", "head"} & {tensor.name for tensor in inside.tensors}
    for lacking in ("mtp.norm.weight", "mtp.layers.0.self_attn.k_proj.weight"):
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
