"""Pulling with the real library from a server of our own on this machine: no network beyond the loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.bundle import Capabilities, Geometry, Manifest, seal
from tests.cli import TIME_LIMIT

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "c" * 40


class Hub(ThreadingHTTPServer):
    """Answers as the hub does for the repositories it is given: {repo: {file: contents}}."""

    daemon_threads = True

    def __init__(self, repos: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos = repos
        self.served: list[str] = []


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Keeps stderr clean."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        repo = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        if repo == "org/gated":
            self.answer(b"{}", 403, {"X-Error-Code": "GatedRepo"})
        elif repo == "org/broken":
            self.answer(b"{}", 500)
        elif repo not in self.server.repos:
            self.answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"})
        elif parts[0] == "api" and "missing" in parts:
            self.answer(b"{}", 404, {"X-Error-Code": "RevisionNotFound"})
        elif parts[0] == "api":
            self.describe(self.server.repos[repo], listing=parts[4:5] == ["tree"])
        else:
            self.send_file(self.server.repos[repo]["/".join(parts[4:])], "/".join(parts[4:]))

    def describe(self, files: dict[str, bytes], *, listing: bool) -> None:
        tree = [
            {"type": "file", "path": name, "size": len(data), "oid": sha1(data).hexdigest()}
            for name, data in files.items()
        ]
        info = {"id": "org/x", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
        self.answer(json.dumps(tree if listing else info).encode(), 200, {"Content-Type": "application/json"})

    def send_file(self, data: bytes, name: str) -> None:
        if self.command == "GET":
            self.server.served.append(name)
        self.answer(data, 200, {"ETag": f'"{sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT})

    def answer(self, body: bytes, status: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def bundle_files(root: Path) -> dict[str, bytes]:
    root.mkdir()
    (root / "model.onnx").write_bytes(b"graph")
    (root / "weights.bin").write_bytes(b"w" * 100_000)
    geometry = Geometry(vocab_size=8, hidden_size=8, num_layers=1, num_kv_heads=1, head_dim=8, max_positions=16)
    able = Capabilities(layer_skip=True, hidden=True, tree=True)
    seal(root, Manifest("toy", "llama", "onnx", geometry, parameters=64, capabilities=able))
    return {path.name: path.read_bytes() for path in root.iterdir()}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    code = {"modeling.py": b"raise SystemExit", "pytorch_model.bin": b"pickle"}
    checkpoint = {"config.json": b"{}", "model.safetensors": b"tensors", "onnx/model.onnx": b"graph"}
    files = {"toy-Q4_0.gguf": b"GGUF", "toy-Q8_0-00001-of-00002.gguf": b"GGUF", "toy-Q8_0-00002-of-00002.gguf": b"GGUF"}
    bundle = bundle_files(tmp_path_factory.mktemp("hub") / "source") | code
    hub = Hub({"org/bundle": bundle, "org/checkpoint": checkpoint | code, "org/gguf": files})
    thread = threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield hub
    hub.shutdown()
    hub.server_close()
    thread.join(TIME_LIMIT)


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
    env = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{port}",
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0" if online else "1",
        "NO_PROXY": "127.0.0.1",
        "PYTHONPATH": str(ROOT),
    }
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
    ((code, out, err),) = edgeinfer(server.server_port, tmp_path, "pull org/checkpoint --json")
    assert code == 0, err
    assert json.loads(out)["kind"] == "checkpoint"
    assert sorted(server.served) == ["config.json", "model.safetensors"]
    ((code, _, err),) = edgeinfer(server.server_port, tmp_path, "inspect org/checkpoint", online=False)
    assert code == 3
    assert "edgeinfer export org/checkpoint" in err


def test_refusals(server: Hub, tmp_path: Path) -> None:
    refused = {
        "org/gated": "is gated. Accept its terms",
        "org/absent": "There is no org/absent on the hub",
        "org/broken": "The hub answered 500",
        "org/bundle --revision missing": "has no revision 'missing'",
        "not_an_id": "is not a hub id",
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
        assert "Run `edgeinfer pull org/bundle` when online" in err
        assert err.count("\n") == 1
