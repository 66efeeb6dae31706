"""A GGUF file as a bundle: sizes, small files, digests, links, and as the model file of a folder."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.bundle.gguf.reader import read_gguf
from edgeinfer.bundle.gguf_bundle import KV_TYPES, kv_bytes_per_token, manifest_of
from edgeinfer.bundle.manifest import Capabilities, Manifest
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.writing import seal
from edgeinfer.errors import BundleError, UsageError
from edgeinfer.tokenizing import boundary_ids, chat_template
from tests.gguf_builder import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT32, small_model


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


def test_files_of_other_names_are_refused(tmp_path: Path) -> None:
    for name in ("model.bin", "edgeinfer.json"):
        with pytest.raises(BundleError, match="is not a bundle"):
            open_bundle(small_model().write(tmp_path / name))
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
