"""Well-formed GGUF files: what the reader gives is what was written, by the gguf package or byte by byte."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.bundle.gguf.metadata import GGML_TYPES, ITEM_TYPES, GgufArray, ggml_type
from edgeinfer.bundle.gguf.reader import GgufFile, read_gguf
from edgeinfer.errors import BundleError
from tests.gguf_builder import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT32, Builder, Tensor, small_model

SCALARS: dict[str, tuple[int, Any]] = {
    "a.uint8": (0, 255),
    "a.int8": (1, -128),
    "a.uint16": (2, 65_535),
    "a.int16": (3, -32_768),
    "a.uint32": (UINT32, 2**32 - 1),
    "a.int32": (INT32, -(2**31)),
    "a.float32": (FLOAT32, 0.15625),
    "a.infinite": (FLOAT32, float("-inf")),
    "a.false": (BOOL, 0),
    "a.true": (BOOL, 1),
    "a.string": (STRING, "naïve \U0001f600\n"),
    "a.empty": (STRING, ""),
    "a.uint64": (10, 2**64 - 1),
    "a.int64": (11, -(2**63)),
    "a.float64": (12, 1e300),
    "a.long": (STRING, "é" * 100_000),
}
ARRAYS: dict[str, tuple[int, list[Any]]] = {
    "b.uint8": (0, [0, 255]),
    "b.int16": (3, [-1, 2]),
    "b.float32": (FLOAT32, [0.5, float("nan")]),
    "b.bool": (BOOL, [1, 0, 1]),
    "b.string": (STRING, ["", "é", "\U0001f600", "x" * 1000]),
    "b.int64": (11, [-(2**63)]),
    "b.none": (INT32, []),
    "b.no strings": (STRING, []),
}


def plain(gguf: GgufFile) -> dict[str, object]:
    """Metadata with arrays as lists."""
    return {key: value.values() if isinstance(value, GgufArray) else value for key, value in gguf.metadata.items()}


@pytest.fixture
def written(tmp_path: Path) -> GgufFile:
    arrays = {key: (ARRAY, value) for key, value in ARRAYS.items()}
    tensors = [
        Tensor("vector", [3], bytes(12)),
        Tensor("matrix", [64, 3], bytes(3 * 2 * 34), type=8),
        Tensor("experts", [32, 2, 4], bytes(8 * 18), type=2),
        Tensor("four", [1, 2, 3, 4], bytes(48), type=30),
    ]
    return read_gguf(Builder({**SCALARS, **arrays}, tensors).write(tmp_path / "some.gguf"))


def test_values_are_what_was_written(written: GgufFile) -> None:
    for key, (_, value) in SCALARS.items():
        assert written.metadata[key] == value
        assert type(written.metadata[key]) is (bool if key in ("a.true", "a.false") else type(value))


def test_arrays_are_what_was_written(written: GgufFile) -> None:
    for key, (kind, items) in ARRAYS.items():
        value = written.metadata[key]
        assert isinstance(value, GgufArray)
        assert (value.item_type, value.count) == (ITEM_TYPES[kind].name, len(items))
        values = value.values()
        if kind == STRING:
            assert values == items
        else:
            assert isinstance(values, np.ndarray)
            assert values.dtype == (np.bool_ if kind == BOOL else np.dtype(ITEM_TYPES[kind].dtype))
            np.testing.assert_array_equal(values, items)


def test_tensors_are_what_was_written(written: GgufFile) -> None:
    table = [(t.name, t.shape, t.type.name, t.nbytes, t.size) for t in written.tensors]
    assert table == [
        ("vector", (3,), "F32", 12, 3),
        ("matrix", (3, 64), "Q8_0", 204, 192),
        ("experts", (4, 2, 32), "Q4_0", 144, 256),
        ("four", (4, 3, 2, 1), "BF16", 48, 24),
    ]
    assert [t.offset - written.data_offset for t in written.tensors] == [0, 32, 256, 416]
    assert written.data_offset % 32 == 0
    assert written.header_bytes <= written.data_offset < written.header_bytes + 32
    assert written.tensor_bytes == 12 + 204 + 144 + 48
    assert written.size == written.path.stat().st_size


def test_version_2_and_other_alignments_are_read(tmp_path: Path) -> None:
    builder = small_model(general__alignment=(UINT32, 256))
    builder.alignment, builder.version = 256, 2
    gguf = read_gguf(builder.write(tmp_path / "m.gguf"))
    assert (gguf.version, gguf.alignment) == (2, 256)
    assert all(tensor.offset % 256 == 0 for tensor in gguf.tensors)


def test_tensors_off_multiples_of_32_cannot_be_mapped(tmp_path: Path) -> None:
    """In any part: the header of the second has other lengths."""
    made = []
    for filler in range(4):
        builder = small_model(general__alignment=(UINT32, 8), general__description=(STRING, "x" * 8 * filler))
        builder.alignment = 8
        made.append(read_gguf(builder.write(tmp_path / "model.gguf")))
    assert [gguf.mappable for gguf in made] == [not gguf.data_offset % 32 for gguf in made]
    assert sorted(gguf.data_offset % 32 for gguf in made) == [0, 8, 16, 24]
    fits = next(gguf for gguf in made if gguf.mappable)
    parts = dataclasses.replace(fits, tensors=fits.tensors + made[made[0].mappable].tensors)
    assert fits.mappable and not parts.mappable


def test_metadata_insist_on_types(written: GgufFile) -> None:
    data = written.metadata
    assert (data.integer("a.uint8"), data.integer("missing", 7)) == (255, 7)
    assert (data.text("a.empty"), data.flag("a.true"), data.number("a.int8")) == ("", True, -128.0)
    wrong = (
        lambda: data.integer("a.int8"),
        lambda: data.integer("a.true"),
        lambda: data.integer("a.float32"),
        lambda: data.integer("missing"),
        lambda: data.number("a.infinite"),
        lambda: data.number("a.true"),
        lambda: data.number("a.string"),
        lambda: data.text("a.uint8"),
        lambda: data.flag("a.uint8"),
        lambda: data.array("a.uint8", "uint8"),
        lambda: data.array("b.uint8", "int8"),
    )
    for look_up in wrong:
        with pytest.raises(BundleError):
            look_up()


def test_arrays_of_a_file_that_changed(written: GgufFile) -> None:
    texts, numbers = written.metadata.array("b.string", "string"), written.metadata.array("b.uint8", "uint8")
    for take in (texts.numbers, numbers.strings):
        with pytest.raises(BundleError):
            take()
    written.path.write_bytes(b"\xff" * written.size)
    with pytest.raises(BundleError, match="changed"):
        texts.values()
    written.path.write_bytes(b"")
    with pytest.raises(BundleError, match="changed"):
        numbers.values()
    written.path.unlink()
    again: tuple[Callable[[], object], ...] = (texts.values, numbers.values, lambda: written.fingerprint)
    for reading in again:
        with pytest.raises(BundleError, match="Cannot read"):
            reading()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(BundleError, match="not a file"):
            read_gguf(path)


def test_fingerprints_tell_files_apart(tmp_path: Path) -> None:
    builder = small_model()
    builder.tensors.append(Tensor("large", [1_000_000], bytes(4_000_000)))
    whole = builder.build()

    def fingerprint(data: bytes) -> str:
        (tmp_path / "m.gguf").write_bytes(data)
        return read_gguf(tmp_path / "m.gguf").fingerprint

    first = fingerprint(whole)
    assert len(first) == 64
    assert fingerprint(whole) == first
    data = builder.boundaries[-2]
    for place in (whole.index(b"Tiny"), data, len(whole) - 1):
        assert fingerprint(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]) != first
    assert fingerprint(whole + b"\0") != first


@settings(max_examples=40, deadline=None)
@given(
    texts=st.dictionaries(st.from_regex(r"[a-z]{1,8}\.[a-z_]{1,8}", fullmatch=True), st.text(max_size=30), max_size=6),
    arrays=st.lists(st.lists(st.text(max_size=12), max_size=9), max_size=4),
    rows=st.lists(st.integers(1, 9), max_size=5),
)
def test_whatever_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, texts: dict[str, str], arrays: list[list[str]], rows: list[int]
) -> None:
    metadata: dict[Any, tuple[int, Any]] = {key: (STRING, text) for key, text in texts.items()}
    metadata |= {f"array {i}": (ARRAY, (STRING, items)) for i, items in enumerate(arrays)}
    tensors = [Tensor(f"t{i}", [32, n], bytes(34 * n), type=8) for i, n in enumerate(rows)]
    path = tmp_path_factory.getbasetemp() / "whatever.gguf"
    gguf = read_gguf(Builder(metadata, tensors).write(path))
    assert plain(gguf) == {key: value if kind == STRING else value[1] for key, (kind, value) in metadata.items()}
    assert [t.shape for t in gguf.tensors] == [(n, 32) for n in rows]


# Compared with the gguf package


@pytest.mark.gguf
def test_types_are_those_of_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    sizes = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {n: (kind.name, kind.block_values, kind.block_bytes) for n, kind in GGML_TYPES.items()} == sizes
    assert {n: kind.name.upper() for n, kind in ITEM_TYPES.items()} == {int(v): v.name for v in gguf.GGUFValueType}
    assert ggml_type("Q4_K").bits == 4.5
    assert ggml_type("Q4_K").quantized and not ggml_type("BF16").quantized


@pytest.mark.gguf
def test_files_of_the_gguf_package_are_read(tmp_path: Path) -> None:
    package = pytest.importorskip("gguf")
    path = tmp_path / "m.gguf"
    writer = package.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_block_count(3)
    writer.add_float32("x.float", 0.1)
    writer.add_bool("x.bool", True)
    writer.add_uint64("x.large", 1 << 63)
    writer.add_array("x.heads", [1, 2, 3])
    writer.add_array("x.floats", [0.5, -1.0])
    writer.add_token_list(["a", "é", "\U0001f600"])
    writer.add_string("x.text", "été")
    for kind, (values, size) in package.GGML_QUANT_SIZES.items():
        if kind in (package.GGMLQuantizationType.F32, package.GGMLQuantizationType.F16):
            writer.add_tensor(f"{kind.name}.weight", np.ones((3, 32), kind.name.replace("F", "float")))
        else:
            data = np.zeros((3, 2 * size), np.uint8)
            writer.add_tensor(f"{kind.name}.weight", data, raw_dtype=kind)
            assert values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = read_gguf(path), package.GGUFReader(path)
    assert [(t.name, t.shape, t.type.name, t.nbytes, t.offset) for t in ours.tensors] == [
        (t.name, tuple(map(int, t.shape[::-1])), t.tensor_type.name, int(t.n_bytes), int(t.data_offset))
        for t in theirs.tensors
    ]
    for key, value in plain(ours).items():
        expected = theirs.get_field(key).contents()
        np.testing.assert_equal(value.tolist() if isinstance(value, np.ndarray) else value, expected)
    assert len(ours.metadata) + 3 == len(theirs.fields)  # theirs counts the header's own numbers
    assert struct.pack("<f", 0.1) == struct.pack("<f", ours.metadata.number("x.float"))
