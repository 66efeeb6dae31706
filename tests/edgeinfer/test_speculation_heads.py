"""Heads in a bundle as a caller meets them: the same text whoever drafts, planned for, asked only where they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.bundle.additions import add_heads
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.errors import UsageError
from edgeinfer.runtime.speculation.drafters.method import drafter_method
from tests.heads import DRAFTING, random_heads, with_heads
from tests.speculation import BUILTIN, load_eager, needs_builtin, same
from tests.tables import each_row

WHO = (*DRAFTING, "copy,recycle,hydra")
# Drafters of research are loaded by name.
LOADED = ",".join((*DRAFTING, "copy", "recycle"))
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 11}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "penalties": SAMPLED | {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = with_heads(BUILTIN, tmp_path_factory.mktemp("heads") / "tales", "hydra")
    add_heads(made, random_heads(open_bundle(made), "medusa", tokens=0))
    return made


@pytest.fixture(scope="module")
def tales(folder: Path) -> Iterator[edgeinfer.Model]:
    """The built-in model with random heads of every kind that drafts."""
    with load_eager(folder, context=256, remember=False, speculation=LOADED) as model:
        yield model


@pytest.fixture(scope="module")
def short(folder: Path) -> Iterator[edgeinfer.Model]:
    """A model with a context that is soon full."""
    with load_eager(folder, context=24, remember=False, speculation=LOADED) as model:
        yield model


@needs_builtin
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_text_is_that_of_plain_decoding(tales: edgeinfer.Model, way: str, width: int) -> None:
    """Whoever drafts."""
    for who in WHO:
        # What random heads taught would keep them from drafting at all.
        edgeinfer.tools.restore_drafting(tales, {})
        found = same(tales, who, max_tokens=40, ignore_eos=True, draft_width=width, **WAYS[way])
        assert (found.exact, found.lossless) == (True, True)
        assert found.drafted > 0


@needs_builtin
@pytest.mark.parametrize("verification", ["rejection", "typical"])
@pytest.mark.parametrize("who", DRAFTING)
def test_other_verifications_take_their_guesses(tales: edgeinfer.Model, who: str, verification: str) -> None:
    options: dict[str, Any] = {"speculation": who, "verification": verification, "max_tokens": 24, "ignore_eos": True}
    result = tales.generate("Once upon a time", temperature=0.8, seed=3, **options)
    assert len(result.token_ids) == 24 and result.speculation.lossless == (verification != "typical")


@needs_builtin
@each_row("who", DRAFTING)
def test_a_context_that_fills_up(short: edgeinfer.Model, who: str) -> None:
    """Prompt tokens need room of their own, and do without where there is none."""
    edgeinfer.tools.restore_drafting(short, {})
    for length in (1, 9, 20, 22, 23, 24):
        same(short, who, prompt=[5 + i % 7 for i in range(length)], ignore_eos=True)


def test_heads_must_be_there_and_auto_never_asks_them(small_bundle: Path, tmp_path: Path) -> None:
    some = with_heads(small_bundle, tmp_path / "some", "hydra")
    with load_eager(some, remember=False) as model:
        assert not set(DRAFTING) & set(model._parts.speculator._names("auto"))
    with pytest.raises(UsageError, match="has no medusa heads"):
        edgeinfer.load(some, remember=False, speculation="medusa")


@each_row(("kind", "tokens"), [("medusa", 0), *((kind, 320) for kind in DRAFTING)])
def test_heads_hold_no_more_than_planned(small_bundle: Path, tmp_path: Path, kind: str, tokens: int) -> None:
    path = with_heads(small_bundle, tmp_path / f"{kind}-{tokens}", kind, tokens=tokens)
    with load_eager(path, speculation=kind, remember=False) as model:
        model.generate([5 + i % 300 for i in range(200)], speculation=kind, ignore_eos=True)
        bundle = open_bundle(path)
        taken = drafter_method(kind).nbytes(bundle, model.context)
        assert model.plan.terms["drafting"] > taken
        assert 0 < model._parts.speculator._drafters[kind].nbytes() <= taken
