"""The prefix cache: against a dictionary of all prefixes, under its cap, and by texts that it must not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeinfer.bundle.geometry import KVLayer
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import BackendError
from edgeinfer.runtime.backends.cache import CacheSnapshot, CopiedRows
from edgeinfer.runtime.backends.paged_cache import PagedCache
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.decoding.sequence import Sequence as Text
from edgeinfer.runtime.kv_cache.context_shift.registry import POLICIES, make_context_shift
from edgeinfer.runtime.kv_cache.prefix_cache import PrefixCache
from edgeinfer.runtime.paging.codecs import find_row_codec
from edgeinfer.runtime.paging.layout import PAGE, PageLayout
from edgeinfer.runtime.paging.pool import PagePool
from tests.alone import Alone
from tests.runtime.models import make_graph_backend
from tests.runtime.test_sequence import generate
from tests.speculation import random_bundle
from tests.tables import each_row

LAYERS, HEADS, HEAD = 2, 3, 4
TOKEN = 4 + 2 * LAYERS * HEADS * HEAD * 4
UNBOUNDED = 1 << 40
reply = partial(generate, count=20)


def rows_of(tokens: Sequence[int], start: int = 0, stop: int | None = None) -> CacheSnapshot:
    """Rows that depend on their token and on all before it, as a model's do."""
    sums = [hash(tuple(tokens[: place + 1])) % 1000 for place in range(len(tokens))][start:stop]
    row = np.arange(HEADS * HEAD, dtype=np.float32).reshape(HEADS, 1, HEAD)
    arrays = [row + np.array(sums, np.float32)[None, :, None] * (layer + 1) for layer in range(2 * LAYERS)]
    return CopiedRows(len(sums), tuple(arrays[:LAYERS]), tuple(arrays[LAYERS:]))


def offer(cache: PrefixCache, tokens: Sequence[int], wanted: Sequence[int] = ()) -> None:
    cache.offer(tokens, lambda start, stop: rows_of(tokens, start, stop), wanted)


def assert_same(found: CacheSnapshot, expected: CacheSnapshot) -> None:
    for mine, theirs in zip((*found.keys, *found.values), (*expected.keys, *expected.values), strict=True):
        assert np.array_equal(mine, theirs)


def assert_right(cache: PrefixCache, tokens: Sequence[int], start: int = 0) -> None:
    """Asserts that the cache gives these tokens' rows."""
    stop = cache.match(tokens)
    at = start
    for piece in cache.take(tokens, start, stop):
        assert_same(piece, rows_of(tokens, at, at + piece.length))
        at += piece.length
    assert at == max(start, stop)


def bytes_in(cache: PrefixCache) -> int:
    return sum(array.nbytes for array in arrays_in(cache))


def arrays_in(cache: PrefixCache) -> Iterator[NDArray[Any]]:
    for span in cache._spans:
        assert span.rows is not None
        yield from (span.tokens, *span.rows.keys, *span.rows.values)


def owned(cache: PrefixCache) -> bool:
    """Whether no array keeps rows alive that are not its own."""
    return all(a.base is None or a.base.nbytes == a.nbytes for a in arrays_in(cache))


texts = st.lists(st.integers(0, 2), max_size=12)


@given(st.lists(texts, max_size=8), texts, st.integers(0, 12))
@settings(deadline=None)
def test_unbounded_it_knows_every_prefix(offered: list[list[int]], asked: list[int], start: int) -> None:
    cache, prefixes = PrefixCache(UNBOUNDED), {tuple[int, ...]()}
    for tokens in offered:
        offer(cache, tokens)
        prefixes |= {tuple(tokens[:end]) for end in range(len(tokens) + 1)}
    assert cache.match(asked) == max(end for end in range(len(asked) + 1) if tuple(asked[:end]) in prefixes)
    assert_right(cache, asked, min(start, cache.match(asked)))
    assert cache.nbytes == bytes_in(cache) == TOKEN * (len(prefixes) - 1)
    assert owned(cache)


@given(st.lists(st.tuples(texts, texts, st.booleans()), max_size=12), st.integers(0, 30), texts)
@settings(deadline=None)
def test_capped_it_never_lies_and_never_exceeds(
    asked: list[tuple[list[int], list[int], bool]], room: int, last: list[int]
) -> None:
    cache = PrefixCache(room * TOKEN + TOKEN // 2)
    for tokens, wanted, evicts in asked:
        known = cache.match(wanted)
        offer(cache, tokens, wanted)
        assert cache.match(wanted) >= known
        assert cache.nbytes == bytes_in(cache) <= room * TOKEN
        assert_right(cache, wanted)
        if evicts:
            cache.evict(room * TOKEN // 2)
            assert cache.nbytes == bytes_in(cache) <= room * TOKEN // 2
    assert_right(cache, last)
    assert owned(cache)
    cache.evict()
    assert cache.nbytes == bytes_in(cache) == cache.match(last) == 0


def test_the_longest_unused_goes_first_and_ends_before_beginnings() -> None:
    cache = PrefixCache(12 * TOKEN)
    system, one, two, three = [0] * 4, [1] * 4, [2] * 4, [3] * 4
    offer(cache, system + one)
    offer(cache, system + two)
    list(cache.take(system + one, 0, 8))
    offer(cache, system + three)
    assert [cache.match(system + end) for end in (one, two, three)] == [8, 4, 8]


def test_what_does_not_fit_is_kept_from_its_beginning() -> None:
    cache = PrefixCache(5 * TOKEN)
    offer(cache, list(range(9)))
    assert cache.match(range(9)) == 5
    offer(cache, list(range(9)))
    assert cache.nbytes == 5 * TOKEN


def test_of_a_paged_cache_it_holds_pages_within_its_cap() -> None:
    """Conversations come back in any order, with the rows they had; a page that two of them share is counted once."""
    codec, rng = find_row_codec("float32"), np.random.default_rng(0)
    layout = PageLayout((KVLayer(HEADS, HEAD, HEAD),) * LAYERS, codec, codec)
    most = 9
    pool, kept = PagePool(layout, 6 + most), PrefixCache(most * layout.page_bytes + 4 * 64 * most)
    cache, current, back = PagedCache(pool, 6 * PAGE), list[int](), 0
    segments = [[10 * number + int(t) for t in rng.integers(0, 10, 30 + 17 * number)] for number in range(6)]
    for turn in range(60):
        wanted = [token for number in rng.permutation(6)[: rng.integers(1, 4)] for token in segments[number]]
        same = [a == b for a, b in zip(current, wanted, strict=False)]
        shared = same.index(False) if False in same else len(same)
        kept.offer(current, cache.snapshot, wanted)
        assert kept.nbytes <= kept.cap
        cache.trim(shared)
        list(map(cache.append, kept.take(wanted, shared, max(kept.match(wanted), shared))))
        back += cache.length - shared
        cache.prepare(len(wanted) - cache.length)
        for layer in range(LAYERS):
            rows = rows_of(wanted, cache.length)
            cache.write(layer, cache.length, rows.keys[layer], rows.values[layer])
        cache.length, current = len(wanted), wanted
        assert_same(cache.snapshot(), rows_of(wanted))
        if turn % 20 == 19:
            kept.evict(3 * layout.page_bytes)
            assert kept.nbytes <= 3 * layout.page_bytes
    assert back > 1000
    kept.evict()
    assert (kept.nbytes, pool.used) == (0, -(-cache.nbytes // layout.page_bytes))


def test_nothing_is_kept_without_a_cap() -> None:
    cache = PrefixCache(0)
    cache.offer([1, 2, 3], lambda start, stop: pytest.fail("copied for nothing"))
    assert cache.nbytes == cache.match([1, 2, 3]) == 0


def test_no_memory_for_a_copy_drops_all_and_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def copy(start: int, stop: int) -> CacheSnapshot:
        if stop > start:
            raise MemoryError
        return rows_of([])

    cache = PrefixCache(UNBOUNDED)
    offer(cache, [1, 2, 3])
    cache.offer([4, 5, 6], copy)
    assert cache.nbytes == 0
    assert "Not enough memory" in caplog.text
    offer(cache, [4, 5, 6])
    assert cache.match([4, 5, 6]) == 3


MAKERS: dict[str, Callable[[Bundle], Alone[Any]]] = {
    "onnx": lambda bundle: make_graph_backend(bundle, 300, pages=64),
    "onnx, int8": lambda bundle: make_graph_backend(bundle, 300, kv="int8", pages=64),
    "onnx, int4": lambda bundle: make_graph_backend(bundle, 300, kv="int4", pages=64),
    "reference": lambda bundle: Alone(ReferenceBackend(bundle, 300), 300),
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A random 4-bit model."""
    return open_bundle(random_bundle(tmp_path_factory.mktemp("model"), max_position_embeddings=400))


_FURTHER = [pytest.param(name, marks=pytest.mark.more_cases) for name in MAKERS if name != "onnx"]


@pytest.fixture(scope="module", params=["onnx", *_FURTHER])
def backend(request: pytest.FixtureRequest, bundle: Bundle) -> Iterator[Alone[Any]]:
    """The model, run in every way."""
    made = MAKERS[request.param](bundle)
    yield made
    made.close()


def conversations(engine: Text, rounds: int) -> tuple[list[list[int]], list[int]]:
    """Greedy replies of three conversations by turns, two of which begin alike, and how much was found each time."""
    chance = np.random.default_rng(7)
    system = chance.integers(2, 300, 60).tolist()
    talks = [[*system, 5, 6], [*system, 7, 8], chance.integers(2, 300, 30).tolist()]
    replies, cached = [], []
    for _ in range(rounds):
        for talk in talks:
            talk += chance.integers(2, 300, 5).tolist()
            replies.append(reply(engine, talk))
            talk += replies[-1]
            cached.append(engine.prefill.cached)
    return replies, cached


@pytest.mark.parametrize("backend", MAKERS, indirect=True)
def test_replies_equal_recomputed_ones(backend: Alone[Any]) -> None:
    plain, few = conversations(Text(backend.model, backend.cache, 16), 3)
    kept, most = conversations(Text(backend.model, backend.cache, 16, prefixes=PrefixCache(UNBOUNDED)), 3)
    assert kept == plain
    assert few[3:] == [0, 60, 0, 0, 60, 0]
    # All but the last token, which is chosen and not fed, and what was asked since.
    assert most[3:] == [86, 86, 54, 111, 111, 79]


@pytest.mark.parametrize("tokens", [10, 70, 150])
def test_replies_are_the_same_under_any_cap(backend: Alone[Any], tokens: int) -> None:
    reply(Text(backend.model, backend.cache, 16), [2])
    token = 4 + backend.cache.snapshot(0, 1).nbytes
    engine = Text(backend.model, backend.cache, 16, prefixes=PrefixCache(tokens * token))
    assert conversations(engine, 3)[0] == conversations(Text(backend.model, backend.cache, 16), 3)[0]
    assert 0 < engine.prefix_bytes <= tokens * token
    engine.evict_prefixes(5 * token)
    assert engine.prefix_bytes <= 5 * token


@each_row("name", POLICIES)
def test_rows_that_an_overflow_changed_are_not_kept(bundle: Bundle, name: str) -> None:
    backend = make_graph_backend(bundle, 96)

    def engine(prefix_bytes: int) -> Text:
        return Text(
            backend.model,
            backend.cache,
            16,
            make_context_shift(name, bundle, backend.model, backend.cache),
            PrefixCache(prefix_bytes),
        )

    plain, kept = engine(0), engine(UNBOUNDED)
    assert conversations(kept, 3)[0] == conversations(plain, 3)[0]
    assert plain.lost.events > 0
    assert kept.prefix_bytes > 0
    backend.close()


def test_a_few_lost_tokens_are_not_kept(backend: Alone[Any]) -> None:
    engine = Text(backend.model, backend.cache, 16, prefixes=PrefixCache(UNBOUNDED))
    prompt = list(range(2, 40))
    generate(engine, prompt, 10)
    generate(engine, [*prompt, 99, 98], 10)
    assert engine.prefix_bytes == 0


def test_rows_move_from_one_engine_to_another(backend: Alone[Any]) -> None:
    engine, prompt = Text(backend.model, backend.cache, 16, prefixes=PrefixCache(UNBOUNDED)), list(range(2, 60))
    expected = reply(engine, prompt)
    tokens = engine.cached_tokens
    pieces = [backend.cache.snapshot(start, min(start + 10, 77)) for start in range(0, 77, 10)]
    assert (len(tokens), pieces[-1].length) == (77, 7)
    engine.forget()
    reply(engine, list(range(60, 90)))
    engine.adopt(tokens, iter(pieces))
    assert engine.cached_tokens == tokens
    assert (reply(engine, prompt), engine.prefill.cached) == (expected, len(prompt) - 1)
    # What was there before is still known.
    reply(engine, list(range(60, 90)))
    assert engine.prefill.cached == 29


def test_rows_of_another_model_leave_an_empty_cache(backend: Alone[Any]) -> None:
    engine = Text(backend.model, backend.cache, 16)
    reply(engine, [2, 3, 4])
    with pytest.raises(BackendError):
        engine.adopt([1, 2, 3], [rows_of([1, 2, 3])])
    assert engine.cached_tokens == ()
    assert engine.cache.length == 0
