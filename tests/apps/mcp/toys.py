"""An MCP server made with the official SDK, for tests: python -m tests.apps.mcp.toys, or in process over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.waiting import TIME_LIMIT, wait_until

ROOT = Path(__file__).resolve().parents[3]


def make(log: Path | None = None) -> Any:
    """A server of some tools, good and bad; `log` gets a line for each call of `add`."""
    import anyio
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("toys")

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        if log is not None:
            with log.open("a") as file:
                file.write(f"{a}+{b}\n")
        return a + b

    def long() -> str:
        """Write a lot."""
        return "x" * 100_000

    def die() -> str:
        """End the server."""
        os._exit(3)

    async def hang() -> str:
        """Never answer."""
        await anyio.sleep_forever()
        return ""

    for tool in (add, long, die, hang):
        server.add_tool(tool)
    return server


def config(folder: Path, **servers: Any) -> Path:
    """A file that names the servers."""
    path = folder / "mcp.json"
    path.write_text(json.dumps({"mcpServers": servers}))
    return path


def by_stdio(log: Path | None = None, **more: Any) -> dict[str, Any]:
    """How the file names this server as a command."""
    arguments = ["-m", "tests.apps.mcp.toys", *([str(log)] if log else [])]
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])}
    return {"command": sys.executable, "args": arguments, "env": env, "cwd": str(ROOT), **more}


@contextlib.contextmanager
def by_http() -> Iterator[dict[str, Any]]:
    """How the file names this server as an address, where it answers for the block to requests with a key."""
    import uvicorn

    app = make().streamable_http_app()

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (b"x-key", b"secret") not in scope["headers"]:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await app(scope, receive, send)

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(guarded, log_level="error", ws="none"))
        thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
        thread.start()
        wait_until(lambda: server.started, "the server starts")
        try:
            yield {"url": f"http://127.0.0.1:{bound.getsockname()[1]}/mcp", "headers": {"X-Key": "${TOYS_KEY}"}}
        finally:
            server.should_exit = True
            thread.join(TIME_LIMIT)


if __name__ == "__main__":
    make(Path(sys.argv[1]) if sys.argv[1:] else None).run()
