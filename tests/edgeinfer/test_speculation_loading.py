"""Drafters that a model is loaded with: by name, by a draft model, by heads in the bundle; what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.bundle.additions import add_heads
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.core.errors import BundleError, CapabilityError, EdgeInferError, ModelError, UsageError
from edgeinfer.core.results import DrafterUse
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.runtime.speculation.drafters.method import drafter_method
from tests.cache import made
from tests.cli import contents
from tests.factories import make_checkpoint, make_tokenizer
from tests.heads import DRAFTING, random_heads, with_heads
from tests.speculation import BUILTIN, PROMPT, load_eager, needs_builtin, random_bundle, same
from tests.tables import each_row


def test_a_choice_that_the_model_has_no_logits_for(tmp_path: Path) -> None:
    with load_eager(random_bundle(tmp_path, vocab_size=300)) as model:
        for who in ("off", "auto"):
            with pytest.raises(
                UsageError, match="' upon a time' contains a token id outside the model's vocabulary of 300"
            ):
                model.generate("ab", choices=("ab", " upon a time"), speculation=who)
            assert model.generate("ab", choices=("ab", "ba"), speculation=who).text in ("ab", "ba")


def test_drafters_given_by_name_are_what_auto_means(small_bundle: Path) -> None:
    """Also those that `auto` would not choose by itself."""
    with load_eager(small_bundle, speculation="exit,copy") as model:
        assert {"exit", "copy"} == set(edgeinfer.tools.drafting_state(model)) - {"acceptance"}
        assert "exit" in same(model, "auto", max_tokens=30, ignore_eos=True).per_drafter
        assert set(same(model, "copy", max_tokens=30, ignore_eos=True).per_drafter) <= {"copy"}
        with pytest.raises(UsageError, match=r"recycle cannot draft: .* only with exit, copy\. Load it with"):
            model.generate(PROMPT, speculation="recycle")
        assert len(model.generate(PROMPT, max_tokens=3, ignore_eos=True).token_ids) == 3


def test_a_model_loaded_without_drafters_decodes_plainly(small_bundle: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with edgeinfer.load(small_bundle, threads=1, speculation="off") as model:
        assert model.plan.draft_max == 0
        found = model.generate(PROMPT, max_tokens=5).speculation
        assert (found.mode, found.rounds, found.plain_ms) == ("off", 0, None)
        with pytest.raises(UsageError, match="copy cannot draft: the model was loaded without drafters"):
            model.generate(PROMPT, max_tokens=5, speculation="copy")
        assert edgeinfer.tools.drafting_state(model) == {"acceptance": {}}
    assert contents(tmp_path) == {}


@needs_builtin
def test_draft_max_holds() -> None:
    with load_eager(context=128, speculation="ngram,recycle,copy", draft_max=4) as model:
        for most in (None, 1, 3, 63):
            for width in (1, 2):
                options: dict[str, Any] = {
                    "max_tokens": 60,
                    "ignore_eos": True,
                    "draft_max": most,
                    "draft_width": width,
                }
                found = same(model, "auto", **options)
                assert 0 < found.drafted <= found.rounds * min(4, most or 4)
                assert len(found.accepted_per_position) <= min(4, most or 4)


def test_a_draft_model_with_a_smaller_context(small_bundle: Path, short_drafter: Path) -> None:
    with load_eager(small_bundle, context=80, draft_model=short_drafter) as model:
        for who in ("model", "auto"):
            edgeinfer.tools.restore_drafting(model, {})
            for length in (3, 30, 31, 32, 33, 60):
                found = same(model, who, prompt=[5 + i % 9 for i in range(length)], ignore_eos=True)
                drafted = found.per_drafter.get("model" if who == "auto" else who, DrafterUse()).drafted
                assert length != 3 or drafted > 0
                # The root and what is drafted have to fit its cache.
                assert drafted <= max(0, 32 - length)


def refused(error: type[EdgeInferError], code: int, says: str, **options: Any) -> None:
    """Checks that loading fails with one line and the right exit code."""
    with pytest.raises(error, match=says) as caught:
        edgeinfer.load(**{"threads": 1} | options).close()
    assert caught.value.exit_code == code
    assert "\n" not in str(caught.value)
    assert caught.value.hint


def make_other(folder: Path) -> None:
    """A bundle with a tokenizer of its own."""
    make_checkpoint(folder / "checkpoint", "llama")
    make_tokenizer(folder / "checkpoint", sentences=["all the other words of another language"] * 3)
    export_checkpoint(folder / "checkpoint", folder / "bundle")


def test_draft_models_that_do_not_fit(small_bundle: Path, tmp_path: Path) -> None:
    other = made(make_other) / "bundle"
    refused(ModelError, 3, "different (vocabulary|merges)", model=small_bundle, draft_model=other)
    narrow = random_bundle(tmp_path / "narrow", vocab_size=256)
    refused(ModelError, 3, r"\d+ tokens and 256 logits", model=small_bundle, draft_model=narrow)
    refused(ModelError, 3, "No model at 'nowhere'", model=small_bundle, draft_model="nowhere")
    refused(BundleError, 3, "is not a bundle", model=small_bundle, draft_model=tmp_path)
    damaged = shutil.copytree(small_bundle, tmp_path / "damaged")
    (damaged / "weights.bin").write_bytes(b"short")
    refused(BundleError, 3, "weights.bin", model=small_bundle, draft_model=damaged)
    (damaged / "edgeinfer.json").write_text("{")
    refused(BundleError, 3, "not valid JSON", model=small_bundle, draft_model=damaged)
    with pytest.raises(ModelError, match="No model at 'nowhere'"):
        edgeinfer.plan(small_bundle, draft_model="nowhere")


def test_a_wider_draft_model_works(small_bundle: Path, tmp_path: Path) -> None:
    """Rows of logits may be padded, as long as they have a column for every token."""
    wide = random_bundle(tmp_path, vocab_size=384)
    with load_eager(small_bundle, context=64, draft_model=wide) as model:
        assert same(model, "model", max_tokens=30, ignore_eos=True).drafted > 0


def test_drafters_that_the_backend_cannot_carry(bigrams: Path) -> None:
    with load_eager(bigrams) as model:
        for who in ("exit", "bits", "copy,exit"):
            refused(CapabilityError, 2, "onnx-optimum backend cannot", model=bigrams, speculation=who)
            with pytest.raises(CapabilityError, match="onnx-optimum backend cannot"):
                model.generate("Once", speculation=who)
            assert model.generate("Once", max_tokens=3, ignore_eos=True).usage.completion_tokens == 3


def test_trees_on_a_backend_of_chains(bigrams: Path, caplog: pytest.LogCaptureFixture) -> None:
    with load_eager(bigrams) as model:
        for who in ("auto", "copy", "ngram", "recycle"):
            assert same(model, who, prompt="Once", ignore_eos=True).accepted > 0
            with pytest.raises(UsageError, match="cannot verify trees"):
                model.generate("Once", speculation=who, draft_width=2)
        # Without drafts there is nothing to verify.
        assert model.generate("Once", speculation="off", draft_width=2, max_tokens=3).speculation.mode == "off"


def test_what_a_drafter_needs_and_does_not_get(small_bundle: Path) -> None:
    for who in ("model", "copy,model"):
        refused(UsageError, 2, "No draft model was given", model=small_bundle, speculation=who)
    refused(CapabilityError, 2, "cannot read one plane", model=small_bundle, speculation="bits")
    with load_eager(small_bundle) as model:
        for who, says in (("model", "No draft model was given"), ("bits", "one plane")):
            with pytest.raises(EdgeInferError, match=says):
                model.generate(PROMPT, speculation=who)
        assert "bits" not in same(model, "auto", max_tokens=10).per_drafter


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
@pytest.mark.parametrize("who", DRAFTING)
def test_rejection_takes_their_guesses(tales: edgeinfer.Model, who: str) -> None:
    options: dict[str, Any] = {"speculation": who, "verification": "rejection", "max_tokens": 24, "ignore_eos": True}
    result = tales.generate("Once upon a time", temperature=0.8, seed=3, **options)
    assert len(result.token_ids) == 24 and result.speculation.lossless


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
