"""Drafters with heads: what they hear of states, when rows of their own ride along, and products on one thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from edgeinfer.bundle.additions import Heads
from edgeinfer.bundle.store import Bundle
from edgeinfer.config import GenerationConfig
from edgeinfer.errors import CapabilityError
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend, ForwardInput, ForwardOutput
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.decoding.engine import Engine
from edgeinfer.runtime.sampling.processor import LogitsProcessor
from edgeinfer.runtime.sampling.sampler import Sampler
from edgeinfer.runtime.speculation.acceptance import Acceptance
from edgeinfer.runtime.speculation.decoding import SpeculativeDecoding
from edgeinfer.runtime.speculation.drafters.contract import (
    Draft,
    DraftContext,
    Drafter,
    Guess,
    ProbingDrafter,
    Round,
    Verdict,
    main_branch_end,
)
from edgeinfer.runtime.speculation.drafters.heads import Matrix
from edgeinfer.runtime.speculation.drafters.medusa import MedusaDrafter
from edgeinfer.runtime.speculation.drafters.prompt_tokens import PromptDrafter
from edgeinfer.runtime.speculation.governor import Governor
from edgeinfer.runtime.speculation.probing import choose_probe_rows
from edgeinfer.runtime.speculation.verification import find_verification
from tests.heads import random_heads
from tests.runtime.speculation.drafters.models import BACKENDS, export, make_backend, take_in
from tests.runtime.speculation.prices import FLAT, LINEAR, Prices
from tests.tables import each_row

PROMPT = [40, 51, 62, 73, 84, 95, 40, 51]


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return export("reference")


def test_a_product_is_that_of_the_whole_matrix() -> None:
    for count, width in ((1, 1), (5, 3), (64, 128), (1024, 96), (7, 9001), (3, 20000)):
        rng = np.random.default_rng(count)
        values, vector = rng.standard_normal((count, width)).astype(np.float16), rng.standard_normal(width)
        matrix, given = Matrix(values), vector.astype(np.float32)
        expected = values.astype(np.float64) @ given
        np.testing.assert_allclose(matrix @ given, expected, rtol=1e-4, atol=1e-3)
        assert matrix.nbytes >= 4 * values.size
        # No part of it is so large that a BLAS would take threads for it.
        assert all(part.size <= max(9216, width) for part in matrix._stacked)


class Listener(MedusaDrafter):
    """Keeps the states that rounds show."""

    def __init__(self, target: ReferenceBackend, heads: Heads) -> None:
        super().__init__(target, heads)
        self.told: list[tuple[int, Floats]] = []

    def observe(self, round: Round) -> None:
        super().observe(round)
        assert round.hidden is not None
        self.told.append((round.committed[-1], self._state.copy()))


class Resting(Governor):
    """Takes three plain steps before every round."""

    pause = 3

    @property
    def rest(self) -> int:
        return self.pause

    def rested(self, steps: int) -> None:
        super().rested(steps)
        self.pause = 0

    def draft(self, context: DraftContext, rows: int, depth: int) -> Draft:
        self.pause = 3
        return super().draft(context, rows, depth)


@each_row("kind", [Governor, Resting])
def test_every_round_shows_the_state_that_predicted_the_root(bundle: Bundle, kind: type[Governor]) -> None:
    backend = ReferenceBackend(bundle, 64)
    drafter = Listener(backend, random_heads(bundle, "medusa"))
    acceptance = Acceptance()
    acceptance.add(drafter.name, [0.9] * len(drafter.priors))
    sampler = Sampler(LogitsProcessor(GenerationConfig(), backend.geometry.vocab_size, 0), PROMPT, None)
    governor = kind([drafter], Prices(FLAT), acceptance, 3, 1)
    rounds = SpeculativeDecoding(
        backend, sampler, [drafter], governor, find_verification("keyed"), on_plain_ms=lambda ms: None
    )
    steps = Engine(backend, 8).generate(PROMPT, sampler, max_tokens=16, stop_ids=frozenset(), strategy=rounds)
    text = [*PROMPT, *(step.token for step in steps)]
    assert len(drafter.told) >= 3
    backend.cache.trim(0)
    whole = backend.forward(ForwardInput(np.array(text), np.arange(len(text)), np.arange(len(text))))
    assert whole.hidden is not None
    for token, state in drafter.told:
        matches = [p for p in range(len(PROMPT), len(text)) if np.allclose(whole.hidden[p - 1], state, atol=1e-3)]
        assert any(text[place] == token for place in matches)


@each_row("kind", BACKENDS)
def test_embeddings_are_the_models_own(kind: str) -> None:
    """A pass that begins with them gives what one of tokens gives; to the last bit where a backend is exact."""
    bundle = export(kind)
    backend = make_backend(kind, bundle)
    drafter = PromptDrafter(backend, random_heads(bundle, "prompt"))
    assert isinstance(drafter, ProbingDrafter) and drafter.probes == 3
    take_in(backend, PROMPT)
    fed = np.array([62, 73, 62, 84])
    states = drafter.embed(fed, (0, 0, 0, 3))
    assert states is not None and states.shape == (7, 128) and backend.cache.length == len(PROMPT)
    assert np.array_equal(states[0], states[2])
    rows = np.arange(4)
    plain = backend.forward(ForwardInput(fed, rows + len(PROMPT), rows)).logits.copy()
    backend.cache.trim(len(PROMPT))
    riding = np.arange(7)
    output = backend.forward(ForwardInput(np.pad(fed, (0, 3)), riding + len(PROMPT), riding, hidden=states))
    tolerance = 1e-4 if kind == "reference" else 0.0
    np.testing.assert_allclose(output.logits[:4], plain, rtol=tolerance, atol=tolerance)


def test_embeddings_are_read_once_and_no_more_than_fit(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ReferenceBackend(bundle, 8)
    drafter = PromptDrafter(backend, random_heads(bundle, "prompt"))
    monkeypatch.setattr(drafter, "_kept", drafter._kept[:5])
    passes: list[int] = []
    whole = backend.forward

    def counted(batch: ForwardInput) -> ForwardOutput:
        passes.append(len(batch.tokens))
        return whole(batch)

    monkeypatch.setattr(backend, "forward", counted)
    for fed in ([1, 2, 3], [3, 2, 1, 1], [4, 5], [6], [6, 4]):
        states = drafter.embed(np.array(fed), ())
        assert states is not None
        expected = bundle.tensor("embed")[fed]
        np.testing.assert_allclose(states[: len(fed)], expected, rtol=1e-5)
    assert passes == [3, 2, 1, 1]  # the fifth token was the last that fit; 6 and 4 were computed again
    assert drafter.embed(np.arange(6), ()) is None
    take_in(backend, PROMPT)
    assert drafter.embed(np.array([9]), ()) is None and drafter.embed(np.array([6]), ()) is not None
    assert backend.cache.length == 8


def test_what_rides_must_promise_its_cost_and_be_paid_for(bundle: Bundle) -> None:
    drafter = PromptDrafter(ReferenceBackend(bundle, 64), random_heads(bundle, "prompt"))

    def governor(prices: dict[int, float]) -> Governor:
        acceptance = Acceptance()
        acceptance.add(drafter.name, [0.5] * len(drafter.priors))
        return Governor([drafter], Prices(prices), acceptance, 7, 1)

    def rows(asked: Governor) -> tuple[int, ...]:
        return asked.probe_rows("prompt", Draft(), 3, 12, spread=True)

    assert rows(governor(FLAT)) == (3,)
    assert rows(governor(LINEAR)) == ()
    # A tenth of a pass more is worth half a token, but two tries are all that nothing has paid for.
    dear = governor({rows: 10.0 + (rows > 1) for rows in range(1, 65)})
    assert [rows(dear) for _ in range(4)] == [(3,), (3,), (), ()]
    # What it saves later pays for it, and what it costs is entered.
    fed, seen = np.zeros(1, np.int64), np.zeros((1, 1), np.float32)
    before = dear._account._saved
    dear.observe(Round(Draft(), Verdict((), 3, True), (3,), fed, seen, None, 3))
    assert dear._account._saved == pytest.approx(before - 1.0 + 0.1)


def test_the_main_branch_ends_where_first_children_do() -> None:
    guesses = tuple(Guess(token, 0) for token in range(5))
    assert main_branch_end(Draft()) == -1
    assert main_branch_end(Draft(guesses[:3], (-1, 0, 1), ("any",) * 3)) == 2
    assert main_branch_end(Draft(guesses, (-1, 0, -1, 2, 0), ("any",) * 5)) == 1


def test_targets_without_states_are_refused(bundle: Bundle) -> None:
    backend = ReferenceBackend(bundle, 16)
    backend.capabilities = replace(backend.capabilities, hidden=False)
    with pytest.raises(CapabilityError, match="hidden states"):
        MedusaDrafter(backend, random_heads(bundle, "medusa"))
    with pytest.raises(CapabilityError, match="embeddings"):
        PromptDrafter(backend, random_heads(bundle, "prompt"))


def test_probe_rows_go_where_paths_are_likely_to_end() -> None:
    """By what each promises: that the path ends at its node, and that its guess and those before it are accepted."""
    guesses = tuple(Guess(token, 0) for token in range(3))
    # The path ends at the root in a tenth of cases, at its children in 0.24 and 0.3, at a grandchild in 0.36.
    draft = Draft(guesses, (-1, 0, -1), ("any",) * 3, (0.6, 0.36, 0.3))

    def rows(most: int, row_ms: float, *, spread: bool = True) -> tuple[int, ...]:
        price = lambda rows: 10.0 + row_ms * rows  # noqa: E731
        return choose_probe_rows(draft, 0.5, 2, most, price, 0.1, spread=spread).counts

    assert rows(8, 0.0) == (2, 2, 2, 2)
    assert rows(8, 1.0) == (0, 1, 1, 1)
    assert rows(2, 1.0) == (0, 0, 1, 1)
    assert rows(8, 1.0, spread=False) == (0, 0, 1, 0)
    assert rows(8, 2.0) == () and rows(0, 0.0) == ()
    assert choose_probe_rows(draft, 0.5, 2, 8, lambda rows: 10.0 + rows, 0.1, spread=True).ms == pytest.approx(3.0)


class Siblings(Drafter):
    """Guesses a wrong token before the right one of a text that it knows, so that side branches are accepted."""

    name = "siblings"
    priors = (0.5,)
    branches = True

    def __init__(self, text: list[int]) -> None:
        self._text = text

    def guesses(self, context: DraftContext, drafted: Sequence[int], width: int) -> Sequence[Guess]:
        place = len(context.tokens) + len(drafted)
        if [*context.tokens, *drafted] != self._text[:place] or place >= len(self._text):
            return ()
        right = self._text[place]
        return [Guess(1 if right != 1 else 2, 0), Guess(right, 0)][:width]


class Recorded(PromptDrafter):
    """Keeps what it is told of its rows, by the length of the text that they followed."""

    def begin(self, tokens: Sequence[int]) -> None:
        super().begin(tokens)
        self.length, self.told = len(tokens), dict[int, Floats]()

    def observe(self, round: Round) -> None:
        super().observe(round)
        self.length += len(round.committed)
        if round.probed is not None:
            self.told[self.length - 1] = round.probed.copy()


@pytest.mark.slow
@each_row("kind", ("reference", "native"))
def test_rows_behind_any_node_say_what_they_say_behind_a_text(kind: str) -> None:
    bundle = export(kind)
    heads = random_heads(bundle, "prompt")

    def decode(drafters: Sequence[Drafter], backend: Backend) -> list[int]:
        acceptance = Acceptance()
        for drafter in drafters:
            acceptance.add(drafter.name, [0.5] * len(drafter.priors))
        sampler = Sampler(LogitsProcessor(GenerationConfig(), backend.geometry.vocab_size, 0), PROMPT, None)
        governor = Governor(drafters, Prices(FLAT), acceptance, 4, 2)
        rounds = SpeculativeDecoding(
            backend, sampler, drafters, governor, find_verification("keyed"), on_plain_ms=lambda ms: None
        )
        steps = Engine(backend, 8).generate(PROMPT, sampler, max_tokens=20, stop_ids=frozenset(), strategy=rounds)
        return [*PROMPT, *(step.token for step in steps)]

    text = decode([], make_backend(kind, bundle))
    backend = make_backend(kind, bundle)
    told = Recorded(backend, heads)
    assert decode([Siblings(text), told], backend) == text
    assert len(told.told) >= 3
    other = make_backend(kind, bundle)
    plain = PromptDrafter(other, heads)
    for length, logits in told.told.items():
        other.cache.trim(0)
        take_in(other, text[: length - 1])
        count = len(logits)
        states = plain.embed(np.array(text[length - 1 : length]), (count,))
        rows = np.arange(1 + count)
        fed = np.pad(np.array(text[length - 1 : length]), (0, count))
        expected = other.forward(ForwardInput(fed, rows + length - 1, rows, hidden=states)).logits[1:]
        np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3)
