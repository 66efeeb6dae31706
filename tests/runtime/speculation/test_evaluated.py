"""Logits of a verified draft are computed a few rows at a time, as far as they are read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edgeinfer.config import GenerationConfig
from edgeinfer.export import ExportConfig
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.head import HEAD_ROWS
from edgeinfer.runtime.backends.onnx.paged_backend import PagedBackend
from edgeinfer.runtime.decoding.engine import Engine
from edgeinfer.runtime.sampling import LogitsProcessor, Sampler
from edgeinfer.runtime.speculation.drafters.contract import Draft, Guess
from edgeinfer.runtime.speculation.drafters.recycle import RecycleDrafter
from edgeinfer.runtime.speculation.evaluated import LogitRows, head_of
from edgeinfer.runtime.speculation.verification import RoundView, verify_keyed
from tests.kernel import require_kernel
from tests.runtime.models import bundle_of
from tests.runtime.speculation.drafters.rounds import ask, settled
from tests.runtime.speculation.subjects import PROMPT, Subject, Witness

ROWS, VOCABULARY = 11, 16
# Row by row the state is the only number that is not zero, and so is its logit.
HIDDEN = np.eye(VOCABULARY, dtype=np.float32)[1 : ROWS + 1]


class Head:
    """Implements `HeadBackend`."""

    head_apart = True

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def head(self, hidden: Floats) -> Floats:
        self.asked.append((hidden.argmax(axis=1) - 1).tolist())
        return hidden.copy()


def verified(tokens: list[int]) -> tuple[tuple[int, ...], Head]:
    """The accepted tokens of a draft, and what its head was asked for."""
    head = Head()
    rows = LogitRows(HIDDEN[:HEAD_ROWS], HIDDEN, head)
    draft = Draft(
        tuple(Guess(token, 0) for token in tokens), tuple(range(-1, len(tokens) - 1)), ("copy",) * len(tokens)
    )
    sampler = Sampler(LogitsProcessor(GenerationConfig(), VOCABULARY, 0), [0])
    return verify_keyed(draft, RoundView(sampler, draft, rows, 1)).accepted, head


def test_rows_behind_the_first_refused_guess_are_not_computed() -> None:
    # After row i the model says i + 1.
    right = list(range(1, ROWS))
    accepted, head = verified(right)
    assert (len(accepted), head.asked) == (10, [[4, 5, 6, 7], [8, 9, 10]])
    accepted, head = verified([*right[:5], 15, *right[6:]])
    assert (len(accepted), head.asked) == (5, [[4, 5, 6, 7]])
    accepted, head = verified([15, *right[1:]])
    assert (len(accepted), head.asked) == (0, [])


def test_rows_that_were_overwritten_are_computed_again() -> None:
    head = Head()
    rows = LogitRows(HIDDEN[:HEAD_ROWS], HIDDEN, head)
    assert [int(rows[row].argmax()) for row in (0, 9, 1, 2)] == [1, 10, 2, 3]
    assert (head.asked, rows.first) == ([[9, 10], [1, 2, 3, 4]], 1)


def test_tables_learn_from_rows_that_are_not_there_what_was_accepted() -> None:
    table = RecycleDrafter(VOCABULARY)
    round = settled([3, 4, 5, 6, 7], [2, 3, 4, 5, 6, 9], HIDDEN[[11 - 1, 12 - 2]])
    table.observe(replace(round, first_row=4, branches=False))
    assert {token: [guess.token for guess in ask(table, [token])] for token in (2, 5, 6, 9)} == {
        2: [3],
        5: [6],
        6: [11],
        9: [11],
    }


def test_long_drafts_give_the_text_and_log_probabilities_of_plain_decoding() -> None:
    require_kernel()
    bundle = bundle_of("qwen2", ExportConfig(4, 32, keep_small=False, layout="native"), hidden_size=128)
    backend = PagedBackend(bundle, 64)
    assert head_of(backend) is backend
    subject = Subject(bundle, backend, lambda: backend)
    # One token again and again, so that drafts of any length come true.
    config = GenerationConfig(logit_bias={40: 60.0}, logprobs=2)

    def told(drafters: tuple[str, ...]) -> list[tuple[int, float]]:
        subject.engine = Engine(backend, 8)
        sampler = Witness(config, backend.geometry.vocab_size)
        rounds = subject.rounds(sampler, config, drafters, 1, 0.0) if drafters else None
        steps = [*subject.engine.generate(PROMPT, sampler, max_tokens=28, stop_ids=frozenset(), strategy=rounds)]
        if rounds is not None:
            assert len(rounds.statistics.accepted_per_position) > HEAD_ROWS
        return [(step.token, each.logprob) for step, each in zip(steps, sampler.logprobs, strict=True)]

    assert told(("copy",)) == told(())
    backend.close()
