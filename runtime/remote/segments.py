"""Connections whose requests leave in one segment.

httpcore writes a request's head and its body apart, so that both ends of a connection wake up twice for one request;
between two programs of one machine that takes 0.4 ms.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterable
from typing import Any

import httpcore

# Seconds for which an unused connection is kept: no longer than servers keep theirs.
_KEPT_S = 5.0


def connection_pool(trusted: ssl.SSLContext | None) -> httpcore.ConnectionPool:
    """Connections by HTTP/1.1 that send a request when its answer is waited for; no proxy sees texts.

    Args:
        trusted: certificates; None for servers without TLS.
    """
    return httpcore.ConnectionPool(ssl_context=trusted, keepalive_expiry=_KEPT_S, network_backend=_JoiningBackend())


class _JoiningBackend(httpcore.SyncBackend):
    """Opens connections that join what is written."""

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        return _JoiningStream(super().connect_tcp(host, port, timeout, local_address, socket_options))


class _JoiningStream(httpcore.NetworkStream):
    """A connection that keeps what is written until something is read."""

    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream, self._kept = stream, b""

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._kept = self._kept + buffer if self._kept else buffer

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        kept, self._kept = self._kept, b""
        if kept:
            # Who refuses a request may answer before all of it was sent.
            with contextlib.suppress(httpcore.WriteError):
                self._stream.write(kept, timeout)
        return self._stream.read(max_bytes, timeout)

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _JoiningStream(self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
