"""Drafts whose tokens are drawn from distributions: whole replies are distributed as plain sampling's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chisquare

from edgeinfer.config import GenerationConfig
from edgeinfer.drafting import VerificationRule
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import ForwardInput, ForwardOutput
from edgeinfer.runtime.decoding.engine import Engine
from edgeinfer.runtime.sampling.processor import LogitsProcessor
from edgeinfer.runtime.sampling.sampler import Sampler
from edgeinfer.runtime.speculation.acceptance import Acceptance
from edgeinfer.runtime.speculation.decoding import SpeculativeDecoding
from edgeinfer.runtime.speculation.drafters.contract import DraftContext
from edgeinfer.runtime.speculation.drafters.logit_drafter import LogitDrafter
from edgeinfer.runtime.speculation.governor import Governor
from edgeinfer.runtime.speculation.shaped_governor import stochastic_governor
from edgeinfer.runtime.speculation.verification import find_verification
from tests.runtime.speculation.prices import FLAT, Prices
from tests.runtime.test_engine import TableBackend

V = 4
TOKENS = 4
PROMPT = [1, 2]
RULES = [("rejection", 1), ("rejection", 2), ("k-seq", 2), ("k-seq", 3), ("keyed", 1)]
# Of fixed shapes: a beam, and siblings behind an only child.
SHAPES = [(3, "beam"), (2, "2,1,2")]


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

    def forward(self, batch: ForwardInput) -> ForwardOutput:
        tokens, tree = batch.tokens, batch.tree
        parents = range(-1, len(tokens) - 1) if tree is None else tree.tolist()
        paths: list[list[int]] = []
        for token, parent in zip(tokens.tolist(), parents, strict=True):
            paths.append([*(self.held if parent < 0 else paths[parent]), token])
        self.cache.held += tokens.tolist()
        logits = [target_logits(paths[row]) for row in batch.rows]
        return ForwardOutput(np.array(logits, np.float32).reshape(-1, V), None)


class Drafter(LogitDrafter):
    """Proposes by logits of its own."""

    name = "model"
    uses_target = False

    def _logits(self, context: DraftContext, drafted: Sequence[int]) -> Floats:
        return drafter_logits([*context.tokens, *drafted])


def reply(config: GenerationConfig, width: int) -> tuple[int, ...]:
    backend = Target()
    processor = LogitsProcessor(config, V, config.seed or 0)
    sampler = Sampler(processor, PROMPT)
    drafter, verification = Drafter(V), find_verification(config.verification)
    acceptance = Acceptance()
    acceptance.add("model", [0.9] * len(drafter.priors))
    governor = stochastic_governor(verification, config)([drafter], Prices(FLAT), acceptance, 9, width)
    rounds = SpeculativeDecoding(backend, sampler, [drafter], governor, verification, on_plain_ms=lambda ms: None)
    steps = Engine(backend, 4).generate(PROMPT, sampler, max_tokens=TOKENS, stop_ids=frozenset(), strategy=rounds)
    tokens = tuple(step.token for step in steps)
    assert rounds.statistics.drafted > 0
    return tokens


def expected(config: GenerationConfig) -> dict[tuple[int, ...], float]:
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


def check_distribution(name: VerificationRule, width: int, seeds: int, tree: str = "adaptive") -> None:
    """Chi-square of so many replies; false of one right rule in ten thousand, however many they are."""
    config = GenerationConfig(temperature=0.9, verification=name, draft_tree=tree)
    distributions = expected(config)
    counts = Counter(reply(config.replace(seed=seed), width) for seed in range(seeds))
    assert set(counts) <= set(distributions)
    # Rare replies together, so that every cell has some.
    likely = [said for said, probability in distributions.items() if probability * seeds >= 8]
    seen = [counts[said] for said in likely]
    wanted = [distributions[said] * seeds for said in likely]
    p = chisquare([*seen, seeds - sum(seen)], [*wanted, seeds - sum(wanted)]).pvalue
    assert p > 1e-4


@pytest.mark.parametrize(("name", "width"), RULES)
def test_replies_are_distributed_as_plain_samplings(name: VerificationRule, width: int) -> None:
    check_distribution(name, width, 400)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "width"), RULES)
def test_thousands_of_replies_are_distributed_as_plain_samplings(name: VerificationRule, width: int) -> None:
    check_distribution(name, width, 3000)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "tree"), SHAPES)
def test_trees_of_a_shape_leave_the_distribution_as_it_is(width: int, tree: str) -> None:
    check_distribution("rejection", width, 400, tree)


def rounds_of(config: GenerationConfig, seed: int, most: int, width: int) -> tuple[Governor, DraftContext]:
    """A governor of up to so many tokens, and the context that it drafts behind."""
    sampler = Sampler(LogitsProcessor(config, V, seed), PROMPT)
    drafter, acceptance, verification = Drafter(V), Acceptance(), find_verification(config.verification)
    acceptance.add("model", [0.9] * len(drafter.priors))
    governor = stochastic_governor(verification, config)([drafter], Prices(FLAT), acceptance, most, width)
    rounds = SpeculativeDecoding(Target(), sampler, [drafter], governor, verification, on_plain_ms=lambda ms: None)
    rounds._context.tokens[:] = PROMPT
    return governor, rounds._context


def test_chains_fit_the_cache_side_by_side_and_the_reply_each() -> None:
    governor, context = rounds_of(GenerationConfig(temperature=1.0, verification="k-seq"), 0, 9, 3)
    assert governor.draft(context, 9, 1).parents == (-1, -1, -1)
    assert len(governor.draft(context, 9, 2)) == 6
    assert len(governor.draft(context, 7, 4)) == 6
    assert len(governor.draft(context, 2, 4)) == 0


@pytest.mark.slow
def test_a_beam_draws_paths_without_replacement() -> None:
    """The two paths of two tokens that arrive first come as often as two draws without replacement say."""
    config = GenerationConfig(temperature=1.0, verification="rejection", draft_tree="beam")
    processor = LogitsProcessor(config, V, 0)
    laws = {path: processor.probabilities(drafter_logits([*PROMPT, *path])) for path in [(), *((x,) for x in range(V))]}
    likely = {(x, y): float(laws[()][x] * laws[x,][y]) for x in range(V) for y in range(V)}
    seeds, counts = 2000, Counter[tuple[tuple[int, int], ...]]()
    for seed in range(seeds):
        governor, context = rounds_of(config, seed, 4, 2)
        draft = governor.draft(context, 4, 2)
        counts[tuple(tuple(draft.path(node)) for node in range(2, 4))] += 1  # type: ignore[misc]
    pairs = {(a, b): likely[a] * likely[b] / (1 - likely[a]) for a in likely for b in likely if a != b}
    common = [pair for pair, share in pairs.items() if share * seeds >= 5]
    seen, wanted = [counts[pair] for pair in common], [pairs[pair] * seeds for pair in common]
    assert len(common) > 20 and set(counts) <= set(pairs)
    assert chisquare([*seen, seeds - sum(seen)], [*wanted, seeds - sum(wanted)]).pvalue > 1e-4
