"""Contexts: texts whose rows are made once, and stand before any prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.context_model import ContextModel
from edgeinfer.core.errors import CapabilityError, ContextLengthError, ModelError, PromptError, StorageError, UsageError
from edgeinfer.core.results import ContextUse, Placement
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.paged_cache import PagedCache
from edgeinfer.runtime.kv_cache.contexts import EditPart, parts_of_edit
from edgeinfer.runtime.kv_cache.prefix_cache import shared_length
from tests.edgeinfer.conftest import TEMPLATE
from tests.speculation import load_eager, random_bundle

pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
TEXTS = (
    "The little dog sat by the door and waited for the rain to stop.",
    "A cat that no one knew came to the house on a cold day in May.",
    "There was once a tree that wanted to see what is behind the hill.",
)
EDITED = TEXTS[0].replace("waited", "slept and waited again")


@pytest.fixture(autouse=True)
def own_cache(cache: Path) -> Path:
    """Rows are kept for one test alone."""
    return cache


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{number}.txt" for number in range(len(TEXTS))]
    for path, text in zip(paths, TEXTS, strict=True):
        path.write_text(text, "utf-8")
    return paths


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[edgeinfer.Model]:
    """A model of the same shape with other weights."""
    path = tmp_path_factory.mktemp("stranger")
    bundle = random_bundle(path, chat_template=TEMPLATE, max_position_embeddings=512, seed=1)
    with load_eager(bundle) as model:
        yield model


def cache_of(model: edgeinfer.Model) -> PagedCache:
    found = model._parts.sequence.cache
    assert isinstance(found, PagedCache)
    return found


def first_layer(model: edgeinfer.Model, stop: int) -> tuple[Floats, Floats]:
    """Keys and values of the first layer, which hang on tokens and positions alone."""
    return cache_of(model).read(0, 0, stop)


def whole(model: edgeinfer.Model, texts: Sequence[str], prompt: str) -> list[int]:
    """Tokens of contexts and prompt as one text."""
    ids, begin = model.tokenize(prompt), model.begin_ids
    prefix = begin if begin and ids[: len(begin)] == begin else model.tokenize_data("\n")
    rest = ids[len(begin) :] if prefix == begin else ids
    return [*prefix, *(token for text in texts for token in model.tokenize_data(text + "\n\n")), *rest]


def used(contexts: ContextModel, prompt: str = "And then") -> ContextUse:
    """Makes a reply; what it tells of its contexts."""
    found = contexts.generate(prompt, **OPTIONS).contexts
    assert found is not None
    return found


def test_one_context_gives_the_text_that_evaluating_all_gives(model: edgeinfer.Model, files: list[Path]) -> None:
    reply = model.with_contexts(files[:1]).generate("And then", temperature=0.8, seed=3, **OPTIONS)
    assert reply.contexts is not None and reply.contexts.lossless
    assert reply.contexts.evaluated == reply.contexts.tokens > 10
    assert reply.timings.cached_prompt_tokens > reply.contexts.tokens
    tokens = whole(model, TEXTS[:1], "And then")
    assert reply.usage.prompt_tokens == len(tokens)
    model.score([5, 6])
    again = model.generate(tokens, temperature=0.8, seed=3, **OPTIONS)
    assert again.token_ids == reply.token_ids
    assert again.contexts is None


def test_contexts_are_evaluated_once_and_go_in_any_order(model: edgeinfer.Model, files: list[Path]) -> None:
    first = model.with_contexts(files).generate("And then", **OPTIONS)
    assert first.contexts is not None and not first.contexts.lossless
    model.generate("Something else", **OPTIONS)
    again = model.with_contexts(files).generate("And then", **OPTIONS)
    assert again.token_ids == first.token_ids
    assert again.contexts is not None and again.contexts.evaluated == 0
    other = used(model.with_contexts(files[::-1]))
    assert (other.contexts, other.tokens, other.evaluated) == (3, first.contexts.tokens, 0)


def test_in_sequence_keys_are_turned_to_where_their_text_stands(model: edgeinfer.Model, files: list[Path]) -> None:
    tokens = whole(model, TEXTS, "And then")
    model.generate(tokens, **OPTIONS)
    expected = first_layer(model, len(tokens))
    model.with_contexts(files).generate("And then", **OPTIONS)
    for mine, theirs in zip(first_layer(model, len(tokens)), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)


def test_in_parallel_all_begin_behind_the_prefix(model: edgeinfer.Model, files: list[Path]) -> None:
    sizes = [len(model.tokenize_data(text + "\n\n")) for text in TEXTS]
    tokens = whole(model, TEXTS, "And then")
    model.with_contexts(files, placement="parallel").generate("And then", **OPTIONS)
    keys, _ = first_layer(model, len(tokens))
    longest = int(np.argmax(sizes))
    rest = len(tokens) - sum(sizes) - 1
    assert cache_of(model).shift == sum(sizes) - max(sizes)
    alone = whole(model, TEXTS[longest : longest + 1], "And then")
    model.generate(alone, **OPTIONS)
    assert cache_of(model).shift == 0
    expected, _ = first_layer(model, len(alone))
    start = 1 + sum(sizes[:longest])
    np.testing.assert_allclose(keys[:, start : start + max(sizes)], expected[:, 1 : 1 + max(sizes)], atol=2e-5)
    np.testing.assert_allclose(keys[:, -rest:], expected[:, -rest:], atol=2e-5)


@pytest.mark.parametrize("placement", ["sequence", "parallel"])
def test_drafts_change_nothing(small_bundle: Path, files: list[Path], placement: Placement) -> None:
    texts = []
    for speculation in ("off", "copy,ngram"):
        with edgeinfer.load(small_bundle, threads=1, speculation=speculation) as model:
            contexts = model.with_contexts(files, placement=placement)
            texts.append(contexts.generate("The little dog sat", max_tokens=40, ignore_eos=True).token_ids)
    assert texts[0] == texts[1]


def test_replies_side_by_side_are_those_one_after_the_other(
    small_bundle: Path, files: list[Path], tmp_path: Path
) -> None:
    """Contexts without a file yet, together with other replies and alone."""
    with edgeinfer.load(small_bundle, threads=1, parallel=3) as model:

        def reply(chosen: Sequence[Path], prompt: str) -> edgeinfer.TokenStream:
            if not chosen:
                return model.stream(prompt, **OPTIONS)
            kept = [edgeinfer.Context(path, rows=path.with_suffix(f".{len(chosen)}")) for path in chosen]
            return model.with_contexts(kept).stream(prompt, **OPTIONS)

        asked = [(files, "And then"), ((), "And then"), (files[:1], "The dog"), (files[1:], "And then"), ((), "A")]
        with closing(model.reply_batch(3)) as batch:
            together = batch.run([partial(reply, *each) for each in asked])
        evaluated = [None if each.contexts is None else each.contexts.evaluated > 0 for each in together]
        assert evaluated == [True, None, True, True, None]
        for (chosen, prompt), found in zip(asked, together, strict=True):
            assert reply(chosen, prompt).complete().token_ids == found.token_ids
        assert asyncio.run(_sent(model, files)) == model.with_contexts(files).chat().send("Hello", **OPTIONS).text


async def _sent(model: edgeinfer.Model, files: Sequence[Path]) -> str:
    return (await model.with_contexts(files).chat().asend("Hello", **OPTIONS)).text


def test_a_temperature_divides_scores_of_contexts_alone(model: edgeinfer.Model, files: list[Path]) -> None:
    rows = 1 + len(model.tokenize_data(TEXTS[0] + "\n\n"))
    model.with_contexts(files[:1]).generate("And then", **OPTIONS)
    keys, values = first_layer(model, rows)
    assert not used(model.with_contexts(files[:1], temperature=0.5)).lossless
    tempered, same = first_layer(model, rows)
    np.testing.assert_allclose(tempered[:, 1:], keys[:, 1:] * 2, atol=2e-5)
    np.testing.assert_array_equal(tempered[:, 0], keys[:, 0])
    np.testing.assert_array_equal(same, values)


def test_an_edit_evaluates_what_is_new_and_turns_the_rest(model: edgeinfer.Model, files: list[Path]) -> None:
    context = edgeinfer.Context(files[0], edits="turn")
    contexts = model.with_contexts([context])
    assert used(contexts).lossless
    files[0].write_text(EDITED, "utf-8")
    edited = used(contexts)
    assert 0 < edited.evaluated < edited.tokens / 3
    assert (edited.edited, edited.lossless) == (1, False)
    tokens = whole(model, [EDITED], "And then")
    mine = first_layer(model, len(tokens))
    model.generate(tokens, **OPTIONS)
    for ours, theirs in zip(mine, first_layer(model, len(tokens)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
    plain = used(model.with_contexts([files[0]]))
    assert plain.lossless and plain.evaluated == plain.tokens


def test_rows_that_were_turned_are_no_prefix_of_other_texts(small_bundle: Path, files: list[Path]) -> None:
    with load_eager(small_bundle, prefix_cache="20MB") as model:
        contexts = model.with_contexts([edgeinfer.Context(files[0], edits="turn")])
        contexts.generate("And then", **OPTIONS)
        files[0].write_text(EDITED, "utf-8")
        contexts.generate("And then", **OPTIONS)
        before, tokens = (whole(model, [text], "And then") for text in (TEXTS[0], EDITED))
        same = shared_length(np.array(before), np.array(tokens))
        assert model.generate(tokens, **OPTIONS).timings.cached_prompt_tokens <= same


def test_parts_of_an_edit_make_the_new_text() -> None:
    old = list(range(100))
    new = [*range(10), 500, 501, *range(20, 60), 502, *range(62, 66), 503, *range(70, 100)]
    parts = list(parts_of_edit(old, new))
    assert [token for part in parts for token in new[part.start : part.stop]] == new
    assert parts == [
        EditPart(0, 10, 0),
        EditPart(10, 12, None),
        EditPart(12, 52, 20),
        EditPart(52, 58, None),  # four tokens in it are too few to be turned
        EditPart(58, 88, 70),
    ]
    assert list(parts_of_edit([1, 2], [1, 2])) == [EditPart(0, 2, 0)]
    assert list(parts_of_edit([1, 1], [1, 1, 1])) == [EditPart(0, 2, 0), EditPart(2, 3, None)]
    assert list(parts_of_edit([1, 2, 3], [4])) == [EditPart(0, 1, None)]


def test_other_replies_know_nothing_of_contexts(model: edgeinfer.Model, files: list[Path]) -> None:
    tokens = whole(model, TEXTS, "And then")
    expected = model.generate(tokens, **OPTIONS)
    contexts = model.with_contexts(files, placement="parallel")
    contexts.generate("And then", **OPTIONS)
    after = model.generate(tokens, **OPTIONS)
    assert after.token_ids == expected.token_ids
    assert model.score(tokens).logprobs == pytest.approx(model.score(tokens).logprobs)


def test_a_conversation_goes_on_behind_contexts(model: edgeinfer.Model, files: list[Path]) -> None:
    chat = model.with_contexts(files).chat("Be brief.")
    first = chat.send("Who sat by the door?", **OPTIONS)
    second = chat.send("And who came?", **OPTIONS)
    assert second.contexts is not None and second.contexts.evaluated == 0
    assert second.timings.cached_prompt_tokens >= first.usage.prompt_tokens
    with pytest.raises(UsageError, match="without its cache"):
        chat.save(files[0].with_suffix(".session"))


def test_where_no_file_can_be_written_one_selection_is_in_memory(
    model: edgeinfer.Model, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StorageError("The disk is full.", "Make room.")

    monkeypatch.setattr("edgeinfer.context_model.keep_rows", refuse)
    for selected in (files[:1], files[1:2]):
        evaluated = []
        for _ in range(2):
            found = used(model.with_contexts(selected))
            evaluated.append(found.evaluated / found.tokens)
        assert evaluated == [1, 0]
    assert sum(each._holds_rows for each in model._context_models.values()) == 1


def test_texts_write_no_control_tokens(model: edgeinfer.Model, files: list[Path]) -> None:
    files[0].write_text("<s></s>" + TEXTS[0], "utf-8")
    begin = model.begin_ids[0]
    contexts = model.with_contexts(files[:1])
    contexts.generate("And then", **OPTIONS)
    (joined,) = contexts._joined.values()
    assert begin not in joined.tokens


def test_a_damaged_file_of_the_cache_is_made_again(model: edgeinfer.Model, files: list[Path], own_cache: Path) -> None:
    model.with_contexts(files).generate("And then", **OPTIONS)
    kept = sorted((own_cache / "edgeinfer" / "contexts").iterdir())
    assert len(kept) == len(files)
    kept[0].write_bytes(kept[0].read_bytes()[:-100])
    again = used(model.with_contexts(files))
    assert 0 < again.evaluated < again.tokens


def test_files_that_cannot_be_used_are_refused_in_one_line(
    model: edgeinfer.Model, stranger: edgeinfer.Model, files: list[Path], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.session"
    context = edgeinfer.Context(files[0], rows=rows)
    model.with_contexts([context]).generate("And then", **OPTIONS)
    size = len(rows.read_bytes())
    with pytest.raises(ModelError, match="is a context of another model") as refused:
        stranger.with_contexts([context]).generate("And then", **OPTIONS)
    assert refused.value.hint
    saved = rows.read_bytes()
    for data in (saved[:-100], saved[:40], b"", b"hello", saved[:-5] + b"xxxxx"):
        rows.write_bytes(data)
        with pytest.raises(UsageError) as wrong:
            model.with_contexts([context]).generate("And then", **OPTIONS)
        assert "\n" not in wrong.value.message
        assert wrong.value.hint == "Remove it, and the context is evaluated again."
    model.chat().save(rows)
    with pytest.raises(UsageError, match="keeps no context"):
        model.with_contexts([context]).generate("And then", **OPTIONS)
    rows.unlink()
    again = used(model.with_contexts([context]))
    assert again.evaluated == again.tokens
    assert len(rows.read_bytes()) == size


def test_texts_that_cannot_be_used_are_refused(model: edgeinfer.Model, files: list[Path], tmp_path: Path) -> None:
    files[0].write_bytes(b"\xff no text")
    files[1].write_text(" \n", "utf-8")
    files[2].write_text(TEXTS[2] * 60, "utf-8")
    for path, error in (
        (files[0], PromptError),
        (files[1], PromptError),
        (tmp_path, PromptError),
        (tmp_path / "none", PromptError),
        (files[2], ContextLengthError),
    ):
        with pytest.raises(error):
            model.with_contexts([path]).generate("And then", **OPTIONS)
    for options in ({"placement": "beside"}, {"temperature": 0.0}):
        with pytest.raises(UsageError, match="out of range"):
            model.with_contexts(files, **options)
    with pytest.raises(UsageError, match="out of range"):
        model.with_contexts([])
    with pytest.raises(UsageError, match="out of range"):
        edgeinfer.Context(files[0], edits="guess")  # type: ignore[arg-type]


def test_a_backend_without_pages_says_so(small_bundle: Path, files: list[Path]) -> None:
    with (
        edgeinfer.load(small_bundle, threads=1, native=False) as model,
        pytest.raises(CapabilityError, match="cannot put contexts together"),
    ):
        model.with_contexts(files).generate("And then", **OPTIONS)
