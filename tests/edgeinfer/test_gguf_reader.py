"""Well-formed GGUF files: their contents and vocabularies as they were written, and such a file as a bundle."""

from __future__ import annotations

import dataclasses
import hashlib
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
from edgeinfer.bundle.gguf.vocabulary import GgufVocabulary, read_vocabulary
from edgeinfer.bundle.gguf_bundle import KV_TYPES, kv_bytes_per_token, manifest_of
from edgeinfer.bundle.manifest import Capabilities, Manifest
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.writing import seal
from edgeinfer.core.errors import BundleError, UsageError
from edgeinfer.tokenizing import boundary_ids, chat_template
from tests.gguf_builder import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT32, Builder, Tensor, small_model
from tests.tables import each_row

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
    assert [t.offset - written.splits[0].data_offset for t in written.tensors] == [0, 32, 256, 416]
    assert written.splits[0].data_offset % 32 == 0
    assert written.splits[0].header_bytes <= written.splits[0].data_offset < written.splits[0].header_bytes + 32
    assert written.tensor_bytes == 12 + 204 + 144 + 48
    assert written.size == written.path.stat().st_size


def test_version_2_and_other_alignments_are_read(tmp_path: Path) -> None:
    builder = small_model(general__alignment=(UINT32, 256))
    builder.alignment, builder.version = 256, 2
    gguf = read_gguf(builder.write(tmp_path / "m.gguf"))
    assert (gguf.splits[0].version, gguf.splits[0].alignment) == (2, 256)
    assert all(tensor.offset % 256 == 0 for tensor in gguf.tensors)


def test_tensors_off_multiples_of_32_cannot_be_mapped(tmp_path: Path) -> None:
    """In any part: the header of the second has other lengths."""
    made = []
    for filler in range(4):
        builder = small_model(general__alignment=(UINT32, 8), general__description=(STRING, "x" * 8 * filler))
        builder.alignment = 8
        made.append(read_gguf(builder.write(tmp_path / "model.gguf")))
    assert [gguf.mappable for gguf in made] == [not gguf.splits[0].data_offset % 32 for gguf in made]
    assert sorted(gguf.splits[0].data_offset % 32 for gguf in made) == [0, 8, 16, 24]
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
    ours = {n: (kind.name, kind.block_values, kind.block_bytes) for n, kind in GGML_TYPES.items()}
    newer = {number: ours.pop(number) for number in ours.keys() - sizes.keys()}
    # llama.cpp's types that the package has not yet.
    assert ours == sizes and {name for name, *_ in newer.values()} <= {"Q1_0", "Q2_0"}
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


_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def vocabulary(folder: Path, **changes: Any) -> GgufVocabulary:
    return read_vocabulary(read_gguf(small_model(**changes).write(folder / "m.gguf")))


def spelled(folder: Path, *tokens: str, **changes: Any) -> GgufVocabulary:
    """A vocabulary of these tokens alone, the first of which is the one that ends."""
    metadata = {
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, list(tokens))),
        "tokenizer.ggml.merges": (ARRAY, (STRING, [])),
        "tokenizer.ggml.eos_token_id": (UINT32, 0),
    }
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return read_vocabulary(read_gguf(Builder(metadata).write(folder / "m.gguf")))


def test_all_that_a_file_says(tmp_path: Path) -> None:
    found = vocabulary(tmp_path)
    assert (found.model, found.pre, found.size, found.merges) == ("gpt2", "qwen2", 12, 2)
    assert found.special == {"bos": 1, "eos": 2}
    assert found.special_texts == {"bos": "<s>", "eos": "</s>"}
    assert (found.bos, found.add_bos, found.ends) == (1, True, (2, 11))
    assert found.tokens.strings()[3:7] == ["Ġa", "b", "é", "\U0001f600"]
    assert found.token_types is not None and found.scores is not None
    np.testing.assert_array_equal(found.token_types.numbers()[:4], [2, 3, 3, 1])
    np.testing.assert_array_equal(found.scores.numbers(), -np.arange(12, dtype=np.float32))
    assert found.chat_template is not None and found.chat_template.startswith("{% for")


def test_byte_pairs_without_merges(tmp_path: Path) -> None:
    unmerged = {"tokenizer__ggml__pre": (STRING, "kimi-k2"), "tokenizer__ggml__merges": None}
    assert vocabulary(tmp_path, **unmerged).merges == 0


@each_row(
    ("kind", "pre", "begins"),
    [
        ("llama", "", True),
        ("gpt2", "qwen2", False),
        ("gpt2", "llama-bpe", True),
        ("gemma4", "", True),
        ("t5", "", False),
    ],
)
def test_whether_texts_begin_with_a_token_where_files_do_not_say(
    tmp_path: Path, kind: str, pre: str, begins: bool
) -> None:
    found = spelled(tmp_path, *_BYTES, "a", model=(STRING, kind), pre=(STRING, pre))
    assert found.add_bos is begins


def test_bytes_may_be_spelled_as_characters(tmp_path: Path) -> None:
    tokens = [*map(chr, range(128)), *_BYTES[128:]]
    assert spelled(tmp_path, *tokens, model=(STRING, "llama")).size == 256
    with pytest.raises(BundleError, match="no token for some bytes"):
        spelled(tmp_path, *tokens[1:], model=(STRING, "llama"))


def test_no_token_begins_a_text_where_there_is_none(tmp_path: Path) -> None:
    found = spelled(tmp_path, "a", "b", add_bos_token=(BOOL, 1))
    assert (found.add_bos, found.bos) == (True, None)  # by default it is token 11
    found = spelled(tmp_path, *map(chr, range(97, 110)), pre=(STRING, "glm4"), add_bos_token=(BOOL, 1))
    assert found.bos is None


def test_ids_by_default(tmp_path: Path) -> None:
    unsaid = {f"tokenizer__ggml__{name}_token_id": None for name in ("bos", "eos")}
    assert vocabulary(tmp_path, **unsaid).special == {"bos": 11, "eos": 11}
    assert spelled(tmp_path, *_BYTES, model=(STRING, "llama")).special == {"bos": 1, "eos": 0, "unk": 0}


def test_ids_that_matter_little_may_be_wrong(tmp_path: Path) -> None:
    for value in ((UINT32, 2**32 - 1), (INT32, -1)):
        found = vocabulary(tmp_path, tokenizer__ggml__padding_token_id=value)
        assert "pad" not in found.special


@each_row(
    ("tokens", "ends"),
    [
        (["</s>", "a", "<|im_end|>", "<end_of_turn>", "<|im_start|>"], (0, 2, 3)),
        (["x", "<|endoftext|>", "<|eom_id|>", "<｜end▁of▁sentence｜>", "[e~["], (0, 1, 2, 3, 4)),
        (["<|return|>", "<|call|>", "<|end|>"], (0, 1)),
        (["<|flush|>", "<|calls|>", "<|end|>"], (0, 1)),
        (["<|return|>", "<|end|>"], (0, 1)),
        (["<eos>", "</s>", "<|tool_response>"], (0, 2)),
        (["<|plamo:eos|>", "</s>"], (0,)),
        (["x", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_prefix|>"], (0, 1, 2, 3)),
    ],
)
def test_what_ends_a_reply(tmp_path: Path, tokens: list[str], ends: tuple[int, ...]) -> None:
    assert spelled(tmp_path, *tokens).ends == ends


def test_what_the_metadata_name_ends_a_reply(tmp_path: Path) -> None:
    tokens = ["a", "b", "c", "d", "<PAD>"]
    ids = {"eot_token_id": (UINT32, 1), "eom_token_id": (UINT32, 2), "fim_pad_token_id": (UINT32, 3)}
    assert spelled(tmp_path, *tokens, **ids).ends == (0, 1, 2, 3)


def test_empty_tokens_are_no_token_twice(tmp_path: Path) -> None:
    assert spelled(tmp_path, "", "a", "").size == 3


def opened(folder: Path, **changes: Any) -> Bundle:
    return open_bundle(small_model(**changes).write(folder / "some-model.gguf"))


def test_a_plain_file_is_a_bundle(tmp_path: Path) -> None:
    bundle = opened(tmp_path)
    manifest, path = bundle.manifest, tmp_path / "some-model.gguf"
    assert (manifest.name, manifest.architecture, manifest.backend) == ("some-model", "llama", "llamacpp")
    assert vars(manifest.geometry) == {
        "vocab_size": 12,
        "hidden_size": 8,
        "num_layers": 2,
        "num_kv_heads": 1,
        "head_dim": 4,
        "max_positions": 64,
        "kv_layers": (),
        "states": (),
    }
    assert manifest.parameters == 96 + 2 * (64 + 32 + 128) + 8
    assert manifest.capabilities == Capabilities(layer_skip=False, hidden=False, tree=True, exact=False)
    assert manifest.decoder is None and manifest.tensors == ()
    assert manifest.weight_bytes == path.stat().st_size
    entry = manifest.files["some-model.gguf"]
    assert (entry.bytes, entry.sha256) == (path.stat().st_size, bundle.gguf.fingerprint)
    assert bundle.path == tmp_path
    assert bundle.file("some-model.gguf") == path
    assert bundle.gguf.path == path
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_small_files_are_made_of_the_metadata(tmp_path: Path) -> None:
    bundle = opened(tmp_path)
    assert bundle.has("chat_template.jinja") and bundle.has("generation_config.json")
    assert not bundle.has("tokenizer.json") and not bundle.has("edgeinfer.json")
    assert bundle.read_object("generation_config.json") == {"bos_token_id": 1, "eos_token_id": [2, 11]}
    assert bundle.read_object("special_tokens.json") == {"bos_token": "<s>", "eos_token": "</s>"}
    assert boundary_ids(bundle) == ((1,), frozenset({2, 11}))
    template = chat_template(bundle)
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == "hi</s>"
    with pytest.raises(BundleError, match=r"has no tokenizer\.json"):
        bundle.read_text("tokenizer.json")


def test_what_a_file_does_not_say(tmp_path: Path) -> None:
    bundle = opened(
        tmp_path, tokenizer__chat_template=None, general__name=None, tokenizer__ggml__add_bos_token=(BOOL, 0)
    )
    assert bundle.manifest.name == "some-model"
    assert chat_template(bundle) is None
    assert boundary_ids(bundle)[0] == ()


def test_names_are_fit_to_print(tmp_path: Path) -> None:
    def name(file: str, **changes: Any) -> str:
        return open_bundle(small_model(**changes).write(tmp_path / file)).manifest.name

    # What the metadata say counts only where the file's name says nothing.
    author = (STRING, "\x1b[2JModel\n" + "x" * 1000)
    assert name("some-model.gguf", general__name=author) == "some-model"
    shown = name("model.gguf", general__name=author)
    assert shown.isprintable() and shown.startswith("[2JModel x") and len(shown) == 100
    assert name("model.gguf", general__name=(UINT32, 7)) == tmp_path.name
    assert name("\x1b[2J.gguf", general__name=(UINT32, 7)) == "[2J"


def test_a_plain_file_has_no_digest(tmp_path: Path) -> None:
    bundle = opened(tmp_path)
    with pytest.raises(UsageError, match="without a digest"):
        bundle.verify()
    with pytest.raises(UsageError, match="without a digest"):
        bundle.check("some-model.gguf")


def test_sizes_that_differ_by_layer(tmp_path: Path) -> None:
    changes = {
        "llama__attention__head_count": (ARRAY, (INT32, [2, 4])),
        "llama__attention__head_count_kv": (ARRAY, (INT32, [0, 2])),
        "llama__attention__key_length": (UINT32, 64),
        "llama__attention__value_length": (UINT32, 64),
    }
    bundle = opened(tmp_path, **changes)
    assert (bundle.manifest.geometry.num_kv_heads, bundle.manifest.geometry.head_dim) == (2, 64)
    sizes = {kv: kv_bytes_per_token(bundle.gguf, kv) for kv in KV_TYPES}
    assert sizes == {"float32": 2 * 128 * 4, "float16": 2 * 128 * 2, "q8_0": 2 * 4 * 34, "q4_0": 2 * 4 * 18}
    plain = opened(tmp_path)
    assert kv_bytes_per_token(plain.gguf, "float16") == plain.manifest.geometry.kv_bytes_per_token() // 2
    assert kv_bytes_per_token(plain.gguf, "q8_0") is None


def test_a_head_has_channels(tmp_path: Path) -> None:
    one = {"llama__attention__key_length": (UINT32, 2), "llama__attention__value_length": (UINT32, 2)}
    assert opened(tmp_path, **one).manifest.geometry.head_dim == 2
    with pytest.raises(BundleError, match="key_length is 0, not 1 to"):
        opened(tmp_path, **one | {"llama__attention__key_length": (UINT32, 0)})


def test_key_heads_are_heads_unless_said(tmp_path: Path) -> None:
    assert opened(tmp_path, llama__attention__head_count_kv=None).manifest.geometry.num_kv_heads == 2


def test_links_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / ("0" * 40)
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    small_model().write(blobs / ("1" * 64))
    (snapshot / "model-q8.gguf").symlink_to(Path("..") / ".." / "blobs" / ("1" * 64))
    bundle = open_bundle(snapshot / "model-q8.gguf")
    assert bundle.path == snapshot
    assert bundle.file("model-q8.gguf").is_file()
    assert bundle.manifest.files["model-q8.gguf"].bytes == (blobs / ("1" * 64)).stat().st_size


def test_files_are_known_by_how_they_begin_or_end(tmp_path: Path) -> None:
    for name in ("model.bin", "edgeinfer.json"):
        assert open_bundle(small_model().write(tmp_path / name)).manifest.files.keys() == {name}
        with pytest.raises(BundleError, match="is not a bundle"):
            open_bundle(dataclasses.replace(small_model(), magic=b"GGML").write(tmp_path / name))
    with pytest.raises(BundleError, match="not a file"):
        open_bundle(tmp_path / "missing.gguf")
    assert opened(tmp_path).manifest == manifest_of(read_gguf(tmp_path / "some-model.gguf"))


# As the model file of a folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bundle whose model file is a GGUF."""
    root = tmp_path / "bundle"
    root.mkdir()
    gguf = read_gguf(small_model().write(root / "model.gguf"))
    (root / "generation_config.json").write_text('{"eos_token_id": [2]}', "utf-8")
    seal(root, dataclasses.replace(manifest_of(gguf), name="mine", files={}))
    return root


def test_a_folder_with_a_model_file(folder: Path) -> None:
    bundle = open_bundle(folder)
    assert bundle.gguf.path == folder / "model.gguf"
    assert bundle.texts == {} and bundle.digests
    assert bundle.read_object("generation_config.json") == {"eos_token_id": [2]}
    assert not bundle.has("chat_template.jinja")
    assert bundle.manifest.weight_bytes == (folder / "model.gguf").stat().st_size
    digest = hashlib.sha256((folder / "model.gguf").read_bytes()).hexdigest()
    assert bundle.manifest.files["model.gguf"].sha256 == digest
    bundle.verify()


def test_a_folder_whose_model_file_changed(folder: Path) -> None:
    path = folder / "model.gguf"
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    with pytest.raises(BundleError, match="does not match"):
        open_bundle(folder).verify()
    data[:4] = b"GGML"
    path.write_bytes(data)
    with pytest.raises(BundleError, match="not a GGUF file"):
        open_bundle(folder)


def test_a_folder_whose_manifest_is_of_another_model(folder: Path) -> None:
    manifest = open_bundle(folder).manifest
    geometry = dataclasses.replace(manifest.geometry, num_layers=3, max_positions=128)
    seal(folder, dataclasses.replace(manifest, geometry=geometry))
    with pytest.raises(BundleError, match="num_layers, max_positions are not what the manifest says"):
        open_bundle(folder)


def test_a_folder_without_its_model_file(folder: Path) -> None:
    manifest = open_bundle(folder).manifest
    (folder / "model.gguf").rename(folder / "other.gguf")
    seal(folder, manifest)
    with pytest.raises(BundleError, match=r"has no model\.gguf"):
        open_bundle(folder)


def test_a_folder_whose_vocabulary_is_malformed(folder: Path) -> None:
    manifest = open_bundle(folder).manifest
    scores = (ARRAY, (FLOAT32, [float("nan")] * 12))
    small_model(tokenizer__ggml__scores=scores).write(folder / "model.gguf")
    seal(folder, manifest)
    with pytest.raises(BundleError, match="score is not finite"):
        open_bundle(folder)


def test_other_bundles_hold_no_gguf(bigrams: Path) -> None:
    with pytest.raises(BundleError, match="contains no GGUF file"):
        _ = open_bundle(bigrams).gguf
