"""A way to a server that cannot be trusted, has no TLS or stays silent ends a reply with one line."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

import edgeinfer
from edgeinfer.errors import RemoteError
from edgeinfer.remote_options import RemoteApi
from tests.speculation import needs_builtin

pytestmark = [pytest.mark.slow, needs_builtin]


class Handler(BaseHTTPRequestHandler):
    """Has a model, and refuses to decide with it."""

    def do_GET(self) -> None:
        self._answer(200, b'{"data": [{"id": "m", "owned_by": "edgeinfer"}]}')

    def do_POST(self) -> None:
        self._answer(400, b'{"error": {"message": "This server decides nothing."}}')

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Tests are quiet."""


@contextmanager
def answering(certificate: Path | None) -> Iterator[int]:
    """The port of a server, with TLS where it has a certificate."""
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, certificate.with_suffix(".key"))
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join(60)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that this test vouches for alone, for this machine."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test"]
    named = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(path), "-keyout", str(path.with_suffix(".key"))]
    subprocess.run([*made, *named], check=True, capture_output=True, timeout=300)
    return path


def refusal(url: str, api: RemoteApi | None = None) -> str:
    with edgeinfer.load(remote=url, remote_api=api) as model, pytest.raises(RemoteError) as caught:
        model.generate("Once", max_tokens=4)
    assert "\n" not in str(caught.value)
    return caught.value.message


def test_certificates_are_trusted_where_the_system_is_told_to(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(certificate) as port:
        assert "cannot be trusted: self-signed certificate" in refusal(f"https://127.0.0.1:{port}")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert "decides nothing" in refusal(f"https://127.0.0.1:{port}")
        assert "cannot be trusted: hostname mismatch" in refusal(f"https://localhost:{port}")
    with answering(None) as port:
        assert "cannot be trusted" in refusal(f"https://127.0.0.1:{port}")


def test_a_silent_server_ends_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.runtime.remote.http._READ_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert "has sent nothing for 0.2 seconds" in refusal(url, "edgeinfer")
