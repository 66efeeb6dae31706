"""Attention of the latest tokens, against a pass that shows it; observing changes nothing."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import UsageError
from edgeinfer.core.options.load import MERGING, OVERFLOWS
from edgeinfer.export.options import ExportConfig
from edgeinfer.nn import arithmetic
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend, Pass
from edgeinfer.runtime.backends.onnx.concat import ConcatBackend
from edgeinfer.runtime.backends.paged_cache import PagedCache
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.kv_cache.context_shift.merge import Observer, attention
from edgeinfer.runtime.kv_cache.context_shift.policy import ContextShiftPolicy
from edgeinfer.runtime.kv_cache.context_shift.registry import POLICIES, make_context_shift, planned_bytes
from tests.alone import Alone
from tests.factories import make_bigram_bundle
from tests.runtime.models import bundle_of, make_graph_backend

if TYPE_CHECKING:
    from tests.runtime.conftest import Family

TOKENS = (np.arange(40) * 37 + 11) % 320
LATEST = 7


def test_observes_the_attention_of_a_pass(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = family.bundle.manifest.decoder
    assert spec is not None
    if spec.window_size:
        pytest.skip("policies that observe refuse layers with windows")
    backend = Alone(ReferenceBackend(family.bundle, 40), 40)
    seen: list[Floats] = []
    whole = arithmetic.softmax

    def watched(scores: Floats) -> Floats:
        seen.append(whole(scores))
        return seen[-1]

    monkeypatch.setattr(arithmetic, "softmax", watched)
    backend.forward(Pass(TOKENS, np.arange(40), np.zeros(0, np.int64)))
    shown = [weights[:, :, -LATEST:] for weights in seen]  # L x (H, g, w, n)
    monkeypatch.undo()
    before = backend.cache.snapshot()
    queries = Observer(family.bundle, backend.model, backend.cache).queries(TOKENS[-LATEST:].tolist())
    for query, keys, weights in zip(queries, before.keys, shown, strict=True):
        may_see = np.minimum(40 - np.arange(40), LATEST)
        expected = weights.sum(axis=(1, 2)) / (weights.shape[1] * may_see)
        np.testing.assert_allclose(attention(query, keys), expected, atol=1e-5)
    after = backend.cache.snapshot()
    assert after.length == before.length
    for mine, theirs in zip((*after.keys, *after.values), (*before.keys, *before.values), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)


def shift_of(name: str, bundle: Bundle, backend: Backend, capacity: int) -> ContextShiftPolicy | None:
    return make_context_shift(name, bundle, backend, backend.new_sequence(capacity))


@pytest.fixture(scope="module")
def quantized() -> Bundle:
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    return bundle_of(
        "qwen2", ExportConfig(4, 128, keep_small=False, calibration="none"), **sizes, max_position_embeddings=512
    )


def test_looking_leaves_every_bit_of_the_cache(quantized: Bundle) -> None:
    bundle = quantized
    backend = make_graph_backend(bundle, 40)
    # In several passes, as a text comes.
    for start, stop in ((0, 13), (13, 14), (14, 40)):
        backend.forward(Pass(TOKENS[start:stop], np.arange(start, stop), np.zeros(0, np.int64)))
    before = backend.cache.snapshot()
    for size in (2, 7, 16):
        Observer(bundle, backend.model, backend.cache).queries(TOKENS[-size:].tolist())
        after = backend.cache.snapshot()
        assert after.length == before.length == 40
        pairs = zip((*after.keys, *after.values), (*before.keys, *before.values), strict=True)
        assert all(np.array_equal(mine, theirs) for mine, theirs in pairs)
    backend.close()


@pytest.mark.parametrize("capacity", [64, 512])
@pytest.mark.parametrize("name", POLICIES)
def test_an_overflow_takes_no_more_than_planned(quantized: Bundle, name: str, capacity: int) -> None:
    bundle = quantized
    backend = make_graph_backend(bundle, capacity)
    policy = make_context_shift(name, bundle, backend.model, backend.cache)
    assert policy is not None
    tokens = np.arange(capacity) % 320
    peaks = []
    for _ in range(3):
        start = backend.cache.length
        backend.forward(Pass(tokens[start:], np.arange(start, capacity), np.zeros(0, np.int64)))
        tracemalloc.start()
        policy.make_room(tokens.tolist())
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    planned = planned_bytes(name, bundle.manifest.decoder, capacity)
    # Fixed costs of a few small arrays and of onnxruntime's values are in the process's own share.
    assert max(peaks) <= planned + 64 * 1024
    if capacity == 512:
        assert planned <= 3 * max(peaks)
    backend.close()


def test_merged_rows_weigh_as_much_as_their_tokens(quantized: Bundle) -> None:
    bundle, capacity = quantized, 100
    backend = make_graph_backend(bundle, capacity, weighed=True)
    assert isinstance(backend.cache, PagedCache)
    policy = make_context_shift("cluster", bundle, backend.model, backend.cache)
    assert policy is not None
    tokens, (group,) = np.arange(300) * 37 % 320, backend.cache.pool.layout.groups
    fed = 0
    while fed < 290:
        start = backend.cache.length
        rows = capacity - start
        backend.forward(Pass(tokens[fed : fed + rows], np.arange(start, capacity), np.zeros(0, np.int64)))
        fed += rows
        policy.make_room(tokens[:fed].tolist())
        pages = backend.cache.pool.memory.reshape(-1, backend.cache.pool.layout.page_bytes)
        weights = group.weights(pages)[backend.cache.table[:2]]  # (pages, L, H, 64)
        lying = np.concatenate(list(weights), axis=-1)[..., : backend.cache.length]
        np.testing.assert_allclose(np.exp(lying).sum(axis=-1), fed, rtol=1e-5)
    backend.cache.trim(0)
    backend.forward(Pass(tokens[:40], np.arange(40), np.zeros(0, np.int64)))
    assert not group.weights(pages)[backend.cache.table[0], ..., :40].any()
    backend.close()


def test_one_policy_for_each_name() -> None:
    assert {name for name, kind in POLICIES.items() if kind.reorders} == set(MERGING)
    assert ("stop", *POLICIES, "auto") == OVERFLOWS


def test_refuses_unsuitable_models(make_family: Callable[..., Family], tmp_path: Path) -> None:
    full, windowed = make_family("llama"), make_family("mistral")
    assert shift_of("stop", full.bundle, ReferenceBackend(full.bundle, 8), 8) is None
    with pytest.raises(UsageError, match="context of at least 32 tokens, not 8"):
        shift_of("window", full.bundle, ReferenceBackend(full.bundle, 8), 8)
    backend = Alone(ReferenceBackend(windowed.bundle, 40), 40)
    assert make_context_shift("window", windowed.bundle, backend.model, backend.cache) is not None
    for name in ("merge", "cluster"):
        with pytest.raises(UsageError, match="last 6 tokens"):
            make_context_shift(name, windowed.bundle, backend.model, backend.cache)
    decoder = full.bundle.manifest.decoder
    assert decoder is not None
    for part, refused in (("norm_after_rope", list(POLICIES)), ("sinks", ["merge"])):
        given: dict[str, Any] = {part: True}
        odd = dataclasses.replace(decoder, qk_norm=True, **given)
        bundle = dataclasses.replace(full.bundle, manifest=dataclasses.replace(full.bundle.manifest, decoder=odd))
        for name in refused:
            with pytest.raises(UsageError, match=f"has {part}=True, which overflow"):
                shift_of(name, bundle, ReferenceBackend(full.bundle, 40), 40)
    opaque = open_bundle(make_bigram_bundle(tmp_path / "bigrams"))
    for name in POLICIES:
        with pytest.raises(UsageError, match="does not describe"):
            shift_of(name, opaque, ConcatBackend(opaque, 40), 40)
    assert planned_bytes("merge", None, 100) == planned_bytes("stop", full.bundle.manifest.decoder, 100) == 0


def test_observing_needs_single_layers(make_family: Callable[..., Family], monkeypatch: pytest.MonkeyPatch) -> None:
    family = make_family("llama")
    backend = Alone(ReferenceBackend(family.bundle, 40), 40)
    monkeypatch.setattr(backend.model, "capabilities", type(backend.capabilities)(False, True, True))
    assert make_context_shift("cluster", family.bundle, backend.model, backend.cache) is not None
    with pytest.raises(UsageError, match="single layers"):
        make_context_shift("merge", family.bundle, backend.model, backend.cache)
