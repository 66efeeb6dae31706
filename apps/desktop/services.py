"""The parts of the running app, made once and handed to every endpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from edgeinfer.apps.desktop.control import ModelControl
from edgeinfer.apps.desktop.documents import Documents
from edgeinfer.apps.desktop.downloads import Downloads
from edgeinfer.apps.desktop.history import History
from edgeinfer.apps.desktop.library import Catalog, Library, Planner
from edgeinfer.apps.desktop.replies import ConversationReplies
from edgeinfer.apps.desktop.settings import DataFolder, SettingsFile
from edgeinfer.apps.server.events import EventFeed
from edgeinfer.apps.server.host import ModelHost
from edgeinfer.apps.server.security import Security


@dataclass(frozen=True)
class Services:
    """The parts of the running app.

    Attributes:
        notices: what the user should know of how the app started.
    """

    host: ModelHost
    security: Security
    history: History
    settings: SettingsFile
    planner: Planner
    library: Library
    control: ModelControl
    replies: ConversationReplies
    downloads: Downloads
    documents: Documents
    catalog: Catalog
    feed: EventFeed
    notices: tuple[str, ...]

    @classmethod
    def make(
        cls,
        folder: DataFolder,
        security: Security,
        host: ModelHost,
        *,
        settings: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        models: Sequence[Path] = (),
    ) -> Self:
        """Makes the parts.

        Args:
            folder: where the user's own is kept.
        """
        folder.make()
        kept = SettingsFile(folder.settings, settings)
        history = History.open(folder.history)
        feed, planner = EventFeed(), Planner(options, host.parallel)
        library = Library((folder.models, *models), planner)
        control = ModelControl(host, kept, options or {}, planner, library, feed)

        def told() -> None:
            feed.publish("conversations", {})

        replies = ConversationReplies(
            host, history, control.loaded_or_failed, lambda: {**control.defaults, **kept.now.options}, told
        )
        downloads = Downloads(
            lambda state: feed.publish("download", asdict(state), state.key),
            unfinished=kept.now.unfinished,
            remember=lambda ids: kept.keep(unfinished=ids),
        )
        notices = tuple(
            f"The file of your {what} was damaged. It was put aside as {path}, and a new one was started."
            for what, path in (("conversations", history.put_aside), ("settings", kept.put_aside))
            if path is not None
        )
        return cls(
            host=host,
            security=security,
            history=history,
            settings=kept,
            planner=planner,
            library=library,
            control=control,
            replies=replies,
            downloads=downloads,
            documents=Documents(),
            catalog=Catalog(),
            feed=feed,
            notices=notices,
        )

    async def start(self) -> None:
        """Starts loading the last model."""
        self.feed.publish("conversations", {})
        self.downloads.publish()
        self.control.start()

    async def stop(self) -> None:
        """Ends replies, downloads and loading, keeps what there is of them, and closes the windows' feeds."""
        await self.replies.close()
        await self.downloads.close()
        await self.control.close()
        self.feed.close()

    def close(self) -> None:
        """Closes the files."""
        self.history.close()
