"""Rounds of the reference backend: trees, other verifications, stops, constraints, near ties and failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.runtime.backends.contract import KVCache, Pass, PassResult
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.sampling.constraint import ChoiceConstraint, ChoiceTrie
from tests.alone import Alone
from tests.runtime.speculation.subjects import GREEDY, PENALISED, PROMPT, SAMPLED, TOKENS, Subject, Witness, bundles


@pytest.fixture(scope="module")
def reference() -> Subject:
    target, drafter = bundles("8-bit-32", "portable")
    backend = Alone(ReferenceBackend(target, 64), 64)
    return Subject(target, backend, lambda: Alone(ReferenceBackend(drafter, 64), 64))


@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("config", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize(
    "drafters", [("recycle",), ("model",), ("medusa",), ("copy", "ngram", "recycle")], ids="+".join
)
def test_trees_give_the_text_of_plain_decoding(
    reference: Subject, drafters: tuple[str, ...], config: ReplyOptions, width: int
) -> None:
    plain = reference.plain(config)
    drafted = reference.decode(config, drafters, width=width)
    assert drafted.rounds is not None
    assert drafted.rounds.speculation.drafted > drafted.rounds.speculation.rounds
    assert drafted.tokens == plain.tokens
    # Cache rows of the accepted branch were moved together; a numpy product of other shapes differs in rounding.
    for actual, expected in zip(drafted.cache.keys, plain.cache.keys, strict=True):
        assert np.allclose(actual, expected, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rejection_runs_and_is_greedy_without_temperature(reference: Subject, temperature: float) -> None:
    config = replace(GREEDY, temperature=temperature, seed=3, verification="rejection")
    drafted = reference.decode(config, ("model",), width=1)
    assert drafted.rounds is not None
    assert drafted.rounds.speculation.drafted > 0
    assert len(drafted.tokens) == TOKENS
    if temperature == 0:
        assert drafted.tokens == reference.plain(GREEDY).tokens


def test_a_stop_token_inside_a_round_ends_the_text_there(reference: Subject) -> None:
    plain = reference.plain(GREEDY)
    stop = frozenset({plain.tokens[9]})
    expected = plain.tokens[: plain.tokens.index(plain.tokens[9]) + 1]
    drafted = reference.decode(GREEDY, ("model",), stop_ids=stop)
    assert drafted.tokens == expected
    assert drafted.cache.length == len(PROMPT) + len(expected) - 1


def test_forced_tokens_are_drafted_and_accepted(reference: Subject) -> None:
    choices = [[50, 51, 52, 53, 54, 55, 56, 57], [60, 61, 62, 63, 64, 65, 66, 67]]
    stop = frozenset({1})
    # A constraint is a stack, so each text has its own.
    plain = reference.decode(GREEDY, constraint=ChoiceConstraint(ChoiceTrie(choices, stop)), stop_ids=stop)
    drafted = reference.decode(
        GREEDY, ("forced",), constraint=ChoiceConstraint(ChoiceTrie(choices, stop)), stop_ids=stop
    )
    assert plain.tokens[:-1] in choices
    assert drafted.tokens == plain.tokens
    assert drafted.rounds is not None
    assert drafted.rounds.speculation.accepted == drafted.rounds.speculation.drafted >= 6


def test_near_ties_are_decided_again_by_a_plain_pass(reference: Subject) -> None:
    plain = reference.plain(GREEDY)
    drafted = reference.decode(GREEDY, ("model",), noise=1e9)
    assert drafted.rounds is not None
    # Steps for which no drafter was asked are plain already.
    assert drafted.rounds.speculation.rechecked == drafted.rounds.speculation.recovered > 5
    assert drafted.tokens == plain.tokens


def test_a_failed_pass_leaves_the_cache_as_it_was(reference: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    reference.conversation.forget()
    sampler = Witness(GREEDY, 320)
    rounds = reference.rounds(sampler, GREEDY, ("exit",), 1, 0.0)
    steps = reference.conversation.generate(PROMPT, sampler, max_tokens=TOKENS, stop_ids=frozenset(), strategy=rounds)
    next(steps)
    whole = reference.backend.model.forward

    def fails(passes: Sequence[tuple[KVCache, Pass]]) -> list[PassResult]:
        if passes[0][1].hidden is not None:
            raise RuntimeError("broken")
        found: list[PassResult] = whole(passes)
        return found

    monkeypatch.setattr(reference.backend.model, "forward", fails)
    with pytest.raises(RuntimeError, match="broken"):
        next(steps)
    monkeypatch.undo()
    assert reference.backend.cache.length == len(PROMPT)
    assert reference.decode(GREEDY, ("exit",)).tokens == reference.plain(GREEDY).tokens
