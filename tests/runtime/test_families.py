"""Every family of models gives transformers' logits on every backend: in any passes, in trees, after cuts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.runtime.models import feed
from tests.runtime.test_parity import (
    CAPACITY,
    DRAFT,
    MAKERS,
    OTHER,
    PARENTS,
    TEXT,
    assert_close,
    feed_in,
    feed_tree,
    path,
)

if TYPE_CHECKING:
    from tests.runtime.conftest import Family

pytestmark = pytest.mark.matrix


def test_logits_equal_transformers(family: Family) -> None:
    for maker in MAKERS.values():
        backend = maker(family.bundle, CAPACITY)
        for sizes in ([20], [7, 1, 9, 3], [1] * 20):
            backend.cache.trim(0)
            assert_close(feed_in(backend, TEXT, sizes), family.expected(TEXT))
            assert backend.cache.length == len(TEXT)
        for length in (9, 0):
            backend.cache.trim(length)
            assert_close(feed_in(backend, OTHER, [2, 5]), family.expected(TEXT[:length] + OTHER)[length:])
        backend.cache.trim(0)
        feed(backend, TEXT[:8])
        context = TEXT[:8]
        logits = feed_tree(backend, DRAFT, PARENTS)
        for node in range(len(DRAFT)):
            branch = [DRAFT[i] for i in path(PARENTS, node)]
            assert_close(logits[node], family.expected(context + branch)[-1])
        kept = path(PARENTS, 8)
        backend.cache.keep(8, kept)
        held = context + [DRAFT[i] for i in kept]
        assert_close(feed(backend, OTHER), family.expected(held + OTHER)[len(held) :])
        backend.close()
