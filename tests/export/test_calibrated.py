"""Exports that run the model over a text first: what they write, what they refuse, and that they leave nothing."""

from __future__ import annotations

import itertools
import logging
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from edgeinfer.bundle.layouts import PORTABLE
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import CheckpointError, UsageError
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from edgeinfer.export.source.calibration_text import builtin_text, read_builtin_text, read_calibration_text
from edgeinfer.runtime.backends.contract import Pass
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from tests.alone import Alone
from tests.factories import make_checkpoint, make_tokenizer
from tests.tables import each_row

WORDS = ["cat", "dog", "sun", "moon", "tree", "house", "runs", "sleeps", "sees", "the", "a", "red", "big"]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chance = np.random.default_rng(0)
    lines = (" ".join(chance.choice(WORDS, 12)) + ".\n" for _ in range(300))
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(lines))
    return path


def export(checkpoint: Path, text: Path | None, **options: Any) -> Bundle:
    """A bundle in a folder of its own."""
    out = Path(tempfile.mkdtemp(dir=checkpoint.parent)) / "bundle"
    usual: dict[str, Any] = {"bits": 8, "bits_for": (("*", 4),), "keep_small": False, "calibration_tokens": 2048}
    return open_bundle(
        export_checkpoint(checkpoint, out, ExportConfig(**usual | {"calibration": text or "none"} | options))
    )


def logits_error(model: Any, bundle: Bundle, tokens: NDArray[np.int64]) -> float:
    """Mean square of the difference of a bundle's logits from a model's."""
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    places = np.arange(len(tokens))
    ours = Alone(ReferenceBackend(bundle, len(tokens)), len(tokens)).forward(Pass(tokens, places, places)).logits
    return float(np.mean((ours - theirs) ** 2))


@pytest.mark.parametrize("name", ["llama", "llama-mha-odd-sizes", "qwen3-moe"])
def test_calibrating_lowers_the_error_on_such_texts(tmp_path: Path, text: Path, name: str) -> None:
    model = make_checkpoint(tmp_path / "in", name)
    tokenizer = (tmp_path / "in" / "tokenizer.json").read_bytes()
    # Not the places that calibration takes.
    (tokens,) = read_calibration_text(text, tokenizer, 100, 128).texts
    errors = {
        method: logits_error(model, export(tmp_path / "in", given, method=method, layout=PORTABLE), tokens)
        for method, given in (("rtn", None), ("gptq", text))
    }
    assert errors["gptq"] < 0.8 * errors["rtn"]


def test_what_is_not_quantized_is_as_it_was(tmp_path: Path, text: Path) -> None:
    make_checkpoint(tmp_path / "in", "llama-biases")
    calibrated, plain = (
        export(tmp_path / "in", given, bits=32, bits_for=(), calibration_tokens=64).path for given in (text, None)
    )
    assert (calibrated / "weights.bin").read_bytes() == (plain / "weights.bin").read_bytes()


def test_progress_moves_within_a_large_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "in", "llama")
    monkeypatch.setattr("edgeinfer.export.weights.planning._SLAB_VALUES", 1024)
    seen: list[tuple[str, int, int]] = []
    export_checkpoint(tmp_path / "in", tmp_path / "out", ExportConfig(bits=32), lambda *step: seen.append(step))
    # The embedding is the first tensor, and a tenth of the model.
    assert len({done for _, done, total in seen if done < total / 25}) > 4 and seen[0][1] == 0
    assert np.diff([done for _, done, _ in seen]).min() >= 0 and seen[-1][1] == seen[-1][2]


def refused(checkpoint: Path, text: Path, error: type[Exception], says: str, bits: int = 4, **options: Any) -> None:
    """Exports, and checks that the right error came and nothing was written."""
    before = sorted(checkpoint.parent.iterdir())
    with pytest.raises(error, match=says):
        export_checkpoint(checkpoint, checkpoint.parent / "out", ExportConfig(bits=bits, calibration=text, **options))
    assert sorted(checkpoint.parent.iterdir()) == before


def test_a_text_that_is_too_short_says_how_much_is_needed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "in", "llama")
    short = tmp_path / "short.txt"
    short.write_text("the cat sees the dog. " * 3)
    refused(tmp_path / "in", short, UsageError, r"short.txt has \d+ tokens, and 16384 are needed")
    short.write_text("")
    refused(tmp_path / "in", short, UsageError, "0 tokens", calibration_tokens=64)


def test_a_text_that_cannot_be_read(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "in", "llama")
    refused(tmp_path / "in", tmp_path / "none.txt", UsageError, "Cannot read")
    (tmp_path / "bytes.txt").write_bytes(b"caf\xe9 " * 500)
    refused(tmp_path / "in", tmp_path / "bytes.txt", UsageError, "not UTF-8")


def edit(checkpoint: Path, name: str, value: float) -> None:
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    tensors[name].view(-1)[7] = value
    save_file(tensors, path)


def test_activations_that_are_not_finite(tmp_path: Path, text: Path) -> None:
    make_checkpoint(tmp_path / "in", "llama")
    edit(tmp_path / "in", "model.layers.1.input_layernorm.weight", 3e38)
    with np.errstate(all="ignore"):
        refused(tmp_path / "in", text, UsageError, "not finite", calibration_tokens=64)


@each_row("stage", ["running the text", "writing"])
def test_ctrl_c_leaves_nothing(tmp_path: Path, text: Path, ctrl_c: None, stage: str) -> None:
    make_checkpoint(tmp_path / "in", "llama")
    told = itertools.count()

    def progress(name: str, done: int, total: int) -> None:
        if next(told) == 0:
            assert len(list(tmp_path.iterdir())) == 2, "there is a temporary folder while it runs"
        if stage == "running the text" or done > total / 2:
            signal.raise_signal(signal.SIGINT)

    config = ExportConfig(bits=8, bits_for=(("*", 4),), calibration=text, calibration_tokens=64)
    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(tmp_path / "in", tmp_path / "out", config, progress)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """The handler that Python begins with, also where the tests were started with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return (folder / "tokenizer.json").read_bytes()


def test_texts_come_from_all_over_the_file(tokenizer: bytes, text: Path) -> None:
    found = read_calibration_text(text, tokenizer, 500, 128)
    assert [len(t) for t in found.texts] == [128, 128, 128, 116] and found.tokens == 500
    assert len({t.tobytes() for t in found.texts}) == 4


def test_a_text_of_just_enough_tokens_is_taken_whole(tmp_path: Path, tokenizer: bytes) -> None:
    path = tmp_path / "text.txt"
    path.write_text("the cat sees a dog. " * 40)
    with pytest.raises(UsageError, match=r"has (\d+) tokens") as caught:
        read_calibration_text(path, tokenizer, 10000, 128)
    count = int(caught.value.message.split(" has ")[1].split()[0])
    whole = np.concatenate(read_calibration_text(path, tokenizer, count, 128).texts)
    (alone,) = read_calibration_text(path, tokenizer, count, 1 << 20).texts if count <= 512 else (whole,)
    np.testing.assert_array_equal(whole, alone)
    assert len(whole) == count


def test_a_long_file_is_looked_at_in_pieces(tmp_path: Path, tokenizer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "long.txt"
    path.write_text("".join(f"línea número {i} — ünïcode\n" for i in range(20000)), "utf-8")
    monkeypatch.setattr("edgeinfer.export.source.calibration_text._MOST_BYTES", 1 << 16)
    found = read_calibration_text(path, tokenizer, 1024, 512)
    assert found.tokens == 1024


def test_the_parts_of_the_text_that_ships_have_no_line_in_common() -> None:
    lines = [
        {line for piece in builtin_text(part) for line in piece.splitlines() if len(line) > 60}
        for part in ("calibrate", "held_out")
    ]
    assert min(map(len, lines)) > 200 and not lines[0] & lines[1]


@each_row("kind", ["def ", "struct", "User: ", "Question: ", "century", "die ", "的"])
def test_the_first_pieces_are_of_all_kinds(kind: str) -> None:
    for part in ("calibrate", "held_out"):
        assert any(kind in piece for piece in builtin_text(part)[:36])


def test_tokens_of_the_text_that_ships_are_of_the_beginning_of_every_piece(tokenizer: bytes) -> None:
    few, many = (read_calibration_text("default", tokenizer, tokens, 128) for tokens in (300, 4000))
    assert few.tokens == 300 and many.tokens == 4000 and few.sha256 == many.sha256
    assert [len(text) for text in few.texts] == [128, 128, 44]
    for mine, theirs in zip(few.texts, many.texts, strict=False):
        np.testing.assert_array_equal(mine, theirs[: len(mine)])
    everything = read_builtin_text("held_out", tokenizer, 1 << 22, 1 << 20)
    assert 10_000 < everything.tokens < 1 << 22 and max(map(len, everything.texts)) == 512


def test_a_broken_tokenizer(text: Path) -> None:
    with pytest.raises(CheckpointError, match="tokenizer"):
        read_calibration_text(text, b"{}", 64, 64)


def test_unreached_experts_are_reported(caplog: pytest.LogCaptureFixture, tmp_path: Path, text: Path) -> None:
    make_checkpoint(tmp_path / "in", "qwen3-moe")
    path = tmp_path / "in" / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor.fill_(1)
        if name.endswith("embed_tokens.weight"):
            tensor[:, 0] = 50
        if name.endswith("layers.0.mlp.gate.weight"):
            tensor[:, 0], tensor[1, 0] = 5, -5
    save_file(tensors, path)
    with caplog.at_level(logging.WARNING, "edgeinfer"):
        bundle = export(tmp_path / "in", text, calibration_tokens=128)
    assert "layers.0.mlp.experts.1" in caplog.text
    assert np.isfinite(bundle.tensor("layers.0.mlp.experts.1.down")).all()
