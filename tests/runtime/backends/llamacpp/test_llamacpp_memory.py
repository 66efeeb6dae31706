"""Planned memory of a file against llama.cpp's own count, and rows that are filled up."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.bundle.geometry import LLAMA_KV
from edgeinfer.bundle.gguf.library import listening
from edgeinfer.bundle.layouts import NATIVE
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.runtime.backends.contract import Pass
from edgeinfer.runtime.backends.llamacpp import memory
from edgeinfer.runtime.backends.llamacpp.backend import LlamaCppBackend
from edgeinfer.runtime.backends.llamacpp.context import RowSteps
from edgeinfer.runtime.backends.llamacpp.factory import GgufMemory, LlamaCppFactory
from edgeinfer.runtime.planning.facts import Configuration
from tests.alone import Alone
from tests.runtime.backends.llamacpp.conftest import Q4_0, Q8_0
from tests.runtime.backends.llamacpp.models import Shape, quantized, realigned, write_gguf

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")
pytestmark = pytest.mark.gguf

MIB = 1024**2
DENSE, SPARSE = Shape(head_dim=64, ffn=512, vocab=2048), Shape(head_dim=64, experts=8, used=2, ffn=256)
Make = Callable[..., Bundle]


def allocated(bundle: Bundle, **options: Any) -> dict[str, float]:
    """MiB of the buffers that llama.cpp names while a backend is made."""
    lines: list[str] = []
    with listening(lines.append):
        Alone(LlamaCppBackend(bundle, 256, **options), 256).close()
    found = re.findall(r"(\S+) +(model|KV|compute|output) +buffer size = +([\d.]+) MiB", "".join(lines))
    return {f"{kind} {what}": float(size) for kind, what, size in found}


@pytest.mark.parametrize("weights", ["packed", "mapped", "experts"])
@pytest.mark.parametrize("file_type", [Q4_0, Q8_0], ids=["Q4_0", "Q8_0"])
@pytest.mark.parametrize("shape", [DENSE, SPARSE], ids=["dense", "experts"])
def test_packed_copies(gguf_bundle: Make, shape: Shape, file_type: int, weights: str) -> None:
    bundle = gguf_bundle(shape, file_type=file_type)
    found = allocated(bundle, weights=weights)
    packed = sum(size for name, size in found.items() if name.endswith("model") and "Mapped" not in name)
    # Printed with two digits, each tensor aligned.
    assert abs(memory.packed_bytes(bundle.gguf, weights) / MIB - packed) < 0.03
    total = memory.packed_bytes(bundle.gguf, weights) + memory.mapped_bytes(bundle.gguf, weights)
    assert total >= bundle.gguf.tensor_bytes - bundle.gguf.by_name["token_embd.weight"].nbytes


@pytest.mark.parametrize("alignment", [8, 16])
@pytest.mark.parametrize("file_type", [0, Q4_0], ids=["F32", "Q4_0"])
def test_what_cannot_be_mapped_is_copied(tmp_path: Path, alignment: int, file_type: int) -> None:
    """llama.cpp ends the process where tensors of a mapped file do not lie at multiples of 32."""
    path = write_gguf(tmp_path / "model.gguf", Shape(head_dim=64, vocab=320))
    path = quantized(path, file_type) if file_type else path
    usual, bundle = open_bundle(path), open_bundle(realigned(path, alignment))
    assert usual.gguf.mappable and not bundle.gguf.mappable
    assert LlamaCppFactory().weights_modes(bundle, NATIVE) == ("packed",)
    found = allocated(bundle)
    assert not any("Mapped" in name for name in found)
    held = sum(size for name, size in found.items() if name.endswith("model"))
    plan = GgufMemory(bundle).weights(Configuration(256, 64, "float16", "packed", 0, (), 0, "model"))
    assert plan.anonymous["weights_packed"] / MIB == pytest.approx(held, abs=0.03) and not plan.file["weights_mapped"]
    one, other = Alone(LlamaCppBackend(usual, 64, threads=1), 64), Alone(LlamaCppBackend(bundle, 64, threads=1), 64)
    given = Pass(np.arange(9), np.arange(9), np.arange(9))
    assert np.array_equal(one.forward(given).logits, other.forward(given).logits)
    one.close()
    other.close()


@pytest.mark.parametrize("kv", list(LLAMA_KV))
@pytest.mark.parametrize("shape", [DENSE, SPARSE, Shape(head_dim=128, heads=2, kv_heads=1)], ids=str)
def test_buffers_are_as_large_as_said(gguf_bundle: Make, shape: Shape, kv: str) -> None:
    bundle = gguf_bundle(shape)
    for capacity, chunk, rows in ((40, 16, 9), (700, 64, 4), (1500, 128, 16)):
        backend = Alone(LlamaCppBackend(bundle, capacity, kv=kv, chunk=chunk, draft_rows=rows), capacity)
        sizes = backend.nbytes()
        backend.close()
        assert memory.kv_bytes(bundle.gguf, kv, capacity) == pytest.approx(sizes["kv"], abs=0.02 * MIB)
        said = memory.compute_bytes(bundle.gguf, kv, capacity, max(chunk, rows + memory.PADDING), rows)
        assert sizes["buffers"] <= said <= 2 * sizes["buffers"] + MIB


def test_rows_are_filled_up_where_weights_are_packed(gguf_bundle: Make) -> None:
    gguf = gguf_bundle(DENSE, file_type=Q4_0).gguf
    assert (
        RowSteps.of(gguf, "mapped") == RowSteps(0, 0) == RowSteps.of(gguf_bundle(SPARSE, file_type=Q4_0).gguf, "packed")
    )
    # The head of a file of this type is Q6_K, which is not packed everywhere.
    assert 0.5 < RowSteps.of(gguf, "packed").layers <= 1
    sizes, added = range(1, 9), {1.0: (0, 2, 1, 0, 0, 2, 1, 0), 0.5: (0, 0, 1, 0, 0, 0, 1, 0), 0.1: (0,) * 8}
    for share, wanted in added.items():
        assert tuple(RowSteps(share, 0).padding(size, size)[0] for size in sizes) == wanted
    assert [RowSteps(1, 1).padding(6, outputs)[1] for outputs in range(7)] == [0, 0, 2, 1, 0, 0, 2]
    assert RowSteps(1, 1).padding(13, 13) == (memory.PADDING, memory.PADDING)
    assert RowSteps(1, 0).padding(6, 6) == (2, 0) and RowSteps(1, 1).padding(7, 2) == (1, 1)
