"""Endpoints about models: settings, plans, loading, events, catalog, downloads, import, removal."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any, cast, get_args

import psutil
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import edgeinfer
from edgeinfer import hub
from edgeinfer.apps.desktop.checks import ConflictError
from edgeinfer.apps.desktop.library import (
    catalog_view,
    folder_view,
    id_of,
    importable,
    model_of,
    offers_view,
    search_view,
)
from edgeinfer.apps.desktop.records import ModelChoice
from edgeinfer.apps.desktop.requests import Endpoints, Table, event_stream, fields, optional, search_text, whole_number
from edgeinfer.apps.desktop.settings import AppSettings
from edgeinfer.apps.mcp.servers import Permission
from edgeinfer.core.errors import HubError, UsageError

_TEXT = str | None
_NUMBER = int | None


class ModelEndpoints(Endpoints):
    def table(self) -> Table:
        return (
            ("GET", "/state", self.state),
            ("PATCH", "/settings", self.change_settings),
            ("GET", "/models", self.models),
            ("POST", "/plan", self.plan),
            ("POST", "/model/load", self.load),
            ("POST", "/model/cancel", self.cancel),
            ("POST", "/model/unload", self.unload),
            ("GET", "/events", self.events),
            ("GET", "/tools", self.tools),
            ("POST", "/tools/reload", self.reload_tools),
            ("POST", "/tools/allow", self.allow_tool),
        )

    async def state(self, request: Request) -> Response:
        s = self._services
        memory = psutil.virtual_memory()
        return JSONResponse(
            {
                "version": edgeinfer.__version__,
                "model": s.control.state(),
                "settings": _settings_view(s.settings.now),
                "defaults": {"options": s.control.defaults},
                "machine": {"total_bytes": memory.total, "available_bytes": memory.available},
                "notices": s.notices,
            }
        )

    async def change_settings(self, request: Request) -> Response:
        kinds = {"theme": _TEXT, "memory": int | str | None, "context": _NUMBER, "model": _TEXT, "system": str}
        changes = await fields(request, self._security, **kinds, options=dict)
        if "model" in changes:
            changes["model"] = model_of(changes["model"])
        return JSONResponse(_settings_view(await asyncio.to_thread(self._services.settings.change, changes)))

    async def models(self, request: Request) -> Response:
        settings = self._services.settings.now
        found = await asyncio.to_thread(self._services.library.models, settings.recent, settings.context)
        return JSONResponse({"models": list(map(asdict, found))})

    async def plan(self, request: Request) -> Response:
        body = await fields(request, self._security, model=_TEXT, memory=_NUMBER, context=_NUMBER, kv=_TEXT)
        model = model_of(body.get("model"))
        numbers = {name: whole_number(body, name) for name in ("memory", "context")}

        def make() -> dict[str, object]:
            _require_local(model)
            return self._services.planner.plan(model, **numbers, **optional(body, "kv"))

        return JSONResponse(await asyncio.to_thread(make))

    async def load(self, request: Request) -> Response:
        """Load a model for one conversation, for new ones (`default`), or for both."""
        kinds = {"model": _TEXT, "memory": _NUMBER, "context": _NUMBER, "conversation": _TEXT, "default": bool}
        body = await fields(request, self._security, **kinds)
        services, default = self._services, body.get("default", True)
        now = services.settings.now
        usual = {"memory": now.memory, "context": now.context}
        numbers = {name: whole_number(body, name) if name in body else usual[name] for name in usual}
        choice = ModelChoice(model_of(body.get("model")), **numbers)
        await asyncio.to_thread(_require_local, choice.model)
        if body.get("conversation") is not None:
            await asyncio.to_thread(services.history.change, body["conversation"], choice=choice)
        if default:
            await asyncio.to_thread(services.settings.change, numbers)
        services.control.load(choice, default=default)
        return JSONResponse(self._services.control.state(), status_code=202)

    async def cancel(self, request: Request) -> Response:
        self._services.control.cancel()
        return JSONResponse(self._services.control.state(), status_code=202)

    async def unload(self, request: Request) -> Response:
        await self._services.host.unload()
        return JSONResponse(self._services.control.state(), status_code=202)

    async def events(self, request: Request) -> Response:
        self._services.control.publish()
        return event_stream(self._services.feed.read(), self._security)

    async def tools(self, request: Request) -> Response:
        """The MCP servers, their tools, and what is allowed of each."""
        s = self._services
        shown = [
            {name: getattr(state, name) for name in ("name", "place", "status", "message")}
            | {
                "tools": [
                    {"title": tool.title, "description": tool.description, "permission": s.servers.permission(tool)}
                    for tool in state.tools
                ]
            }
            for state in s.servers.states
        ]
        return JSONResponse({"path": str(s.servers.path), "error": s.servers_error, "servers": shown})

    async def reload_tools(self, request: Request) -> Response:
        await self._services.start_servers()
        return await self.tools(request)

    async def allow_tool(self, request: Request) -> Response:
        body = await fields(request, self._security, server=str, tool=str, permission=str)
        states = self._services.servers.states
        found = [each for state in states if state.name == body.get("server") for each in state.tools]
        tool = next((each for each in found if each.title == body.get("tool")), None)
        if tool is None or (permission := body.get("permission")) not in get_args(Permission):
            raise UsageError("There is no such tool, or no such permission.", "Give server, tool and permission.")
        await asyncio.to_thread(self._services.servers.allow, tool, cast(Permission, permission))
        return await self.tools(request)


def _require_local(model: str | None) -> None:
    """Refuse a model that loading would download without asking."""
    if hub.find_model(model).here is None:
        raise HubError(f"{model} is not on this machine.", "Download it first.")


def _settings_view(settings: AppSettings) -> dict[str, Any]:
    data = asdict(settings)
    del data["recent"], data["unfinished"]
    return data | {
        "options": dict(settings.options),
        "model": id_of(settings.model),
        "model_name": hub.shown_name(settings.model),
    }


class CatalogEndpoints(Endpoints):
    def table(self) -> Table:
        return (
            ("GET", "/catalog", self.catalog),
            ("GET", "/hub", self.search),
            ("GET", "/offers", self.offers),
            ("POST", "/downloads", self.download),
            ("DELETE", "/downloads/{key}", self.cancel),
            ("GET", "/folders", self.folder),
            ("POST", "/models/import", self.import_model),
            ("POST", "/models/remove", self.remove),
        )

    async def catalog(self, request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(catalog_view))

    async def search(self, request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(search_view, search_text(request)))

    async def offers(self, request: Request) -> Response:
        name = search_text(request, "name")
        return JSONResponse(await asyncio.to_thread(offers_view, name))

    async def download(self, request: Request) -> Response:
        id = (await fields(request, self._security, id=str)).get("id", "").strip()
        if not id or id.startswith("-"):
            raise UsageError("No model to download was named.", "Give a catalog name, or OWNER/NAME of the hub.")
        return JSONResponse(asdict(self._services.downloads.begin(id)), status_code=202)

    async def cancel(self, request: Request) -> Response:
        return JSONResponse(asdict(await self._services.downloads.cancel(request.path_params["key"])))

    async def folder(self, request: Request) -> Response:
        """List what can be imported from a folder; the home folder by default."""
        return JSONResponse(await asyncio.to_thread(folder_view, request.query_params.get("path", "")))

    async def import_model(self, request: Request) -> Response:
        """List a model found on this machine; a checkpoint is converted first."""
        path = (await fields(request, self._security, path=str)).get("path", "")
        found = await asyncio.to_thread(importable, path)
        if await asyncio.to_thread(lambda: hub.find_model(str(found)).here) is None:
            return JSONResponse({"download": asdict(self._services.downloads.begin(str(found)))}, status_code=202)
        # A model that cannot be read is refused now, not when it is loaded.
        await asyncio.to_thread(edgeinfer.describe, found)
        await asyncio.to_thread(self._services.settings.used, str(found), default=False)
        return JSONResponse({"id": str(found)})

    async def remove(self, request: Request) -> Response:
        """Delete a model that was downloaded or converted."""
        id = (await fields(request, self._security, id=str)).get("id", "")
        loaded: Any = self._services.control.choice
        if loaded is not None and id == loaded.model:
            raise ConflictError("The model is in use.", "Load another one first, or unload it.")
        return JSONResponse({"freed_bytes": await asyncio.to_thread(edgeinfer.remove_model, id)})
