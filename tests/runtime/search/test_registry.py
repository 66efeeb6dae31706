"""Every way by its name, and what it does not go together with."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from edgeinfer.core.errors import CapabilityError, UsageError
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.runtime.decoding.sequence import Sequence
from edgeinfer.runtime.sampling.constraint import ChoiceConstraint, ChoiceTrie
from edgeinfer.runtime.sampling.sampler import LogitsProcessor, Sampler
from edgeinfer.runtime.search.strategy import SearchParts, make_search, search_method
from tests.methods import all_methods
from tests.runtime.search.fakes import END, PROMPT, Letters, LettersBackend, Trial, V
from tests.tables import each_row

SEARCH_KINDS = {name: search_method(name) for name in all_methods("searches")}
DRAWING = [name for name, kind in SEARCH_KINDS.items() if kind.draws == "always"]
RULED = [name for name, kind in SEARCH_KINDS.items() if kind.draws == "never"]
# Those that follow one text.
LINES = ("momentum",)


def options_of(name: str) -> dict[str, Any]:
    warm = {"temperature": 0.7} if name in DRAWING else {}
    needed = {"extract": {"passage": "abcabd"}}
    return {"search": name} | warm | needed.get(name, {})


def test_every_way_tells_what_it_did() -> None:
    for name in SEARCH_KINDS:
        form = ChoiceConstraint(ChoiceTrie([[1, 2, 3], [4, 5]], [END])) if name == "aligned" else None
        trial = Trial(LettersBackend(400), constraint=form, **options_of(name))
        found, use = trial.tokens(), trial.strategy.search
        assert 1 <= len(found) <= 12
        assert (use.search, use.lossless) == (name, name == "samples")
        assert use.passes > 0 and use.rows >= use.passes
        assert (use.branches == 0) == (name in LINES)
        if use.texts:
            assert list(use.texts[use.chosen].token_ids) == found


def test_drawing_needs_a_temperature() -> None:
    greedies: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 1}]
    for name, greedy in product(DRAWING, greedies):
        with pytest.raises(UsageError, match="value above 0"):
            Trial(LettersBackend(), search=name, **greedy)
            pytest.fail(f"{name} takes {greedy}")


def test_rules_of_its_own_leave_no_place_for_others() -> None:
    others: dict[str, Any] = {
        "temperature": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {1: 2.0},
        "presence_penalty": 1.0,
    }
    for name, (option, value) in product(RULED, others.items()):
        with pytest.raises(UsageError, match=option):
            Trial(LettersBackend(), **(options_of(name) | {option: value}))
            pytest.fail(f"{name} takes {option}")


@each_row("name", SEARCH_KINDS)
def test_only_some_follow_a_constraint(name: str) -> None:
    choices = [[1, 2, 3], [4, 5], [1, 2, 6]]
    config = ReplyOptions(**options_of(name), max_tokens=8)
    sampler = Sampler(LogitsProcessor(config, V, 1), PROMPT, ChoiceConstraint(ChoiceTrie(choices, [END])))
    backend = LettersBackend()
    text, stops = Sequence(backend, backend.cache, 16), frozenset({END})
    parts = SearchParts(text, sampler, config, stops, Letters(), continues=False)
    if not SEARCH_KINDS[name].constrained:
        with pytest.raises(UsageError, match="cannot follow a grammar"):
            make_search(parts, forgets=False)
        return
    trial = Trial(backend, constraint=ChoiceConstraint(ChoiceTrie(choices, [END])), **options_of(name))
    trial.sequence, trial.sampler, trial.strategy = text, sampler, make_search(parts, forgets=False)
    assert trial.tokens() in [[*choice, END] for choice in choices]


def test_branches_need_a_backend_that_can_and_a_context_that_keeps() -> None:
    class Single(LettersBackend):
        def __init__(self) -> None:
            super().__init__()
            self.cache.copyable = False

    for name in {*SEARCH_KINDS} - {*LINES}:
        with pytest.raises(CapabilityError, match=r"several ways.*momentum"):
            Trial(Single(), **options_of(name))
            pytest.fail(f"{name} in a single text")
        with pytest.raises(UsageError, match="forgets nothing"):
            Trial(LettersBackend(), forgets=True, **options_of(name))
            pytest.fail(f"{name} in a context that forgets")
    trial = Trial(Single(), forgets=True, max_tokens=5, stop_ids=frozenset(), search="momentum")
    assert len(trial.tokens()) == 5


def test_wrong_values_are_refused() -> None:
    wrongs: list[dict[str, Any]] = [{"search": wrong} for wrong in ("magic", 3, ["vote"])]
    wrongs += [{"answer": "yes"}, {"beams": 4, "beam_groups": 3}, {"resistance": ()}, {"resistance": "1,2"}]
    for wrong in wrongs:
        with pytest.raises(UsageError) as caught:
            ReplyOptions(**wrong)
            pytest.fail(f"{wrong} was taken")
        assert caught.value.hint


def test_defaults_are_right() -> None:
    assert ReplyOptions(resistance=[1, 2]).resistance == (1.0, 2.0)  # type: ignore[arg-type]
