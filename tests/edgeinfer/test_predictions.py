"""Figures of predictions: against scipy, whatever arrays the logits come in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import log_softmax

from edgeinfer.errors import ModelError
from edgeinfer.tools.evaluation import Divergence, Evaluation, compare_predictions, read_predictions

Logits = NDArray[np.float32]


class Told:
    """Gives a table's logits in blocks, in one buffer that each block overwrites."""

    def __init__(self, table: Logits, blocks: Sequence[int]) -> None:
        self._table, self._blocks = table, blocks

    def logits(self, tokens: Sequence[int]) -> Iterator[Logits]:
        buffer = np.empty((64, self._table.shape[1]), np.float32)
        start = turn = 0
        while start < len(tokens):
            count = min(self._blocks[turn % len(self._blocks)], len(tokens) - start)
            buffer[:] = np.nan
            buffer[:count] = self._table[np.asarray(tokens[start : start + count])]
            yield buffer[:count]
            start, turn = start + count, turn + 1


def tables(vocabulary: int = 40, seed: int = 0) -> tuple[Logits, Logits]:
    generator = np.random.default_rng(seed)
    reference = generator.normal(0, 3, (vocabulary, vocabulary)).astype(np.float32)
    return reference, reference + generator.normal(0, 0.5, reference.shape).astype(np.float32)


def nothing(read: int) -> None:
    """Nobody looks."""


blocks = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@given(ours=blocks, theirs=blocks, lengths=st.lists(st.integers(2, 50), min_size=1, max_size=3))
def test_figures_are_those_of_the_distributions(ours: list[int], theirs: list[int], lengths: list[int]) -> None:
    reference, candidate = tables()
    windows = [np.random.default_rng(n).integers(0, 40, n).tolist() for n in lengths]
    read: list[int] = []
    logprobs, divergence = compare_predictions(
        Told(candidate, ours), Told(reference, theirs), windows, top=5, told=read.append
    )
    assert sum(read) == sum(lengths)
    p, q = (
        np.concatenate([log_softmax(t.astype(np.float64)[w], axis=1) for w in windows]) for t in (reference, candidate)
    )
    np.testing.assert_allclose(divergence.values, (np.exp(p) * (p - q)).sum(axis=1), atol=1e-12)
    np.testing.assert_array_equal(divergence.same, p.argmax(axis=1) == q.argmax(axis=1))
    best = [np.argsort(-each, axis=1)[:, :5] for each in (p, q)]
    shared = [len(set(a) & set(b)) / 5 for a, b in zip(*map(np.ndarray.tolist, best), strict=True)]
    np.testing.assert_allclose(divergence.overlap, shared)
    wanted = np.concatenate(
        [log_softmax(candidate.astype(np.float64)[w], axis=1)[np.arange(len(w) - 1), w[1:]] for w in windows]
    )
    np.testing.assert_allclose(logprobs, wanted, atol=1e-12)
    np.testing.assert_allclose(read_predictions(Told(candidate, ours), windows, nothing), wanted, atol=1e-12)


def test_a_model_is_its_own_reference() -> None:
    reference, _ = tables()
    logprobs, divergence = compare_predictions(
        Told(reference, [3]), Told(reference, [7]), [list(range(40))], top=100, told=nothing
    )
    assert divergence.mean == 0.0 and divergence.agreement == 1.0
    # There are no more tokens than the vocabulary has.
    assert divergence.top == 40 and (divergence.overlap == 1.0).all()
    assert divergence.reference_perplexity == pytest.approx(Evaluation(logprobs, 1).perplexity)


def test_vocabularies_of_different_sizes_are_refused() -> None:
    with pytest.raises(ModelError, match="40 and 39"):
        compare_predictions(Told(tables(39)[0], [2]), Told(tables(40)[0], [2]), [[1, 2]], top=1, told=nothing)


def test_figures_over_all_tokens() -> None:
    values = np.arange(101.0)
    divergence = Divergence(values, values > 50, values / 100, top=3, reference_perplexity=2.0)
    figures = divergence.to_dict()
    assert (figures["median"], figures["p90"], figures["p95"], figures["p99"], figures["max"]) == (50, 90, 95, 99, 100)
    assert figures["mean"] == 50 and figures["same_top"] == pytest.approx(50 / 101)
    assert figures["standard_error"] == pytest.approx(values.std() / np.sqrt(101))
    evaluation = Evaluation(np.log([0.5, 0.25, 0.125]), 1, divergence)
    assert evaluation.perplexity == pytest.approx(4.0)
    assert evaluation.perplexity_error == pytest.approx(4.0 * np.log([0.5, 0.25, 0.125]).std() / np.sqrt(3))
    data = evaluation.to_dict()
    assert data["divergence"] == figures and data["tokens"] == 3 and data["weight_bytes"] is None
