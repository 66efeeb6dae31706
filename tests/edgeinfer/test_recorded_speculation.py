"""What every drafter drafts of one text, and what verification makes of it, as recorded."""

from __future__ import annotations

import dataclasses
from typing import Any

from edgeinfer.results import SpeculationUse
from tests.recorded import check_recorded
from tests.speculation import BUILTIN, DENSE, PROMPT, load_eager, needs_builtin

pytestmark = needs_builtin
WAYS: dict[str, dict[str, Any]] = {who: {"speculation": who} for who in DENSE}
WAYS |= {
    "trees": {"speculation": "copy,ngram,recycle", "draft_width": 3, "draft_max": 12},
    "typical": {"speculation": "model", "verification": "typical", "temperature": 0.8, "seed": 3},
    "rejection": {"speculation": "model,exit", "verification": "rejection", "temperature": 0.9, "seed": 4},
}


def figures(use: SpeculationUse) -> dict[str, Any]:
    """Counts; no times."""
    found = dataclasses.asdict(use)
    return {name: found[name] for name in found if not name.endswith("_ms") and name != "speedup_vs_plain"}


def test_drafters_draft_what_they_drafted() -> None:
    found = {}
    # The oracle computes in float32, so what it says depends on no kernel. Drafters of research are loaded by name.
    for loaded, ways in (("auto", WAYS), ("rapid", {"rapid": {"speculation": "rapid"}})):
        asked: dict[str, Any] = {"context": 160, "draft_model": BUILTIN, "backend": "reference", "speculation": loaded}
        with load_eager(BUILTIN, **asked) as model:
            for name, options in ways.items():
                result = model.generate(PROMPT, max_tokens=24, ignore_eos=True, **options)
                found[name] = {"text": result.text} | figures(result.speculation)
    check_recorded("speculation", found)
