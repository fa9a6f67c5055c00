"""Owns the page at ``/``: its files, and the headers that they are served with.

It must not know the engine; what the page shows it fetches from ``/live`` and ``/v1``.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from jaxpage.server.state import ApiServer

FOLDER = Path(__file__).parent
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    # Nothing from elsewhere, nothing inline, and no other site may frame a page that may hold a key.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Kept, but asked for each time: after an upgrade nobody runs old scripts against a new server.
    "Cache-Control": "no-cache",
}


class PageFile:
    """One file, read once."""

    def __init__(self, path: Path) -> None:
        self._content = path.read_bytes()
        self._headers = HEADERS | {"ETag": f'"{hashlib.sha256(self._content).hexdigest()[:32]}"'}
        self._media_type = MEDIA_TYPES[path.suffix]

    def answer(self, request: Request) -> Response:
        """The file, or 304 if the client has it."""
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if self._headers["ETag"] in known:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers=self._headers, media_type=self._media_type)


def routes(server: ApiServer) -> list[Route]:
    """The page at ``/`` and what it loads. Open to all: the page itself holds nothing that a key protects."""
    files = {path.name: PageFile(path) for path in FOLDER.iterdir() if path.suffix in MEDIA_TYPES}

    async def index(request: Request) -> ASGIApp:
        return files["index.html"].answer(request)

    async def file(request: Request) -> ASGIApp:
        found = files.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404)
        return found.answer(request)

    return [
        Route("/", index, include_in_schema=False),
        Route("/page/{name}", file, include_in_schema=False),
    ]
