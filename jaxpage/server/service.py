"""Owns the small endpoints about the server itself: models, health, version, load and the prefix cache's reset.

It must not know how text is generated.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import jaxpage
from jaxpage.server.state import ApiServer


def routes(server: ApiServer) -> list[Route]:
    """The endpoints, of which /v1 and what slows everybody down ask for the key."""

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model_card(server, name) for name in server.model_names]})

    async def model(request: Request) -> Response:
        return JSONResponse(_model_card(server, server.check_model(request.path_params["model_id"])))

    async def reset_prefix_cache(request: Request) -> Response:
        # Requests keep what they hold; later ones find nothing older.
        await server.engine.reset_prefix_cache()
        return Response(status_code=200)

    async def health(request: Request) -> Response:
        server.check_alive()
        return Response(status_code=200)

    async def version(request: Request) -> Response:
        return JSONResponse({"version": jaxpage.__version__})

    async def load(request: Request) -> Response:
        return JSONResponse({"server_load": server.num_in_flight})

    return [
        Route("/v1/models", server.guarded(models)),
        Route("/v1/models/{model_id:path}", server.guarded(model)),
        Route("/flush_cache", server.guarded(reset_prefix_cache), methods=["POST"]),
        Route("/reset_prefix_cache", server.guarded(reset_prefix_cache), methods=["POST"]),
        Route("/health", health),
        Route("/version", version),
        Route("/load", load),
    ]


def _model_card(server: ApiServer, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": server.started_at,
        "owned_by": "jaxpage",
        "root": server.model_names[0],
        "parent": None,
        "max_model_len": server.engine.max_model_len,
    }
