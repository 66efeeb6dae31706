"""Drafters and policies for full contexts tuned on a user's texts: what pays, what is lost, what is kept."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.apps.cli.main import main
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.core.errors import EdgeInferError, StorageError, UsageError
from edgeinfer.core.results import Result
from edgeinfer.hub import resolve
from edgeinfer.runtime.kv_cache.context_shift.registry import POLICIES
from edgeinfer.runtime.profile.drafting import TunedDrafting
from edgeinfer.runtime.profile.kept import KEPT_POLICIES, MeasuredPolicy, files_digest, measured_policy
from edgeinfer.tools import cache_policies, drafters
from edgeinfer.tools.cache_policies import CacheLoss, Foreseen, tune_cache
from tests.speculation import PROMPT, known_costs, load_eager, needs_builtin, random_bundle, same
from tests.tables import each_row

TEXTS = [PROMPT, "Once upon a time"]
# Milliseconds of a token, by who drafts.
TIMES = {"off": 4.0, "copy": 2.0, "recycle": 2.5, "copy,recycle": 1.0, "copy,ngram,recycle": 1.5}


@pytest.fixture(autouse=True)
def costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is timed, and what is kept is this test's alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with known_costs(kept=True):
        yield


def made_up(monkeypatch: pytest.MonkeyPatch, **times: float) -> None:
    """Replies take these milliseconds per token; those of drafters that are not named, as long as plain ones."""

    def ms(reply: Result) -> float:
        return (TIMES | times).get(reply.speculation.mode, TIMES["off"])

    monkeypatch.setattr(drafters, "_ms", ms)


@pytest.mark.slow
def test_auto_asks_those_that_pay(small_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch)
    steps: list[tuple[int, int]] = []
    with load_eager(small_bundle) as model:
        learnt = edgeinfer.tools.drafting_state(model)
        found = edgeinfer.tools.tune_drafters(
            model, TEXTS, max_tokens=30, repeats=2, progress=lambda *step: steps.append(step)
        )
        assert found.kept == ("copy", "recycle") and found.texts == len(TEXTS) and found.plain_ms == 4.0
        assert found.usual is not None and found.usual.drafters == "copy,ngram,recycle"
        assert found.together is not None and found.together.speedup == pytest.approx(4.0)
        by_name = {gain.drafters: gain for gain in found.gains}
        assert by_name["copy"].speedup == pytest.approx(2.0) and by_name["ngram"].speedup == pytest.approx(1.0)
        for gain in found.gains:
            assert gain.least_speedup <= gain.speedup and gain.mean_accepted_length >= 1
            assert all(0 <= place <= 1 for place in gain.acceptance) and gain.guess_ms >= 0
        assert "bits" in found.unusable and not {*by_name} & {*found.unusable, "forced"}
        # Two replies to each text by each drafter and plainly; then by both sets.
        counts = [2 * len(TEXTS) * (len(by_name) + 1), 2 * len(TEXTS) * 3]
        assert steps == [(n, count) for count in counts for n in range(1, count + 1)]
        # What the texts taught is forgotten.
        for name, state in edgeinfer.tools.drafting_state(model).items():
            for key, array in learnt.get(name, {}).items():
                np.testing.assert_array_equal(array, state[key])
        assert set(same(model, "auto", max_tokens=30, ignore_eos=True).per_drafter) <= {"copy", "recycle"}
    with load_eager(small_bundle) as model:
        use = same(model, "auto", max_tokens=30, ignore_eos=True)
        assert use.rounds and "ngram" not in use.per_drafter
        # The next texts have other winners.
        made_up(monkeypatch, **{"copy,ngram,recycle": 0.5})
        again = edgeinfer.tools.tune_drafters(model, TEXTS, max_tokens=30, repeats=2)
        assert again.usual is not None and again.usual.drafters == "copy,recycle" and again.kept == ("copy", "recycle")


@pytest.mark.slow
def test_sets_that_are_slower_than_the_usual_do_not_take_its_place(
    small_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up(monkeypatch, **{"copy,recycle": 1.6})
    with load_eager(small_bundle) as model:
        found = edgeinfer.tools.tune_drafters(model, TEXTS, max_tokens=30, repeats=2)
        assert found.kept == ("copy", "ngram", "recycle")
        made_up(monkeypatch, copy=3.95, recycle=4.0)
        found = edgeinfer.tools.tune_drafters(model, TEXTS, max_tokens=30, repeats=2)
        assert found.kept == () and found.together is None
        assert same(model, "auto", max_tokens=20, ignore_eos=True).drafted == 0


@pytest.mark.slow
def test_what_may_be_chance_does_not_pay(small_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = cycle([3.0, 4.5])

    def ms(reply: Result) -> float:
        return next(turns) if reply.speculation.mode == "copy" else 3.0 if reply.speculation.mode == "recycle" else 4.0

    monkeypatch.setattr(drafters, "_ms", ms)
    with load_eager(small_bundle) as model:
        found = edgeinfer.tools.tune_drafters(model, TEXTS, max_tokens=30, repeats=2)
    copy, recycle = (next(gain for gain in found.gains if gain.drafters == name) for name in ("copy", "recycle"))
    assert copy.speedup > 1.03 and copy.error > 0 and not copy.pays
    assert recycle.error == 0 and recycle.pays


@pytest.mark.slow
@each_row(
    "says, texts, options",
    [
        ("no text", [], {}),
        ("repeats", TEXTS, {"repeats": 1}),
        ("long enough", TEXTS, {"max_tokens": 2}),
        ("max_tokens", TEXTS, {"max_tokens": -1}),
        ("empty", [""], {}),
        ("context", [[1] * 5000], {}),
    ],
)
def test_what_cannot_be_tuned_is_refused_and_changes_nothing(
    small_bundle: Path, says: str, texts: Any, options: dict[str, Any]
) -> None:
    with load_eager(small_bundle) as model:
        with pytest.raises(EdgeInferError, match=says) as caught:
            edgeinfer.tools.tune_drafters(model, texts, **options)
        assert caught.value.hint
        assert same(model, "auto", max_tokens=20, ignore_eos=True).rounds


@pytest.mark.slow
def test_models_that_draft_nothing_have_nothing_to_tune(small_bundle: Path) -> None:
    with edgeinfer.load(small_bundle, threads=1, speculation="off") as model, pytest.raises(UsageError, match="auto"):
        edgeinfer.tools.tune_drafters(model, TEXTS)


def test_kept_drafters_are_taken_back_or_refused() -> None:
    for names in (None, (), ("copy", "recycle")):
        assert TunedDrafting.from_state(TunedDrafting(drafters=names).state(), 2).drafters == names
    for damaged in (np.frombuffer(b"copy,", np.uint8), np.array([255, 1], np.uint8), np.zeros(2)):
        with pytest.raises(StorageError, match="--drafters"):
            TunedDrafting.from_state({"drafters": damaged}, 2)


def planned() -> str:
    return edgeinfer.plan(context=64, overflow="auto").overflow


@pytest.mark.slow
@needs_builtin
def test_what_outgrows_the_context_is_lost_and_the_best_policy_kept(caplog: pytest.LogCaptureFixture) -> None:
    told: list[tuple[int, int]] = []
    found = tune_cache(context=288, shares=(0.4, 0.95), progress=lambda *each: told.append(each))
    assert [(each.context, each.policy) for each in found.losses] == [(n, p) for n in (274, 115) for p in POLICIES]
    steps = 2 * len(POLICIES)
    assert told == [(done, steps) for done in range(steps)]
    assert found.unusable == {}
    # A context that is full behind the text alone has lost nothing of it.
    assert {each.text for each in found.losses[: len(POLICIES)]} == {found.whole.text}
    assert len({each.text for each in found.losses[len(POLICIES) :]} | {found.whole.text}) == 1 + len(POLICIES)
    assert planned() == found.kept.policy
    bundle = open_bundle(resolve(None))
    assert measured_policy(bundle) == found.kept
    KEPT_POLICIES.keep(files_digest(bundle), MeasuredPolicy("cluster", 300, 0.1, 0.2, 0.3))
    assert planned() == "cluster"
    with edgeinfer.load(context=64, overflow="auto", remember=False) as model:
        assert model.generate("Once", max_tokens=2).overflow.policy == "cluster"
    assert main(["tune", "--forget"]) == 0
    assert planned() == "window"
    for damage in (
        "{",
        '{"format": 1}',
        '{"format": 1, "policy": [], "tokens": 1, "text": 0, "copying": 0, "needles": 0}',
    ):
        KEPT_POLICIES.keep(files_digest(bundle), found.kept).write_text(damage)
        with caplog.at_level(logging.WARNING):
            assert planned() == "window"
        assert "discarded" in caplog.text
        assert measured_policy(bundle) is None
        caplog.clear()


def test_the_best_beats_the_window_on_every_kind() -> None:
    def lost(policy: str, context: int, perplexities: Sequence[float]) -> CacheLoss:
        return CacheLoss(policy, context, *(Foreseen(10, each, 0.5) for each in perplexities))

    whole = lost("stop", 100, (2, 2, 2))
    losses = [lost("window", 50, (4, 4, 4)), lost("other", 50, (3, 3, 5)), lost("cluster", 50, (3, 3, 4.1))]
    assert cache_policies._best(whole, losses, 100).policy == "window"
    losses += [lost("window", 25, (8, 8, 8)), lost("other", 25, (2, 2, 7)), lost("cluster", 25, (4, 4, 4))]
    assert cache_policies._best(whole, losses, 100).policy == "cluster"
    assert cache_policies._best(whole, losses[:3:2], 100).policy == "window"


@pytest.mark.slow
@needs_builtin
def test_the_command_prints_what_is_lost(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    story = tmp_path / "story.txt"
    story.write_text("Tom had a red ball. He went to the park with Ann, and they saw a small brown dog there. " * 20)
    assert main(["tune", "--cache", "--text", str(story), "-c", "256"]) == 0
    table = capsys.readouterr().out
    for line in ("all of the text", "needles", "window", "cluster", "auto takes", "which is lossy", "nats on text"):
        assert line in table
    story.write_text("Too short.")
    assert main(["tune", "--cache", "--text", str(story)]) == 2
    assert "too few to measure" in capsys.readouterr().err


@pytest.mark.slow
@needs_builtin
def test_what_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Leave overflow out"):
        tune_cache(overflow="window")
    for shares in ((), (1.0,), (0.5, 0.0)):
        with pytest.raises(UsageError, match="between 0 and 1"):
            tune_cache(shares=shares)
    with pytest.raises(UsageError, match="too few to measure"):
        tune_cache(random_bundle(tmp_path, max_position_embeddings=128))
