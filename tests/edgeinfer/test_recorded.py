"""What the built-in model says by every way of decoding, and what every drafter drafts, as recorded."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

import edgeinfer
from edgeinfer.core.results import SpeculationUse
from edgeinfer.runtime.layer_skip.block_costs import BlockCosts
from edgeinfer.runtime.layer_skip.reduced_compute import ReducedComputeStrategies
from tests.recorded import FOLDER, check_recorded
from tests.speculation import BUILTIN, DENSE, PROMPT, load_eager, needs_builtin

pytestmark = needs_builtin
# Milliseconds by which layers are skipped; the model has 6 layers.
COSTS = BlockCosts(fixed=1.0, blocks=(0.5, 1.0) * 6, whole=(10.0,) * 8)


def test_seeds_give_the_same_text_in_every_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReducedComputeStrategies, "_measure", lambda _: COSTS)
    made: list[dict[str, Any]] = []
    # The reference computes in float32, so what it says depends on no kernel.
    with edgeinfer.load(backend="reference", speculation="off", remember=False, profile="off") as model:
        for entry in json.loads((FOLDER / "replies.json").read_text("utf-8")):
            prompt = "Tom and Mia went to the park. They saw"
            result = model.generate(prompt, max_tokens=9, **entry["options"])
            search, compute = result.search, result.compute
            made.append(
                {
                    "options": entry["options"],
                    "text": result.text,
                    "search": search and [search.passes, search.rows, [text.text for text in search.texts]],
                    "compute": compute and [compute.tokens, compute.reduced],
                }
            )
    check_recorded("replies", made)


WAYS: dict[str, dict[str, Any]] = {who: {"speculation": who} for who in DENSE}
WAYS |= {
    "trees": {"speculation": "copy,ngram,recycle", "draft_width": 3, "draft_max": 12},
    "rejection": {"speculation": "model,exit", "verification": "rejection", "temperature": 0.9, "seed": 4},
}


def figures(use: SpeculationUse) -> dict[str, Any]:
    """Counts; no times."""
    found = dataclasses.asdict(use)
    return {name: found[name] for name in found if not name.endswith("_ms") and name != "speedup_vs_plain"}


def test_drafters_draft_what_they_drafted() -> None:
    found = {}
    asked: dict[str, Any] = {"context": 160, "draft_model": BUILTIN, "backend": "reference"}
    with load_eager(BUILTIN, **asked) as model:
        for name, options in WAYS.items():
            result = model.generate(PROMPT, max_tokens=24, ignore_eos=True, **options)
            found[name] = {"text": result.text} | figures(result.speculation)
    check_recorded("speculation", found)
