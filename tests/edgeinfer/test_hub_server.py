"""Pulling with the real library from a server of our own on this machine: no network beyond the loopback."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli import TIME_LIMIT
from tests.hub_server import COMMIT, Hub, bundle_files, hub_environment, serving

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    code = {"modeling.py": b"raise SystemExit", "pytorch_model.bin": b"pickle"}
    checkpoint = {"config.json": b"{}", "model.safetensors": b"tensors", "onnx/model.onnx": b"graph"}
    files = {"toy-Q4_0.gguf": b"GGUF", "toy-Q8_0-00001-of-00002.gguf": b"GGUF", "toy-Q8_0-00002-of-00002.gguf": b"GGUF"}
    bundle = bundle_files(tmp_path_factory.mktemp("hub") / "source") | code
    with serving({"org/bundle": bundle, "org/checkpoint": checkpoint | code, "org/gguf": files}) as hub:
        yield hub


@pytest.fixture
def server(started: Hub) -> Hub:
    """The hub, that has served nothing yet."""
    started.served.clear()
    return started


# Several commands in one process, which its first import of the library dominates.
COMMANDS = """
import contextlib, io, json, sys
from edgeinfer.apps.cli.main import main

done = []
for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    done.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(done))
"""
LISTINGS = """
import json, sys
from pathlib import Path
from edgeinfer import hub

def listed():
    return [hub.cached(), [None if path is None else str(path) for path in map(hub.local, names)]]

names = ["org/bundle", "org/absent", "org/gguf:Q8_0", "org/gguf:Q2_K"]
empty = listed()
for repo in ("org/bundle", "org/checkpoint", "org/gguf:Q4_0", "org/gguf:Q8_0"):
    hub.pull(repo, progress=False)
filled = listed()
# A bundle that is not whole would have to be fetched.
Path(filled[1][0], "weights.bin").unlink()
print(json.dumps([empty, filled, listed()]))
"""


def python(port: int, home: Path, *arguments: str, online: bool = True) -> Any:
    """The JSON that a program prints, for which the server of this port is the hub."""
    env = hub_environment(f"http://127.0.0.1:{port}", home, online=online) | {"PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-c", *arguments]
    done = subprocess.run(line, env=env, cwd=home, capture_output=True, text=True, check=False, timeout=TIME_LIMIT)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def edgeinfer(port: int, home: Path, *commands: str, online: bool = True) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each command, whose words are parted by blanks; an underscore stands for one."""
    lines = [[word.replace("_", " ") for word in command.split()] for command in commands]
    return [tuple(done) for done in python(port, home, COMMANDS, json.dumps(lines), online=online)]


def test_bundle_is_pulled_once_and_used_offline(server: Hub, tmp_path: Path) -> None:
    inspect = "inspect org/bundle --verify --json"
    (code, path, err), online = edgeinfer(server.server_port, tmp_path, "pull org/bundle", inspect)
    assert code == 0, err
    assert sorted(server.served) == ["edgeinfer.json", "model.onnx", "weights.bin"]
    (offline,) = edgeinfer(server.server_port, tmp_path, inspect, online=False)
    for code, out, err in (online, offline):
        assert code == 0, err
        assert json.loads(out)["path"] == path.strip()
    assert len(server.served) == 3


def test_what_is_cached_is_listed(server: Hub, tmp_path: Path) -> None:
    empty, (found, local), damaged = python(server.server_port, tmp_path, LISTINGS)
    assert empty == [[], [None] * 4]
    assert [Path(name).name for name in found] == ["toy-Q4_0.gguf", "toy-Q8_0-00001-of-00002.gguf", "bundle"]
    assert found[2] == "org/bundle"
    assert [path and Path(path).name for path in local] == [COMMIT, None, "toy-Q8_0-00001-of-00002.gguf", None]
    assert damaged[0] == found[:2]


@pytest.mark.slow
def test_interrupted_pull_is_completed(server: Hub, tmp_path: Path) -> None:
    ((_, path, _),) = edgeinfer(server.server_port, tmp_path, "pull org/bundle")
    weights = Path(path.strip()) / "weights.bin"
    weights.resolve().unlink()
    weights.unlink(missing_ok=True)
    server.served.clear()
    ((code, _, err),) = edgeinfer(server.server_port, tmp_path, "inspect org/bundle --verify")
    assert code == 0, err
    assert server.served == ["weights.bin"]


@pytest.mark.slow
def test_checkpoint_is_pulled_without_code(server: Hub, tmp_path: Path) -> None:
    ((code, out, err),) = edgeinfer(server.server_port, tmp_path, "pull org/checkpoint --json --no-convert")
    assert code == 0, err
    assert json.loads(out)["kind"] == "checkpoint"
    assert sorted(server.served) == ["config.json", "model.safetensors"]
    ((code, _, err),) = edgeinfer(server.server_port, tmp_path, "inspect org/checkpoint", online=False)
    assert code == 3
    assert "names no model class" in err


def test_refusals(server: Hub, tmp_path: Path) -> None:
    refused = {
        "org/gated": "is gated. Accept its terms",
        "org/absent": "There is no org/absent on the hub",
        "org/broken": "The hub answered 500",
        "org/bundle --revision missing": "has no revision 'missing'",
        "not_an_id": "nor a Hugging Face id",
    }
    done = edgeinfer(server.server_port, tmp_path, *(f"pull {arguments}" for arguments in refused))
    for (code, _, err), said in zip(done, refused.values(), strict=True):
        assert code == 3
        assert said in err
        assert err.count("\n") == 1


@pytest.mark.slow
def test_unreachable(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for online in (True, False):
        ((code, _, err),) = edgeinfer(port, tmp_path, "inspect org/bundle", online=online)
        assert code == 3
        assert "org/bundle is not on this machine" in err
        assert err.count("\n") == 1
