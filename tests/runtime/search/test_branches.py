"""Branches of a text: each is a text of its own, whatever was forked, dropped or fed next to it, on every backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.core.errors import BackendError
from edgeinfer.core.options.reply import GenerationConfig
from edgeinfer.export.options import ExportConfig, StaticOptions
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend, Pass, PassCancelledError
from edgeinfer.runtime.backends.onnx.graph_backend import GraphBackend
from edgeinfer.runtime.backends.onnx.windowed import StreamedBackend
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.backends.static.backend import StaticBackend
from edgeinfer.runtime.decoding.strategy import SearchStatistics
from edgeinfer.runtime.sampling.processor import LogitsProcessor
from edgeinfer.runtime.sampling.sampler import Sampler
from edgeinfer.runtime.search.branches import Branch, Branches
from edgeinfer.runtime.search.strategy import Passes, SearchParts
from tests.kernel import require_kernel
from tests.runtime.models import bundle_of, make_graph_backend
from tests.runtime.search.fakes import PROMPT, Letters, LettersBackend, V, letters_logits
from tests.runtime.test_states import DELTA
from tests.tables import each_row

CAPACITY = 64


def parts_of(backend: Backend, cancelled: bool = False) -> SearchParts:
    config = GenerationConfig()
    sampler = Sampler(LogitsProcessor(config, V, 0), PROMPT)
    given: dict[str, Any] = {"fed": tuple, "chunk": 4, "continues": False}
    return SearchParts(backend, sampler, config, frozenset(), Letters(), cancelled=lambda: cancelled, **given)


def fed_prompt(capacity: int = 200) -> LettersBackend:
    backend = LettersBackend(capacity)
    run(backend, [PROMPT])
    return backend


def run(backend: Backend, parts: list[list[int]]) -> list[Floats]:  # of (V,)
    """The logits behind each part of a text, which has the cache to itself."""
    backend.cache.trim(0)
    found = []
    for part in parts:
        places = np.arange(len(part)) + backend.cache.length
        output = backend.forward(Pass(np.array(part), places, np.array([len(part) - 1])))
        found.append(output.logits[0].copy())
    return found


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_each_branch_is_a_text_of_its_own(data: st.DataObject) -> None:
    backend, statistics = fed_prompt(60), SearchStatistics()
    branches = Branches(Passes(parts_of(backend), statistics))
    texts: dict[Branch, list[int]] = {branches.begin(): list(PROMPT), branches.begin(apart=True): []}
    for _ in range(data.draw(st.integers(1, 25))):
        act = data.draw(st.sampled_from(["feed", "feed", "feed", "fork", "drop"]))
        some = list(texts)
        if act == "fork" and len(texts) < 6:
            parent = data.draw(st.sampled_from(some))
            texts[branches.fork(parent)] = list(texts[parent])
        elif act == "drop" and len(texts) > 1:
            gone = data.draw(st.sampled_from(some))
            branches.drop(gone)
            del texts[gone]
        elif act == "feed":
            chosen = data.draw(st.lists(st.sampled_from(some), unique=True, min_size=1))
            fed = [(b, data.draw(st.lists(st.integers(0, V - 1), min_size=1, max_size=3))) for b in chosen]
            if branches.room < sum(len(part) for _, part in fed):
                continue
            logits = branches.feed(fed)
            for (branch, part), row in zip(fed, logits, strict=True):
                texts[branch] += part
                assert np.array_equal(row, letters_logits(texts[branch]))
            assert backend.held == PROMPT, "the reply's own rows are there between two passes"
    assert statistics.passes == len(backend.passes) - 1
    assert statistics.rows == sum(backend.passes) - len(PROMPT)
    branches.end()
    assert (backend.held, branches.live) == (PROMPT, ())


def model(name: str, **config: Any) -> Any:
    asked: dict[str, Any] = {"bits": 32, "calibration": "none"} | config
    return bundle_of(name, ExportConfig(**asked))


def streamed() -> Backend:
    inner = make_graph_backend(model("qwen2", bits=8), CAPACITY)
    assert isinstance(inner, GraphBackend)
    return StreamedBackend(inner, 1)


STATIC = {"static": StaticOptions(context=CAPACITY, chunk=12, widths=(1, 2, 4))}
MAKERS: dict[str, Callable[[], Backend]] = {
    "portable": lambda: make_graph_backend(model("llama", layout="portable"), CAPACITY, layout="portable"),
    "portable, 4 bits, windows": lambda: make_graph_backend(
        model("mistral", bits=4, layout="portable"), CAPACITY, layout="portable"
    ),
    "portable, not exact": lambda: make_graph_backend(
        model("qwen3", layout="portable"), CAPACITY, layout="portable", exact=False
    ),
    "streamed": streamed,
    "paged": lambda: make_graph_backend(model("llama"), CAPACITY),
    "static": lambda: StaticBackend(model("llama", **STATIC), CAPACITY),
    "reference": lambda: ReferenceBackend(model("llama"), CAPACITY),
    "reference, hybrid": lambda: ReferenceBackend(bundle_of("Qwen3_5", ExportConfig(32), **DELTA), CAPACITY),
    "reference, float16": lambda: ReferenceBackend(model("llama"), CAPACITY, kv="float16"),
}


@each_row("maker", MAKERS)
def test_branches_have_the_bits_of_texts_alone(maker: str) -> None:
    if maker in ("paged", "streamed"):
        require_kernel()
    backend = MAKERS[maker]()
    check_branches(backend)
    backend.close()


def check_branches(backend: Backend) -> None:
    """Forks, drops and feeds, and one branch that goes on in the cache of the text itself."""
    prompt, random = [5, 9, 2, 7, 7, 30, 1], np.random.default_rng(3)
    run(backend, [prompt])
    branches = Branches(Passes(parts_of(backend), SearchStatistics()))
    parts: dict[Branch, list[list[int]]] = {branches.begin(): [prompt], branches.begin(apart=True): []}
    main = branches.begin_trunk()
    parts[main] = [prompt]
    found: dict[Branch, list[Floats]] = {branch: [np.zeros(0, np.float32)] * len(fed) for branch, fed in parts.items()}
    for step in range(12):
        if step in (2, 6):
            forked = branches.fork(branches.live[0])
            parts[forked], found[forked] = list(parts[branches.live[0]]), list(found[branches.live[0]])
        if step == 8:
            branches.drop(branches.live[0])
        fed = [(b, random.integers(0, 40, 1 + (step == 4)).tolist()) for b in branches.live[step % 2 :]]
        for (branch, part), row in zip(fed, branches.feed(fed), strict=True):
            parts[branch].append(part)
            found[branch].append(row.copy())
        assert backend.cache.length == sum(map(len, parts[main]))
    # It goes on with what the cache holds.
    parts[main].append([3])
    place = np.array([backend.cache.length])
    found[main].append(backend.forward(Pass(np.array([3]), place, np.array([0]))).logits[0].copy())
    for branch, fed_alone in parts.items():
        alone = run(backend, fed_alone)
        for row, expected in zip(found[branch], alone, strict=True):
            assert len(row) == 0 or np.array_equal(row, expected)


def test_texts_are_bound_by_the_context_and_by_memory_for_copies() -> None:
    backend = fed_prompt(len(PROMPT) + 4)
    branches = Branches(Passes(parts_of(backend), SearchStatistics()))
    one, two = branches.begin(), branches.begin()
    branches.feed([(one, [3, 4]), (two, [5])])
    assert branches.room == 1
    with pytest.raises(BackendError, match="does not fit"):
        branches.feed([(two, [1, 1])])
    branches.drop(one)
    assert branches.room == 3
    (row,) = branches.feed([(two, [6, 0])])
    assert np.array_equal(row, letters_logits([*PROMPT, 5, 6, 0]))
    row_bytes = backend.cache.snapshot(0, 1).nbytes
    for rows, room in ((0, 0), (3, 3), (4, 4), (9, 4)):
        spare = replace(parts_of(backend), spare_bytes=rows * row_bytes)
        assert spare.room() == (room, "context" if rows >= 4 else "memory")
        apart = Branches(Passes(spare, SearchStatistics()))
        apart.begin(apart=True)
        assert apart.room == max(0, min(4, rows - len(PROMPT)))


def test_a_cancelled_reply_runs_no_pass() -> None:
    backend = fed_prompt()
    parts = parts_of(backend, cancelled=True)
    branches = Branches(Passes(parts, SearchStatistics()))
    with pytest.raises(PassCancelledError):
        branches.feed([(branches.begin(), [1])])
    with pytest.raises(PassCancelledError):
        Passes(parts, SearchStatistics()).feed(1)
    assert backend.cache.length == len(PROMPT)


def test_a_chain_is_fed_as_it_is_asked_for() -> None:
    backend, statistics = fed_prompt(), SearchStatistics()
    tokens = [i % V for i in range(40)]
    rows = Passes(parts_of(backend), statistics).chain(tokens)
    for count in range(1, 21):
        assert np.array_equal(next(rows), letters_logits([*PROMPT, *tokens[:count]]))
    assert (statistics.passes, statistics.rows) == (2, 32)
