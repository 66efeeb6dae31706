"""Endpoints about models that can be had: catalog, search of the hub, downloads, import from the disk, removal."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

import edgeinfer
from edgeinfer import hub
from edgeinfer.apps.desktop.checks import ConflictError
from edgeinfer.apps.desktop.offers import folder_view, importable
from edgeinfer.apps.desktop.requests import Endpoint, answered, fields, search_text
from edgeinfer.apps.desktop.services import Services
from edgeinfer.errors import UsageError


def catalog_routes(services: Services) -> list[BaseRoute]:
    """The routes."""
    api = _Catalog(services)
    table: tuple[tuple[str, str, Endpoint], ...] = (
        ("GET", "/catalog", api.catalog),
        ("GET", "/hub", api.search),
        ("GET", "/offers", api.offers),
        ("POST", "/downloads", api.download),
        ("DELETE", "/downloads/{key}", api.cancel),
        ("GET", "/folders", api.folder),
        ("POST", "/models/import", api.import_model),
        ("POST", "/models/remove", api.remove),
    )
    return [Route(path, answered(endpoint), methods=[method]) for method, path, endpoint in table]


class _Catalog:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._security = services.security

    async def catalog(self, request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(self._services.catalog.view))

    async def search(self, request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(self._services.catalog.search, search_text(request)))

    async def offers(self, request: Request) -> Response:
        name = search_text(request, "name")
        return JSONResponse(await asyncio.to_thread(self._services.catalog.offers, name))

    async def download(self, request: Request) -> Response:
        id = (await fields(request, self._security, id=str)).get("id", "").strip()
        if not id or id.startswith("-"):
            raise UsageError("No model to download was named.", "Give a catalog name, or OWNER/NAME of the hub.")
        return JSONResponse(asdict(self._services.downloads.begin(id)), status_code=202)

    async def cancel(self, request: Request) -> Response:
        return JSONResponse(asdict(await self._services.downloads.cancel(request.path_params["key"])))

    async def folder(self, request: Request) -> Response:
        """What of a folder of this machine may be imported; the user's own where none is named."""
        return JSONResponse(await asyncio.to_thread(folder_view, request.query_params.get("path", "")))

    async def import_model(self, request: Request) -> Response:
        """Lists a model that is somewhere on this machine; a checkpoint is converted first."""
        path = (await fields(request, self._security, path=str)).get("path", "")
        found = await asyncio.to_thread(importable, path)
        if await asyncio.to_thread(hub.local, str(found)) is None:
            return JSONResponse({"download": asdict(self._services.downloads.begin(str(found)))}, status_code=202)
        # What cannot be read is refused now, and not when it is loaded.
        await asyncio.to_thread(edgeinfer.describe, found)
        await asyncio.to_thread(self._services.settings.used, str(found), default=False)
        return JSONResponse({"id": str(found)})

    async def remove(self, request: Request) -> Response:
        """Removes a model that was downloaded or converted from the disk."""
        id = (await fields(request, self._security, id=str)).get("id", "")
        loaded: Any = self._services.control.choice
        if loaded is not None and id == loaded.model:
            raise ConflictError("The model is in use.", "Load another one first, or unload it.")
        return JSONResponse({"freed_bytes": await asyncio.to_thread(edgeinfer.remove_model, id)})
