"""Hydra++ modules from a checkpoint to replies: what they draft, which text comes of it, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import edgeinfer
from tests.cache import made
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
from tests.hydra_modules import ReferenceHydra, make_hydra
from tests.speculation import load_eager, same

pytestmark = pytest.mark.slow

# Of each kind the target's family and the module.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "hydra-plus": ("llama", {}),
    # Its embedding is stored grown, and its norms are stored without a one.
    "of one layer": ("Gemma3", {"heads": 4, "layers": 1}),
    # In tests/edgeinfer/test_module_exactness.py.
    "hydra-plus of a mixture": ("mixtral", {}),
}


def make_bundle(folder: Path, kind: str, bits: int) -> None:
    """Target, module and bundle."""
    family, settings = KINDS[kind]
    export_with_module(folder, family, bits, lambda own, target: make_hydra(own, target, **settings))


@pytest.mark.parametrize("kind", ["hydra-plus", "of one layer"])
def test_it_drafts_what_the_published_code_drafts(kind: str) -> None:
    """Along paths that part."""
    folder = made(make_bundle, kind, 32)
    reference = ReferenceHydra(folder / "drafter", folder / "target")
    # Of one layer's text nothing that is drafted comes true unless some tokens are likelier.
    bias = dict.fromkeys((7, 9, 11), 3.0 if kind == "of one layer" else 0.0)
    for drafter, text in read_texts(folder / "bundle", "hydra-plus", logit_bias=bias):
        for path in ([], [7], [7, 9], [5, 9], [7, 12], []):
            require_logits(drafter, text, path, reference.logits(text, path).numpy())
        assert drafted_logits(drafter, text, [7] * KINDS[kind][1].get("heads", 3)) is None


def test_text_is_that_of_plain_decoding() -> None:
    """As `auto` asks it, in a context that fills up, and by other verifications."""
    bundle = made(make_bundle, "hydra-plus", 4) / "bundle"
    with load_eager(bundle, context=256, remember=False) as model:
        for who, way in (("auto", "tree"), ("hydra-plus", "sampled tree"), ("copy,recycle,hydra-plus", "chain")):
            edgeinfer.tools.restore_drafting(model, {})
            found = same(model, who, prompt=PROMPT, max_tokens=24, ignore_eos=True, **WAYS[way])
            assert (found.exact, found.lossless) == (True, True) and "hydra-plus" in found.per_drafter
        require_other_verifications(model, "hydra-plus")
    require_same_near_the_end(bundle, "hydra-plus", (1, 9, 20, 22, 24))
    require_planned(bundle, "hydra-plus")


OWN = "hydra_config"
DAMAGES: dict[str, Damage] = {
    "hidden size": (change_config(hidden_size=128), "has a hidden size of 128, the model one of 64"),
    "vocabulary": (change_config(vocab_size=999), "has a vocabulary of 999"),
    "heads": (change_config(OWN, num_heads=9), "has num_heads = 9"),
    "too many heads": (change_config(OWN, num_heads=4), "heads.3.first"),
    "layers": (change_config(OWN, num_layers="3"), "has num_layers = '3'"),
    "map too short": (change_config(draft_vocab_size=121), "has 120 tokens, config.json says 121"),
    "map outside": (change_tensors(lambda t: t["d2t"].add_(10**6)), "outside a vocabulary"),
    "no map": (change_tensors(lambda t: t.pop("d2t")), "has a vocabulary of drafts of 120"),
    "no norm": (change_tensors(lambda t: t.pop("state_norm.weight")), "state_norm.weight"),
    "part of a layer": (change_tensors(lambda t: t.pop("layers.0.mlp.up_proj.weight")), "mlp.up_proj.weight"),
    "a narrow head": (
        change_tensors(lambda t: t.update({"heads.1.first.linear.weight": torch.zeros(64, 128)})),
        r"shape \(64, 128\)",
    ),
}


def test_a_module_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    source = made(make_bundle, "hydra-plus", 4)
    require_refused(source / "target", source / "drafter", DAMAGES, tmp_path)
