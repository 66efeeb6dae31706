"""The bench of overflow policies: which tokens count, and that a whole context is what they are compared with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import edgeinfer
from edgeinfer.apps.bench.overflow_quality import main, measure_losses
from tests.speculation import needs_builtin

STORY = "Once upon a time there was a dog. The dog liked to play with a ball in the park. One day the ball was gone. "


@needs_builtin
def test_compares_every_policy_with_a_context_that_holds_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stories, dialogues = tmp_path / "stories.txt", tmp_path / "dialogues.jsonl"
    stories.write_text("<|endoftext|>".join([STORY * 3] * 2), "utf-8")
    talk = [{"role": "user", "content": STORY}, {"role": "assistant", "content": STORY}]
    asked = [*talk, {"role": "user", "content": "Tell it again."}]
    dialogues.write_text(json.dumps({"kind": "again", "messages": asked, "answer": STORY}) + "\n", "utf-8")
    options = ["--stories", str(stories), "--dialogues", str(dialogues), "--context", "40", "--texts", "1", "--json"]
    assert main([*options, "--policies", "window,cluster"]) == 0
    losses = json.loads(capsys.readouterr().out)
    assert len(losses) == 3 * 3
    assert {loss["policy"] for loss in losses} == {"stop", "window", "cluster"}
    for loss in losses:
        same = [other for other in losses if other["kind"] == loss["kind"]]
        assert len({other["tokens"] for other in same}) == 1
        base = next(other for other in same if other["policy"] == "stop")
        assert loss["change"] == pytest.approx(loss["perplexity"] / base["perplexity"] - 1)


@needs_builtin
def test_counts_the_tokens_behind_the_context() -> None:
    def make(model: edgeinfer.Model) -> list[list[int]]:
        return [model.tokenize(STORY * 3)[:70], model.tokenize(STORY * 3)[:50]]

    whole, small = measure_losses(None, {"text": make}, 40, ["window"])
    assert (whole.tokens, small.tokens) == (40, 40)
    assert small.change == pytest.approx(small.perplexity / whole.perplexity - 1) != 0


@needs_builtin
def test_says_what_is_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([]) == 2
    assert "nothing to read" in capsys.readouterr().err
    short = tmp_path / "short.txt"
    short.write_text("Hello.", "utf-8")
    assert main(["--stories", str(short)]) == 2
    assert "outgrows 128 tokens" in capsys.readouterr().err
