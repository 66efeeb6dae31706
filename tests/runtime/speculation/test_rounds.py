"""Speculation gives the text of plain decoding: the same tokens, logits and cache, bit for bit, whoever drafts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from edgeinfer.bundle.layouts import Layout
from edgeinfer.core.options.reply import ReplyOptions
from tests.kernel import require_kernel
from tests.runtime.models import make_graph_backend
from tests.runtime.speculation.subjects import EXPORTS, GREEDY, PENALISED, PROMPT, SAMPLED, Subject, Text, bundles

# Each drafter, subject and sampling once: the pairs, eighty of them, are among the further cases.
pytestmark = pytest.mark.matrix(strength=1)

DRAFTERS = (
    ("copy",),
    ("ngram",),
    ("recycle",),
    ("model",),
    ("exit",),
    ("bits",),
    ("medusa",),
    ("hydra",),
    ("copy", "model", "hydra"),
    ("copy", "ngram", "recycle", "model", "exit", "bits"),
)
LAYOUTS: dict[str, tuple[Layout, ...]] = {
    **dict.fromkeys(EXPORTS, ("native", "portable")),
    "float32": ("portable",),
    "5-bit": ("native",),
}


@pytest.fixture(
    scope="module",
    params=[(e, layout, t) for e in EXPORTS for layout in LAYOUTS[e] for t in (1, 2)],
    ids=lambda p: f"{p[0]}-{p[1]}-threads-{p[2]}",
)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    export, layout, threads = request.param
    if layout == "native":
        require_kernel()
    target, drafter = bundles(export, layout)
    backend = make_graph_backend(target, 64, threads=threads)
    yield Subject(target, backend, lambda: make_graph_backend(drafter, 64, exact=False))
    backend.close()


def assert_same(actual: Text, expected: Text) -> None:
    assert actual.tokens == expected.tokens
    for position in range(len(PROMPT), len(PROMPT) + len(expected.tokens)):
        assert np.array_equal(actual.logits[position], expected.logits[position]), f"logits of position {position}"
    assert actual.cache.length == expected.cache.length
    pairs = zip((*actual.cache.keys, *actual.cache.values), (*expected.cache.keys, *expected.cache.values), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("config", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("drafters", DRAFTERS, ids="+".join)
def test_the_text_is_that_of_plain_decoding_bit_for_bit(
    subject: Subject, drafters: tuple[str, ...], config: ReplyOptions
) -> None:
    plain = subject.plain(config)
    drafted = subject.decode(config, drafters)
    assert drafted.rounds is not None
    assert drafted.rounds.speculation.drafted > 0
    assert_same(drafted, plain)


@pytest.mark.parametrize("drafters", [("recycle",), ("model",), ("hydra",)], ids="+".join)
def test_trees_are_exact_where_side_branches_are_not_built_on(subject: Subject, drafters: tuple[str, ...]) -> None:
    plain = subject.plain(SAMPLED)
    drafted = subject.decode(SAMPLED, drafters, width=3)
    assert drafted.rounds is not None
    assert drafted.rounds.speculation.drafted > drafted.rounds.speculation.rounds
    assert_same(drafted, plain)
