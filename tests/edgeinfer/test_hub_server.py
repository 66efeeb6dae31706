"""Pulling with the real library from a server of our own on this machine: no network beyond the loopback."""

from __future__ import annotations

import json
import os
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


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Hub]:
    code = {"modeling.py": b"raise SystemExit", "pytorch_model.bin": b"pickle"}
    checkpoint = {"config.json": b"{}", "model.safetensors": b"tensors", "onnx/model.onnx": b"graph"}
    files = {"toy-Q4_0.gguf": b"GGUF", "toy-Q8_0-00001-of-00002.gguf": b"GGUF", "toy-Q8_0-00002-of-00002.gguf": b"GGUF"}
    bundle = bundle_files(tmp_path / "source") | code
    hub = Hub({"org/bundle": bundle, "org/checkpoint": checkpoint | code, "org/gguf": files})
    thread = threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield hub
    hub.shutdown()
    hub.server_close()
    thread.join()


def environment(server: Hub, home: Path, *, online: bool = True) -> dict[str, str]:
    """Of a process for which this server is the hub."""
    return os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0" if online else "1",
        "NO_PROXY": "127.0.0.1",
        "PYTHONPATH": str(ROOT),
    }


def edgeinfer(server: Hub, home: Path, *arguments: str, online: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgeinfer.cli.main", *arguments]
    env = environment(server, home, online=online)
    return subprocess.run(command, env=env, cwd=home, capture_output=True, text=True, check=False)


def test_bundle_is_pulled_once_and_used_offline(server: Hub, tmp_path: Path) -> None:
    pulled = edgeinfer(server, tmp_path, "pull", "org/bundle")
    assert pulled.returncode == 0, pulled.stderr
    assert sorted(server.served) == ["edgeinfer.json", "model.onnx", "weights.bin"]
    for online in (True, False):
        seen = edgeinfer(server, tmp_path, "inspect", "org/bundle", "--verify", "--json", online=online)
        assert seen.returncode == 0, seen.stderr
        assert json.loads(seen.stdout)["path"] == pulled.stdout.strip()
    assert len(server.served) == 3


def test_what_is_cached_is_listed(server: Hub, tmp_path: Path) -> None:
    code = "import json; from edgeinfer import hub; print(json.dumps([hub.cached(), *map(str, map(hub.local, {}))]))"
    names = ["org/bundle", "org/absent", "org/gguf:Q8_0", "org/gguf:Q2_K"]

    def listed() -> tuple[list[str], list[str]]:
        command = [sys.executable, "-c", code.format(names)]
        env = environment(server, tmp_path, online=False)
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
        found, *local = json.loads(done.stdout)
        return found, local

    assert listed() == ([], ["None"] * 4)
    for repo in ("org/bundle", "org/checkpoint", "org/gguf:Q4_0", "org/gguf:Q8_0"):
        assert edgeinfer(server, tmp_path, "pull", repo).returncode == 0
    found, local = listed()
    assert [Path(name).name for name in found] == ["toy-Q4_0.gguf", "toy-Q8_0-00001-of-00002.gguf", "bundle"]
    assert found[2] == "org/bundle"
    assert [Path(path).name for path in local] == [COMMIT, "None", "toy-Q8_0-00001-of-00002.gguf", "None"]
    # A bundle that is not whole would have to be fetched.
    (Path(local[0]) / "weights.bin").unlink()
    assert "org/bundle" not in listed()[0]


def test_interrupted_pull_is_completed(server: Hub, tmp_path: Path) -> None:
    path = Path(edgeinfer(server, tmp_path, "pull", "org/bundle").stdout.strip())
    weights = path / "weights.bin"
    weights.resolve().unlink()
    weights.unlink(missing_ok=True)
    server.served.clear()
    done = edgeinfer(server, tmp_path, "inspect", "org/bundle", "--verify")
    assert done.returncode == 0, done.stderr
    assert server.served == ["weights.bin"]


def test_checkpoint_is_pulled_without_code(server: Hub, tmp_path: Path) -> None:
    done = edgeinfer(server, tmp_path, "pull", "org/checkpoint", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kind"] == "checkpoint"
    assert sorted(server.served) == ["config.json", "model.safetensors"]
    run = edgeinfer(server, tmp_path, "inspect", "org/checkpoint", online=False)
    assert run.returncode == 3
    assert "edgeinfer export org/checkpoint" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("org/gated",), "is gated. Accept its terms"),
        (("org/absent",), "There is no org/absent on the hub"),
        (("org/broken",), "The hub answered 500"),
        (("org/bundle", "--revision", "missing"), "has no revision 'missing'"),
        (("not an id",), "is not a hub id"),
    ],
)
def test_refusals(server: Hub, tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    done = edgeinfer(server, tmp_path, "pull", *arguments)
    assert done.returncode == 3
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_unreachable(server: Hub, tmp_path: Path) -> None:
    server.shutdown()
    server.server_close()
    for online in (True, False):
        done = edgeinfer(server, tmp_path, "inspect", "org/bundle", online=online)
        assert done.returncode == 3
        assert "Run `edgeinfer pull org/bundle` when online" in done.stderr
        assert done.stderr.count("\n") == 1
