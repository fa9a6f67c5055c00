"""Owns the app: which files' routes it has and what is around them. It runs on any ASGI server.

It must not know what the routes do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from jaxpage.server import completions, embeddings, live, metrics_routes, openapi, page, service, tokenizing
from jaxpage.server.cross_origin import cross_origin
from jaxpage.server.envelope import Envelope, Faults
from jaxpage.server.errors import error_response, to_api_error
from jaxpage.server.http_metrics import CallObserver
from jaxpage.server.options import DEFAULT_OPTIONS, ServerOptions
from jaxpage.server.state import ApiServer

ROUTES = (
    completions.routes,
    embeddings.routes,
    service.routes,
    metrics_routes.routes,
    tokenizing.routes,
    page.routes,
    live.routes,
    openapi.routes,
)
"""Each gives its routes for a server; in this order paths are looked up."""


def create_app(engine: Any, options: ServerOptions = DEFAULT_OPTIONS) -> Starlette:
    """The ASGI app for ``engine``, an ``AsyncLLMEngine`` or anything with its methods.

    ``app.state.server`` is its ``ApiServer``.
    """
    server = ApiServer(engine, options)

    async def http_error(request: Request, error: Exception) -> Response:
        return error_response(to_api_error(error))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        yield
        await asyncio.to_thread(server.close)

    routes = [route for each in ROUTES for route in each(server)]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(CallObserver, routes=routes, metrics=server.metrics),
            Middleware(Envelope, server=server),
            *cross_origin(options),
            Middleware(Faults),
        ],
        exception_handlers={HTTPException: http_error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.server = server
    return app
