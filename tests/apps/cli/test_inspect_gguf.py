"""`edgeinfer inspect` of GGUF files: what it prints for people and as JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from edgeinfer.apps.cli.main import main
from edgeinfer.bundle.gguf.reader import read_gguf
from edgeinfer.bundle.gguf_bundle import manifest_of
from edgeinfer.bundle.writing import seal
from tests.gguf_builder import FLOAT32, STRING, UINT32, small_model
from tests.recorded import check_recorded

_WIDE = {"llama__attention__key_length": (UINT32, 64), "llama__attention__value_length": (UINT32, 64)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    texts = {"x__long": (STRING, "word " * 100), "x__escape": (STRING, "\x1b[2J"), "x__inf": (FLOAT32, float("inf"))}
    return small_model(**_WIDE, **texts).write(tmp_path / "some-model.gguf")


def test_facts(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0] == str(path)
    rows = {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in lines if "  " in line}
    assert (rows["name"], rows["runs on"], rows["layers"]) == (
        "some-model",
        "llama.cpp (extra gguf)",
        "2, hidden size 8, vocabulary 12",
    )
    assert rows["tokenizer.ggml.tokens"] == "12 x string: '<unk>', '<s>', '</s>', 'Ġa', ..."
    assert rows["general.tags"] == "2 x string: 'small', ''"
    assert rows["tokenizer.ggml.add_bos_token"] == "yes"
    assert rows["llama.rope.freq_base"] == "10000"
    assert rows["x.escape"] == r"'\x1b[2J'"
    assert rows["x.long"].endswith("... (500 characters)")
    assert rows["F16"].split() == ["1", "192", "B", "16"]
    assert rows["KV cache float16"] == "512 bytes per token, 32.8 KB for 64"
    assert rows["KV cache q8_0"] == "272 bytes per token, 17.4 KB for 64"
    assert rows["KV cache q4_0"] == "144 bytes per token, 9.2 KB for 64"
    assert "layout" not in rows and "blk.0.attn_q.weight" not in out and "\x1b" not in out
    check_recorded("cli-inspect-gguf", lines[1:])


def test_tensors(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(path), "--tensors"]) == 0
    lines = capsys.readouterr().out.splitlines()
    offset = read_gguf(path).by_name["token_embd.weight"].offset
    (row,) = [line.split() for line in lines if line.startswith("token_embd.weight ")]
    assert row == ["token_embd.weight", "12", "x", "8", "F16", "192", "B", f"{offset:,}"]


def test_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert data["path"] == str(path)
    assert data["geometry"]["vocab_size"] == 12
    gguf = data["gguf"]
    assert "tensors" not in gguf
    assert gguf["files"] == [str(path)]
    assert gguf["metadata"]["tokenizer.ggml.scores"] == {"type": "float32", "count": 12, "first": [0, -1, -2, -3]}
    assert gguf["metadata"]["x.inf"] == "inf"
    assert gguf["memory"]["kv_bytes_per_token"] == {"float16": 512, "q8_0": 272, "q4_0": 144}
    assert main(["inspect", str(path), "--json", "--tensors"]) == 0
    tensors = json.loads(capsys.readouterr().out)["gguf"]["tensors"]
    assert tensors[1]["name"] == "blk.0.attn_q.weight"
    assert tensors[1]["shape"] == [8, 8]
    assert tensors[1]["bytes"] == 256
    assert tensors[1]["offset"] % 32 == 0
    check_recorded("cli-inspect-gguf-json", data | {"tensors": tensors}, without=("path", "files"))


def test_caches_that_are_not_possible(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(small_model().write(tmp_path / "m.gguf"))]) == 0
    assert "KV cache q8_0     not supported" in capsys.readouterr().out


def test_a_plain_file_is_verified_by_what_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = small_model().write(tmp_path / "m.gguf")
    assert main(["inspect", str(path), "--verify"]) == 0
    assert "as long as it does not change" in capsys.readouterr().err
    assert main(["inspect", str(path), "--verify"]) == 0
    assert "Every file matches" in capsys.readouterr().err
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main(["inspect", str(path), "--verify"]) == 3
    assert f"edgeinfer inspect {path} --accept" in capsys.readouterr().err
    assert main(["inspect", str(path), "--accept"]) == 0
    assert main(["inspect", str(path), "--verify"]) == 0
    capsys.readouterr()


def test_what_has_a_digest_is_not_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gguf = read_gguf(small_model().write(tmp_path / "model.gguf"))
    seal(tmp_path, dataclasses.replace(manifest_of(gguf), files={}))
    assert main(["inspect", str(tmp_path), "--accept"]) == 2
    assert "has to match" in capsys.readouterr().err


def test_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gguf = read_gguf(small_model().write(tmp_path / "model.gguf"))
    seal(tmp_path, dataclasses.replace(manifest_of(gguf), name="mine", files={}))
    assert main(["inspect", str(tmp_path), "--verify"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == str(tmp_path)
    assert "mine" in out and "KV cache float16" in out
    assert "Every file matches" in err
