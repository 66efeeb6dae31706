"""Bad input and odd files: one line on what is wrong, the right exit code, nothing half-written or waited for."""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

import edgeinfer as package
from edgeinfer import chat
from edgeinfer.apps.cli.inputs import read_text
from edgeinfer.bundle.layouts import MODEL, WEIGHTS
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.writing import MANIFEST, seal
from edgeinfer.core.errors import StorageError, UsageError
from edgeinfer.core.user_files import user_cache
from tests.cache import export_checkpoint, made
from tests.cli import TIME_LIMIT, contents, edgeinfer, refuses
from tests.factories import make_checkpoint
from tests.tables import each_row

Edit = Callable[[Path], object]


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return made(make_tiny) / "tiny"


def make_tiny(folder: Path) -> None:
    make_checkpoint(folder / "tiny", "Llama", chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")


@pytest.fixture(scope="module")
def good_bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_checkpoint(checkpoint, tmp_path_factory.mktemp("bundle") / "tiny")


@pytest.fixture
def bundle(good_bundle: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(good_bundle, tmp_path / "bundle")


@pytest.fixture
def damaged(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint to damage."""
    return shutil.copytree(checkpoint, tmp_path / "checkpoint")


def edit_json(path: Path, *keys: str | int, value: Any) -> None:
    data = json.loads(path.read_text("utf-8"))
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path.write_text(json.dumps(data), "utf-8")


def edit_header(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edits the header of a safetensors file; the tensors' bytes stay."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def rename_tensor(header: dict[str, Any], old: str, new: str) -> None:
    header[new] = header.pop(old)


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def shard(folder: Path, name: str) -> None:
    """Makes the checkpoint one of shards, with one tensor in one file."""
    weights(folder).unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))


# Exporting: what is done to the checkpoint, and what the user reads.
CHECKPOINTS: dict[str, tuple[Edit, str]] = {
    "no-weights": (lambda f: weights(f).unlink(), "has neither model.safetensors nor"),
    "truncated-weights": (lambda f: weights(f).write_bytes(weights(f).read_bytes()[:-100]), "is truncated"),
    "garbage-weights": (lambda f: weights(f).write_bytes(b"\x10" + bytes(7) + b"not json at all."), "not valid JSON"),
    "tensor-missing": (
        lambda f: edit_header(weights(f), lambda h: rename_tensor(h, "model.norm.weight", "model.rotary_emb.inv_freq")),
        "has no tensor 'model.norm.weight' (expected shape (64,))",
    ),
    "tensor-unknown": (
        lambda f: edit_header(
            weights(f), lambda h: h.update({"model.extra": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})
        ),
        "does not use: model.extra",
    ),
    "wrong-shape": (
        lambda f: edit_header(weights(f), lambda h: h["lm_head.weight"].update(shape=[64, 320])),
        "has shape (64, 320), config.json implies (320, 64)",
    ),
    "not-a-number": (
        lambda f: weights(f).write_bytes(weights(f).read_bytes()[:-4] + struct.pack("<f", float("nan"))),
        "not finite",
    ),
    "shard-of-a-long-name": (lambda f: shard(f, "x" * 300), "is missing"),
    "no-config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "config-not-json": (lambda f: (f / "config.json").write_bytes(b"\xff{"), "is not valid JSON"),
    "config-too-deep": (lambda f: (f / "config.json").write_text("[" * 100_000), "is not valid JSON"),
    "unknown-architecture": (
        lambda f: edit_json(f / "config.json", "architectures", value=["ParrotForCausalLM"]),
        "ParrotForCausalLM",
    ),
    "layers-without-end": (
        lambda f: edit_json(f / "config.json", "num_hidden_layers", value=10**12),
        "num_hidden_layers=1000000000000",
    ),
    "activation-of-a-wrong-type": (lambda f: edit_json(f / "config.json", "hidden_act", value=["silu"]), "['silu']"),
    "theta-beyond-floats": (
        lambda f: edit_json(f / "config.json", "rope_parameters", "rope_theta", value=10**400),
        "rope_theta",
    ),
    "head-beyond-floats": (lambda f: edit_json(f / "config.json", "head_dim", value=10**400), "head_dim"),
    "no-tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json"),
    "tokenizer-not-json": (lambda f: (f / "tokenizer.json").write_bytes(b"<xml>"), "is not valid JSON"),
    "template-not-unicode": (
        lambda f: edit_json(f / "tokenizer_config.json", "chat_template", value="\ud800"),
        "not Unicode text",
    ),
    "end-token-not-an-id": (
        lambda f: edit_json(f / "generation_config.json", "eos_token_id", value="</s>"),
        "'</s>'",
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_bad_checkpoint_exports_nothing(damaged: Path, tmp_path: Path, name: str) -> None:
    edit, says = CHECKPOINTS[name]
    edit(damaged)
    before = contents(tmp_path)
    refuses(3, says, edgeinfer("export", damaged, tmp_path / "out"))
    assert contents(tmp_path) == before


def test_a_bad_checkpoint_leaves_the_bundle_it_would_have_replaced(damaged: Path, bundle: Path, tmp_path: Path) -> None:
    # The last tensor is bad, so all others have been written by then.
    CHECKPOINTS["not-a-number"][0](damaged)
    before = contents(tmp_path)
    refuses(3, "not finite", edgeinfer("export", damaged, bundle, "--force"))
    assert contents(tmp_path) == before


def edit_manifest(*keys: str | int, value: Any) -> Edit:
    return lambda bundle: edit_json(bundle / MANIFEST, *keys, value=value)


def edit_sizes(name: str, value: int) -> Edit:
    """Edits a size of the decoder, and of the geometry, which must agree."""

    def edit(bundle: Path) -> None:
        edit_json(bundle / MANIFEST, "decoder", name, value=value)
        edit_json(bundle / MANIFEST, "geometry", name, value=value)

    return edit


def overwrite(name: str, data: bytes) -> Edit:
    """Changes a file as an attacker would, with a new manifest."""

    def edit(bundle: Path) -> None:
        manifest = open_bundle(bundle).manifest
        (bundle / name).write_bytes(data)
        seal(bundle, manifest)

    return edit


def flip(name: str) -> Edit:
    """Changes the first byte of a file, not its size."""

    def edit(bundle: Path) -> None:
        data = (bundle / name).read_bytes()
        (bundle / name).write_bytes(bytes([data[0] ^ 1]) + data[1:])

    return edit


def relocate(location: str) -> Edit:
    """Makes the graph read its weights elsewhere, with a manifest that fits."""

    def edit(bundle: Path) -> None:
        shutil.copy(bundle / WEIGHTS, bundle.parent / "evil.bin")
        model = onnx.load(str(bundle / MODEL), load_external_data=False)
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = location.format(parent=bundle.parent)
        overwrite(MODEL, model.SerializeToString())(bundle)

    return edit


def shorten_weights(bundle: Path) -> None:
    """Leaves the graph fewer bytes than it names, and the manifest no tensors that would tell."""
    edit_json(bundle / MANIFEST, "tensors", value=[])
    overwrite(WEIGHTS, b"short")(bundle)


def link_outside(name: str) -> Edit:
    def edit(bundle: Path) -> None:
        target = (bundle / name).rename(bundle.parent / "outside")
        (bundle / name).symlink_to(target)

    return edit


def forget(name: str) -> Edit:
    """Takes a file out of the bundle and of its manifest."""

    def edit(bundle: Path) -> None:
        manifest = open_bundle(bundle).manifest
        (bundle / name).unlink()
        seal(bundle, manifest)

    return edit


def without_table(edit: Edit) -> Edit:
    """Takes the tokenizer's table out as well, which would be read in the place of what the edit damages."""

    def both(bundle: Path) -> None:
        forget("tokenizer.table")(bundle)
        edit(bundle)

    return both


# Running: what is done to the bundle, and what the user reads.
BUNDLES: dict[str, tuple[Edit, str]] = {
    "no-manifest": (lambda b: (b / MANIFEST).unlink(), "is not a bundle: it has no edgeinfer.json"),
    "manifest-not-json": (lambda b: (b / MANIFEST).write_text("{"), "edgeinfer.json is not valid JSON"),
    "manifest-too-deep": (lambda b: (b / MANIFEST).write_text("[" * 100_000), "is not valid JSON"),
    "manifest-a-list": (lambda b: (b / MANIFEST).write_text("[]"), "is not an edgeinfer manifest"),
    "manifest-from-the-future": (edit_manifest("format_version", value=99), "format version 99"),
    "manifest-unknown-field": (edit_manifest("magic", value=1), "unknown field 'magic'"),
    "manifest-mistyped-field": (edit_manifest("parameters", value="many"), "manifest.parameters must be a int"),
    "manifest-unknown-backend": (edit_manifest("backend", value="abacus"), "'abacus'"),
    "number-not-a-number": (edit_manifest("decoder", "rope", "theta", value=float("nan")), "theta"),
    "number-infinite": (edit_manifest("decoder", "rope", "theta", value=float("inf")), "theta"),
    "number-beyond-floats": (edit_manifest("decoder", "rope", "theta", value=10**400), "theta"),
    "vocabulary-without-end": (edit_sizes("vocab_size", 10**12), "embed has shape (320, 64)"),
    "layers-that-are-not-there": (edit_sizes("num_layers", 4), "layers.3.attn.qkv has shape None"),
    "layers-without-end": (edit_sizes("num_layers", 10**12), "num_layers 1000000000000 is impossible"),
    "rows-of-no-multiple": (edit_manifest("capabilities", "row_multiple", value=0), "row_multiple 0 is impossible"),
    "rows-without-end": (edit_manifest("capabilities", "row_multiple", value=10**12), "is impossible"),
    "heads-without-end": (edit_sizes("head_dim", 10**12), "layers.0.attn.qkv has shape"),
    "blob-beyond-the-file": (
        edit_manifest("tensors", 0, "data", "offset", value=10**18),
        "past the end of weights.bin",
    ),
    "path-upwards": (edit_manifest("files", "../outside.json", value={"bytes": 1, "sha256": "0" * 64}), "leaves its"),
    "path-too-long": (edit_manifest("files", "x" * 300, value={"bytes": 1, "sha256": "0" * 64}), "File name too long"),
    "path-with-nul": (edit_manifest("files", "a\0b", value={"bytes": 1, "sha256": "0" * 64}), "leaves its"),
    "drafter-missing": (edit_manifest("drafters", value=["drafter"]), "has no drafter/edgeinfer.json"),
    "drafter-outside": (edit_manifest("drafters", value=[".."]), "has no ../edgeinfer.json"),
    "model-missing": (lambda b: (b / MODEL).unlink(), "model.onnx is missing"),
    "weights-missing": (lambda b: (b / WEIGHTS).unlink(), "weights.bin is missing"),
    "weights-truncated": (
        lambda b: (b / WEIGHTS).write_bytes((b / WEIGHTS).read_bytes()[:-1]),
        "bytes, the manifest says",
    ),
    "wrong-hash-weights": (flip(WEIGHTS), "weights.bin does not match its sha256"),
    "wrong-hash-model": (flip(MODEL), "model.onnx does not match its sha256"),
    "weights-linked-outside": (link_outside(WEIGHTS), "'weights.bin', which leaves its directory"),
    "manifest-linked-outside": (link_outside(MANIFEST), "'edgeinfer.json', which leaves its directory"),
    "external-data-upwards": (relocate("../evil.bin"), "escapes model directory"),
    "external-data-absolute": (relocate("{parent}/evil.bin"), "Absolute path not allowed"),
    "external-data-winding": (relocate("sub/../../evil.bin"), "escapes model directory"),
    "external-data-missing": (relocate("nowhere.bin"), "does not exist"),
    "model-garbage": (overwrite(MODEL, b"garbage"), "model.onnx cannot be loaded"),
    "model-empty": (overwrite(MODEL, b""), "model.onnx cannot be loaded"),
    "weights-short-for-the-graph": (shorten_weights, "model.onnx cannot be loaded"),
    "tokenizer-missing": (without_table(forget("tokenizer.json")), "has no tokenizer.json"),
    "tokenizer-garbage": (without_table(overwrite("tokenizer.json", b"\xff")), "tokenizer"),
    "tokenizer-empty-object": (without_table(overwrite("tokenizer.json", b"{}")), "is not a usable tokenizer"),
    "tokenizer-too-deep": (without_table(overwrite("tokenizer.json", b"[" * 100_000)), "is not a usable tokenizer"),
    "generation-missing": (forget("generation_config.json"), "has no generation_config.json"),
    "generation-garbage": (overwrite("generation_config.json", b"{"), "generation_config.json is not valid JSON"),
    "generation-a-list": (overwrite("generation_config.json", b"[]"), "generation_config.json is not a JSON object"),
    "generation-mistyped": (overwrite("generation_config.json", b'{"eos_token_id": {}}'), "must be a list of ids"),
    "special-tokens-garbage": (overwrite("special_tokens.json", b"[]"), "special_tokens.json is not a JSON object"),
    "template-malformed": (overwrite("chat_template.jinja", b"{% for"), "The chat template is malformed"),
    "template-not-text": (overwrite("chat_template.jinja", b"\xff"), "is not UTF-8"),
}


@pytest.mark.parametrize("name", BUNDLES)
def test_a_bad_bundle_is_refused(bundle: Path, name: str) -> None:
    edit, says = BUNDLES[name]
    edit(bundle)
    before = contents(bundle.parent)
    refuses(3, says, edgeinfer("run", "-m", bundle, "-p", "Once", "-n", "2"))
    assert contents(bundle.parent) == before


def test_a_bundle_linked_into_a_hub_cache_runs(good_bundle: Path, tmp_path: Path) -> None:
    """The hub's library keeps files in a blob store and links them; that much leaving is allowed, and onnxruntime
    follows."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / ("c" * 40)
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for file in good_bundle.iterdir():
        shutil.copy(file, blobs / f"blob-of-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/blob-of-{file.name}")
    done = edgeinfer("run", "-m", snapshot, "-p", "Once", "-n", "2", "--json")
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_nested_manifest_is_sealed_like_any_file(bundle: Path) -> None:
    manifest = open_bundle(bundle).manifest
    shutil.copytree(bundle, bundle / "drafter")
    sealed = seal(bundle, manifest)
    assert f"drafter/{MANIFEST}" in sealed.files
    assert MANIFEST not in sealed.files
    edit_json(bundle / MANIFEST, "drafters", value=["drafter"])
    assert open_bundle(bundle).manifest.drafters == ("drafter",)
    flip(f"drafter/{MANIFEST}")(bundle)
    refuses(3, f"drafter/{MANIFEST} does not match its sha256", edgeinfer("inspect", bundle))


PROMPTS: dict[str, tuple[tuple[str, ...], bytes, str]] = {
    "empty": (("-p", ""), b"", "The prompt is empty"),
    "empty-file": (("-f", "-"), b"", "The prompt is empty"),
    "blank-message": (("-p", " "), b"", "The message is empty"),
    "longer-than-the-context": (("-p", "x" * 200), b"", "the context holds 128"),
    "longer-than-a-small-context": (("-p", "xyzxyzxyz", "-c", "4"), b"", "the context holds 4"),
    "not-utf-8": (("-f", "-"), b"caf\xe9", "stdin is not UTF-8 text (byte 3)"),
    "without-end": (("-f", "/dev/zero"), b"", "/dev/zero is larger than 64.0 MB"),
    "missing-file": (("-f", "no-such-file"), b"", "Cannot read no-such-file"),
    "context-beyond-the-model": (("-p", "Once", "-c", "129"), b"", "the model allows 128"),
    "context-without-end": (("-p", "Once", "-c", "9" * 30), b"", "is out of range. --context must be"),
    "context-of-nothing": (("-p", "Once", "-c", "0"), b"", "--context 0 is out of range"),
    "unknown-backend": (("-p", "Once", "--backend", "abacus"), b"", "There is no backend 'abacus'"),
}


@each_row("name", PROMPTS)
def test_a_bad_prompt_or_context_is_bad_usage(good_bundle: Path, name: str) -> None:
    arguments, stdin, says = PROMPTS[name]
    refuses(2, says, edgeinfer("run", "-m", good_bundle, *arguments, stdin=stdin))


@each_row("model", ["nowhere", "x" * 300, "~nobody-of-this-name/model"])
def test_a_model_that_is_not_there(model: str, tmp_path: Path) -> None:
    refuses(3, "No model at", edgeinfer("run", "-m", model, "-p", "Once"))
    refuses(3, "No model at", edgeinfer("export", model, tmp_path / "out"))
    assert not list(tmp_path.iterdir())


def test_a_bundle_is_no_checkpoint(checkpoint: Path, good_bundle: Path, tmp_path: Path) -> None:
    refuses(3, "is already a bundle", edgeinfer("export", good_bundle, tmp_path / "out"))
    refuses(3, "has no config.json", edgeinfer("export", checkpoint / "config.json", tmp_path / "out"))


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    if sys.platform == "win32":
        pytest.skip("pipes and devices of POSIX systems")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@each_row("wanted", ["model", "text"])
def test_what_is_no_file(pipe: Path, tmp_path: Path, wanted: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "edgeinfer.json").symlink_to(pipe)
    odd = [pipe, Path("/dev/zero"), Path("/dev/null"), folder, tmp_path / ("\udcff" * 10), Path("x" * 5_000)]
    for path in odd:
        if wanted == "model":
            for command in (("run", "-p", "x", "-m", path), ("inspect", path), ("plan", "--memory", "1GB", "-m", path)):
                refuses(3, "", edgeinfer(*command))
            refuses(3, "", edgeinfer("export", path, tmp_path / "out"))
        else:
            # A pipe was waited for without end.
            refuses(2, "", edgeinfer("run", "-f", path))
            refuses(2, "", edgeinfer("serve", "--api-key-file", path))


def test_a_pipe_that_somebody_writes_into_is_read(pipe: Path) -> None:
    read, write = os.pipe()

    def tell() -> None:
        os.write(write, b"Once\n")
        os.close(write)

    writing = threading.Thread(target=tell)
    writing.start()
    # As a shell's <(command) names it.
    assert read_text(Path(f"/dev/fd/{read}")) == "Once"
    writing.join(TIME_LIMIT)
    os.close(read)


def test_conversations_that_cannot_be_read(
    loaded: package.Model, pipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "_MOST_BYTES", 1_000)
    (tmp_path / "long.json").write_bytes(b"[" * 2_000)
    for path in (pipe, Path("/dev/zero"), tmp_path, tmp_path / "long.json", Path("a\0b"), Path("x" * 5_000)):
        with pytest.raises(UsageError) as caught:
            loaded.load_chat(path)
        assert caught.value.hint
    with pytest.raises(UsageError, match="larger than"):
        loaded.load_chat(tmp_path / "long.json")


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="the cache lies elsewhere")
def test_the_variable_of_the_desktop_counts_before_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert user_cache() == Path("/somewhere/.cache")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert user_cache() == Path("/elsewhere")


def test_a_user_without_a_home_folder_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(StorageError, match="no home folder"):
        user_cache()
