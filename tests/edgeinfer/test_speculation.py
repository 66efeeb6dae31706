"""Speculation as a caller meets it: the same text whoever drafts, figures that add up, requests that cannot be met."""

from __future__ import annotations

import copy
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.config import DRAFTERS
from edgeinfer.errors import (
    BundleError,
    CapabilityError,
    EdgeInferError,
    ModelError,
    UsageError,
)
from edgeinfer.export import ExportConfig, export_checkpoint
from edgeinfer.results import DrafterUse, Speculation
from edgeinfer.runtime.speculation.registry import KINDS
from tests.cli import contents
from tests.factories import make_checkpoint, make_tokenizer
from tests.speculation import (
    BUILTIN,
    DENSE,
    PROMPT,
    check_figures,
    load_eager,
    make_eager,
    needs_builtin,
    plain,
    random_bundle,
    same,
)

WHO = ("auto", *DENSE, "copy,ngram,recycle", "hierarchical,model", "bits,exit,skip,model")
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 11}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "truncated": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "seed": 3},
    "penalties": SAMPLED | {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "biased": {"repetition_penalty": 1.1, "logit_bias": {5: 2.0, 40: -5.0}},
}


@pytest.fixture(scope="module")
def tales() -> Iterator[edgeinfer.Model]:
    """The built-in model, with itself as its draft model."""
    with load_eager(context=256, draft_model=BUILTIN) as model:
        yield model


@needs_builtin
@pytest.mark.parametrize(
    ("who", "way"), [(who, way) for who in WHO for way in WAYS if who == "auto" or way not in ("truncated", "biased")]
)
def test_text_is_that_of_plain_decoding(tales: edgeinfer.Model, who: str, way: str) -> None:
    for width in (1, 3):
        found = same(tales, who, max_tokens=40, ignore_eos=True, draft_width=width, **WAYS[way])
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
@pytest.mark.parametrize("who", WHO)
def test_a_context_that_fills_up(who: str) -> None:
    with load_eager(context=24, draft_model=BUILTIN) as model:
        ids = [5 + i % 7 for i in range(24)]
        for length in (1, 2, 9, 21, 22, 23, 24):
            for width in (1, 2):
                found = same(model, who, prompt=ids[:length], ignore_eos=True, draft_width=width)
                assert found.rounds + found.accepted == 24 - length
                same(model, who, prompt=ids[:length], ignore_eos=True, draft_width=width, max_tokens=26 - length)
        assert len(model.generate(ids[:20], speculation=who, ignore_eos=True).token_ids) == 5


@needs_builtin
@pytest.mark.parametrize("context", [2, 3, 5])
def test_the_smallest_contexts(context: int) -> None:
    for who in ("auto", "model", "exit,skip,bits"):
        with load_eager(context=context, draft_model=BUILTIN, speculation=who) as model:
            for length in range(1, context + 1):
                same(model, who, prompt=[9] * length, ignore_eos=True)


@needs_builtin
@pytest.mark.parametrize("who", ["auto", "model", "copy,ngram,recycle", "exit,skip"])
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
            assert tuple(token for chunk in chunks for token in chunk.token_ids) == stream.result.token_ids
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
def test_a_reply_cancelled_by_another_thread(tales: edgeinfer.Model) -> None:
    for delay in (0.0, 0.004, 0.011):
        stream = tales.stream(PROMPT, ignore_eos=True, speculation="exit,bits")
        next(stream)
        timer = threading.Timer(delay, stream.cancel)
        timer.start()
        list(stream)
        timer.join()
        assert stream.result.finish_reason in ("cancelled", "length")
        same(tales, "exit,bits", max_tokens=20)


@needs_builtin
def test_figures_of_a_reply(tales: edgeinfer.Model) -> None:
    result = tales.generate(PROMPT, max_tokens=30, ignore_eos=True, speculation="model")
    found = result.speculation
    assert list(found.per_drafter) == ["model"]
    assert found.mean_accepted_length == pytest.approx(29 / found.rounds)
    assert found.mean_accepted_length > 3
    assert found.plain_ms is not None
    assert found.speedup_vs_plain == pytest.approx(found.plain_ms / result.timings.per_token_ms)
    # The rounds are what the tokens after the first took.
    spent = found.draft_ms + found.verify_ms + found.overhead_ms
    assert spent == pytest.approx(29 * result.timings.per_token_ms, rel=0.2)
    assert found.draft_ms > 0


@needs_builtin
def test_figures_of_plain_decoding(tales: edgeinfer.Model) -> None:
    found = plain(tales, max_tokens=5).speculation
    assert found == Speculation("off", exact=True, plain_ms=found.plain_ms)
    check_figures(found)


@needs_builtin
def test_a_reply_of_one_token_has_no_rounds(tales: edgeinfer.Model) -> None:
    found = tales.generate(PROMPT, max_tokens=1, speculation="model").speculation
    assert found == Speculation("model", exact=True, plain_ms=found.plain_ms)


@needs_builtin
@pytest.mark.parametrize("verification", ["rejection", "k-seq", "typical"])
@pytest.mark.parametrize("who", ["auto", "model", "exit", "copy,ngram,recycle"])
def test_other_verifications(tales: edgeinfer.Model, who: str, verification: str) -> None:
    options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "speculation": who, "verification": verification}
    for width in (1, 2):
        for way in ("greedy", "sampled", "penalties"):
            result = tales.generate(PROMPT, draft_width=width, **options, **WAYS[way])
            found = result.speculation
            check_figures(found)
            assert found.accepted + found.rounds == len(result.token_ids) - 1 == 29
            assert (found.verification, found.lossless) == (verification, verification != "typical")
            assert found.exact is False
        # A law of one token leaves nothing to chance.
        if verification != "typical":
            expected = plain(tales, max_tokens=30, ignore_eos=True).token_ids
            assert tales.generate(PROMPT, draft_width=width, **options).token_ids == expected


def plain_types(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(key) is str and plain_types(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(plain_types, value))
    return type(value) in (str, int, float, bool, type(None))


@needs_builtin
@pytest.mark.parametrize("who", WHO)
def test_a_result_is_plain_json(tales: edgeinfer.Model, who: str) -> None:
    for width in (1, 2):
        result = tales.generate(PROMPT, max_tokens=25, ignore_eos=True, speculation=who, draft_width=width)
        data = result.to_dict()
        assert plain_types(data)
        assert json.loads(json.dumps(data)) == data
        uses = data["speculation"]["per_drafter"]
        assert uses == {
            name: {
                "rounds": use.rounds,
                "drafted": use.drafted,
                "accepted": use.accepted,
                "accepted_per_position": list(use.accepted_per_position),
            }
            for name, use in result.speculation.per_drafter.items()
        }
        assert all(isinstance(use, DrafterUse) for use in result.speculation.per_drafter.values())


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
    # Nobody else is needed where nothing is left to choose; the stop token is no part of a draft.
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
        ({"choices": ("yes <|end|> no",)}, "stop token inside"),
        ({"choices": ("yes",), "ignore_eos": True}, "needs a token to end it"),
        ({"choices": ("yes",), "ignore_eos": True, "stop_token_ids": (10**6,)}, "needs a token to end it"),
        ({"choices": ("a\udce9b",)}, "Unicode"),
    ],
    ids=str,
)
def test_lists_that_are_none(tales: edgeinfer.Model, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        tales.generate(PROMPT, **options)
    assert tales.generate(PROMPT, max_tokens=2, ignore_eos=True).usage.completion_tokens == 2


def test_a_choice_that_the_model_has_no_logits_for(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", "llama", vocab_size=300)
    bundle = export_checkpoint(tmp_path / "checkpoint", tmp_path / "narrow", ExportConfig(bits=4, keep_small=False))
    with edgeinfer.load(bundle, threads=1) as model:
        for who in ("off", "auto"):
            with pytest.raises(
                UsageError, match="' upon a time' holds a token id outside the model's vocabulary of 300"
            ):
                model.generate("ab", choices=("ab", " upon a time"), speculation=who)
            assert model.generate("ab", choices=("ab", "ba"), speculation=who).text in ("ab", "ba")


@needs_builtin
@pytest.mark.parametrize("who", ["auto", "hierarchical", "copy,ngram,recycle", "model,exit"])
@pytest.mark.parametrize("way", ["greedy", "sampled"])
def test_what_was_learnt_decides_and_can_be_put_back(tales: edgeinfer.Model, who: str, way: str) -> None:
    def choices(state: dict[str, Any]) -> tuple[Any, ...]:
        tales.restore_drafting(state)
        result = tales.generate(PROMPT, max_tokens=40, ignore_eos=True, speculation=who, **WAYS[way])
        return result.speculation.choices, result.speculation.drafted, result.speculation.accepted_per_position

    for state in ({}, tales.drafting_state()):
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


def test_drafters_given_by_name_are_what_auto_means(small_bundle: Path) -> None:
    """Also those that `auto` would not choose by itself."""
    with load_eager(small_bundle, speculation="exit,copy") as model:
        assert {"exit", "copy"} == set(model.drafting_state()) - {"acceptance"}
        assert "exit" in same(model, "auto", max_tokens=30, ignore_eos=True).per_drafter
        assert set(same(model, "copy", max_tokens=30, ignore_eos=True).per_drafter) <= {"copy"}
        with pytest.raises(UsageError, match=r"loaded to draft by exit, copy, not by recycle\. Load it with"):
            model.generate(PROMPT, speculation="recycle")
        assert len(model.generate(PROMPT, max_tokens=3, ignore_eos=True).token_ids) == 3


def test_a_model_loaded_without_drafters_decodes_plainly(small_bundle: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with edgeinfer.load(small_bundle, threads=1, speculation="off") as model:
        assert model.plan.draft_max == 0
        found = model.generate(PROMPT, max_tokens=5).speculation
        assert (found.mode, found.rounds, found.plain_ms) == ("off", 0, None)
        with pytest.raises(UsageError, match="draft by nobody, not by copy"):
            model.generate(PROMPT, max_tokens=5, speculation="copy")
        assert model.drafting_state() == {"acceptance": {}}
    assert contents(tmp_path) == {}


@needs_builtin
def test_draft_max_holds() -> None:
    with load_eager(context=128, speculation="ngram,recycle,copy", draft_max=4) as model:
        for most in (None, 1, 3, 63):
            for width in (1, 2):
                options: dict[str, Any] = {
                    "max_tokens": 60,
                    "ignore_eos": True,
                    "draft_max": most,
                    "draft_width": width,
                }
                found = same(model, "auto", **options)
                assert 0 < found.drafted <= found.rounds * min(4, most or 4)
                assert len(found.accepted_per_position) <= min(4, most or 4)


def test_a_draft_model_with_a_smaller_context(small_bundle: Path, short_drafter: Path) -> None:
    with load_eager(small_bundle, context=80, draft_model=short_drafter) as model:
        for who in ("model", "hierarchical", "auto"):
            model.restore_drafting({})
            for length in (3, 30, 31, 32, 33, 60):
                found = same(model, who, prompt=[5 + i % 9 for i in range(length)], ignore_eos=True)
                drafted = found.per_drafter.get("model" if who == "auto" else who, DrafterUse()).drafted
                assert length != 3 or drafted > 0
                # The root and what is drafted have to fit its cache.
                assert drafted <= max(0, 32 - length)


def refused(error: type[EdgeInferError], code: int, says: str, **options: Any) -> None:
    """Checks that loading fails with one line and the right exit code."""
    with pytest.raises(error, match=says) as caught:
        edgeinfer.load(**{"threads": 1} | options).close()
    assert caught.value.exit_code == code
    assert "\n" not in str(caught.value)
    assert caught.value.hint


def test_draft_models_that_do_not_fit(small_bundle: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "merges" / "checkpoint", "llama")
    make_tokenizer(tmp_path / "merges" / "checkpoint", sentences=["all the other words of another language"] * 3)
    other = export_checkpoint(tmp_path / "merges" / "checkpoint", tmp_path / "merges" / "bundle")
    refused(ModelError, 3, "different (vocabulary|merges)", model=small_bundle, draft_model=other)
    narrow = random_bundle(tmp_path / "narrow", vocab_size=256)
    refused(ModelError, 3, r"\d+ tokens and 256 logits", model=small_bundle, draft_model=narrow)
    refused(ModelError, 3, "No model at 'nowhere'", model=small_bundle, draft_model="nowhere")
    refused(BundleError, 3, "is not a bundle", model=small_bundle, draft_model=tmp_path)
    damaged = shutil.copytree(small_bundle, tmp_path / "damaged")
    (damaged / "weights.bin").write_bytes(b"short")
    refused(BundleError, 3, "weights.bin", model=small_bundle, draft_model=damaged)
    (damaged / "edgeinfer.json").write_text("{")
    refused(BundleError, 3, "not valid JSON", model=small_bundle, draft_model=damaged)
    with pytest.raises(ModelError, match="No model at 'nowhere'"):
        edgeinfer.plan(small_bundle, draft_model="nowhere")


def test_a_wider_draft_model_works(small_bundle: Path, tmp_path: Path) -> None:
    """Rows of logits may be padded, as long as they have a column for every token."""
    wide = random_bundle(tmp_path, vocab_size=384)
    with load_eager(small_bundle, context=64, draft_model=wide) as model:
        assert same(model, "model", max_tokens=30, ignore_eos=True).drafted > 0


@pytest.mark.parametrize("who", ["exit", "skip", "bits", "copy,exit"])
def test_drafters_that_the_backend_cannot_carry(bigrams: Path, who: str) -> None:
    refused(CapabilityError, 5, "onnx-optimum backend cannot", model=bigrams, speculation=who)
    with edgeinfer.load(bigrams, threads=1) as model:
        with pytest.raises(CapabilityError, match="onnx-optimum backend cannot"):
            model.generate("Once", speculation=who)
        assert model.generate("Once", max_tokens=3, ignore_eos=True).usage.completion_tokens == 3


def test_trees_on_a_backend_of_chains(bigrams: Path, caplog: pytest.LogCaptureFixture) -> None:
    with load_eager(bigrams, threads=1) as model:
        for who in ("auto", "copy", "ngram", "recycle"):
            assert same(model, who, prompt="Once", ignore_eos=True).accepted > 0
            with pytest.raises(UsageError, match="cannot verify trees"):
                model.generate("Once", speculation=who, draft_width=2)
        # Without drafts there is nothing to verify.
        assert model.generate("Once", speculation="off", draft_width=2, max_tokens=3).speculation.mode == "off"


def test_what_a_drafter_needs_and_does_not_get(small_bundle: Path) -> None:
    for who in ("model", "hierarchical", "copy,model"):
        refused(UsageError, 2, "No draft model was given", model=small_bundle, speculation=who)
    refused(CapabilityError, 5, "cannot read one plane", model=small_bundle, speculation="bits")
    with edgeinfer.load(small_bundle, threads=1) as model:
        for who, says in (("model", "No draft model was given"), ("bits", "one plane")):
            with pytest.raises(EdgeInferError, match=says):
                model.generate(PROMPT, speculation=who)
        assert "bits" not in same(make_eager(model), "auto", max_tokens=10).per_drafter


LOADING: list[dict[str, Any]] = [
    {"speculation": "psychic"},
    {"speculation": ""},
    {"speculation": "copy,"},
    {"speculation": "auto,copy"},
    {"draft_max": 0},
    {"draft_max": -1},
    {"draft_max": 64},
    {"draft_max": 1000},
]


@pytest.mark.parametrize("option", LOADING, ids=str)
def test_options_out_of_range(small_bundle: Path, option: dict[str, Any]) -> None:
    refused(UsageError, 2, "Unknown drafter|draft_max", model=small_bundle, **option)
    with pytest.raises(UsageError):
        edgeinfer.plan(small_bundle, **option)


def test_the_registry_knows_every_drafter() -> None:
    assert tuple(KINDS) == DRAFTERS
