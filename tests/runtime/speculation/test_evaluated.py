"""Logits of a verified draft are computed a few rows at a time, as far as they are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.core.results import SpeculationUse
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import HEAD_ROWS, KVCache, Pass, PassCancelledError
from edgeinfer.runtime.backends.onnx.paged_backend import PagedBackend
from edgeinfer.runtime.decoding.sequence import Sequence
from edgeinfer.runtime.sampling.distributions import TokenLogprobs
from edgeinfer.runtime.sampling.sampler import LogitsProcessor, Sampler
from edgeinfer.runtime.speculation.decoding import LogitRows, RoundView, decided
from edgeinfer.runtime.speculation.drafters.contract import Draft, Guess
from edgeinfer.runtime.speculation.drafters.recycle import RecycleDrafter
from edgeinfer.runtime.speculation.verification.keyed import verify_keyed
from edgeinfer.runtime.tuning.measure import token_logits
from tests.alone import Alone
from tests.kernel import require_kernel
from tests.runtime.models import bundle_of
from tests.runtime.speculation.drafters.rounds import ask, settled
from tests.runtime.speculation.subjects import PROMPT, Subject, Witness

ROWS, VOCABULARY = 11, 16
Told = tuple[int, TokenLogprobs | None]
# Row by row the state is the only number that is not zero, and so is its logit.
HIDDEN = np.eye(VOCABULARY, dtype=np.float32)[1 : ROWS + 1]


class Head:
    """A head that notes the rows it is asked for."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def head(self, hidden: Floats) -> Floats:
        self.asked.append((hidden.argmax(axis=1) - 1).tolist())
        return hidden.copy()


def verified(tokens: list[int]) -> tuple[tuple[int, ...], Head]:
    """The accepted tokens of a draft, and what its head was asked for."""
    head = Head()
    rows = LogitRows(HIDDEN[:HEAD_ROWS], HIDDEN, head.head)
    draft = Draft(
        tuple(Guess(token, 0) for token in tokens), tuple(range(-1, len(tokens) - 1)), ("copy",) * len(tokens)
    )
    sampler = Sampler(LogitsProcessor(ReplyOptions(), VOCABULARY, 0), [0])
    return decided(verify_keyed(draft, RoundView(sampler, draft, rows, 1)), rows).accepted, head


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
    rows = LogitRows(HIDDEN[:HEAD_ROWS], HIDDEN, head.head)
    found = []
    for row in (0, 9, 1, 2):
        if not rows.has(row):
            rows.bring(row)
        found.append(int(rows.row(row).argmax()))
    assert found == [1, 10, 2, 3]
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


# One token again and again, so that drafts of any length come true.
REPEATING = ReplyOptions(logit_bias={40: 60.0}, logprobs=2)


class LongDrafts:
    """Replies of a small model in rounds whose drafts have more rows than the head takes at once."""

    def __init__(self) -> None:
        require_kernel()
        bundle = bundle_of(
            "qwen2", ExportConfig(4, 32, keep_small=False, layout="native", calibration="none"), hidden_size=128
        )
        self.backend = Alone(PagedBackend(bundle, 64), 64)
        assert self.backend.model.head_apart
        self._subject = Subject(bundle, self.backend, lambda: self.backend)
        self._head = self.backend.model.head
        self.heads, self.fails = 0, 0  # passes of the head; the number of the one that fails
        self.speculation = SpeculationUse("")  # of the latest reply
        self.backend.model.head = self._counted  # type: ignore[method-assign]

    def _counted(self, cache: KVCache, hidden: Floats) -> Floats:
        self.heads += 1
        if self.heads == self.fails:
            raise PassCancelledError("The pass was cancelled.")
        return self._head(cache, hidden)

    def told(
        self, config: ReplyOptions = REPEATING, drafters: tuple[str, ...] = ("copy",), noise: float = 0.0
    ) -> list[Told]:
        """Tokens and what was reported of them, until a pass is cancelled, which ends the reply."""
        self._subject.conversation, self.heads = Sequence(self.backend.model, self.backend.cache, 8), 0
        self.backend.cache.trim(0)
        sampler = Witness(config, self.backend.geometry.vocab_size)
        rounds = self._subject.rounds(sampler, config, drafters, 1, noise) if drafters else None
        made = self._subject.conversation.generate(
            PROMPT, sampler, max_tokens=28, stop_ids=frozenset(), strategy=rounds
        )
        steps = [step.token for step in made]
        if rounds is not None:
            self.speculation = rounds.speculation
        if config.logprobs is None:
            return [(token, None) for token in steps]
        return list(zip(steps, sampler.logprobs, strict=True))


@pytest.fixture
def drafts() -> Iterator[LongDrafts]:
    """Closed afterwards."""
    made = LongDrafts()
    yield made
    made.backend.close()


def test_long_drafts_give_the_text_and_log_probabilities_of_plain_decoding(drafts: LongDrafts) -> None:
    assert drafts.told() == drafts.told(drafters=())
    assert len(drafts.speculation.accepted_per_position) > HEAD_ROWS


def test_log_probabilities_take_no_further_pass_of_the_head(drafts: LongDrafts) -> None:
    drafts.told(replace(REPEATING, logprobs=None))
    heads = drafts.heads
    drafts.told()
    assert drafts.heads == heads > 0


def test_nothing_is_told_of_tokens_whose_round_failed(drafts: LongDrafts) -> None:
    # `told` compares how many tokens there are with how many were reported.
    whole = drafts.told()
    for drafts.fails in range(1, 5):
        part = drafts.told()
        assert part == whole[: len(part)]


def test_drafts_have_no_more_rows_at_once_than_planned_where_rounding_may_decide(drafts: LongDrafts) -> None:
    text = drafts.told()
    assert drafts.told(noise=1e-6) == text
    assert (drafts.heads, len(drafts.speculation.accepted_per_position)) == (0, HEAD_ROWS - 1)


def test_a_text_is_scored_by_no_more_rows_of_logits_than_planned(drafts: LongDrafts) -> None:
    text = [*PROMPT, *PROMPT]
    rows = [logits.copy() for logits in token_logits(Sequence(drafts.backend.model, drafts.backend.cache, 8), text)]
    assert max(map(len, rows)) == HEAD_ROWS and drafts.heads > 0
    drafts.backend.cache.trim(0)
    alone = [
        drafts.backend.forward(Pass(*map(np.array, ([token], [at], [0])))).logits[0].copy()
        for at, token in enumerate(text)
    ]
    np.testing.assert_array_equal(np.concatenate(rows), alone)
