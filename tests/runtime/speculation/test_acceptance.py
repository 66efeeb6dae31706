"""How estimates of acceptance follow what is observed, and what several drafters' guesses say together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.core.errors import StorageError
from edgeinfer.runtime.speculation.acceptance import Acceptance, Answer, Mixer, MixingWeights
from edgeinfer.runtime.speculation.drafters.contract import Drafter, Guess


@pytest.fixture
def acceptance() -> Acceptance:
    acceptance = Acceptance()
    acceptance.add("copy", (0.1, 0.6))
    return acceptance


def test_begins_with_the_priors_and_follows_the_evidence_of_each_sign_apart(acceptance: Acceptance) -> None:
    assert acceptance.estimate("copy", 0, 0) == pytest.approx(0.1)
    assert acceptance.estimate("copy", 1, 3) == pytest.approx(0.6)
    for _ in range(100):
        acceptance.observe("copy", 0, 0, True)
    assert acceptance.estimate("copy", 1, 5) == pytest.approx(0.6)
    for _ in range(100):
        acceptance.observe("copy", 1, 0, False)
    assert acceptance.estimate("copy", 0, 5) > 0.9
    assert acceptance.estimate("copy", 1, 5) < 0.1


def test_forgets_what_is_long_ago(acceptance: Acceptance) -> None:
    for came in (True, False):
        for _ in range(1500):
            acceptance.observe("copy", 1, 0, came)
    assert acceptance.estimate("copy", 1, 7) < 0.05


def test_learns_that_guesses_deep_in_a_draft_fail_more_often(acceptance: Acceptance) -> None:
    for index in range(400):
        acceptance.observe("copy", 1, 0, True)
        acceptance.observe("copy", 1, 4, index % 2 == 0)
    assert acceptance.estimate("copy", 1, 4) < 0.8 * acceptance.estimate("copy", 1, 0)


def test_siblings_take_nothing_from_first_guesses(acceptance: Acceptance) -> None:
    for _ in range(100):
        acceptance.observe("copy", 0, 0, True)
        for rank in range(1, 6):
            acceptance.observe("copy", 0, 0, False, rank)
    assert acceptance.mean("copy") > 0.95 > 0.05 > acceptance.mean("copy", 5)
    assert acceptance.estimate("copy", 0, 0) > 0.9 > 0.05 > acceptance.estimate("copy", 0, 0, 5)


@settings(deadline=None)
@given(outcomes=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 20), st.booleans())))
def test_estimates_are_probabilities_and_survive_storage(outcomes: list[tuple[int, int, bool]]) -> None:
    first, second = Acceptance(), Acceptance()
    for each in (first, second):
        each.add("copy", (0.1, 0.6))
    for sign, depth, came in outcomes:
        first.observe("copy", sign, depth, came)
    second.restore("copy", first.state())
    for sign in range(2):
        estimate = first.estimate("copy", sign, 0)
        assert 0 < estimate < 1
        assert second.estimate("copy", sign, 0) == pytest.approx(estimate)


def test_counts_of_other_signs_are_left_alone(acceptance: Acceptance) -> None:
    acceptance.restore("copy", {"copy_accepted": np.ones((5, 4)), "copy_seen": np.ones((5, 4))})
    acceptance.restore("copy", {})
    assert acceptance.estimate("copy", 0, 0) == pytest.approx(0.1)


def test_damaged_counts_are_refused(acceptance: Acceptance) -> None:
    for accepted in (-1.0, 3.0, np.nan, np.inf):
        with pytest.raises(StorageError, match="damaged"):
            acceptance.restore("copy", {"copy_accepted": np.full((2, 4), accepted), "copy_seen": np.full((2, 4), 2.0)})
            pytest.fail(f"{accepted} of two was taken")


class Table(Drafter):
    """A drafter by name alone."""

    def __init__(self, name: str) -> None:
        self.name, self.draws, self.copies = name, name == "model", name == "copy"


MODELS = [Table(name) for name in ("copy", "ngram", "recycle", "model")]


def answers(**said: tuple[int, float]) -> list[Answer]:
    """Each drafter with its token and its estimate."""
    return [Answer(name, 0, Guess(token, 0), estimate) for name, (token, estimate) in said.items()]


def decide(learnt: MixingWeights, *, copied: bool, times: int = 30) -> Mixer:
    """A reply in which a model and tables differ each time: where text is copied the tables are right."""
    mixer = Mixer(learnt, MODELS)
    for _ in range(times):
        said = answers(copy=(1, 0.7), ngram=(1, 0.7), model=(2, 0.6))
        mixer.observe(mixer.mix(said), 1 if copied else 2)
    return mixer


def test_one_drafter_is_as_sure_as_it_is_alone_and_several_that_agree_are_surer() -> None:
    mixer = Mixer(MixingWeights(), MODELS)
    assert mixer.mix(answers(copy=(7, 0.6))).probabilities == pytest.approx({7: 0.6})
    together = mixer.mix(answers(copy=(7, 0.6), ngram=(7, 0.8), model=(9, 0.3))).probabilities
    assert together[7] > 0.65 > 0.3 > together[9]
    assert sum(together.values()) < 1
    assert mixer.mix([]).probabilities == {}


def test_tables_that_know_the_same_text_do_not_count_several_times() -> None:
    learnt = MixingWeights()
    said = answers(copy=(7, 0.8), ngram=(7, 0.8), recycle=(7, 0.8))
    assert Mixer(learnt, MODELS).mix(said).probabilities[7] > 0.8
    for _ in range(200):
        mixer = Mixer(learnt, MODELS)
        for token in (7, 7, 7, 0, 0):
            mixer.observe(mixer.mix(said), token)
    assert Mixer(learnt, MODELS).mix(said).probabilities[7] == pytest.approx(0.6, abs=0.12)


def test_who_was_right_is_known_in_the_reply_and_early_in_the_next() -> None:
    said = answers(copy=(1, 0.7), model=(2, 0.65))
    fresh = Mixer(MixingWeights(), MODELS).mix(said).probabilities
    assert fresh[1] > fresh[2]
    learnt = MixingWeights()
    within = decide(learnt, copied=False).mix(said).probabilities
    assert within[2] > 0.8 > 0.1 > within[1]
    later = Mixer(learnt, MODELS)
    later.observe(later.mix(answers(recycle=(3, 0.1))), 4)  # a place of which no drafter knew anything
    after, others = later.mix(said).probabilities, Mixer(MixingWeights(), MODELS).mix(said).probabilities
    assert after[2] > after[1] and others[2] < others[1]


def test_replies_that_copy_and_replies_that_do_not_are_told_apart() -> None:
    learnt, said = MixingWeights(), answers(copy=(1, 0.7), model=(2, 0.65))
    for _ in range(4):
        decide(learnt, copied=False)
        decide(learnt, copied=True)
    news, copies = learnt.differences[0], learnt.differences[-1]
    assert news[0] > 10 * news[1] and copies[1] > 10 * copies[0]
    # A few copies that came true, about which no other drafter had anything to say, tell what kind of reply it is.
    mixer = Mixer(learnt, MODELS)
    for _ in range(10):
        mixer.observe(mixer.mix(answers(copy=(5, 0.8))), 5)
    assert mixer.mix(said).probabilities[1] > mixer.mix(said).probabilities[2]


def test_tables_give_way_to_asking_where_models_win_the_differences() -> None:
    tables = answers(copy=(1, 0.8))
    for copied, lower in ((False, True), (True, False)):
        mixer = decide(MixingWeights(), copied=copied)
        asked = mixer.against_tables(mixer.mix(tables), 0.8)
        assert (asked < 0.7) if lower else (asked == pytest.approx(0.8))
        # Where a model has spoken, it is in the probability already.
        both = mixer.mix(answers(copy=(1, 0.8), model=(1, 0.8)))
        assert mixer.against_tables(both, 0.8) == 0.8


def test_what_was_learnt_survives_storage_and_damage_is_refused() -> None:
    first, second, said = MixingWeights(), MixingWeights(), answers(copy=(1, 0.7), model=(2, 0.65))
    decide(first, copied=False)
    for name in ("copy", "model"):
        second.restore(name, first.state())
    assert Mixer(second, MODELS).mix(said).probabilities == Mixer(first, MODELS).mix(said).probabilities
    for name, value in (("copy_weights", np.nan), ("copy_weights", 1e6), ("differences", -1.0), ("differences", 1e6)):
        with pytest.raises(StorageError, match="damaged"):
            MixingWeights().restore("copy", {name: np.full_like(first.state()[name], value)})
    third = MixingWeights()
    third.restore("copy", {"copy_weights": np.ones((2, 2)), "differences": np.ones((5, 5))})  # of another version
    assert Mixer(third, MODELS).mix(said).probabilities == Mixer(MixingWeights(), MODELS).mix(said).probabilities
