"""A hub on this machine: a real HTTP server that answers as the hub does, for the real library and real programs."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from edgeinfer.bundle.geometry import Geometry
from edgeinfer.bundle.manifest import Capabilities, Manifest
from edgeinfer.bundle.writing import seal
from tests.cli import TIME_LIMIT

COMMIT = "c" * 40
_CHUNK = 1 << 16


class Hub(ThreadingHTTPServer):
    """Answers as the hub does for the repositories it is given: {repo: {file: contents}}.

    Attributes:
        served: names of the files that were sent, or of which a part was.
        sent: bytes of files.
        stall_at: bytes of any one file after which the server sends no more until `go_on` is set; None is never.
        stalled: set while it waits.
    """

    daemon_threads = True

    def __init__(self, repos: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos = repos
        self.served: list[str] = []
        self.sent = 0
        self.stall_at: int | None = None
        self.stalled, self.go_on = threading.Event(), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of clients that were killed."""


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Keeps stderr clean."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        parts = path.strip("/").split("/")
        repo = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        if parts == ["api", "models"]:
            self.search(query)
        elif repo == "org/gated":
            self.answer(b"{}", 403, {"X-Error-Code": "GatedRepo"})
        elif repo == "org/broken":
            self.answer(b"{}", 500)
        elif repo not in self.server.repos:
            self.answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"})
        elif parts[0] == "api" and "missing" in parts:
            self.answer(b"{}", 404, {"X-Error-Code": "RevisionNotFound"})
        elif parts[0] == "api":
            self.describe(repo, listing=parts[4:5] == ["tree"])
        else:
            self.send_file(self.server.repos[repo]["/".join(parts[4:])], "/".join(parts[4:]))

    def describe(self, repo: str, *, listing: bool) -> None:
        files = self.server.repos[repo]
        tree = [
            {"type": "file", "path": name, "size": len(data), "oid": sha1(data).hexdigest()}
            for name, data in files.items()
        ]
        siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
        info = {"id": repo, "sha": COMMIT, "siblings": siblings}
        self.answer(json.dumps(tree if listing else info).encode(), 200, {"Content-Type": "application/json"})

    def search(self, query: str) -> None:
        found = []
        for repo, files in self.server.repos.items():
            config = json.loads(files.get("config.json", b"{}"))
            weights = {"parameters": {"F32": 10}, "total": 10} if "model.safetensors" in files else None
            tags = ["license:mit", *(["gguf"] if any(name.endswith(".gguf") for name in files) else [])]
            facts = {"id": repo, "downloads": len(repo), "tags": tags, "config": config, "gated": False}
            found.append(facts | ({} if weights is None else {"safetensors": weights}))
        self.answer(json.dumps(found).encode(), 200, {"Content-Type": "application/json"})

    def send_file(self, data: bytes, name: str) -> None:
        headers = {"ETag": f'"{sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range", "")
        start, status = 0, 200
        if wanted.startswith("bytes="):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, status = int(first), 206
            headers["Content-Range"] = f"bytes {start}-{last or len(data) - 1}/{len(data)}"
            data = data[start : int(last) + 1 if last else None]
        if self.command == "GET":
            self.server.served.append(name)
        self.answer(data, status, headers, start)

    def answer(self, body: bytes, status: int, headers: dict[str, str] | None = None, start: int = 0) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "GET":
            return
        is_file = "ETag" in (headers or {})
        for at in range(0, len(body), _CHUNK):
            chunk = body[at : at + _CHUNK]
            if is_file and self.server.stall_at is not None and start + at >= self.server.stall_at:
                self.wfile.flush()
                self.server.stalled.set()
                self.server.go_on.wait(TIME_LIMIT)
            self.wfile.write(chunk)
            if is_file:
                self.server.sent += len(chunk)


@contextmanager
def serving(repos: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    """A hub that runs as long as the block."""
    hub = Hub(repos)
    thread = threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        hub.shutdown()
        hub.server_close()
        thread.join(TIME_LIMIT)


def hub_environment(url: str, home: Path, *, online: bool = True) -> dict[str, str]:
    """What makes a program take a server for the hub, and a folder for all that is the user's."""
    return os.environ | {
        "HF_ENDPOINT": url,
        "HF_HOME": str(home / "hf"),
        "HF_HUB_OFFLINE": "0" if online else "1",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
        "XDG_DATA_HOME": str(home / "data"),
        "XDG_CACHE_HOME": str(home / "cache"),
    }


def bundle_files(root: Path) -> dict[str, bytes]:
    """The files of a bundle that opens and cannot run."""
    root.mkdir()
    (root / "model.onnx").write_bytes(b"graph")
    (root / "weights.bin").write_bytes(b"w" * 100_000)
    geometry = Geometry(vocab_size=8, hidden_size=8, num_layers=1, num_kv_heads=1, head_dim=8, max_positions=16)
    able = Capabilities(layer_skip=True, hidden=True, tree=True)
    seal(root, Manifest("toy", "llama", "onnx", geometry, parameters=64, capabilities=able))
    return {path.name: path.read_bytes() for path in root.iterdir()}
