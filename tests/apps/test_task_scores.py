"""Scores on tasks: programs that pass or fail, replies that repeat themselves, and a model that is asked."""

import json
from pathlib import Path

import edgeinfer
from edgeinfer.tools.checking import repeated
from tests.tools.task_scores import OPEN, QUESTIONS, passes, scores


def test_only_programs_that_end_well_pass() -> None:
    assert passes("print(1)")
    assert not passes("assert 1 == 2")
    assert not passes("x = 'a' * (1 << 31)")  # more memory than a program may have


def test_repetition_counts_in_the_second_half() -> None:
    assert repeated(range(40)) == 0
    assert repeated([*range(20), *[1, 2, 3] * 20]) > 0.8
    assert repeated([1, 2, 3]) == 0


def test_a_model_is_scored(tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    problem = {
        "prompt": "def one():\n    return 1\n\n\n",
        "test": "def check(f):\n    assert f() == 1",
        "entry_point": "one",
    }
    problems.write_text(json.dumps(problem | {"prompt": problem["prompt"] + "text = '"}) + "\n" + json.dumps(problem))
    with edgeinfer.load(speculation="off", remember=False) as model:
        found = scores(model, {"humaneval": problems}, 1)
        assert found["humaneval"]["of"] == 1
        asked = scores(model, {}, 0)
    assert asked["questions"]["of"] == len(QUESTIONS) and asked["repeating"]["of"] == len(OPEN)
