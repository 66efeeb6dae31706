"""Tests of which experts a token uses, compared with a router that is written out one token at a time."""

import numpy as np

from edgeinfer.bundle.arithmetic import route
from edgeinfer.bundle.parts import MoESpec


def test_sigmoid_shares_choose_within_the_best_groups() -> None:
    random = np.random.default_rng(0)
    moe = MoESpec(
        experts=16, top_k=4, expert_size=8, router="sigmoid", choice_bias=True, groups=4, group_top_k=2, scale=2.5
    )
    scores = random.normal(size=(50, 16)).astype(np.float32)
    bias = (random.random(16) * 0.3).astype(np.float32)
    chosen, weights = route(scores, moe, choice_bias=bias)
    for row, ids, values in zip(scores, chosen, weights, strict=True):
        shares = 1 / (1 + np.exp(-row.astype(np.float64)))
        judged = shares + bias
        ranks = [sum(sorted(judged[start : start + 4])[-2:]) for start in range(0, 16, 4)]
        groups = sorted(range(4), key=lambda group: -ranks[group])[:2]
        expected = sorted((e for e in range(16) if e // 4 in groups), key=lambda e: -judged[e])[:4]
        assert ids.tolist() == expected
        np.testing.assert_allclose(values, shares[expected] / shares[expected].sum() * 2.5, atol=1e-5)
