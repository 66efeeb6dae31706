"""llama.cpp's quantizer: types of files and tensors, importance, layers left out, and what is refused before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.factories import make_checkpoint

pytest.importorskip("gguf")
pytest.importorskip("llama_cpp")

import gguf

from edgeinfer.bundle.gguf.reader import GgufFile, read_gguf
from edgeinfer.core.errors import BackendError, BundleError, StorageError, UsageError
from edgeinfer.export.gguf.quantize import quantize_gguf
from edgeinfer.export.gguf.writer import write_gguf
from edgeinfer.export.options import FILE_TYPES
from tests.gguf_models import GgufModel

pytestmark = pytest.mark.gguf

IDS = [0, 17, 45, 301, 8, 8, 120, 77, 200, 3, 19]
DOWN = "blk.0.ffn_down.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A float file whose rows hold blocks of 32, and the model."""
    folder = tmp_path_factory.mktemp("llama")
    model = make_checkpoint(folder / "model", "llama", intermediate_size=128)
    write_gguf(folder / "model", folder / "float.gguf", vocabulary=False)
    return folder / "float.gguf", model


def types(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.type.name for tensor in read_gguf(path).tensors}


def predict(path: Path) -> NDArray[np.float32]:
    with GgufModel(path, 64) as model:
        return np.concatenate([rows.copy() for rows in model.logits(IDS)])


def tensor(path: Path, name: str) -> NDArray[np.float32]:
    (found,) = (t for t in gguf.GGUFReader(path).tensors if t.name == name)
    values: NDArray[np.float32] = gguf.dequantize(found.data, found.tensor_type)
    return values


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "q5_0", "Q4_0", "Q4_K"])
def test_a_file_is_written_in_a_type(tmp_path: Path, llama: tuple[Path, Any], kind: str) -> None:
    """K types need wider rows and fall back, as llama.cpp decides."""
    told: list[tuple[str, int, int]] = []
    quantize_gguf(llama[0], tmp_path / "q.gguf", kind, threads=1, progress=lambda *step: told.append(step))
    found = types(tmp_path / "q.gguf")
    assert found[DOWN] == {"Q4_K": "Q5_0"}.get(kind, kind.upper())
    assert found["blk.0.attn_norm.weight"] == "F32"
    assert (
        read_gguf(tmp_path / "q.gguf").metadata["general.file_type"]
        == FILE_TYPES[{"Q4_K": "Q4_K_M"}.get(kind, kind.upper())].number
    )
    plain = predict(llama[0])
    assert np.abs(predict(tmp_path / "q.gguf") - plain).mean() < 0.5 * plain.std()
    assert [p.name for p in tmp_path.iterdir()] == ["q.gguf"]
    assert all(0 <= done < total for _, done, total in told)


def test_importance_reaches_the_quantizer(tmp_path: Path, llama: tuple[Path, Any]) -> None:
    """A column of great importance ends nearer to its values."""
    columns = np.full(128, 1e-4, np.float32)
    columns[::2] = 1e4
    weight = llama[1].model.layers[0].mlp.down_proj.weight.detach().numpy()
    errors = []
    for given in (None, {DOWN: columns}):
        quantize_gguf(llama[0], tmp_path / "q.gguf", "Q4_0", importance=given)
        errors.append(float(np.square(tensor(tmp_path / "q.gguf", DOWN) - weight)[:, ::2].mean()))
    assert errors[1] < 0.9 * errors[0]


def test_single_tensors_have_types_of_their_own(tmp_path: Path, llama: tuple[Path, Any]) -> None:
    """By their whole names: that of one is part of another's, and a dot is no joker."""
    wanted = {"blk.1.ffn_down.weight": "Q8_0", "token_embd.weight": "F16", "output.weight": "Q5_1"}
    quantize_gguf(llama[0], tmp_path / "q.gguf", "Q4_0", tensor_types=wanted)
    found = types(tmp_path / "q.gguf")
    assert {name: found[name] for name in wanted} == wanted
    others = {kind for name, kind in found.items() if name not in wanted and "norm" not in name}
    assert others == {"Q4_0"}


def test_layers_are_left_out(tmp_path: Path, llama: tuple[Path, Any]) -> None:
    """The rest is the model without them; types and importance are by the names of the whole."""
    importance = {f"blk.{i}.ffn_down.weight": np.ones(128, np.float32) for i in range(3)}
    quantize_gguf(llama[0], tmp_path / "copy.gguf", "COPY", prune_layers=[1])
    quantize_gguf(
        llama[0],
        tmp_path / "q.gguf",
        "Q4_0",
        importance=importance,
        tensor_types={"blk.2.attn_v.weight": "Q8_0", "blk.1.attn_v.weight": "F16"},
        prune_layers=[1],
    )
    found = read_gguf(tmp_path / "copy.gguf")
    assert found.metadata["llama.block_count"] == 2 and "blk.2.attn_q.weight" not in found.by_name
    assert {t.type.name for t in found.tensors} == {"F32"}
    np.testing.assert_array_equal(
        tensor(tmp_path / "copy.gguf", DOWN.replace("0", "1")), tensor(llama[0], "blk.2.ffn_down.weight")
    )
    assert types(tmp_path / "q.gguf")["blk.1.attn_v.weight"] == "Q8_0"
    model = llama[1]
    layers = model.model.layers
    try:
        model.model.layers = torch.nn.ModuleList([layers[0], layers[2]])
        with torch.no_grad():
            wanted = model(torch.tensor([IDS]), use_cache=False).logits[0].numpy()
    finally:
        model.model.layers = layers
    np.testing.assert_allclose(predict(tmp_path / "copy.gguf"), wanted, atol=2e-3)


def test_experts_are_quantized_by_what_enters_each(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", "qwen3-moe")
    write_gguf(tmp_path / "model", tmp_path / "float.gguf", vocabulary=False)
    name = "blk.0.ffn_gate_exps.weight"
    columns = np.random.default_rng(0).random(6 * 64).astype(np.float32)
    quantize_gguf(tmp_path / "float.gguf", tmp_path / "q.gguf", "Q4_0", importance={name: columns})
    assert (
        types(tmp_path / "q.gguf")[name] == "Q4_0" and types(tmp_path / "q.gguf")["blk.0.ffn_gate_inp.weight"] == "F32"
    )
    with pytest.raises(UsageError, match=r"not 6 x 64 columns"):
        quantize_gguf(tmp_path / "float.gguf", tmp_path / "r.gguf", "Q4_0", importance={name: columns[:64]})


def test_dimensions_of_one_may_be_left_out(tmp_path: Path) -> None:
    """llama.cpp writes the norm of a recurrence of one group with one dimension."""
    sizes: dict[str, Any] = {"num_heads": 4, "head_dim": 32, "n_groups": 1, "state_size": 16}
    make_checkpoint(tmp_path / "model", "Mamba2", tie_word_embeddings=True, **sizes)
    write_gguf(tmp_path / "model", tmp_path / "float.gguf", vocabulary=False)
    quantize_gguf(tmp_path / "float.gguf", tmp_path / "q.gguf", "Q8_0")
    plain = predict(tmp_path / "float.gguf")
    assert types(tmp_path / "q.gguf")["blk.0.ssm_in.weight"] == "Q8_0"
    assert np.abs(predict(tmp_path / "q.gguf") - plain).mean() < 0.1 * plain.std()


def test_quantizing_twice_must_be_asked_for(tmp_path: Path, llama: tuple[Path, Any]) -> None:
    quantize_gguf(llama[0], tmp_path / "eight.gguf", "Q8_0")
    with pytest.raises(UsageError, match="already quantized"):
        quantize_gguf(tmp_path / "eight.gguf", tmp_path / "four.gguf", "Q4_0")
    quantize_gguf(tmp_path / "eight.gguf", tmp_path / "four.gguf", "Q4_0", requantize=True)
    assert types(tmp_path / "four.gguf")[DOWN] == "Q4_0"
    quantize_gguf(tmp_path / "eight.gguf", tmp_path / "short.gguf", "COPY", prune_layers=[0])
    assert types(tmp_path / "short.gguf")[DOWN] == "Q8_0"
    with pytest.raises(UsageError, match="the input file itself"):
        quantize_gguf(tmp_path / "eight.gguf", tmp_path / "eight.gguf", "Q4_0", requantize=True)


def test_files_that_cannot_be_read_or_written(tmp_path: Path, llama: tuple[Path, Any]) -> None:
    with pytest.raises(BundleError):
        quantize_gguf(tmp_path / "nothing.gguf", tmp_path / "q.gguf", "Q4_0")
    (tmp_path / "half.gguf").write_bytes(llama[0].read_bytes()[:10_000])
    with pytest.raises(BundleError):
        quantize_gguf(tmp_path / "half.gguf", tmp_path / "q.gguf", "Q4_0")
    with pytest.raises(StorageError, match="Cannot write"):
        quantize_gguf(llama[0], tmp_path / "none" / "q.gguf", "Q4_0")


def test_what_llama_cpp_refuses_is_said_in_its_words(tmp_path: Path, llama: tuple[Path, Any]) -> None:
    package = gguf.GGUFWriter(tmp_path / "odd.gguf", "no-such-architecture")
    package.add_block_count(1)
    package.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
    package.write_header_to_file()
    package.write_kv_data_to_file()
    package.write_tensors_to_file()
    package.close()
    with pytest.raises(BackendError, match="no-such-architecture"):
        quantize_gguf(tmp_path / "odd.gguf", tmp_path / "q.gguf", "Q4_0")
    assert not (tmp_path / "q.gguf").exists()


def test_files_of_another_alignment_stay_readable(tmp_path: Path, llama: tuple[Path, Any]) -> None:
    """llama.cpp lays tensors out at 32 whatever the file says."""
    source = gguf.GGUFReader(llama[0])
    writer = gguf.GGUFWriter(tmp_path / "wide.gguf", "llama")
    writer.add_custom_alignment(64)
    for key, field in source.fields.items():
        if key.startswith(("llama.", "tokenizer.")):
            writer.add_key_value(key, field.contents(), field.types[0])
    for found in source.tensors:
        writer.add_tensor(found.name, found.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_gguf(tmp_path / "wide.gguf").splits[0].alignment == 64
    quantize_gguf(tmp_path / "wide.gguf", tmp_path / "q.gguf", "COPY", prune_layers=[1])
    written: GgufFile = read_gguf(tmp_path / "q.gguf")
    np.testing.assert_array_equal(tensor(written.path, DOWN), tensor(llama[0], DOWN))
