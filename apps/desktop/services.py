"""The parts of the running app."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgeinfer.apps.desktop.control import ModelControl
from edgeinfer.apps.desktop.documents import Documents
from edgeinfer.apps.desktop.downloads import Downloads
from edgeinfer.apps.desktop.history import History
from edgeinfer.apps.desktop.library import Library, Planner
from edgeinfer.apps.desktop.replies import ConversationReplies
from edgeinfer.apps.desktop.settings import DataFolder, SettingsFile
from edgeinfer.apps.mcp.servers import ToolServers
from edgeinfer.apps.server.events import EventFeed
from edgeinfer.apps.server.host import ModelHost
from edgeinfer.apps.server.security import Security
from edgeinfer.core.errors import UserError


class Services:
    """The parts of the running app; `settings` are of this run only, `options` of every model, but for memory and
    context, and `models` further folders to search. `mcp` names
    the MCP servers in place of the folder's file."""

    def __init__(
        self,
        folder: DataFolder,
        security: Security,
        host: ModelHost,
        *,
        settings: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        models: Sequence[Path] = (),
        mcp: Path | None = None,
    ) -> None:
        folder.make()
        self.host, self.security = host, security
        self.settings = SettingsFile(folder.settings, settings)
        self.history = History.open(folder.history)
        self.feed = EventFeed()
        self.planner = Planner(options, host.parallel)
        self.library = Library((folder.models, *models), self.planner)
        self.control = ModelControl(host, self.settings, options or {}, self.planner, self.library, self.feed)
        self.servers = ToolServers(mcp or folder.mcp, folder.path / "mcp-permissions.json")
        self.servers_error = ""  # why they could not be read
        self.replies = ConversationReplies(
            host,
            self.history,
            self.control.loaded_or_failed,
            lambda: {**self.control.defaults, **self.settings.now.options},
            lambda: self.feed.publish("conversations", {}),
            self.servers,
        )
        self.downloads = Downloads(
            lambda state: self.feed.publish("download", asdict(state), state.key),
            unfinished=self.settings.now.unfinished,
            remember=lambda ids: self.settings.keep(unfinished=ids),
        )
        self.documents = Documents()
        # What the user should know about how the app started.
        self.notices = [
            f"The file of your {what} was damaged. It was put aside as {path}, and a new one was started."
            for what, path in (("conversations", self.history.put_aside), ("settings", self.settings.put_aside))
            if path is not None
        ]

    async def start(self) -> None:
        """Start to load the last model."""
        self.feed.publish("conversations", {})
        self.downloads.publish()
        self.control.start()
        await self.start_servers()

    async def start_servers(self) -> None:
        """Start the MCP servers again, by what their file says now."""
        self.servers_error = ""
        try:
            await asyncio.to_thread(self.servers.reload)
        except UserError as error:
            self.servers_error = error.message
        except ModuleNotFoundError:
            self.servers_error = "MCP servers need an extra: pip install 'edgeinfer[mcp]'"

    async def stop(self) -> None:
        """Stop and save replies, downloads and loading; close the windows' feeds."""
        await self.replies.close()
        await self.downloads.close()
        await self.control.close()
        await asyncio.to_thread(self.servers.close)
        self.feed.close()

    def close(self) -> None:
        self.history.close()
