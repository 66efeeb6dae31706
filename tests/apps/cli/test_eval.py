"""`edgeinfer eval`: options, references, output and exit codes."""

from __future__ import annotations

import builtins
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.apps.cli.main import main
from edgeinfer.export.options import ExportConfig
from tests.cache import export_checkpoint, made
from tests.factories import make_checkpoint
from tests.recorded import check_recorded

STORIES = "Once upon a time there was a little dog.<|endoftext|>\nShe said: the cat is not here, is it?\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint, its 4-bit bundle and a text; temporary files are made in a folder of their own."""
    shutil.copytree(made(make_checkpoint_and_bundle), tmp_path, dirs_exist_ok=True)
    (tmp_path / "text").write_text(STORIES, "utf-8")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path


def make_checkpoint_and_bundle(folder: Path) -> None:
    make_checkpoint(folder / "checkpoint", "llama")
    export_checkpoint(folder / "checkpoint", folder / "small", ExportConfig(bits=4, keep_small=False))


def command(folder: Path, what: str, *more: str) -> list[str]:
    return ["eval", what, "-m", str(folder / "small"), "--text", str(folder / "text"), "-t", "1", *more]


def test_perplexity_needs_no_reference(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(folder, "ppl", "--json")) == 0
    data = json.loads(capsys.readouterr().out)
    wanted = edgeinfer.evaluate(folder / "small", [text.strip() for text in STORIES.split("<|endoftext|>")], threads=1)
    assert data == wanted.to_dict()
    assert data["windows"] == 2
    check_recorded("eval", data, rel=2e-2, without=("model", "seconds"))
    assert main(command(folder, "ppl")) == 0
    out = capsys.readouterr().out
    assert f"{wanted.perplexity:.4f}" in out and "bits each" in out


@pytest.mark.parametrize(("what", "line"), [("kld", "p99"), pytest.param("agree", "likeliest", marks=pytest.mark.slow)])
def test_a_checkpoint_is_a_reference(folder: Path, capsys: pytest.CaptureFixture[str], what: str, line: str) -> None:
    reference = ("--reference", str(folder / "checkpoint"))
    assert main(command(folder, what, *reference)) == 0
    assert line in capsys.readouterr().out
    assert list((folder / "temporary").iterdir()) == []
    assert main(command(folder, what, *reference, "--json", "--top-k", "3")) == 0
    found = json.loads(capsys.readouterr().out)["divergence"]
    export_checkpoint(folder / "checkpoint", folder / "float", ExportConfig(bits=32))
    assert main(command(folder, what, "--reference", str(folder / "float"), "--json", "--top-k", "3")) == 0
    assert json.loads(capsys.readouterr().out)["divergence"] == found
    check_recorded(f"eval-{what}", found, rel=5e-2)
    assert found["top"] == 3 and 0 < found["mean"] < found["p99"] <= found["max"]


def test_texts_are_parted_as_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def windows(*more: str) -> int:
        assert main(command(folder, "ppl", "--json", *more)) == 0
        return int(json.loads(capsys.readouterr().out)["windows"])

    (folder / "text").write_text("one two\n\nthree four\n\nfive", "utf-8")
    assert [windows(), windows("--paragraphs"), windows("--separator", "two")] == [1, 3, 2]
    assert windows("--context", "8") > 1 and windows("--paragraphs", "--tokens", "4") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("kld",), 2, "--reference"),
        (("agree",), 2, "--reference"),
        (("ppl", "--separator", ""), 2, "separator"),
        (("ppl", "--top-k", "0"), 2, "nothing to measure"),
        (("ppl", "--threads", "0"), 2, "threads"),
        (("kld", "--reference", "nowhere"), 3, "nowhere"),
    ],
)
def test_wrong_options(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, said: str
) -> None:
    assert main(command(folder, *arguments)) == code
    assert said in capsys.readouterr().err


def test_an_empty_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "text").write_text(" \n", "utf-8")
    assert main(command(folder, "ppl")) == 2
    assert "no text" in capsys.readouterr().err


def test_without_the_extra_a_checkpoint_is_no_reference(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("edgeinfer.export."):
            raise ModuleNotFoundError("No module named 'onnx'", name="onnx")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert main(command(folder, "kld", "--reference", str(folder / "checkpoint"))) == 2
    assert "edgeinfer[export]" in capsys.readouterr().err


def test_interrupting_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **options: Any) -> None:
        assert len(list((folder / "temporary").iterdir())) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(edgeinfer, "evaluate", interrupted)
    assert main(command(folder, "kld", "--reference", str(folder / "checkpoint"))) == 130
    assert list((folder / "temporary").iterdir()) == []
