"""Owns which web pages may use the API (CORS).

It must not know routes.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from jaxpage.server.errors import ApiError, error_response
from jaxpage.server.options import ServerOptions


class CrossOrigin(CORSMiddleware):
    """Starlette's middleware, whose refusals are plain text; here they have the body of every other error."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """The answer to a browser that asks whether a page may send what it wants to send."""
        answer = super().preflight_response(request_headers)
        if answer.status_code == 200:
            return answer
        message = bytes(answer.body).decode()
        kept = {name: value for name, value in answer.headers.items() if not name.startswith("content-")}
        return error_response(ApiError(answer.status_code, f"{message[:1].lower()}{message[1:]}", headers=kept))


def cross_origin(options: ServerOptions) -> list[Middleware]:
    """The layer, if any page may come in. It belongs outside of ``Faults``, so that pages can read errors, too."""
    if not options.allowed_origins:
        return []
    return [
        Middleware(
            CrossOrigin,
            allow_origins=options.allowed_origins,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
            allow_credentials=options.allow_credentials,
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    ]
