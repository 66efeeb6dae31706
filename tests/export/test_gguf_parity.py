"""Logits of written GGUF files, run by llama.cpp, against transformers and the ONNX bundle of the same checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from edgeinfer.core.errors import CheckpointError
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from tests.factories import MIXTURES, VARIANTS, make_checkpoint
from tests.tables import each_row

pytest.importorskip("gguf")
pytest.importorskip("llama_cpp")

from edgeinfer.bundle.gguf.reader import read_gguf
from edgeinfer.export.gguf.writer import write_gguf
from tests.export.passes import TOKENS, Runner, expected_logits, rotary_tables
from tests.export.test_gguf_requests import REFUSED
from tests.gguf_models import GgufModel

pytestmark = pytest.mark.gguf

Floats = NDArray[np.float32]

# What is asked is 1e-3; logits are around 3, so this is float32's rounding.
TOLERANCE = 2e-5
# llama.cpp's graph of OLMoE has no queries that share keys, as no published one has.
CHANGES: dict[str, dict[str, Any]] = {"olmoe": {"num_key_value_heads": 4}}
# llama.cpp takes LongRoPE's factors by the size of its context, of 256 tokens here, and transformers by the text's.
LENGTHS = {"phi3-longrope": 512}
WRITTEN = [a for a in (*VARIANTS, *MIXTURES) if a not in REFUSED or a in CHANGES]


def gguf_logits(path: Path, tokens: NDArray[np.int64]) -> Floats:
    with GgufModel(path, 256) as model:
        return np.concatenate([rows.copy() for rows in model.logits(tokens.tolist())])


def make(folder: Path, arch: str, **settings: Any) -> Any:
    changes = CHANGES.get(arch, {}) | settings
    if arch in LENGTHS:
        _, settings = VARIANTS[arch]
        rope = settings["rope_parameters"] | {"original_max_position_embeddings": LENGTHS[arch]}
        changes |= {"rope_parameters": rope, "original_max_position_embeddings": LENGTHS[arch]}
        changes["max_position_embeddings"] = 4 * LENGTHS[arch]
    return make_checkpoint(folder / "checkpoint", arch, **changes)


@pytest.mark.parametrize("arch", WRITTEN)
def test_logits_match_transformers_and_the_onnx_bundle(arch: str, tmp_path: Path) -> None:
    model = make(tmp_path, arch)
    write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", vocabulary=False)
    file = read_gguf(tmp_path / "model.gguf")
    name = file.metadata.text("general.architecture")
    # A window is the whole context there, within which it changes nothing.
    size = min(len(TOKENS), file.metadata.integer(f"{name}.context_length"))
    tokens = TOKENS[:size]
    found, expected = gguf_logits(tmp_path / "model.gguf", tokens), expected_logits(model, tokens)
    bundle = export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", ExportConfig(bits=32))
    onnx, _ = Runner(bundle, rotary_tables(model, size)).run(tokens, list(range(size)))
    differences = np.abs(found - expected).max(), np.abs(found - onnx).max()
    print(f"{arch}: transformers {differences[0]:.1e}, onnx {differences[1]:.1e}, {size} tokens")
    assert max(differences) <= TOLERANCE


def test_longropes_long_factors_hold_above_the_original_context(tmp_path: Path) -> None:
    """The context of 256 is longer than the original 32, so the model computes as transformers does for long texts."""
    model = make_checkpoint(tmp_path / "checkpoint", "phi3-longrope")
    write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", vocabulary=False)
    tokens = np.tile(TOKENS, 4)[:40]
    found = gguf_logits(tmp_path / "model.gguf", tokens)
    assert np.abs(found - expected_logits(model, tokens)).max() <= TOLERANCE


@each_row("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sources_keep_their_values_in_their_own_type(dtype: torch.dtype, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", "Qwen2", dtype=dtype, max_shard_size="60KB")
    assert len(list((tmp_path / "checkpoint").glob("*.safetensors"))) > 1
    kinds = ("F32", "F16" if dtype == torch.float16 else "BF16")
    for kind in kinds:
        write_gguf(tmp_path / "checkpoint", tmp_path / f"{kind}.gguf", kind, vocabulary=False)
    exact, half = (read_tensors(tmp_path / f"{kind}.gguf") for kind in kinds)
    for name, values in exact.items():
        np.testing.assert_array_equal(half[name], values, err_msg=name)


@pytest.mark.parametrize(("kind", "error"), [("F16", 2e-3), ("BF16", 2e-2), ("Q8_0", 2e-2)])
def test_each_type_is_as_close_as_it_can_be(kind: str, error: float, tmp_path: Path) -> None:
    model = make(tmp_path, "qwen3-moe")
    write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", kind, vocabulary=False)
    found, expected = gguf_logits(tmp_path / "model.gguf", TOKENS), expected_logits(model, TOKENS)
    # Routers choose experts by small differences, so a token may be far off where a whole text is not.
    assert np.median(np.abs(found - expected)) <= error * np.abs(expected).max()


def test_norms_and_routers_stay_float32_and_odd_rows_float16(tmp_path: Path) -> None:
    make(tmp_path, "qwen3-moe-tied-odd")
    write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", "Q8_0", vocabulary=False)
    types = {tensor.name: tensor.type.name for tensor in read_gguf(tmp_path / "model.gguf").tensors}
    assert types["blk.0.attn_q_norm.weight"] == types["blk.0.ffn_gate_inp.weight"] == "F32"
    assert types["blk.0.attn_q.weight"] == types["token_embd.weight"] == "Q8_0"
    assert types["blk.0.ffn_down_exps.weight"] == "F16"  # rows of 40
    assert "output.weight" not in types


def test_values_too_large_for_float16_are_refused(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "checkpoint", "Llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = 1e5
    model.save_pretrained(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_down\.weight") as error:
        write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", "F16", vocabulary=False)
    assert "BF16" in error.value.hint


def read_tensors(path: Path) -> dict[str, Floats]:
    """The tensors of a file as float32."""
    import gguf

    return {
        t.name: gguf.dequantize(t.data, t.tensor_type).reshape(tuple(reversed(t.shape.tolist())))
        for t in gguf.GGUFReader(path).tensors
    }
