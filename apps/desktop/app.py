"""Puts the app together: its API and its page beside OpenAI's endpoints on one server; knows no window."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Mount

from edgeinfer.apps.desktop.api_conversations import conversation_routes
from edgeinfer.apps.desktop.api_models import model_routes
from edgeinfer.apps.desktop.page import Access, AccessRequired, page_routes
from edgeinfer.apps.desktop.services import Services
from edgeinfer.apps.server.app import make_app

__all__ = ["make_desktop"]


def make_desktop(services: Services, access: Access) -> Starlette:
    """The application; it closes what `services` hold when it ends."""
    api = [*model_routes(services), *conversation_routes(services)]
    guarded = Mount("/app/api", routes=api, middleware=[Middleware(AccessRequired, access=access)])
    app = make_app(services.host, services.security, extra_routes=[guarded, *page_routes(access)])
    serve = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await services.start()
        try:
            async with serve(app):
                try:
                    yield
                finally:
                    await services.stop()
        finally:
            services.close()

    app.router.lifespan_context = lifespan
    return app
