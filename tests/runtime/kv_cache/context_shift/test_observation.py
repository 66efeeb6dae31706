"""What policies take, which models they refuse, and how much rows that stand for several tokens weigh."""

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
from edgeinfer.core.options.load import OVERFLOWS
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.backends.contract import Backend, Pass
from edgeinfer.runtime.backends.onnx.concat import ConcatBackend
from edgeinfer.runtime.backends.paged_cache import PagedCache
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.kv_cache.context_shift.policy import ContextShiftPolicy
from edgeinfer.runtime.kv_cache.context_shift.registry import POLICIES, make_context_shift, planned_bytes
from tests.alone import Alone
from tests.factories import make_bigram_bundle
from tests.runtime.models import bundle_of, make_graph_backend

if TYPE_CHECKING:
    from tests.runtime.conftest import Family

TOKENS = (np.arange(40) * 37 + 11) % 320


def shift_of(name: str, bundle: Bundle, backend: Backend, capacity: int) -> ContextShiftPolicy | None:
    return make_context_shift(name, bundle, backend, backend.new_sequence(capacity))


@pytest.fixture(scope="module")
def quantized() -> Bundle:
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    return bundle_of(
        "qwen2", ExportConfig(4, 128, keep_small=False, calibration="none"), **sizes, max_position_embeddings=512
    )


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
    assert ("stop", *POLICIES, "auto") == OVERFLOWS


def test_refuses_unsuitable_models(make_family: Callable[..., Family], tmp_path: Path) -> None:
    full, windowed = make_family("llama"), make_family("mistral")
    assert shift_of("stop", full.bundle, ReferenceBackend(full.bundle, 8), 8) is None
    with pytest.raises(UsageError, match="context of at least 32 tokens, not 8"):
        shift_of("window", full.bundle, ReferenceBackend(full.bundle, 8), 8)
    backend = Alone(ReferenceBackend(windowed.bundle, 40), 40)
    assert make_context_shift("window", windowed.bundle, backend.model, backend.cache) is not None
    with pytest.raises(UsageError, match="last 6 tokens"):
        make_context_shift("cluster", windowed.bundle, backend.model, backend.cache)
    decoder = full.bundle.manifest.decoder
    assert decoder is not None
    odd = dataclasses.replace(decoder, qk_norm=True, norm_after_rope=True)
    bundle = dataclasses.replace(full.bundle, manifest=dataclasses.replace(full.bundle.manifest, decoder=odd))
    for name in POLICIES:
        with pytest.raises(UsageError, match="has norm_after_rope=True, which overflow"):
            shift_of(name, bundle, ReferenceBackend(full.bundle, 40), 40)
    opaque = open_bundle(make_bigram_bundle(tmp_path / "bigrams"))
    for name in POLICIES:
        with pytest.raises(UsageError, match="does not describe"):
            shift_of(name, opaque, ConcatBackend(opaque, 40), 40)
    assert planned_bytes("cluster", None, 100) == planned_bytes("stop", full.bundle.manifest.decoder, 100) == 0
