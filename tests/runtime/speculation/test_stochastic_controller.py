"""Drafts whose tokens are drawn from distributions: whole replies are distributed as plain sampling's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chisquare

from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import KVCache, Pass, PassResult
from edgeinfer.runtime.decoding.sequence import Passes
from edgeinfer.runtime.decoding.sequence import Sequence as Text
from edgeinfer.runtime.sampling.sampler import LogitsProcessor, Sampler
from edgeinfer.runtime.speculation.drafters.contract import DraftContext
from edgeinfer.runtime.speculation.drafters.logit_drafter import LogitDrafter
from tests.runtime.speculation.prices import FLAT, Prices, eager_rounds
from tests.runtime.test_sequence import TableBackend

V = 4
TOKENS = 4
PROMPT = [1, 2]
RULES = [("rejection", 1), ("rejection", 2), ("keyed", 1)]


@cache
def noise(seed: int, size: float, *latest: int) -> NDArray[np.float64]:  # (V,)
    return np.random.default_rng([seed, *latest]).normal(0, size, V)


def target_logits(context: Sequence[int]) -> Floats:  # (V,)
    return noise(3, 1.2, *context[-2:]).astype(np.float32)


def drafter_logits(context: Sequence[int]) -> Floats:  # (V,)
    return (target_logits(context) + noise(4, 1.0, *context[-2:])).astype(np.float32)


class Target(TableBackend):
    """A model of four tokens whose logits depend on the last two."""

    geometry = TableBackend.geometry.__class__(V, 1, 1, 1, 1, 1000)
    capabilities = TableBackend.capabilities.__class__(layer_skip=False, hidden=False, tree=True)

    def _forward(self, cache: KVCache, batch: Pass) -> PassResult:
        tokens, tree = batch.tokens, batch.tree
        parents = range(-1, len(tokens) - 1) if tree is None else tree.tolist()
        paths: list[list[int]] = []
        for token, parent in zip(tokens.tolist(), parents, strict=True):
            paths.append([*(self.held if parent < 0 else paths[parent]), token])
        self.cache.held += tokens.tolist()
        logits = [target_logits(paths[row]) for row in batch.rows]
        return PassResult(np.array(logits, np.float32).reshape(-1, V), None)


class Drafter(LogitDrafter):
    """Proposes by logits of its own."""

    name = "model"
    uses_target = False

    def _logits(self, context: DraftContext, drafted: Sequence[int]) -> Passes[Floats | None]:
        yield from ()
        return drafter_logits([*context.tokens, *drafted])


def reply(config: ReplyOptions, width: int) -> tuple[int, ...]:
    backend = Target()
    processor = LogitsProcessor(config, V, config.seed or 0)
    sampler = Sampler(processor, PROMPT)
    verification = config.verification
    text = Text(backend, backend.cache, 4)
    rounds = eager_rounds(text, sampler, [Drafter(V)], Prices(FLAT), verification=verification, most=9, width=width)
    steps = text.generate(PROMPT, sampler, max_tokens=TOKENS, stop_ids=frozenset(), strategy=rounds)
    tokens = tuple(step.token for step in steps)
    assert rounds.speculation.drafted > 0
    return tokens


def expected(config: ReplyOptions) -> dict[tuple[int, ...], float]:
    """Probability of every reply."""
    processor = LogitsProcessor(config, V, 0)
    replies: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for said, probability in replies.items():
            probabilities = processor.probabilities(target_logits([*PROMPT, *said]))
            for token in range(V):
                if probabilities[token] > 0:
                    longer[(*said, token)] = probability * float(probabilities[token])
        replies = longer
    return replies


@pytest.mark.parametrize("seeds", [400, pytest.param(1500, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "width"), RULES)
def test_replies_are_distributed_as_plain_samplings(name: str, width: int, seeds: int) -> None:
    """By chi-square; false of one right rule in ten thousand, however many replies there are."""
    config = ReplyOptions(temperature=0.9, verification=name)
    distributions = expected(config)
    counts = Counter(reply(config.replace(seed=seed), width) for seed in range(seeds))
    assert set(counts) <= set(distributions)
    # Rare replies together, so that every cell has some.
    likely = [said for said, probability in distributions.items() if probability * seeds >= 8]
    seen = [counts[said] for said in likely]
    wanted = [distributions[said] * seeds for said in likely]
    assert chisquare([*seen, seeds - sum(seen)], [*wanted, seeds - sum(wanted)]).pvalue > 1e-4
