"""Verification against the real sampler: penalties, bans and truncation act at each node with its path's counts."""

from __future__ import annotations

import math
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.runtime.sampling.sampler import LogitsProcessor, Sampler
from edgeinfer.runtime.speculation.decoding import LogitRows, RoundView
from edgeinfer.runtime.speculation.drafters.contract import Draft, Probabilities
from edgeinfer.runtime.speculation.verification.keyed import verify_keyed
from edgeinfer.runtime.speculation.verification.rule import find_verification
from tests.methods import all_methods
from tests.runtime.speculation.verification.enumeration import (
    drafts,
    make_draft,
    output_probabilities,
    plain_probabilities,
    random_laws,
    settle,
)
from tests.tables import each_row

RULES = all_methods("verifiers")
SIZE = 4
PROMPT, REPLY = (1, 1, 2), (3, 0)
BANNED = 3
CONFIG = ReplyOptions(
    temperature=0.8,
    repetition_penalty=1.4,
    frequency_penalty=0.7,
    presence_penalty=0.3,
    logit_bias={BANNED: -math.inf, 0: 0.5},
)


def logits(text: tuple[int, ...]) -> NDArray[np.float32]:  # (V,)
    """Logits of a model that looks at the last two tokens."""
    return np.random.default_rng([5, *text[-2:]]).normal(0, 2, SIZE).astype(np.float32)


def view_of(draft: Draft, processor: LogitsProcessor, text: tuple[int, ...]) -> RoundView:
    """A pass over a draft behind the prompt and a reply."""
    sampler = Sampler(processor, PROMPT)
    for token in text[len(PROMPT) :]:
        sampler.accept(token, logits(text))
    rows = np.array([logits((*text, *draft.path(node))) for node in range(-1, len(draft))])
    return RoundView(sampler, draft, LogitRows(rows), len(text))


def chain(tokens: tuple[int, ...]) -> Draft:
    return make_draft(*((place - 1, token, None) for place, token in enumerate(tokens)))


@cache
def probabilities_after(path: tuple[int, ...]) -> Probabilities:
    """As verification sees it after a chain of drafted tokens."""
    view = view_of(chain(path), LogitsProcessor(CONFIG, SIZE, 0), (*PROMPT, *REPLY))
    return view.probabilities(len(path) - 1)


@cache
def probabilities_by_hand(path: tuple[int, ...]) -> Probabilities:
    """From the definitions, token by token."""
    row = logits((*PROMPT, *REPLY, *path)).astype(np.float64)
    reply = (*REPLY, *path)
    weights = []
    for token, value in enumerate(row):
        value += CONFIG.logit_bias.get(token, 0.0)
        if token in PROMPT + reply:
            value = value / 1.4 if value > 0 else value * 1.4
        value -= 0.7 * reply.count(token) + 0.3 * (token in reply)
        weights.append(math.exp(value / 0.8))
    return np.array(weights) / sum(weights)


def test_the_probabilities_at_each_depth_counts_the_path() -> None:
    for tokens in ((2, 2, 2), (1, 2, 0), (0, 1, 0), (2, BANNED, 1)):
        view = view_of(chain(tokens), LogitsProcessor(CONFIG, SIZE, 0), (*PROMPT, *REPLY))
        for node in (2, -1, 1, 0, 2):  # in any order: nothing is left behind
            probabilities = view.probabilities(node)
            np.testing.assert_allclose(probabilities, probabilities_by_hand(tokens[: node + 1]), rtol=1e-5)
            assert probabilities[BANNED] == 0


@each_row(("name", "width"), [("rejection", 1), ("rejection", 2), ("keyed", 2)])
def test_text_has_the_probabilities_of_plain_sampling(name: str, width: int) -> None:
    # The drafter knows of no penalty and no ban.
    drafter, depth = random_laws(41, SIZE, zeros=1), 3 if width == 1 else 2
    assert drafter(())[BANNED] > 0
    rule = find_verification(name)
    made = drafts(lambda path: [drafter(path)] * (1 if path else width), depth)
    got = output_probabilities(rule.verify, made, probabilities_after, depth + 1)
    np.testing.assert_allclose(got, plain_probabilities(probabilities_by_hand, depth + 1), atol=3e-5)


def test_a_banned_token_is_never_accepted_nor_drawn() -> None:
    for name, probabilities in product(RULES, (None, np.array([0.1, 0.1, 0.1, 0.7]))):
        draft = make_draft(
            (-1, BANNED, probabilities), (0, 1, probabilities), (-1, 2, probabilities), (2, BANNED, probabilities)
        )
        for seed in range(50):
            view = view_of(draft, LogitsProcessor(CONFIG, SIZE, seed), (*PROMPT, *REPLY))
            verdict = settle(find_verification(name).verify(draft, view))
            assert verdict.accepted in ((), (2,))
            assert verdict.token != BANNED


@each_row("options", [{}, {"top_k": 3}, {"top_p": 0.8, "min_p": 0.05}, {"temperature": 0.0}])
def test_keyed_text_is_that_of_plain_sampling_with_the_same_seed(options: dict[str, float]) -> None:
    rng = np.random.default_rng(8)
    config = ReplyOptions(
        **{  # type: ignore[arg-type]
            "temperature": 1.1,
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.2,
            "logit_bias": {BANNED: -1.0},
            **options,
        }
    )
    for seed in range(8):
        processor = LogitsProcessor(config, SIZE, seed)
        plain: tuple[int, ...] = PROMPT
        text: tuple[int, ...] = PROMPT
        while len(plain) < 40:
            plain += (view_of(Draft(), processor, plain).token(-1),)
        rounds = 0
        while len(text) < 40:
            # A tree with the right text in it for as long as chance has it.
            right, nodes, at = plain[len(text) :], list[tuple[int, int, None]](), -1
            for token in right[: rng.integers(0, 5)]:
                nodes.append((at, int(rng.integers(SIZE)), None))
                nodes.append((at, token, None))
                at = len(nodes) - 1
            draft = make_draft(*nodes)
            verdict = settle(verify_keyed(draft, view_of(draft, processor, text)))
            text += (*(draft.guesses[node].token for node in verdict.accepted), verdict.token)
            rounds += 1
        assert text[:40] == plain
        assert rounds < 30
