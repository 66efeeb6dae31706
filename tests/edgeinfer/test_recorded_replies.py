"""What the built-in model says by every way of decoding, as recorded: seeds give the same text in every version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.runtime.layer_skip.block_costs import BlockCosts
from edgeinfer.runtime.layer_skip.reduced_compute import ReducedComputeStrategies
from tests.methods import nested

RECORDED = Path(__file__).with_name("recorded_replies.json")
PROMPT = "Tom and Mia went to the park. They saw"
# The oracle computes in float32, so what it says depends on no kernel.
ORACLE: dict[str, Any] = {"backend": "reference", "speculation": "off", "remember": False, "profile": "off"}


# Milliseconds by which ways of skipping layers go; the model has 6 layers.
COSTS = BlockCosts(fixed=1.0, blocks=(0.5, 1.0) * 6, whole=(10.0,) * 8)


def replies() -> list[dict[str, Any]]:
    """Replies by the options of the record, in its form."""
    made = []
    with edgeinfer.load(**ORACLE) as model:
        for entry in json.loads(RECORDED.read_text("utf-8")):
            result = model.generate(PROMPT, max_tokens=9, **nested(entry["options"]))
            search, compute = result.search, result.compute
            made.append(
                {
                    "options": entry["options"],
                    "text": result.text,
                    "search": search and [search.passes, search.rows, [text.text for text in search.texts]],
                    "compute": compute and [compute.tokens, compute.reduced],
                }
            )
    return made


def test_replies_are_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReducedComputeStrategies, "_measure", lambda _: COSTS)
    for reply, recorded in zip(replies(), json.loads(RECORDED.read_text("utf-8")), strict=True):
        assert reply == recorded


if __name__ == "__main__":  # records them again, after a change that was meant to change them
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReducedComputeStrategies, "_measure", lambda _: COSTS)
        lines = ",\n".join(json.dumps(reply) for reply in replies())
    RECORDED.write_text(f"[\n{lines}\n]\n", "utf-8")
