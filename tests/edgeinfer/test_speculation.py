"""Speculation as a caller meets it: the same text whoever drafts, figures that add up, requests that cannot be met."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.core.errors import UsageError
from edgeinfer.core.results import SpeculationUse
from tests.cli import TIME_LIMIT
from tests.speculation import BUILTIN, DENSE, PROMPT, check_figures, load_eager, needs_builtin, plain, same

WHO = ("auto", *DENSE, "copy,ngram,recycle", "bits,exit,model")
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 11}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "truncated": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "seed": 3},
    "penalties": SAMPLED | {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "llama.cpp's": SAMPLED
    | {
        "top_n_sigma": 1.5,
        "xtc_probability": 0.5,
        "dynatemp_range": 0.5,
        "dry_multiplier": 0.8,
        "dry_allowed_length": 1,
    },
    "biased": {"repetition_penalty": 1.1, "logit_bias": {5: 2.0, 40: -5.0}},
}


@pytest.fixture(scope="module")
def loaded() -> Iterator[edgeinfer.Model]:
    """The built-in model, with itself as its draft model."""
    with load_eager(context=256, draft_model=BUILTIN) as model:
        yield model


@pytest.fixture
def tales(loaded: edgeinfer.Model) -> edgeinfer.Model:
    """A model that has learnt nothing from other tests."""
    edgeinfer.tools.restore_drafting(loaded, {})
    return loaded


@pytest.fixture(scope="module")
def short() -> Iterator[edgeinfer.Model]:
    """A model with a context that is soon full."""
    with load_eager(context=24, draft_model=BUILTIN) as model:
        yield model


@needs_builtin
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_text_is_that_of_plain_decoding(tales: edgeinfer.Model, way: str, width: int) -> None:
    """Whoever drafts."""
    for who in WHO:
        found = same(tales, who, max_tokens=30, ignore_eos=True, draft_width=width, **WAYS[way])
        assert (found.mode, found.exact, found.lossless, found.verification) == (who, True, True, "keyed")
        if who == "forced":
            assert found.drafted == 0
        elif way == "greedy":
            assert found.accepted > 0


@needs_builtin
@pytest.mark.parametrize("who", ["model", "bits,exit", "copy,ngram,recycle"])
def test_a_reply_may_end_anywhere_in_a_round(tales: edgeinfer.Model, who: str) -> None:
    """By its length, a stop string, a stop token or the end of text; and what follows it is right too."""
    whole = plain(tales, max_tokens=40, ignore_eos=True)
    for length in (1, 2, 3, 7, 12):
        same(tales, who, max_tokens=length)
    for place in (5, 17, 18, 33):
        stop = whole.text[place : place + 3]
        assert same(tales, who, max_tokens=40, stop=(stop,)).rounds > 0
        same(tales, who, max_tokens=40, stop=(stop[:2] + "~",))
    for token in whole.token_ids[3:9]:
        same(tales, who, max_tokens=40, stop_token_ids=(token,))
        same(tales, who, prompt=[*tales.tokenize(PROMPT), *whole.token_ids[:12], 7], max_tokens=20)
    same(tales, who, prompt="The end.", max_tokens=100)


@needs_builtin
@pytest.mark.parametrize("lengths", [(1, 24), (2, 23), (9, 21, 22)], ids=str)
def test_a_context_that_fills_up(short: edgeinfer.Model, lengths: tuple[int, ...]) -> None:
    """Whoever drafts."""
    ids = [5 + i % 7 for i in range(24)]
    for place, who in enumerate(WHO):
        for length in lengths:
            options: dict[str, Any] = {"prompt": ids[:length], "ignore_eos": True, "draft_width": 1 + place % 2}
            # The context ends the reply, whether or not more was asked for.
            for more in ({}, {"max_tokens": 26 - length})[: 1 + (length > 20)]:
                found = same(short, who, **options, **more)
                assert found.rounds + found.accepted == 24 - length
        assert len(short.generate(ids[:20], speculation=who, ignore_eos=True).token_ids) == 5


@needs_builtin
@pytest.mark.parametrize("context", [2, 3, 5])
@pytest.mark.parametrize("who", ["auto", "model", "exit,bits"])
def test_the_smallest_contexts(context: int, who: str) -> None:
    with load_eager(context=context, draft_model=BUILTIN, speculation=who) as model:
        for length in range(1, context + 1):
            same(model, who, prompt=[9] * length, ignore_eos=True)


@needs_builtin
@pytest.mark.parametrize("who", ["auto", "model", "copy,ngram,recycle", "exit"])
@pytest.mark.parametrize("way", ["greedy", "penalties"])
def test_streams_and_chats_that_go_on(tales: edgeinfer.Model, who: str, way: str) -> None:
    """What is cached of one turn serves the next, whoever drafted it."""

    def talk(speculation: str) -> list[tuple[Any, ...]]:
        plain(tales, "Another conversation", max_tokens=1)
        chat, turns = tales.chat(), []
        for message in ("Tell me of a dog.", "Again, please.", "And a cat?"):
            stream = chat.stream(message, max_tokens=25, speculation=speculation, **WAYS[way])
            chunks = list(stream)
            assert "".join(chunk.text for chunk in chunks) == stream.result.text
            told = tuple(token for chunk in chunks for token in chunk.token_ids)
            # The token that ends a reply has no text.
            assert stream.result.token_ids[: len(told)] == told
            assert len(stream.result.token_ids) - len(told) == (stream.result.finish_reason == "stop")
            check_figures(stream.result.speculation)
            turns.append((stream.result.text, stream.result.token_ids, stream.result.timings.cached_prompt_tokens))
        return turns

    assert talk(who) == talk("off")


@needs_builtin
@pytest.mark.parametrize("leave", [edgeinfer.TokenStream.close, edgeinfer.TokenStream.cancel])
@pytest.mark.parametrize("who", ["model", "exit", "auto"])
def test_a_reply_left_within_a_round(
    tales: edgeinfer.Model, who: str, leave: Callable[[edgeinfer.TokenStream], None]
) -> None:
    expected = plain(tales, max_tokens=40, ignore_eos=True)
    for count in (1, 2, 3, 4, 6, 9, 14):
        stream = tales.stream(PROMPT, max_tokens=40, ignore_eos=True, speculation=who)
        chunks = [next(stream) for _ in range(count)]
        leave(stream)
        rest = list(stream)
        assert [chunk.token_ids for chunk in rest] in ([], [()])
        assert stream.result.finish_reason == "cancelled"
        assert stream.result.token_ids == tuple(token for chunk in chunks for token in chunk.token_ids)
        assert stream.result.token_ids == expected.token_ids[:count]
        check_figures(stream.result.speculation)
        # What was committed but not given to anybody must not show.
        same(tales, who, prompt=[*tales.tokenize(PROMPT), *expected.token_ids[:count]], max_tokens=12)


@needs_builtin
@pytest.mark.parametrize("passes", [1, 3, 8])
def test_a_reply_cancelled_by_another_thread(
    tales: edgeinfer.Model, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the model makes a pass."""
    stream = tales.stream(PROMPT, ignore_eos=True, speculation="exit,bits")
    first = next(stream)
    left = passes

    def cancelled_within(run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                canceller = threading.Thread(target=stream.cancel)
                canceller.start()
                canceller.join(timeout=TIME_LIMIT)
            return run(*arguments, **options)

        return forward

    backend = tales._parts.backend
    with monkeypatch.context() as patch:
        patch.setattr(backend, "forward", cancelled_within(backend.forward))
        rest = list(stream)
    assert left <= 0
    assert stream.result.finish_reason == "cancelled"
    expected = plain(tales, max_tokens=60, ignore_eos=True).token_ids
    told = [token for chunk in (first, *rest) for token in chunk.token_ids]
    assert stream.result.token_ids == tuple(told) == expected[: len(told)]
    same(tales, "exit,bits", max_tokens=20)


class PassClock:
    """A clock that only passes of a model move, by a millisecond each, and looks at it, by a millionth of one."""

    def __init__(self) -> None:
        self.ns = 10**9

    def perf_counter_ns(self) -> int:
        self.ns += 1
        return self.ns

    def perf_counter(self) -> float:
        return self.perf_counter_ns() / 1e9

    def counted(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*arguments: Any, **options: Any) -> Any:
            self.ns += 1_000_000
            return run(*arguments, **options)

        return forward


@needs_builtin
def test_figures_of_a_reply(tales: edgeinfer.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, small = PassClock(), tales._parts.speculator.parts.model
    assert small is not None
    for backend in (tales._parts.backend, small):
        monkeypatch.setattr(backend, "forward", clock.counted(backend.forward))
    monkeypatch.setattr(time, "perf_counter", clock.perf_counter)
    monkeypatch.setattr(time, "perf_counter_ns", clock.perf_counter_ns)
    result = tales.generate(PROMPT, max_tokens=30, ignore_eos=True, speculation="model")
    found = result.speculation
    assert list(found.per_drafter) == ["model"]
    assert found.mean_accepted_length == pytest.approx(29 / found.rounds)
    assert found.mean_accepted_length > 3
    assert found.plain_ms is not None
    assert found.speedup_vs_plain == pytest.approx(found.plain_ms / result.timings.per_token_ms)
    # A pass of the target in each round, and as many of the draft model as it drafted tokens, or one more.
    assert found.verify_ms == pytest.approx(found.rounds, rel=0.01)
    assert found.drafted <= found.draft_ms * 1.01 <= (found.drafted + found.rounds) * 1.02
    # The rounds are what the tokens after the first took.
    spent = found.draft_ms + found.verify_ms + found.overhead_ms
    assert spent == pytest.approx(29 * result.timings.per_token_ms, rel=0.01)


@needs_builtin
def test_replies_without_rounds(tales: edgeinfer.Model) -> None:
    for who, tokens in (("off", 5), ("model", 1)):
        found = tales.generate(PROMPT, max_tokens=tokens, speculation=who).speculation
        assert found == SpeculationUse(who, exact=True, plain_ms=found.plain_ms)
        check_figures(found)


@needs_builtin
@pytest.mark.parametrize("who", ["auto", "model", "exit", "copy,ngram,recycle"])
def test_rejection(tales: edgeinfer.Model, who: str) -> None:
    options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "speculation": who, "verification": "rejection"}
    for width in (1, 2):
        for way in ("greedy", "sampled", "penalties"):
            result = tales.generate(PROMPT, draft_width=width, **options, **WAYS[way])
            found = result.speculation
            check_figures(found)
            assert found.accepted + found.rounds == len(result.token_ids) - 1 == 29
            assert (found.verification, found.lossless, found.exact) == ("rejection", True, False)
        # A law of one token leaves nothing to chance.
        expected = plain(tales, max_tokens=30, ignore_eos=True).token_ids
        assert tales.generate(PROMPT, draft_width=width, **options).token_ids == expected


CHOICES = ("yes", "yes, of course it is", "no", "It is a very good dog.", "It is a very bad dog.")


@needs_builtin
@pytest.mark.parametrize("way", ["greedy", "sampled", "penalties"])
@pytest.mark.parametrize("who", ["off", "auto", "forced", "model,forced", "exit", "recycle,copy"])
def test_a_reply_from_a_list(tales: edgeinfer.Model, who: str, way: str) -> None:
    replies = set()
    for seed in range(6):
        options: dict[str, Any] = WAYS[way] | {"seed": seed, "choices": CHOICES}
        for width in (1, 3):
            same(tales, who, prompt="Is it a good dog?", draft_width=width, **options)
        result = tales.generate("Is it a good dog?", speculation=who, **options)
        assert result.text in CHOICES
        assert result.finish_reason == "stop"
        replies.add(result.text)
    assert (len(replies) == 1) == (way == "greedy")
    chat = tales.chat()
    assert chat.send("Is it?", choices=CHOICES, speculation=who, **WAYS[way]).text in CHOICES


@needs_builtin
def test_what_has_to_follow_is_drafted(tales: edgeinfer.Model) -> None:
    text = "A purple elephant named Xylophone sold umbrellas."
    for choices in ((text,), (text, "A purple dog."), (text, "No elephant.")):
        result = tales.generate(PROMPT, choices=choices, speculation="forced")
        assert result.text in choices
        found = result.speculation.per_drafter["forced"]
        assert found.accepted == found.drafted >= (len(result.token_ids) - 1) // 2
    # No other drafter is needed where nothing is left to choose; the stop token is no part of a draft.
    only = tales.generate(PROMPT, choices=(text,), speculation="auto").speculation
    assert only.accepted == only.drafted and only.rounds <= 3


@needs_builtin
def test_a_list_may_be_cut_short(tales: edgeinfer.Model) -> None:
    result = tales.generate(PROMPT, choices=("A purple elephant.",), max_tokens=3)
    assert (len(result.token_ids), result.finish_reason) == (3, "length")
    assert "A purple elephant.".startswith(result.text)
    assert tales.generate(PROMPT, choices=("A purple elephant.",), stop=(" ele",)).text == "A purple"


@needs_builtin
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"choices": ("a", "")}, "free of empty"),
        ({"choices": "abc"}, "several texts"),
        ({"choices": (3,)}, "several texts"),
        ({"choices": ("yes <|end|> no",), "parse_special": True}, "stop token inside"),
        ({"choices": ("yes",), "ignore_eos": True}, "needs a stop token"),
        ({"choices": ("yes",), "ignore_eos": True, "stop_token_ids": (10**6,)}, "needs a stop token"),
        ({"choices": ("a\udce9b",)}, "Unicode"),
    ],
    ids=str,
)
def test_lists_that_are_none(tales: edgeinfer.Model, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        tales.generate(PROMPT, **options)
    assert tales.generate(PROMPT, max_tokens=2, ignore_eos=True).usage.completion_tokens == 2


@needs_builtin
@pytest.mark.parametrize("who", ["auto", "copy,ngram,recycle", "model,exit"])
@pytest.mark.parametrize("way", ["greedy", "sampled"])
def test_what_was_learnt_decides_and_can_be_put_back(tales: edgeinfer.Model, who: str, way: str) -> None:
    def choices(state: dict[str, Any]) -> tuple[Any, ...]:
        edgeinfer.tools.restore_drafting(tales, state)
        result = tales.generate(PROMPT, max_tokens=40, ignore_eos=True, speculation=who, **WAYS[way])
        return result.speculation.choices, result.speculation.drafted, result.speculation.accepted_per_position

    for state in ({}, edgeinfer.tools.drafting_state(tales)):
        before = copy.deepcopy(state)
        first = choices(state)
        plain(tales, "Something else", max_tokens=5)
        tales.generate("One fish, two fish, red fish,", max_tokens=30, speculation=who)
        assert choices(state) == first
        np.testing.assert_equal(state, before)


def test_without_exactness_it_is_not_promised(small_bundle: Path) -> None:
    with edgeinfer.load(small_bundle, threads=1, exact=False) as model:
        found = model.generate(PROMPT, max_tokens=20, ignore_eos=True).speculation
    assert found.exact is None
    assert found.lossless
    check_figures(found)
