"""Policies for full contexts measured on a text: what they lose, which of them `auto` takes, and what is kept of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

import edgeinfer
from edgeinfer.apps.cli.main import main
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.errors import UsageError
from edgeinfer.hub import resolve
from edgeinfer.runtime.kv_cache.context_shift.registry import POLICIES
from edgeinfer.runtime.profile.kept import KEPT_POLICY, MeasuredPolicy
from edgeinfer.tools import cache_policies
from edgeinfer.tools.cache_policies import CacheLoss, Foreseen, tune_cache
from tests.speculation import needs_builtin, random_bundle

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cache"), needs_builtin]


def planned() -> str:
    return edgeinfer.plan(context=64, overflow="auto").overflow


def test_what_outgrows_the_context_is_lost_and_the_best_policy_kept(caplog: pytest.LogCaptureFixture) -> None:
    told: list[tuple[int, int]] = []
    found = tune_cache(context=288, shares=(0.4, 0.95), progress=lambda *each: told.append(each))
    assert [(each.context, each.policy) for each in found.losses] == [(n, p) for n in (274, 115) for p in POLICIES]
    assert told == [(done, 6) for done in range(6)]
    assert found.unusable == {}
    # A context that is full behind the text alone has lost nothing of it.
    assert {each.text for each in found.losses[:3]} == {found.whole.text}
    assert len({each.text for each in found.losses[3:]} | {found.whole.text}) == 4
    assert planned() == found.kept.policy
    bundle = open_bundle(resolve(None))
    assert KEPT_POLICY.read(bundle) == found.kept
    KEPT_POLICY.keep(bundle, MeasuredPolicy("cluster", 300, 0.1, 0.2, 0.3))
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
        KEPT_POLICY.keep(bundle, found.kept).write_text(damage)
        with caplog.at_level(logging.WARNING):
            assert planned() == "window"
        assert "discarded" in caplog.text
        assert KEPT_POLICY.read(bundle) is None
        caplog.clear()


def test_the_best_beats_the_window_on_every_kind() -> None:
    def lost(policy: str, context: int, perplexities: Sequence[float]) -> CacheLoss:
        return CacheLoss(policy, context, *(Foreseen(10, each, 0.5) for each in perplexities))

    whole = lost("stop", 100, (2, 2, 2))
    losses = [lost("window", 50, (4, 4, 4)), lost("merge", 50, (3, 3, 5)), lost("cluster", 50, (3, 3, 4.1))]
    assert cache_policies._best(whole, losses, 100).policy == "window"
    losses += [lost("window", 25, (8, 8, 8)), lost("merge", 25, (2, 2, 7)), lost("cluster", 25, (4, 4, 4))]
    assert cache_policies._best(whole, losses, 100).policy == "cluster"
    assert cache_policies._best(whole, losses[:3:2], 100).policy == "window"


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


def test_what_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Leave overflow out"):
        tune_cache(overflow="window")
    for shares in ((), (1.0,), (0.5, 0.0)):
        with pytest.raises(UsageError, match="between 0 and 1"):
            tune_cache(shares=shares)
    with pytest.raises(UsageError, match="too few to measure"):
        tune_cache(random_bundle(tmp_path, max_position_embeddings=128))
