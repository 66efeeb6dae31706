"""The hierarchy: what its model alone would guess, in fewer passes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeinfer.bundle.store import Bundle
from edgeinfer.runtime.backends.contract import Backend, ForwardInput, ForwardOutput
from edgeinfer.runtime.speculation.drafters.contract import DraftContext, Drafter, Draw, Guess, Resumption, Round, State
from edgeinfer.runtime.speculation.drafters.hierarchical import HierarchicalDrafter
from edgeinfer.runtime.speculation.drafters.model import ModelDrafter
from tests.runtime.speculation.drafters.models import (
    Plain,
    committed,
    context,
    export,
    greedy,
    make_backend,
    sampled,
    speculate,
)

PROMPT = np.random.default_rng(8).integers(0, 320, 10).tolist()


@dataclass
class Scripted(Drafter):
    """A cheap drafter that knows a text by heart, and notes what it is told."""

    text: Sequence[int]
    name: str = "scripted"
    priors: Sequence[float] = (0.5,)
    uses_target: bool = False
    draws: bool = False
    branches: bool = False
    told: list[str] = field(default_factory=list)
    kept: State = field(default_factory=dict)

    def begin(self, tokens: Sequence[int]) -> None:
        self.told.append("begin")

    def guesses(self, context: DraftContext, drafted: Sequence[int], width: int) -> Sequence[Guess]:
        at = len(context.tokens) + len(drafted)
        return [Guess(self.text[at], 0)] if at < len(self.text) else []

    def resume(self, context: DraftContext, drafted: Sequence[int]) -> Resumption | None:
        return None

    def observe(self, round: Round) -> None:
        self.told.append("observe")

    def nbytes(self) -> int:
        return 1000

    def state(self) -> State:
        return {"text": np.array(self.text)}

    def restore(self, state: State) -> None:
        self.kept = state

    def close(self) -> None:
        self.told.append("close")


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return export("portable", num_hidden_layers=2)


@pytest.fixture(scope="module")
def backends(bundle: Bundle) -> Iterator[tuple[Backend, Backend]]:
    """Of the hierarchy's model, and of the model alone."""
    both = make_backend("portable", bundle), make_backend("portable", bundle)
    yield both
    for backend in both:
        backend.close()


def drafters(
    backends: tuple[Backend, Backend], *texts: Sequence[int], look_ahead: int = 3
) -> tuple[HierarchicalDrafter, ModelDrafter]:
    """A hierarchy with cheap drafters of these texts, and its model alone."""
    for backend in backends:
        backend.cache.trim(0)
    model, alone = (ModelDrafter(backend, 8) for backend in backends)
    return HierarchicalDrafter(model, [Scripted(text) for text in texts], look_ahead), alone


@given(
    wrong=st.sets(st.integers(0, 30)),
    asked=st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(1, 3)), max_size=12),
    draw=st.sampled_from([greedy, sampled]),
    look_ahead=st.integers(0, 5),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_it_guesses_what_its_model_guesses(
    backends: tuple[Backend, Backend],
    wrong: set[int],
    asked: list[tuple[int, bool, int]],
    draw: Draw,
    look_ahead: int,
) -> None:
    """Tokens, signs and distributions, whatever the cheap drafter says, on its path and beside it."""
    _, alone = drafters(backends)
    right: list[int] = []
    while len(right) < 12:
        right.append(alone.guesses(context(PROMPT, draw), right, 1)[0].token)
    text = [*PROMPT, *(token if at not in wrong else 5 for at, token in enumerate(right))]
    hierarchy, alone = drafters(backends, text, look_ahead=look_ahead)
    now = context(PROMPT, draw)
    for drafter in (hierarchy, alone):
        drafter.begin(PROMPT)
    for length, beside, width in asked:
        path = [*right[:length], *([9] if beside else [])]
        found, expected = (drafter.guesses(now, path, width) for drafter in (hierarchy, alone))
        assert [(g.token, g.sign) for g in found] == [(g.token, g.sign) for g in expected]
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one.probabilities, other.probabilities)


def passes_of(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the rows of every pass from now on."""
    passes: list[int] = []
    forward = backend.forward

    def counted(batch: ForwardInput) -> ForwardOutput:
        passes.append(len(batch.tokens))
        return forward(batch)

    monkeypatch.setattr(backend, "forward", counted)
    return passes


def draft_the_reply(hierarchy: HierarchicalDrafter, reply: Sequence[int]) -> DraftContext:
    """Requires that its guesses behind the prompt, one after the other, are a reply."""
    hierarchy.begin(PROMPT)
    now, drafted = context(PROMPT), list[int]()
    while len(drafted) < len(reply):
        drafted.append(hierarchy.guesses(now, drafted, 1)[0].token)
    assert drafted == list(reply)
    return now


def test_right_tokens_of_cheap_drafters_save_passes(
    backends: tuple[Backend, Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Plain.decode(backends[1], PROMPT, 12)
    hierarchy, _ = drafters(backends, [*PROMPT, *plain.reply])
    passes = passes_of(backends[0], monkeypatch)
    draft_the_reply(hierarchy, plain.reply)
    # Each pass takes three proposed tokens and gives four guesses; the first feeds the prompt too.
    assert passes == [8, 5, 4, 4]


def test_the_surest_cheap_drafter_leads(backends: tuple[Backend, Backend]) -> None:
    plain = Plain.decode(backends[1], PROMPT, 4)
    text, nonsense = [*PROMPT, *plain.reply], [5] * 40
    for priors, known in (((0.4, 0.6), True), ((0.6, 0.4), False), ((0.5, 0.5), False)):
        model = drafters(backends)[0]._model
        cheap = [replace(Scripted(t), priors=(p,)) for t, p in zip((nonsense, text), priors, strict=True)]
        hierarchy = HierarchicalDrafter(model, cheap, 1)
        hierarchy.begin(PROMPT)
        hierarchy.guesses(context(PROMPT), [], 1)
        assert model.knows(plain.reply[:1]) == known


class Branching(Scripted):
    """Knows the text by heart, and says a wrong token first."""

    def guesses(self, context: DraftContext, drafted: Sequence[int], width: int) -> Sequence[Guess]:
        return [Guess(5, 0), *super().guesses(context, drafted, width)][:width]


def test_a_tree_is_verified_where_siblings_are_right(
    backends: tuple[Backend, Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Plain.decode(backends[1], PROMPT, 12)
    model = drafters(backends)[0]._model
    cheap = Branching([*PROMPT, *plain.reply], priors=(0.5,), branches=True)
    hierarchy = HierarchicalDrafter(model, [cheap], 6)
    passes = passes_of(backends[0], monkeypatch)
    now = draft_the_reply(hierarchy, plain.reply)
    # A wrong and a right token at two places: three guesses a pass. A path that parts from it is fed again.
    assert len(passes) == 5
    path = [*plain.reply[:3], 9]
    alone = ModelDrafter(backends[1], 8)
    assert hierarchy.guesses(now, path, 1)[0].token == alone.guesses(now, path, 1)[0].token


def test_it_decodes_in_rounds(bundle: Bundle, backends: tuple[Backend, Backend]) -> None:
    target = make_backend("portable", bundle)
    plain = Plain.decode(target, PROMPT, 30)
    hierarchy, _ = drafters(backends, [*PROMPT, *plain.reply[:20], *PROMPT, *PROMPT])
    assert speculate(target, hierarchy, plain, seed=2) == list(plain.reply)


def test_its_members_are_told_and_counted_and_closed(bundle: Bundle) -> None:
    model, cheap = ModelDrafter(make_backend("portable", bundle), 8), Scripted(PROMPT)
    hierarchy = HierarchicalDrafter(model, [cheap])
    hierarchy.begin(PROMPT)
    guess = hierarchy.guesses(context(PROMPT), [], 1)
    assert guess
    assert model.knows([])
    hierarchy.observe(committed([], 0, guess[0].token))
    assert not model.knows([])
    assert hierarchy.nbytes() == model.nbytes() + cheap.nbytes()
    assert hierarchy.resume(context(PROMPT), [1]) is None
    hierarchy.restore(hierarchy.state())
    np.testing.assert_array_equal(cheap.kept["text"], PROMPT)
    assert not hierarchy.uses_target
    assert HierarchicalDrafter(model, [replace(cheap, uses_target=True)]).uses_target
    hierarchy.close()
    assert cheap.told == ["begin", "observe", "close"]
