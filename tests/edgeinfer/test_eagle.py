"""EAGLE heads from their published layouts to replies: what they draft, which text comes of it, what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import edgeinfer
from edgeinfer.bundle.conversion import convert_bundle
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.errors import ModelError, UnsupportedArchitectureError, UsageError
from edgeinfer.export.exporter import export_checkpoint as export_anew
from edgeinfer.export.options import ExportConfig
from tests.cache import made
from tests.draft_modules import (
    PROMPT,
    WAYS,
    Damage,
    change_config,
    change_tensors,
    export_with_module,
    read_texts,
    require_logits,
    require_other_verifications,
    require_planned,
    require_refused,
    require_same_near_the_end,
)
from tests.eagle_heads import ReferenceHead, make_head
from tests.speculation import load_eager, same

# Of each head its form and what its config.json says besides.
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {"drafted": 120}),
    "other names and norms": (
        "eagle3-layers",
        {"norm_before_residual": True, "norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [1, 4, 5]},
    ),
    "eagle1": ("eagle1", {}),
}


def make_bundle(folder: Path, kind: str, bits: int) -> None:
    """Target, head and bundle."""
    form, settings = HEADS.get(kind, HEADS["eagle3"])
    family = "llama" if kind in HEADS else "mixtral"
    export_with_module(folder, family, bits, lambda own, target: make_head(own, target, form, **settings))


@pytest.mark.parametrize("kind", HEADS)
def test_it_drafts_what_the_published_code_drafts(kind: str) -> None:
    """Along paths that part."""
    folder = made(make_bundle, kind, 32)
    reference = ReferenceHead(folder / "drafter", folder / "target")
    for drafter, text in read_texts(folder / "bundle", "eagle"):
        for path in ([], [7], [7, 9], [7, 9, 11], [7, 12], [5, 6, 7, 8]):
            require_logits(drafter, text, path, reference.logits(text, path).numpy())


def test_text_is_that_of_plain_decoding() -> None:
    """On one thread; tests/edgeinfer/test_module_exactness.py has the other ways."""
    bundle = made(make_bundle, "eagle3", 4) / "bundle"
    with load_eager(bundle, context=256, remember=False) as model:
        for who in ("eagle", "auto", "copy,recycle,eagle"):
            for way in WAYS.values():
                # What random heads taught would keep them from drafting at all.
                edgeinfer.tools.restore_drafting(model, {})
                found = same(model, who, prompt=PROMPT, max_tokens=32, ignore_eos=True, **way)
                assert (found.exact, found.lossless) == (True, True)
                assert "eagle" in found.per_drafter
        for length in (1, 2, 63, 64, 65, 200):
            same(model, "eagle", prompt=(PROMPT * 3)[:length], max_tokens=8, ignore_eos=True)


def test_a_context_that_fills_up_and_other_verifications() -> None:
    bundle = made(make_bundle, "eagle3", 4) / "bundle"
    require_same_near_the_end(bundle, "eagle", (1, 9, 22, 24))
    with load_eager(bundle, context=24, remember=False) as model:
        require_other_verifications(model, "eagle")


def test_memory_is_planned_and_the_embedding_is_the_targets() -> None:
    bundle = made(make_bundle, "eagle1", 4) / "bundle"
    require_planned(bundle, "eagle")
    inside = open_bundle(bundle / "drafter").manifest
    assert inside.module is not None and inside.module.shares == ("embed", "head")
    assert not {"embed", "head"} & {tensor.name for tensor in inside.tensors}


def test_a_module_is_no_model(tmp_path: Path) -> None:
    bundle = made(make_bundle, "eagle3", 4) / "bundle"
    with pytest.raises(ModelError, match="is the draft module of a bundle"):
        edgeinfer.load(bundle / "drafter")
    with edgeinfer.load(bundle, context=64, native=False, remember=False) as model:
        assert model.generate(PROMPT[:9], max_tokens=4, ignore_eos=True).token_ids
    with pytest.raises(UsageError, match="reads the native layout of its weights"):
        convert_bundle(open_bundle(bundle), "portable", tmp_path / "converted")
    with pytest.raises(UsageError, match="no EAGLE head"):
        edgeinfer.load(bundle, context=64, native=False, speculation="eagle", remember=False)


def _add_to(tensors: dict[str, torch.Tensor], name: str, place: int, more: int) -> None:
    tensors[name][place] += more


DAMAGES: dict[str, Damage] = {
    "hidden size": (change_config(hidden_size=128), "has a hidden size of 128, the model one of 64"),
    "vocabulary": (change_config(vocab_size=999), "has a vocabulary of 999"),
    "layers": (
        change_config(eagle_aux_hidden_state_layer_ids=[1, 2, 7]),
        r"reads the layers \[1, 2, 7\] of a model",
    ),
    "no layers": (change_config(eagle_aux_hidden_state_layer_ids=[]), r"reads the layers \[\]"),
    "deep": (change_config(num_hidden_layers=2), "of 2 layers"),
    "map too short": (change_config(draft_vocab_size=121), "has 120 tokens, config.json says 121"),
    "map outside": (change_tensors(lambda t: _add_to(t, "d2t", -1, 10**6)), "outside a vocabulary"),
    "map twice": (change_tensors(lambda t: t["d2t"].copy_(-torch.arange(120))), "name a token twice"),
    "maps differ": (change_tensors(lambda t: t["t2d"].fill_(False)), "d2t and t2d"),
    "no fc": (change_tensors(lambda t: t.pop("fc.weight")), "no EAGLE head"),
    "no norm": (change_tensors(lambda t: t.pop("norm.weight")), "norm.weight"),
    "part of a layer": (change_tensors(lambda t: t.pop("midlayer.mlp.up_proj.weight")), "mlp.up_proj.weight"),
    "fc of four layers": (
        change_tensors(lambda t: t.update({"fc.weight": torch.zeros(64, 256)})),
        r"shape \(64, 256\)",
    ),
}


def test_a_head_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    source = made(make_bundle, "eagle3", 4)
    require_refused(source / "target", source / "drafter", DAMAGES, tmp_path)


@pytest.mark.slow
def test_assistants_that_read_the_models_cache_are_refused_by_name(tmp_path: Path) -> None:
    source = made(make_bundle, "eagle3", 4)
    assistant = Path(shutil.copytree(source / "drafter", tmp_path / "assistant"))
    change_config(model_type="gemma4_assistant", architectures=["Gemma4AssistantForCausalLM"])(assistant)
    for checkpoint, config in ((source / "target", ExportConfig(drafter=assistant)), (assistant, ExportConfig())):
        with pytest.raises(UnsupportedArchitectureError, match="Gemma 4's assistant model is not supported") as refused:
            export_anew(checkpoint, tmp_path / "bundle", config)
        assert "\n" not in refused.value.message and refused.value.hint
        assert not (tmp_path / "bundle").exists()


def test_a_head_that_reads_the_models_own_excludes_methods_that_change_it(tmp_path: Path) -> None:
    source, text = made(make_bundle, "eagle1", 4), tmp_path / "text"
    text.write_text("Once upon a time there was a dog. " * 40)
    config = ExportConfig(drafter=source / "drafter", method="awq", calibration=text)
    with pytest.raises(UsageError, match="whose columns the method awq scales"):
        export_anew(source / "target", tmp_path / "bundle", config)
    assert not (tmp_path / "bundle").exists()


def test_other_bundles_have_no_heads(tmp_path: Path) -> None:
    others: tuple[dict[str, Any], ...] = ({"format": "gguf"}, {"layout": "portable"}, {"exporter": "optimum"})
    for options in others:
        with pytest.raises(UsageError, match="not supported with a drafter"):
            ExportConfig(drafter=tmp_path, **options)
