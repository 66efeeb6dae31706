"""Layers on other machines: which servers are refused, and that the text is the same where one holds them.

The last needs llama.cpp with RPC, in the folder that EDGEINFER_TEST_RPC names, with ggml-rpc-server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import edgeinfer
from edgeinfer.core.errors import CapabilityError, RemoteError, UsageError
from tests.waiting import wait_until

VERSION = bytes([7, 0, 0, 0])
RUN = """
import json, sys, edgeinfer
options = {"backend": "llamacpp"} if sys.argv[2] == "-" else {"rpc": sys.argv[2]}
with edgeinfer.load(sys.argv[1], threads=1, speculation="off", context=64, **options) as model:
    reply = model.generate([1, 5, 9, 12], max_tokens=8, ignore_eos=True)
    plan = model.plan
    print(json.dumps([reply.token_ids, plan.device, plan.configuration.gpu_layers, dict(plan.footprint.device)]))
"""


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """The address of a server that gives this answer to everything."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(64)
                connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(60)


def test_only_private_networks_without_an_explicit_word() -> None:
    for servers in ("192.168.1.20:50052", "127.0.0.1:1, [fe80::1]:2", "nas:50052"):
        assert edgeinfer.LoadOptions(rpc=servers).rpc_servers
    for options, says in (
        ({"rpc": "8.8.8.8:50052"}, "not on a private network"),
        ({"rpc": "192.168.1.20:50052,example.com:50052"}, "not on a private network"),
        ({"rpc": "192.168.1.20"}, "no RPC server"),
        ({"rpc": "host:99999"}, "no RPC server"),
        ({"rpc": " , "}, "no RPC servers"),
        ({"rpc": ",".join(["nas:1"] * 17)}, "no RPC servers"),
        ({"rpc_public": True}, "needs a server"),
    ):
        with pytest.raises(UsageError, match=says):
            edgeinfer.LoadOptions.of(**options)
    assert edgeinfer.LoadOptions(rpc="8.8.8.8:50052", rpc_public=True).rpc_servers == ("8.8.8.8:50052",)


def test_bundles_are_not_divided() -> None:
    with pytest.raises(UsageError, match="does not divide it between machines"):
        edgeinfer.load(rpc="127.0.0.1:50052")


@pytest.mark.gguf
def test_servers_are_asked_before_llama_cpp_would_end_the_process() -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from edgeinfer.runtime.backends.llamacpp.graphics import _check

    size = (28).to_bytes(8, "little")
    with answering(size + VERSION + bytes(24)) as server:
        _check(server)
    for answer, says in (
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(40), "answers as no RPC server"),
        (size + VERSION, "answers as no RPC server"),
        (b"", "answers as no RPC server|cannot be reached"),
        (size + bytes([6, 0, 0, 0]) + bytes(24), "speaks version 6.0"),
    ):
        with answering(answer) as server, pytest.raises(RemoteError, match=says):
            _check(server)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(RemoteError, match="cannot be reached"):
        _check(f"127.0.0.1:{port}")


@pytest.mark.gguf
def test_a_build_without_rpc_says_how_to_build_one_with_it() -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from edgeinfer.bundle.gguf.library import llama_library
    from edgeinfer.runtime.backends.llamacpp.graphics import rpc_processor

    if llama_library().llama_supports_rpc():
        pytest.skip("this one has it")
    with pytest.raises(CapabilityError, match="without RPC") as caught:
        rpc_processor(("127.0.0.1:50052",))
    assert "GGML_RPC=on" in str(caught.value.hint)


@pytest.mark.gguf
@pytest.mark.slow
def test_layers_in_another_process_make_the_same_text(tmp_path: Path) -> None:
    folder = os.environ.get("EDGEINFER_TEST_RPC")
    if not folder:
        pytest.skip("EDGEINFER_TEST_RPC names no llama.cpp with RPC")
    from tests.gguf_models import builtin_gguf

    with socket.create_server(("127.0.0.1", 0)) as free:
        server = f"127.0.0.1:{free.getsockname()[1]}"
    port = server.rpartition(":")[2]
    command = [f"{folder}/ggml-rpc-server", "-H", "127.0.0.1", "-p", port, "-t", "1"]

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", int(port))) == 0

    def run(servers: str) -> list[object]:
        environment = os.environ | {"LLAMA_CPP_LIB_PATH": folder}
        made = subprocess.run(
            [sys.executable, "-c", RUN, str(builtin_gguf()), servers],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=300,
        )
        found: list[object] = json.loads(made.stdout)
        return found

    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(listens, "the RPC server")
            tokens, device, layers, there = run(server)
        finally:
            process.terminate()
    assert device == f"RPC {server}" and layers and isinstance(there, dict) and there["weights"]
    assert tokens == run("-")[0]
