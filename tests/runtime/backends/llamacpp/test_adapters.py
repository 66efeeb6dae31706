"""A GGUF adapter gives the logits of the model that it is merged into, and is changed between passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeinfer.bundle.opening import open_bundle
from edgeinfer.core.errors import AdapterError
from edgeinfer.runtime.backends.contract import Pass
from edgeinfer.runtime.backends.llamacpp.backend import LlamaCppBackend
from tests.alone import Alone
from tests.runtime.backends.llamacpp.models import Shape, write_gguf

pytestmark = pytest.mark.gguf

RANK, ALPHA = 4, 8.0
CHANGED = {"blk.0.attn_q.weight": (128, 128), "blk.1.ffn_down.weight": (128, 96)}
TOKENS = np.array([5, 17, 250, 9, 120, 77, 31])


def write_adapter(path: Path, seed: int) -> dict[str, NDArray[np.float32]]:
    """An adapter of random factors; what it adds to the weights."""
    import gguf

    writer, draw, added = gguf.GGUFWriter(path, "llama"), np.random.default_rng(seed), {}
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", ALPHA)
    for name, (outputs, inputs) in CHANGED.items():
        a, b = draw.normal(0, 0.2, (RANK, inputs)), draw.normal(0, 0.2, (outputs, RANK))
        writer.add_tensor(f"{name}.lora_a", a.astype(np.float32))
        writer.add_tensor(f"{name}.lora_b", b.astype(np.float32))
        added[name] = (ALPHA / RANK * b @ a).astype(np.float32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return added


def merged(path: Path, added: dict[str, NDArray[np.float32]]) -> Path:
    """The model with that added to its weights, in place."""
    import gguf

    reader: Any = gguf.GGUFReader(path, "r+")
    for tensor in reader.tensors:
        if tensor.name in added:
            tensor.data[...] += added[tensor.name]
    reader.data.flush()
    return path


def logits_of(backend: Alone[LlamaCppBackend]) -> NDArray[np.float32]:
    backend.cache.clear()
    places = np.arange(len(TOKENS))
    return backend.forward(Pass(TOKENS, places, places)).logits.copy()


def test_logits_equal_the_merged_models(tmp_path: Path) -> None:
    added = {name: write_adapter(tmp_path / f"{name}.gguf", seed) for seed, name in enumerate(("a", "b"))}
    base = open_bundle(write_gguf(tmp_path / "base.gguf", Shape()))
    paths = {name: str(tmp_path / f"{name}.gguf") for name in added}
    backend = Alone(LlamaCppBackend(base, 64, adapters=paths), 64)
    plain = logits_of(backend)
    for name in ("a", "b", "a"):
        backend.use_adapter(name)
        found = logits_of(backend)
        path = merged(write_gguf(tmp_path / "merged.gguf", Shape()), added[name])
        whole = Alone(LlamaCppBackend(open_bundle(path), 64), 64)
        assert np.abs(found - logits_of(whole)).max() < 1e-4
        assert np.abs(found - plain).max() > 0.01
        whole.close()
    backend.use_adapter(None)
    assert logits_of(backend).tobytes() == plain.tobytes()
    backend.close()
    with pytest.raises(AdapterError, match=r"convert_lora_to_gguf|no GGUF file") as caught:
        Alone(LlamaCppBackend(base, 64, adapters={"a": str(tmp_path)}), 64)
    assert "convert_lora_to_gguf" in caught.value.hint
    with pytest.raises(AdapterError, match="does not take"):
        Alone(LlamaCppBackend(base, 64, adapters={"a": str(tmp_path / "base.gguf")}), 64)
