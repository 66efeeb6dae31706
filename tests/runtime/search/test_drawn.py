"""Several replies side by side: each is the one that is drawn alone, and the right one is the answer."""

from __future__ import annotations

from typing import Any

import pytest

from edgeinfer.core.errors import BackendError, UsageError
from edgeinfer.runtime.search.drawn import answer_of, elect, most_steps
from tests.runtime.search.fakes import END, PROMPT, Letters, LettersBackend, Trial, alone
from tests.tables import each_row

WARM: dict[str, Any] = {"temperature": 0.9}


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("most", [1, 2, 9, 30])
@pytest.mark.parametrize("extra", [{}, {"repetition_penalty": 1.3}, {"logprobs": 2}])
def test_samples_are_the_texts_of_separate_replies(count: int, most: int, extra: dict[str, Any]) -> None:
    options = WARM | extra | {"max_tokens": most}
    for seed in (5, 2**64 - 2):
        trial = Trial(LettersBackend(400), search="samples", samples=count, **options | {"seed": seed})
        seeds = [(seed + i) % 2**64 for i in range(count)]
        separate = [alone(s, **options) for s in seeds]
        assert trial.tokens() == separate[0]
        use = trial.strategy.search
        assert [list(text.token_ids) for text in use.texts] == separate
        assert [text.text for text in use.texts] == [Letters().decode(tokens) for tokens in separate]
        assert [text.finish_reason for text in use.texts] == [
            "stop" if tokens[-1] == END else "length" for tokens in separate
        ]
        assert use.lossless and use.chosen == 0 and use.trials == count
        if "logprobs" in extra:
            assert len(trial.sampler.logprobs) == len(separate[0])
            mean = sum(found.logprob for found in trial.sampler.logprobs) / len(separate[0])
            assert use.texts[0].score == pytest.approx(mean, abs=1e-5)


def test_samples_are_evaluated_once() -> None:
    trial = Trial(LettersBackend(400), search="samples", samples=4, max_tokens=40, stop_ids=frozenset(), **WARM)
    assert len(trial.tokens()) == 40
    assert trial.strategy.search.rows == 39 * 4 == sum(trial.backend.passes) - len(PROMPT)


def test_samples_are_told_as_they_are_certain() -> None:
    trial = Trial(LettersBackend(400), search="samples", samples=3, max_tokens=40, stop_ids=frozenset(), **WARM)
    seen: list[int] = []
    trial.tokens(lambda token: seen.append(len(trial.backend.passes)))
    assert seen[0] < seen[-1] and len(set(seen)) >= 3


def test_a_reader_who_leaves_finds_the_text_in_the_cache() -> None:
    for stop_at in (1, 2, 3, 5, 8, 13, 19):
        trial = Trial(LettersBackend(400), search="samples", samples=3, max_tokens=30, stop_ids=frozenset(), **WARM)
        steps = trial.sequence.generate(
            PROMPT, trial.sampler, max_tokens=30, stop_ids=frozenset(), strategy=trial.strategy
        )
        found = [next(steps).token for _ in range(stop_at)]
        steps.close()
        trial.check_cache([*found, *alone(5, max_tokens=30, stop_ids=frozenset(), **WARM)[stop_at:]])


@pytest.mark.parametrize("search", ["samples", "vote", "first-finish"])
@pytest.mark.parametrize("at", [1, 2, 5, 9, 14])
def test_a_pass_that_fails_leaves_the_text_so_far(search: str, at: int) -> None:
    backend = LettersBackend(400)
    backend.fails_at = at
    trial = Trial(backend, search=search, max_tokens=30, stop_ids=frozenset(), **WARM)
    found: list[int] = []
    with pytest.raises(BackendError, match="broke"):
        for step in trial.sequence.generate(
            PROMPT, trial.sampler, max_tokens=30, stop_ids=frozenset(), strategy=trial.strategy
        ):
            found.append(step.token)
    trial.check_cache(found)


def test_samples_end_with_the_first_where_others_are_shorter() -> None:
    """Without a limit the context is shared, and what is left of it is the first's."""
    backend = LettersBackend(43)
    trial = Trial(backend, search="samples", samples=4, max_tokens=None, stop_ids=frozenset(), **WARM)
    assert trial.tokens() == alone(5, max_tokens=41, stop_ids=frozenset(), **WARM)
    lengths = [len(text.token_ids) for text in trial.strategy.search.texts]
    assert lengths == [41, 10, 10, 10] and backend.most_held <= 43


def test_what_cannot_fit_is_refused() -> None:
    for search in ("samples", "vote", "first-finish", "beam"):
        options = {} if search == "beam" else WARM
        trial = Trial(LettersBackend(40), search=search, max_tokens=11, **options)
        with pytest.raises(UsageError, match="room for 9 tokens of each"):
            trial.tokens()
        trial.check_cache([])
        full = Trial(LettersBackend(5), search=search, max_tokens=None, **options)
        with pytest.raises(UsageError, match="no room for 4 replies"):
            full.tokens()


@each_row(
    ("search", "samples", "options"),
    [
        ("first-finish", 4, {"max_tokens": 20}),
        ("best-of", 5, {"max_tokens": 8}),
        ("vote", 6, {"max_tokens": 4, "temperature": 0.5}),
    ],
)
def test_one_of_the_separate_replies_is_the_answer(search: str, samples: int, options: dict[str, Any]) -> None:
    """The first that ends or the likeliest where none does, the likeliest, the most common one."""
    for seed in range(12):
        options = WARM | options
        trial = Trial(LettersBackend(400), search=search, samples=samples, **options | {"seed": seed})
        separate = [alone(seed + i, **options) for i in range(samples)]
        found, use = trial.tokens(), trial.strategy.search
        assert found == separate[use.chosen] and not use.lossless
        ended = [len(tokens) for tokens in separate if tokens[-1] == END]
        if search == "vote":
            answers = [answer_of(Letters().decode(tokens), "text") for tokens in separate]
            assert answers.count(answers[use.chosen]) == max(map(answers.count, answers))
        elif search == "first-finish" and ended:
            assert len(found) == min(ended)
        else:
            assert use.texts[use.chosen].score == max(text.score for text in use.texts)
        if search != "first-finish":
            assert [list(text.token_ids) for text in use.texts] == separate


def test_what_an_answer_is() -> None:
    assert answer_of("  The  CAT.\n", "text") == answer_of("the cat", "text") == "the cat"
    assert answer_of("So: 3 + 4\n\nIt is Seven!\n", "line") == "it is seven"
    assert answer_of("3 + 4 is -7.", "number") == "-7"
    assert answer_of("that is 1,200.50 dollars", "number") == "1200.50"
    assert answer_of("so\nnone here", "number") == "none here"
    assert answer_of("", "line") == ""


def test_ties_go_to_the_likelier_answer() -> None:
    assert elect(["a", "b", "b"], [-0.1, -3.0, -2.0]) == 2
    assert elect(["a", "b"], [-2.0, -1.0]) == 1
    assert elect(["a", "b", "a", "b"], [-1.0, -0.1, -2.0, -4.0]) == 0


def test_the_longest_reasoning_votes() -> None:
    """With three short answers and two of more lines, the latter decide; as many as all are plain votes."""
    texts = ["so 3", "so 3", "so 3", "first\n\nthen\n4", "first\nthen\n4"]
    assert most_steps(texts, 2) == [3, 4] and most_steps(texts, 3) == [0, 3, 4] and most_steps(texts, 5) == [*range(5)]
    for seed in range(5):
        options = WARM | {"temperature": 0.5, "max_tokens": 4, "seed": seed}
        votes = [
            Trial(LettersBackend(400), search="vote", samples=6, **options | more).tokens()
            for more in ({}, {"voters": 6})
        ]
        assert votes[0] == votes[1]
    assert most_steps(texts, 9) == [*range(5)]
