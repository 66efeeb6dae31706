"""DFlash drafters from their published layout to replies: what they draft, which text comes of it, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import edgeinfer
from tests.cache import made
from tests.dflash_drafters import ReferenceDrafter, make_drafter
from tests.draft_modules import (
    PROMPT,
    WAYS,
    Damage,
    change_config,
    change_tensors,
    drafted_logits,
    export_with_module,
    read_texts,
    require_logits,
    require_other_verifications,
    require_planned,
    require_refused,
    require_same_near_the_end,
)
from tests.speculation import load_eager, same

# Of each kind the target's family and the drafter.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", {}),
    "by the rule": ("qwen3", {"layers": 1, "taps": None, "block": 16}),
    "of a mixture": ("mixtral", {}),
    "of a hybrid": ("Lfm2", {}),
    # Its embedding is stored grown, and is the head.
    "tied": ("Gemma3", {"input_embedding_scale": 3.0, "output_multiplier": 0.7, "final_logit_softcapping": 5.0}),
    "with windows": (
        "llama",
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20, "use_sliding_window": True},
    ),
}


def make_bundle(folder: Path, kind: str, bits: int) -> None:
    """Target, drafter and bundle."""
    family, settings = KINDS[kind]
    sizes: dict[str, Any] = {"tie_word_embeddings": True} if kind == "tied" else {}
    if family == "Lfm2":
        sizes["layer_types"] = ["conv", "conv", "full_attention"] * 2
    export_with_module(folder, family, bits, lambda own, target: make_drafter(own, target, **settings), **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "by the rule", "tied", "with windows"])
def test_it_drafts_what_the_published_code_drafts(kind: str) -> None:
    """At every place of a block."""
    folder = made(make_bundle, kind, 32)
    reference = ReferenceDrafter(folder / "drafter", folder / "target")
    # Some tokens are likelier, so that copies of them are accepted.
    bias = dict.fromkeys((7, 9, 11), 3.0 if kind == "tied" else 0.0)
    for drafter, text in read_texts(folder / "bundle", "dflash", logit_bias=bias):
        expected = reference.logits(text).numpy()
        for place, wanted in enumerate(expected):
            require_logits(drafter, text, [7] * place, wanted)
        assert drafted_logits(drafter, text, [7] * len(expected)) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "threads", "kv"),
    [
        ("dense", 2, "int8"),
        ("by the rule", 1, "float32"),
        ("of a mixture", 2, "float16"),
        ("of a hybrid", 1, "int4"),
    ],
)
def test_text_is_that_of_plain_decoding(kind: str, threads: int, kv: str) -> None:
    bundle = made(make_bundle, kind, 4) / "bundle"
    with load_eager(bundle, context=256, threads=threads, kv=kv, remember=False) as model:
        for who, way in [*(("dflash", way) for way in WAYS), ("auto", "tree"), ("copy,recycle,dflash", "sampled tree")]:
            # What random drafters taught would keep them from drafting at all.
            edgeinfer.tools.restore_drafting(model, {})
            found = same(model, who, prompt=PROMPT, max_tokens=24, ignore_eos=True, **WAYS[way])
            assert (found.exact, found.lossless) == (True, True)
            assert "dflash" in found.per_drafter
        for length in (1, 65, 200):
            same(model, "dflash", prompt=(PROMPT * 3)[:length], max_tokens=8, ignore_eos=True)
        require_other_verifications(model, "dflash")


@pytest.mark.slow
def test_a_context_that_fills_up_and_memory_that_is_planned() -> None:
    bundle = made(make_bundle, "dense", 4) / "bundle"
    require_same_near_the_end(bundle, "dflash", (1, 9, 17, 22, 24))
    require_planned(bundle, "dflash")


OWN = "dflash_config"
DAMAGES: dict[str, Damage] = {
    "hidden size": (change_config(hidden_size=128), "has a hidden size of 128, the model one of 64"),
    "vocabulary": (change_config(vocab_size=999), "has a vocabulary of 999"),
    "layers": (change_config(OWN, target_layer_ids=[1, 5]), r"reads the layers \[1, 5\] of a model that has 6"),
    "no layers": (change_config(OWN, target_layer_ids=[]), r"reads the layers \[\]"),
    "mask": (change_config(OWN, mask_token_id=10**6), "has the mask token 1000000"),
    "no mask": (change_config(OWN, mask_token_id=None), "has the mask token None"),
    "DFlash 2": (change_config(OWN, conv_kernel_size=3), "is one of DFlash 2"),
    "ahead": (
        change_config(layer_types=["sliding_attention"] * 2, sliding_window=20, is_causal=False),
        "windows that reach ahead",
    ),
    "scale": (change_config(OWN, output_multiplier="1"), "has output_multiplier = '1'"),
    "block": (change_config(block_size=1), "blocks of 1 tokens"),
    "no fc": (change_tensors(lambda t: t.pop("fc.weight")), "fc.weight"),
    "no norm": (change_tensors(lambda t: t.pop("hidden_norm.weight")), "hidden_norm.weight"),
    "part of a layer": (change_tensors(lambda t: t.pop("layers.1.mlp.up_proj.weight")), "mlp.up_proj.weight"),
    "fc of four layers": (
        change_tensors(lambda t: t.update({"fc.weight": torch.zeros(64, 256)})),
        r"shape \(64, 256\)",
    ),
}


@pytest.mark.slow
def test_a_drafter_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    source = made(make_bundle, "dense", 4)
    require_refused(source / "target", source / "drafter", DAMAGES, tmp_path)
