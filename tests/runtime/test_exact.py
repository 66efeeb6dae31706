"""With exact passes, logits and caches are the same bits however a text is cut into passes, alone or in a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeinfer.bundle.geometry import PAGED_KV
from edgeinfer.bundle.layouts import LAYOUTS
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.backends.cache import CacheSnapshot
from edgeinfer.runtime.backends.contract import Pass
from edgeinfer.runtime.backends.onnx.graph_backend import GraphBackend
from edgeinfer.runtime.backends.onnx.paged_backend import PagedBackend
from edgeinfer.runtime.backends.paged_cache import PagedCache
from tests.alone import Alone, restore
from tests.kernel import require_kernel
from tests.runtime.models import bundle_of, depths, feed, make_graph_backend

pytestmark = pytest.mark.matrix

TEXT = np.random.default_rng(3).integers(0, 320, 24)
CONTEXT = 8
# A main branch of five rows, then other branches.
PARENTS = np.array([-1, 0, 1, 2, 3, 0, 5, 2, -1, 8])
SIDE = np.array([9, 17, 300, 5, 42])
# Widths of 128 and 256 take blocks of 32, 64 and 128.
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
EXPORTS = {
    **{
        f"{bits}-bit-{group}": ExportConfig(bits, group, keep_small=False, calibration="none")
        for bits in (4, 8)
        for group in (32, 128)
    },
    "8-bit-64": ExportConfig(8, 64, keep_small=False),
    "2-bit-128": ExportConfig(2, 128, keep_small=False, calibration="none"),
    # Small layers stay wider: 8 bits here, float32 in the one below.
    "4-bit-wider": ExportConfig(4, 128, calibration="none"),
    "8-bit-wider": ExportConfig(8, 128),
    "float32": ExportConfig(32),
}


@dataclass(frozen=True)
class Exact:
    """An exact backend and what it gives for TEXT in one pass."""

    backend: Alone[GraphBackend]
    logits: NDArray[np.float32]  # (S, V)
    cache: CacheSnapshot


@pytest.fixture(
    scope="module",
    params=[(e, layout, t) for e in EXPORTS for layout in LAYOUTS for t in (1, 2)],
    ids=lambda p: f"{p[0]}-{p[1]}-threads-{p[2]}",
)
def exact(request: pytest.FixtureRequest) -> Iterator[Exact]:
    export, layout, threads = request.param
    if layout == "native":
        require_kernel()
    bundle = bundle_of("qwen2", replace(EXPORTS[export], layout=layout), **SIZES)
    backend = make_graph_backend(bundle, 64, threads=threads, layout=layout)
    logits = feed(backend, TEXT)
    yield Exact(backend, logits, backend.cache.snapshot())
    backend.close()


def same_cache(actual: CacheSnapshot, expected: CacheSnapshot) -> bool:
    assert (actual.length, actual.kv, actual.scales) == (expected.length, expected.kv, expected.scales)
    pairs = zip((*actual.keys, *actual.values), (*expected.keys, *expected.values), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


@given(cuts=st.sets(st.integers(1, len(TEXT) - 1)), wanted=st.lists(st.integers(0, len(TEXT) - 1), max_size=3))
@example(cuts=set(range(1, len(TEXT))), wanted=[])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_chunking_gives_the_same_bits(exact: Exact, cuts: set[int], wanted: list[int]) -> None:
    exact.backend.cache.trim(0)
    logits = np.concatenate([feed(exact.backend, chunk) for chunk in np.split(TEXT, sorted(cuts))])
    assert np.array_equal(logits, exact.logits)
    assert same_cache(exact.backend.cache.snapshot(), exact.cache)
    # Nor does it matter which rows are asked for.
    exact.backend.cache.trim(0)
    few = exact.backend.forward(Pass(TEXT, np.arange(len(TEXT)), np.array(wanted, np.int64))).logits
    assert np.array_equal(few, exact.logits[wanted])


def test_trees_and_copies_give_the_same_bits(exact: Exact) -> None:
    backend = exact.backend
    backend.cache.trim(0)
    feed(backend, TEXT[:CONTEXT])
    # The next tokens as the main branch, with other branches.
    tokens = np.concatenate([TEXT[CONTEXT : CONTEXT + 5], SIDE])
    places = CONTEXT + np.array(depths(PARENTS))
    branch = backend.forward(Pass(tokens, places, np.arange(len(tokens)), tree=PARENTS)).logits[:5]
    assert np.array_equal(branch, exact.logits[CONTEXT : CONTEXT + 5])
    backend.cache.keep(CONTEXT, [0, 1, 2])
    assert np.array_equal(feed(backend, TEXT[CONTEXT + 3 :]), exact.logits[CONTEXT + 3 :])
    assert same_cache(backend.cache.snapshot(), exact.cache)
    # Rows are rewritten as they are, cut by an edit, and computed again.
    backend.cache.rewrite(lambda layer, keys, values: (keys, values))
    assert same_cache(backend.cache.snapshot(), exact.cache)
    backend.cache.rewrite(lambda layer, keys, values: (keys[:, :CONTEXT], values[:, :CONTEXT]))
    assert backend.cache.length == CONTEXT
    assert np.array_equal(feed(backend, TEXT[CONTEXT:]), exact.logits[CONTEXT:])
    # They come back whole and in pieces.
    first, second = backend.cache.snapshot(0, CONTEXT), backend.cache.snapshot(CONTEXT)
    backend.cache.trim(CONTEXT)
    restore(backend.cache, exact.cache)
    assert same_cache(backend.cache.snapshot(), exact.cache)
    restore(backend.cache, first)
    backend.cache.append(second)
    assert same_cache(backend.cache.snapshot(), exact.cache)


VOCABULARY = 320
# Behind the second prompt paths cross a page, behind the third a block of 256 positions, and many rows a block's end.
PROMPTS = (3, 60, 250, 511)
CAPACITY = 640
LATENT = {"kv_lora_rank": 48, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24}
MODELS: dict[str, tuple[str, ExportConfig, dict[str, Any]]] = {
    "qwen2, 4 bits": ("qwen2", ExportConfig(4, 128, keep_small=False, calibration="none"), {}),
    "windows of 6, 8 bits": ("Mistral", ExportConfig(8, 32, keep_small=False), {}),
    "norms of heads, float32": ("qwen3", ExportConfig(32), {}),
    "latent attention, 4 bits": ("Youtu", ExportConfig(4, 32, keep_small=False, calibration="none"), LATENT),
}
STEPS = 8

Row = tuple[int, ...]  # the tokens of a path behind the prompt
Floats = NDArray[np.float32]


@dataclass
class Text:
    """A text that grows: the rows of its cache behind the prompt, by their paths; a chain has each row on its path."""

    cache: PagedCache
    rows: list[Row] = field(default_factory=list)
    places: list[tuple[int, ...]] = field(default_factory=list)  # of each row, the rows on its path

    @property
    def is_chain(self) -> bool:
        return all(place == tuple(range(number + 1)) for number, place in enumerate(self.places))


class Company:
    """A backend, the prompt that all texts begin with, and what chains of their own give."""

    def __init__(self, backend: Alone[PagedBackend], prompt: NDArray[np.int64]) -> None:
        self.backend, self.start = backend, len(prompt)
        backend.cache.clear()
        backend.forward(Pass(prompt, np.arange(len(prompt)), np.zeros(0, np.int64)))
        self.prompt = backend.cache.fork()
        self._known: dict[Row, Floats] = {}

    def text(self) -> Text:
        return Text(self.prompt.fork())

    def alone(self, row: Row) -> Floats:  # (V,)
        """The logits behind the prompt and these tokens, which are evaluated in one pass of their own."""
        if row not in self._known:
            cache, size = self.prompt.fork(), len(row)
            batch = Pass(np.array(row), self.start + np.arange(size), np.arange(size))
            (output,) = self.backend.forward_together([(cache, batch)])
            for number in range(size):
                self._known.setdefault(row[: number + 1], output.logits[number].copy())
        return self._known[row]

    def feed(self, drawn: Sequence[tuple[Text, Pass, list[Row], list[tuple[int, ...]]]]) -> None:
        """Evaluates rows of several texts in one pass and compares every one."""
        outputs = self.backend.forward_together([(text.cache, batch) for text, batch, _, _ in drawn])
        logits = [output.logits.copy() for output in outputs]
        for (text, _, rows, places), found in zip(drawn, logits, strict=True):
            for row, got in zip(rows, found, strict=True):
                np.testing.assert_array_equal(got, self.alone(row))
            text.rows += rows
            text.places += places


def draw(company: Company, text: Text, random: np.random.Generator, size: int) -> tuple[Any, ...]:
    """A chain or a tree of so many rows behind a text, of whose last tree a path stays."""
    if not text.is_chain:
        keep(company, text, random)
    first = len(text.rows)
    rows, places = list(text.rows), list(text.places)
    kind = random.choice(["chain", "tree"])
    parents: list[int] = []
    for number in range(size):
        newest = first + number - 1
        parent = newest if kind == "chain" else int(random.integers(first - 1, newest + 1))
        token = int(random.integers(VOCABULARY))
        rows.append((*(rows[parent] if parent >= 0 else ()), token))
        places.append((*(places[parent] if parent >= 0 else ()), first + number))
        parents.append(parent)
    tokens = np.array([row[-1] for row in rows[first:]])
    positions = np.array([company.start + len(row) - 1 for row in rows[first:]])
    batch = Pass(tokens, positions, np.arange(size))
    if kind == "tree":
        batch = replace(batch, tree=np.array([parent - first if parent >= first else -1 for parent in parents]))
    return text, batch, rows[first:], places[first:]


def keep(company: Company, text: Text, random: np.random.Generator) -> None:
    """Keeps the path of one row."""
    chosen = int(random.integers(len(text.rows)))
    kept = text.places[chosen]
    text.cache.keep(company.start, list(kept))
    text.rows = [text.rows[place] for place in kept]
    text.places = [tuple(range(place + 1)) for place in range(len(kept))]


def change(company: Company, texts: list[Text], random: np.random.Generator) -> None:
    """Keeps a branch, takes rows back, forks, or comes back to what was there."""
    number = int(random.integers(len(texts)))
    text = texts[number]
    what = random.choice(["keep", "keep", "trim", "fork", "restore"])
    if what == "keep" and text.rows:
        keep(company, text, random)
    elif what == "trim":
        length = int(random.integers(len(text.rows) + 1))
        text.cache.trim(company.start + length)
        del text.rows[length:], text.places[length:]
    elif what == "fork":
        texts.append(Text(text.cache.fork(), list(text.rows), list(text.places)))
        del texts[: len(texts) - 4]
    elif what == "restore":
        kept_rows, kept_places, snapshot = list(text.rows), list(text.places), text.cache.snapshot()
        company.feed([draw(company, text, random, 3)])
        restore(text.cache, snapshot)
        text.rows, text.places = kept_rows, kept_places


@pytest.fixture(
    scope="module",
    params=[(model, kv, threads) for model in MODELS for kv in PAGED_KV for threads in (1, 2)],
    ids=lambda p: f"{p[0]}-{p[1]}-threads-{p[2]}",
)
def backend(request: pytest.FixtureRequest) -> Iterator[Alone[PagedBackend]]:
    require_kernel()
    model, kv, threads = request.param
    variant, config, settings = MODELS[model]
    bundle = bundle_of(variant, config, **SIZES, **settings, max_position_embeddings=CAPACITY)
    backend = Alone(PagedBackend(bundle, CAPACITY, threads=threads, kv=kv, pages=200), CAPACITY)
    yield backend
    backend.close()


def test_a_row_depends_on_its_path_alone(backend: Alone[PagedBackend]) -> None:
    random = np.random.default_rng(23)
    for length in PROMPTS:
        prompt = random.integers(0, VOCABULARY, length)
        company = Company(backend, prompt)
        texts = [company.text() for _ in range(3)]
        for _ in range(STEPS):
            together = random.permutation(len(texts))[: random.integers(1, len(texts) + 1)]
            sizes = random.choice([1, 2, 3, 5, 9], len(together))
            company.feed([draw(company, texts[n], random, int(s)) for n, s in zip(together, sizes, strict=True)])
            change(company, texts, random)
