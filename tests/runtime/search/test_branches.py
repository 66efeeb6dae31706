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
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.core.results import SearchUse
from edgeinfer.export.options import ExportConfig, StaticOptions
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend, KVCache, Pass, PassCancelledError
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.backends.static.backend import StaticBackend
from edgeinfer.runtime.decoding.sequence import Sequence, run_alone
from edgeinfer.runtime.sampling.sampler import LogitsProcessor, Sampler
from edgeinfer.runtime.search.branches import Branch, Branches
from edgeinfer.runtime.search.strategy import Feeder, SearchParts
from tests.alone import Alone
from tests.kernel import require_kernel
from tests.runtime.models import bundle_of, make_graph_backend
from tests.runtime.search.fakes import PROMPT, Letters, LettersBackend, V, letters_logits
from tests.runtime.test_states import DELTA
from tests.tables import each_row
from tests.windowed import stream_layers

CAPACITY = 64


def parts_of(backend: Any) -> SearchParts:
    config = ReplyOptions()
    sampler = Sampler(LogitsProcessor(config, V, 0), PROMPT)
    text = Sequence(getattr(backend, "model", backend), backend.cache, 4)
    return SearchParts(text, sampler, config, frozenset(), Letters(), continues=False)


def feeder_of(backend: Any) -> Feeder:
    return Feeder(parts_of(backend), SearchUse("", False))


def fed_prompt(capacity: int = 200) -> LettersBackend:
    backend = LettersBackend(capacity)
    run(backend, backend.cache, [PROMPT])
    return backend


def run(backend: Backend, cache: KVCache, parts: list[list[int]]) -> list[Floats]:  # of (V,)
    """The logits behind each part of a text, which has the cache to itself."""
    cache.trim(0)
    found = []
    for part in parts:
        places = np.arange(len(part)) + cache.length
        (output,) = backend.forward([(cache, Pass(np.array(part), places, np.array([len(part) - 1])))])
        found.append(output.logits[0].copy())
    return found


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_each_branch_is_a_text_of_its_own(data: st.DataObject) -> None:
    backend = fed_prompt(60)
    feeder = feeder_of(backend)
    branches, statistics = Branches(feeder), feeder.use
    texts: dict[Branch, list[int]] = {branches.begin(): list(PROMPT) for _ in range(2)}
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
            logits = run_alone(branches.feed(fed))
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


def streamed() -> Alone[Any]:
    return stream_layers(make_graph_backend(model("qwen2", bits=8), CAPACITY), 1)


STATIC = {"static": StaticOptions(context=CAPACITY, chunk=12, widths=(1, 2, 4))}
MAKERS: dict[str, Callable[[], Alone[Any]]] = {
    "portable": lambda: make_graph_backend(model("llama", layout="portable"), CAPACITY, layout="portable"),
    "portable, 4 bits, windows": lambda: make_graph_backend(
        model("mistral", bits=4, layout="portable"), CAPACITY, layout="portable"
    ),
    "portable, not exact": lambda: make_graph_backend(
        model("qwen3", layout="portable"), CAPACITY, layout="portable", exact=False
    ),
    "streamed": streamed,
    "paged": lambda: make_graph_backend(model("llama"), CAPACITY),
    "static": lambda: Alone(StaticBackend(model("llama", **STATIC), CAPACITY), CAPACITY),
    "reference": lambda: Alone(ReferenceBackend(model("llama"), CAPACITY), CAPACITY),
    "reference, hybrid": lambda: Alone(
        ReferenceBackend(bundle_of("Qwen3_5", ExportConfig(32), **DELTA), CAPACITY), CAPACITY
    ),
    "reference, float16": lambda: Alone(ReferenceBackend(model("llama"), CAPACITY, kv="float16"), CAPACITY),
}


@each_row("maker", MAKERS)
def test_branches_have_the_bits_of_texts_alone(maker: str) -> None:
    if maker in ("paged", "streamed"):
        require_kernel()
    backend = MAKERS[maker]()
    check_branches(backend)
    backend.close()


def check_branches(backend: Alone[Any]) -> None:
    """Forks, drops and feeds, and one branch that goes on in the cache of the text itself."""
    prompt, random = [5, 9, 2, 7, 7, 30, 1], np.random.default_rng(3)
    run(backend.model, backend.cache, [prompt])
    branches = Branches(feeder_of(backend))
    parts: dict[Branch, list[list[int]]] = {branches.begin(): [prompt] for _ in range(2)}
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
        for (branch, part), row in zip(fed, run_alone(branches.feed(fed)), strict=True):
            parts[branch].append(part)
            found[branch].append(row.copy())
        assert backend.cache.length == sum(map(len, parts[main]))
    # It goes on with what the cache holds.
    parts[main].append([3])
    place = np.array([backend.cache.length])
    found[main].append(backend.forward(Pass(np.array([3]), place, np.array([0]))).logits[0].copy())
    for branch, fed_alone in parts.items():
        alone = run(backend.model, backend.cache, fed_alone)
        for row, expected in zip(found[branch], alone, strict=True):
            assert len(row) == 0 or np.array_equal(row, expected)


def test_texts_are_bound_by_the_context_and_by_memory_for_copies() -> None:
    backend = fed_prompt(len(PROMPT) + 4)
    branches = Branches(feeder_of(backend))
    one, two = branches.begin(), branches.begin()
    run_alone(branches.feed([(one, [3, 4]), (two, [5])]))
    assert branches.room == 1
    with pytest.raises(BackendError, match="does not fit"):
        run_alone(branches.feed([(two, [1, 1])]))
    branches.drop(one)
    assert branches.room == 3
    (row,) = run_alone(branches.feed([(two, [6, 0])]))
    assert np.array_equal(row, letters_logits([*PROMPT, 5, 6, 0]))
    row_bytes = backend.cache.snapshot(0, 1).nbytes
    for rows, room in ((0, 0), (3, 3), (4, 4), (9, 4)):
        spare = replace(parts_of(backend), spare_bytes=rows * row_bytes)
        assert spare.room() == (room, "context" if rows >= 4 else "memory")


def test_a_cancelled_reply_runs_no_pass() -> None:
    backend = fed_prompt()
    feeder = feeder_of(backend)
    branches = Branches(feeder)
    for waiting in (branches.feed([(branches.begin(), [1])]), feeder.feed(1)):
        next(waiting)
        with pytest.raises(PassCancelledError):
            waiting.throw(PassCancelledError("The reply was cancelled."))
    assert backend.cache.length == len(PROMPT)


def test_a_chain_is_fed_a_few_tokens_at_a_time() -> None:
    backend = fed_prompt()
    feeder, tokens = feeder_of(backend), [i % V for i in range(40)]
    seen: list[int] = []

    def see(index: int, row: Floats) -> None:
        assert np.array_equal(row, letters_logits([*PROMPT, *tokens[: index + 1]]))
        seen.append(index)

    run_alone(feeder.chain(tokens, see))
    assert seen == list(range(40))
    assert (feeder.use.passes, feeder.use.rows) == (3, 40)
