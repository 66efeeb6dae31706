"""Reading safetensors: values of every type, and every kind of damage named."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from edgeinfer.errors import CheckpointError
from edgeinfer.export.source.checkpoint import Checkpoint
from tests.tables import each_row


@each_row("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_values_and_row_ranges_agree_with_torch(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"a": torch.randn(7, 5).to(dtype), "b": torch.tensor([1e-7, -3.0, 65504.0]).to(dtype)}
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.names == {"a", "b"}
        for name, tensor in tensors.items():
            checkpoint.require(name, tuple(tensor.shape))
            np.testing.assert_array_equal(checkpoint.read(name), tensor.float().numpy())
        np.testing.assert_array_equal(checkpoint.read("a", 2, 6), tensors["a"][2:6].float().numpy())


def test_shards_are_found_through_the_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "two.safetensors")
    index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.read("a").tolist() == [1, 1]
        assert checkpoint.read("b").tolist() == [0, 0, 0]


def index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@each_row(
    ("weight_map", "says"),
    [
        ({"a": "gone.safetensors"}, "missing"),
        ({"c": "one.safetensors"}, "'c'"),
        ({"a": "../one.safetensors"}, "outside its folder"),
        ({"a": 1}, "weight_map"),
        (None, "weight_map"),
    ],
)
def test_a_wrong_index_is_named(weight_map: Any, says: str, tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=says):
        Checkpoint(tmp_path)


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickle") as caught:
        Checkpoint(tmp_path)
    assert "safe_serialization" in caught.value.hint


def test_an_empty_or_absent_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors"):
        Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="not a directory"):
        Checkpoint(tmp_path / "nowhere")


def test_wrong_names_shapes_and_types_are_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, 3), "i": torch.ones(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        with pytest.raises(CheckpointError, match=r"'b' \(expected shape \(2,\)\)"):
            checkpoint.require("b", (2,))
        with pytest.raises(CheckpointError, match=r"'a' .* shape \(2, 3\), .* \(3, 2\)"):
            checkpoint.require("a", (3, 2))
        with pytest.raises(CheckpointError, match="type I8"):
            checkpoint.require("i", (2,))


def safetensors_bytes(entries: Any, payload: int) -> bytes:
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + bytes(payload)


def entry(shape: Any, start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@each_row(
    ("data", "says"),
    [
        (b"", "truncated"),
        (b"\xff" * 40, "truncated"),
        (safetensors_bytes({"a": entry([2], 0, 8)}, 8)[:-1], "truncated"),
        (safetensors_bytes({"a": entry([2], 0, 8)}, 9), "does not describe"),
        (safetensors_bytes({"a": entry([3], 0, 8)}, 8), "need 12"),
        (safetensors_bytes({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, 12), "overlap"),
        (safetensors_bytes({"a": entry([2], 8, 16)}, 16), "gaps"),
        (safetensors_bytes({"a": entry([2], 0, 8, "F99")}, 8), "malformed"),
        (safetensors_bytes({"a": entry([-2], 0, 8)}, 8), "malformed"),
        (safetensors_bytes({"a": 7}, 0), "malformed"),
        (safetensors_bytes([1], 0), "not a JSON object"),
        (struct.pack("<Q", 3) + b"{{{", "not valid JSON"),
    ],
)
def test_damaged_files_are_named(data: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=says) as caught:
        Checkpoint(tmp_path)
    assert "model.safetensors" in caught.value.message


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 150), value=st.integers(0, 255))
def test_any_changed_byte_is_read_or_refused(
    position: int, value: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = bytearray(safetensors_bytes({"a": entry([2], 0, 8), "b": entry([2, 2], 8, 24)}, 24))
    data[position % len(data)] = value
    folder = tmp_path_factory.getbasetemp() / "mutated"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(bytes(data))
    try:
        with Checkpoint(folder) as checkpoint:
            for name in checkpoint.names:
                assert name
    except CheckpointError as error:
        assert error.message


def test_a_file_cut_after_opening_is_noticed(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1000)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        with (tmp_path / "model.safetensors").open("r+b") as file:
            file.truncate(500)
        with pytest.raises(CheckpointError, match="ended before"):
            checkpoint.read("a")
