"""Whatever draft modules draft, text and probabilities are plain decoding's: every cache, threads, trees, budgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.results import SpeculationUse, TokenLogprob
from tests.cache import made
from tests.edgeinfer import test_eagle, test_hydra_plus, test_mtp
from tests.speculation import load_eager

pytestmark = pytest.mark.slow

PROMPT = [5 + place % 7 for place in range(70)]
# Chains and trees, greedy and drawn; together with drafters whose branches are accepted and built on.
OWN, ALL = "own", "all"
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    (OWN, {}),
    (OWN, {"draft_width": 3, "temperature": 1.0, "seed": 11}),
    (ALL, {"draft_width": 3}),
    (ALL, {"temperature": 0.7, "seed": 3}),
)
# Of every cache the threads that its reply is drafted with; the last one has no byte more than it needs.
CACHES = {"float32": 1, "float16": 2, "int8": 1, "int4": 2}
KINDS = (
    *("eagle3", "eagle1", "of a mixture", "Qwen3_5", "Qwen3Next", "DeepseekV3", "Glm4Moe"),
    "hydra-plus of a mixture",
)


def bundle_of(kind: str) -> tuple[Path, str]:
    """A bundle with a module, and the drafter that it has."""
    if kind in (*test_eagle.HEADS, "of a mixture"):
        return made(test_eagle.make_bundle, kind, 4) / "bundle", "eagle"
    if kind in test_hydra_plus.KINDS:
        return made(test_hydra_plus.make_bundle, kind, 4) / "bundle", "hydra-plus"
    return made(test_mtp.make_bundle, kind, 4) / "bundle", "mtp"


def drawn(model: edgeinfer.Model, who: str, **options: Any) -> tuple[list[TokenLogprob], SpeculationUse]:
    """The tokens of a reply with their log-probabilities, and what drafting did."""
    edgeinfer.tools.restore_drafting(model, {})
    stream = model.stream(PROMPT, max_tokens=16, ignore_eos=True, logprobs=3, speculation=who, **options)
    return [token for chunk in stream for token in chunk.logprobs], stream.result.speculation


@pytest.mark.parametrize("kind", KINDS)
def test_text_and_probabilities_are_those_of_plain_decoding(kind: str) -> None:
    bundle, own = bundle_of(kind)
    for place, (kv, threads) in enumerate(CACHES.items()):
        who = f"copy,recycle,{own}"
        options: dict[str, Any] = {"context": 128, "kv": kv, "speculation": who}
        # Each cache meets both numbers of threads with half of the kinds.
        options["threads"] = 1 + (threads + KINDS.index(kind)) % 2
        if place == len(CACHES) - 1:
            options["memory"] = edgeinfer.plan(bundle, **options).minimum_bytes
        with load_eager(bundle, **options, remember=False) as model:
            for asked, way in WAYS:
                expected, _ = drawn(model, "off", **way)
                found, use = drawn(model, own if asked == OWN else who, **way)
                assert found == expected and len(found) == 16
                assert (use.exact, use.lossless) == (True, True)
                assert asked != OWN or use.per_drafter[own].drafted > 0
