"""What the app's API says, as JSON objects; knows nothing of requests."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

from edgeinfer.apps.desktop.downloads import Download
from edgeinfer.apps.desktop.library import BUILT_IN, ListedModel
from edgeinfer.apps.desktop.markdown import render_reply, render_user
from edgeinfer.apps.desktop.records import Conversation, Message, Role, Summary
from edgeinfer.apps.desktop.replies import RunningReply
from edgeinfer.apps.desktop.settings import AppSettings

__all__ = [
    "conversation_view",
    "download_view",
    "listed_view",
    "message_view",
    "settings_view",
    "summary_view",
]

_UNNAMED = "New chat"


def conversation_view(conversation: Conversation, running: RunningReply | None) -> dict[str, Any]:
    """A conversation with all its messages."""
    c = conversation
    return {
        "id": c.id,
        "title": c.title or _UNNAMED,
        "created": c.created,
        "updated": c.updated,
        "system": c.system,
        "options": dict(c.options),
        "leaf": c.leaf,
        "replying": None if running is None else running.message.id,
        "messages": [message_view(message, running) for message in c.messages],
    }


def message_view(message: Message, running: RunningReply | None = None) -> dict[str, Any]:
    """A message with its HTML. A reply that nobody makes, as its end could not be kept, counts as interrupted.

    Args:
        running: the reply that its conversation is getting.
    """
    m = message
    if m.status == "replying" and (running is None or running.message.id != m.id):
        m = dataclasses.replace(m, status="interrupted")
    return {
        "id": m.id,
        "parent": m.parent,
        "role": m.role,
        "content": m.content,
        "html": _html(m.role, m.content),
        "created": m.created,
        "status": m.status,
        "error": None if m.failure is None else dataclasses.asdict(m.failure),
        "figures": None if m.figures is None else dataclasses.asdict(m.figures),
    }


@lru_cache(maxsize=256)
def _html(role: Role, content: str) -> str:
    return render_user(content) if role == "user" else render_reply(content)


def summary_view(summary: Summary) -> dict[str, Any]:
    """A line of the list of conversations."""
    return dataclasses.asdict(summary) | {"title": summary.title or _UNNAMED}


def listed_view(model: ListedModel) -> dict[str, Any]:
    """A model of the library."""
    return dataclasses.asdict(model)


def download_view(download: Download) -> dict[str, Any]:
    """A DownloadState."""
    return dataclasses.asdict(download)


def settings_view(settings: AppSettings) -> dict[str, Any]:
    """The settings that the window shows."""
    data = dataclasses.asdict(settings)
    del data["recent"]
    return data | {"options": dict(settings.options), "model": settings.model or BUILT_IN}
