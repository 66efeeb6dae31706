"""Branches of a tree have the bits of a chain, on every layout the main one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeinfer.bundle.layouts import Layout
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Pass
from edgeinfer.runtime.speculation.drafters.contract import Draft, Guess, main_branch_first
from tests.alone import Alone
from tests.kernel import require_kernel
from tests.runtime.models import bundle_of, make_graph_backend

VOCABULARY = 320
PAST = 21
TEXT = np.random.default_rng(1).integers(0, VOCABULARY, PAST)


@st.composite
def trees(draw: st.DrawFn, most: int = 8) -> Draft:
    """Any tree, its nodes in any order that has parents before children."""
    parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(1, most)))]
    tokens = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=len(parents), max_size=len(parents)))
    return Draft(tuple(Guess(t, 0) for t in tokens), tuple(parents), tuple(f"node {i}" for i in range(len(parents))))


def paths(draft: Draft) -> list[tuple[list[int], str]]:
    return sorted((draft.path(node), draft.sources[node]) for node in range(len(draft)))


def main_branch_size(draft: Draft) -> int:
    """Nodes of the chain in front."""
    length = 0
    while length < len(draft) and draft.parents[length] == length - 1:
        length += 1
    return length


@settings(deadline=None)
@given(trees())
def test_the_main_branch_comes_first_and_the_tree_stays_the_same(draft: Draft) -> None:
    ordered = main_branch_first(draft)
    assert paths(ordered) == paths(draft)
    assert all(parent < node for node, parent in enumerate(ordered.parents))
    firsts, node = [], -1
    while children := draft.children(node):
        node = children[0]
        firsts.append(draft.sources[node])
    assert list(ordered.sources[: len(firsts)]) == firsts
    assert main_branch_size(ordered) == len(firsts)
    sides = [source for source in draft.sources if source not in firsts]
    assert list(ordered.sources[len(firsts) :]) == sides


@pytest.fixture(scope="module", params=["native", "portable"])
def backend(request: pytest.FixtureRequest) -> Iterator[Alone[Any]]:
    """A small model with a sliding window, in blocks of 128."""
    layout: Layout = request.param
    if layout == "native":
        require_kernel()
    config = ExportConfig(4, 128, keep_small=False, layout=layout, calibration="none")
    backend = make_graph_backend(bundle_of("qwen2-windows", config, hidden_size=128, intermediate_size=256), 64)
    yield backend
    backend.close()


def feed(backend: Alone[Any], root: int, draft: Draft) -> Floats:  # (S, V)
    """One pass over root and draft."""
    start = backend.cache.length
    positions = start + np.array([0, *(draft.depth(node) + 1 for node in range(len(draft)))])
    tree = np.array([-1, *(parent + 1 for parent in draft.parents)])
    tokens = np.array([root, *draft.tokens])
    return backend.forward(Pass(tokens, positions, np.arange(len(tokens)), tree=tree)).logits.copy()


@given(trees(), st.integers(1, PAST), st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_branch_has_the_bits_of_a_chain(backend: Alone[Any], draft: Draft, past: int, data: st.DataObject) -> None:
    """The main branch everywhere, any other where attention reads pages."""
    draft = main_branch_first(draft)
    branch = list(range(1 + main_branch_size(draft)))
    if backend.capabilities.paged:
        branch, node = [], data.draw(st.integers(-1, len(draft) - 1))
        while node >= 0:
            branch.append(node + 1)
            node = draft.parents[node]
        branch = [0, *branch[::-1]]
    backend.cache.trim(0)
    backend.forward(Pass(TEXT[:past], np.arange(past), np.zeros(0, np.int64)))
    logits = feed(backend, 5, draft)[branch]
    backend.cache.keep(past, branch)
    cache = backend.cache.snapshot()
    backend.cache.trim(past)
    rows = np.arange(len(branch))
    chain = backend.forward(Pass(np.array([5, *draft.tokens])[branch], rows + past, rows)).logits
    assert np.array_equal(logits, chain)
    plain = backend.cache.snapshot()
    pairs = zip((*cache.keys, *cache.values), (*plain.keys, *plain.values), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
