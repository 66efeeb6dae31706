"""The MCP servers that a chat may use: named by the common JSON, connected, and what is allowed of their tools."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import tempfile
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import field, replace
from pathlib import Path
from typing import IO, Any, Literal, Self, TextIO, TypeVar, cast

from edgeinfer.core.errors import StorageError, UsageError
from edgeinfer.core.records import dataclass
from edgeinfer.core.user_files import user_data

T = TypeVar("T")
Permission = Literal["ask", "always", "never"]

# Seconds for a server to start and list its tools, which may download it first, and for a call, unless "timeout" says.
_START_S, _CALL_S = 60.0, 60.0
# The SDK kills a server that does not end by itself in less.
_END_S = 10.0
_MOST_TOOLS = 256
MOST_CHARACTERS = 32_000  # of a result
_MOST_SAID = 300  # characters of an error
_VARIABLE = re.compile(r"\$\{(?:env:)?(\w+)\}")
_HINT = (
    'It looks like {"mcpServers": {"files": {"command": "npx", "args": ["-y", "..."]}, "web": {"url": "https://..."}}}.'
)


def usual_file() -> Path:
    """Where the servers of the terminal's chat are configured; it need not exist."""
    return user_data() / "edgeinfer" / "mcp.json"


@dataclass(frozen=True)
class ServerConfig:
    """A server as the JSON names it: a command to start, or an address."""

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    kind: str = "stdio"  # or "http", or "sse", as older servers have it
    disabled: bool = False
    timeout: float = _CALL_S

    @property
    def place(self) -> str:
        """What runs or answers, without secrets."""
        return self.url or " ".join((self.command, *self.args))


def read_config(path: Path) -> tuple[ServerConfig, ...]:
    """Read the servers of a file in the form that Claude, Cursor, LM Studio and others share; none if it is missing."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}.", _HINT) from error
    servers = data.get("mcpServers") if isinstance(data, dict) else None
    if not isinstance(servers, dict):
        raise UsageError(f"{path} has no mcpServers.", _HINT)
    return tuple(_server(name, given, path) for name, given in servers.items())


def _server(name: str, given: Any, path: Path) -> ServerConfig:
    def take(key: str, kind: type[T], default: T) -> T:
        value = given.get(key, default)
        if not isinstance(value, kind):
            raise UsageError(f"{path}: {key} of the server {name} is no {kind.__name__}.", _HINT)
        return value

    if not isinstance(given, dict) or bool(given.get("command")) == bool(given.get("url")):
        raise UsageError(f"{path}: the server {name} needs either a command or a url.", _HINT)
    texts = [*take("args", list, []), *take("env", dict, {}).values(), *take("headers", dict, {}).values()]
    if not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{path}: args, env and headers of the server {name} must be strings.", _HINT)
    kind = (
        take("type", str, "http" if "url" in given else "stdio").lower().replace("streamable", "").strip("-_") or "http"
    )
    timeout = given.get("timeout", _CALL_S)
    if not isinstance(timeout, int | float) or timeout <= 0:
        raise UsageError(f"{path}: timeout of the server {name} is no number of seconds.", _HINT)
    return ServerConfig(
        name=name,
        command=_filled(take("command", str, "")),
        args=tuple(map(_filled, take("args", list, []))),
        env={key: _filled(value) for key, value in take("env", dict, {}).items()},
        cwd=None if given.get("cwd") is None else _filled(take("cwd", str, "")),
        url=_filled(take("url", str, "")),
        headers={key: _filled(value) for key, value in take("headers", dict, {}).items()},
        kind=kind,
        disabled=take("disabled", bool, False),
        timeout=float(timeout),
    )


def _filled(text: str) -> str:
    """A text with ${NAME} replaced by this process's variables, so that keys need not lie in the file."""
    return _VARIABLE.sub(lambda found: os.environ.get(found[1], ""), text)


@dataclass(frozen=True)
class ServerTool:
    """A tool of a server; `name` is how the model calls it."""

    name: str
    server: str
    title: str  # its name at the server
    description: str
    parameters: Mapping[str, Any]  # JSON Schema of its arguments
    key: str  # changes with the server's place and with what the tool says of itself

    @property
    def as_tool(self) -> dict[str, Any]:
        """The form of OpenAI's requests."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ServerState:
    """A server, whether it is connected, and its tools."""

    name: str
    place: str
    status: Literal["starting", "ready", "failed", "disabled"]
    message: str = ""  # why it failed
    tools: tuple[ServerTool, ...] = ()


@dataclass(frozen=True)
class ToolAnswer:
    """What a call returned, as the model reads it."""

    text: str
    failed: bool = False


class ToolServers:
    """The configured servers, connected from a thread with an event loop of its own, so that none can stall a chat.

    Methods may be called from any thread. What is always or never allowed is kept next to the user's other data, by
    what the tool was when it was allowed: a tool that says something else of itself is asked about again.
    """

    def __init__(self, path: Path, permissions: Path | None = None) -> None:
        self.path = path
        self._permissions_path = permissions or usual_file().with_name("mcp-permissions.json")
        self._permissions = _read_permissions(self._permissions_path)
        self._lock = threading.Lock()
        self._links: dict[str, _Link] = {}
        self._loop: asyncio.AbstractEventLoop | None = None  # from the first server on

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reload(self) -> None:
        """Read the file again, end the connections and start what it names; a mistake in it changes nothing."""
        configs = read_config(self.path)
        if configs:
            import mcp  # noqa: F401 - missing where the extra is not installed
        self._end_all()
        with self._lock:
            self._links = {config.name: _Link(config) for config in configs}
        if self._links and self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="edgeinfer-mcp", daemon=True)
            self._thread.start()
        for link in self._links.values():
            if self._loop is not None and not link.config.disabled:
                self._loop.call_soon_threadsafe(link.start)

    @property
    def states(self) -> tuple[ServerState, ...]:
        with self._lock:
            links = list(self._links.values())
        return tuple(link.state for link in links)

    @property
    def starting(self) -> bool:
        return any(state.status == "starting" for state in self.states)

    def wait(self, seconds: float = _START_S) -> None:
        """Wait until every server has started or failed, but not longer."""
        waits = [link.tried.wait() for link in self._links.values() if not link.config.disabled]
        if waits:
            with contextlib.suppress(TimeoutError):
                self._do(_all(waits)).result(seconds)

    @property
    def tools(self) -> dict[str, ServerTool]:
        """What can be called now, by the name that the model uses; never what is never allowed."""
        found: dict[str, ServerTool] = {}
        for state in self.states:
            for tool in state.tools:
                if self.permission(tool) == "never":
                    continue
                name = tool.name if tool.name not in found else _name(f"{tool.server}_{tool.title}")
                found.setdefault(name, replace(tool, name=name))
        return found

    def permission(self, tool: ServerTool) -> Permission:
        return self._permissions.get(tool.key, "ask")

    def allow(self, tool: ServerTool, permission: Permission) -> None:
        """Remember what is allowed of a tool; "ask" forgets it."""
        with self._lock:
            self._permissions.pop(tool.key, None)
            if permission != "ask":
                self._permissions[tool.key] = permission
            _write_permissions(self._permissions_path, self._permissions)

    def call(self, tool: ServerTool, arguments: str, most: int = MOST_CHARACTERS) -> Future[ToolAnswer]:
        """Call a tool with JSON. Whatever goes wrong is an answer that says so; cancelling the future ends the call."""
        with self._lock:
            link = self._links.get(tool.server)
        return self._do(_answer(link, tool, arguments, most))

    def close(self) -> None:
        """End all connections, and with them the servers that were started."""
        self._end_all()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._links, self._loop = {}, None

    def _end_all(self) -> None:
        if self._loop is not None:
            self._do(_all([link.end() for link in self._links.values()])).result()

    def _do(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        assert self._loop is not None, "no server was configured"
        return asyncio.run_coroutine_threadsafe(work, self._loop)


async def _all(waits: Sequence[Coroutine[Any, Any, Any]]) -> None:
    await asyncio.gather(*waits)


class _Link:
    """A connection, held by one task: what enters it also leaves it, as the SDK's task groups ask."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        status: Literal["disabled", "starting"] = "disabled" if config.disabled else "starting"
        self.state = ServerState(config.name, config.place, status)
        self.tried = asyncio.Event()
        self.client: Any = None  # mcp.Client, while it is connected
        self._leave = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._hold())

    async def _hold(self) -> None:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            try:
                async with contextlib.AsyncExitStack() as stack:
                    async with asyncio.timeout(_START_S):
                        client = await stack.enter_async_context(_client(self.config, log))
                        tools = await _listed(self.config, client)
                    self.client = client
                    self.state = replace(self.state, status="ready", tools=tools)
                    self.tried.set()
                    await self._leave.wait()
            except Exception as error:  # of any kind: the server is another program
                if not self._leave.is_set():
                    self.fail(_said(error, _START_S) + _last_line(log))
            finally:
                self.client = None
                self.tried.set()

    def fail(self, message: str) -> None:
        """Note why the server cannot be used any more."""
        self.state = replace(self.state, status="failed", message=message, tools=())

    async def end(self) -> None:
        self._leave.set()
        if self._task is not None:
            if not self.tried.is_set():
                self._task.cancel()
            await asyncio.wait([self._task], timeout=_END_S)
            self._task.cancel()


def _client(config: ServerConfig, log: IO[str]) -> Any:
    import mcp
    from mcp.client.sse import sse_client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    if config.kind == "stdio":
        parameters = mcp.StdioServerParameters(
            command=config.command, args=list(config.args), env=dict(config.env), cwd=config.cwd
        )
        transport: Any = mcp.stdio_client(parameters, errlog=cast(TextIO, log))
    elif config.kind == "sse":
        transport = sse_client(config.url, headers=dict(config.headers))
    else:
        http = create_mcp_http_client(headers=dict(config.headers))
        transport = _with_http(http, streamable_http_client(config.url, http_client=http))
    return mcp.Client(transport, client_info=mcp.Implementation(name="edgeinfer", version="1"))


@contextlib.asynccontextmanager
async def _with_http(http: Any, transport: Any) -> Any:
    async with http, transport as streams:
        yield streams


async def _listed(config: ServerConfig, client: Any) -> tuple[ServerTool, ...]:
    tools: list[ServerTool] = []
    cursor: str | None = None
    while len(tools) < _MOST_TOOLS:
        page = await client.list_tools(cursor=cursor)
        tools += [_tool(config, each) for each in page.tools]
        cursor = page.next_cursor
        if not cursor:
            break
    return tuple(tools[:_MOST_TOOLS])


def _tool(config: ServerConfig, tool: Any) -> ServerTool:
    schema = tool.input_schema if isinstance(tool.input_schema, dict) else {}
    parameters = {word: value for word, value in schema.items() if word not in ("$schema", "title")}
    description = (tool.description or tool.title or "").strip()
    identity = [config.command, config.args, config.url, tool.name, description, parameters]
    key = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:32]
    return ServerTool(_name(tool.name), config.name, tool.name, description, parameters, key)


def _name(text: str) -> str:
    """A name that every model's notation of calls can hold."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", text)[:64]


async def _answer(link: _Link | None, tool: ServerTool, arguments: str, most: int) -> ToolAnswer:
    if link is None or link.client is None:
        why = f" {link.state.message}" if link is not None else ""
        return ToolAnswer(f"The server {tool.server} is not connected.{why}", failed=True)
    try:
        given = json.loads(arguments or "{}")
        if not isinstance(given, dict):
            raise ValueError("they are no object")
    except (ValueError, RecursionError) as error:
        return ToolAnswer(f"The arguments are not valid JSON: {error}.", failed=True)
    try:
        async with asyncio.timeout(link.config.timeout):
            result = await link.client.call_tool(tool.title, given)
    except Exception as error:  # of any kind: the server is another program
        if _has_ended(error):
            link.fail(f"The server {tool.server} has ended.")
            link._leave.set()
            return ToolAnswer(link.state.message, failed=True)
        return ToolAnswer(_said(error, link.config.timeout), failed=True)
    text = "\n".join(_text(part) for part in result.content)
    if not text and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    if len(text) > most:
        text = f"{text[:most]}\n[{len(text) - most:,} more characters were left out]"
    return ToolAnswer(text, failed=bool(result.is_error))


def _text(part: Any) -> str:
    """A part of a result as text; the model reads nothing else."""
    text = getattr(part, "text", None) or getattr(getattr(part, "resource", None), "text", None)
    if text is not None:
        return str(text)
    uri = getattr(part, "uri", None) or getattr(getattr(part, "resource", None), "uri", None)
    return f"[{part.type} {uri or getattr(part, 'mime_type', '') or ''}, which is not text]"


def _said(error: BaseException, seconds: float) -> str:
    """What went wrong, in a sentence."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"It did not answer within {seconds:g} seconds."
    if isinstance(error, ModuleNotFoundError | FileNotFoundError):
        return f"{error}."
    return f"{type(error).__name__}: {error}"[:_MOST_SAID]


def _has_ended(error: BaseException) -> bool:
    from mcp.types import CONNECTION_CLOSED

    closed = type(error).__name__ in ("ClosedResourceError", "BrokenResourceError", "EndOfStream")
    return closed or getattr(getattr(error, "error", None), "code", None) == CONNECTION_CLOSED


def _last_line(log: IO[str]) -> str:
    """What a server that did not start wrote last."""
    log.seek(0)
    lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    return f" It said: {lines[-1][:_MOST_SAID]}" if lines else ""


def _read_permissions(path: Path) -> dict[str, Permission]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return {key: value for key, value in data.items() if value in ("always", "never")} if isinstance(data, dict) else {}


def _write_permissions(path: Path, permissions: Mapping[str, Permission]) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(permissions, indent=1) + "\n", "utf-8")
        temporary.replace(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}.", "Check its permissions.") from error
