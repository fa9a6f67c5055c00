"""Owns ``GET /openapi.json``: the description of everything that the server answers to.

It must not know how anything is answered. That it says what the checks do is for tests to see to.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxpage.server.openapi.document import document
from jaxpage.server.state import ApiServer


def routes(server: ApiServer) -> list[Route]:
    """The endpoint, open to everybody: it says nothing that the source does not."""

    async def openapi(request: Request) -> Response:
        return JSONResponse(document(server.limits, server.options, server.model_names))

    return [Route("/openapi.json", openapi)]


__all__ = ["document", "routes"]
