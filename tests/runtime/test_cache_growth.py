"""What a backend computes while the buffers of its cache grow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeinfer.bundle.layouts import PORTABLE
from edgeinfer.bundle.store import Bundle
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.backends.contract import ForwardInput
from edgeinfer.runtime.backends.onnx.backend import OnnxBackend
from tests.runtime.models import bundle_of

TEXT = np.random.default_rng(1).integers(0, 320, 300)


@pytest.fixture
def bundle() -> Bundle:
    return bundle_of("qwen2", ExportConfig(4, 32, keep_small=False, layout=PORTABLE), hidden_size=128)


def run(backend: OnnxBackend, tokens: NDArray[np.int64]) -> NDArray[np.float32]:  # (S,) -> (S, V)
    rows = np.arange(len(tokens))
    return backend.forward(ForwardInput(tokens, rows + backend.cache.length, rows)).logits.copy()


def test_a_grown_cache_holds_what_it_held(bundle: Bundle) -> None:
    whole, parts = (OnnxBackend(bundle, 600) for _ in range(2))
    expected = run(whole, TEXT)
    assert np.array_equal(np.concatenate([run(parts, part) for part in np.split(TEXT, [250, 251, 256, 257])]), expected)
    assert parts.nbytes()["kv"] == 512 * bundle.manifest.geometry.kv_bytes_per_token()


def test_growth_without_memory_leaves_the_backend_usable(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, other = (OnnxBackend(bundle, 600) for _ in range(2))
    for each in (backend, other):
        run(each, TEXT[:256])
    zeros, left = np.zeros, iter(range(3))

    def scarce(shape: Any, *args: Any) -> Any:
        if isinstance(shape, tuple) and len(shape) == 4 and next(left, None) is None:
            raise MemoryError
        return zeros(shape, *args)

    with monkeypatch.context() as patch:
        patch.setattr(np, "zeros", scarce)
        with pytest.raises(MemoryError):
            run(backend, TEXT[256:])
    assert backend.cache.length == 256
    assert np.array_equal(run(backend, TEXT[256:]), run(other, TEXT[256:]))
