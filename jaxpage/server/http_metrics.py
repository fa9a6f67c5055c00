"""Owns what is noted about every call from outside: its series in the metrics, and its line in the access log.

It must not know what the routes do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxpage.metrics import ServerMetrics

logger = logging.getLogger("jaxpage.access")

PROBES = ("/metrics", "/health", "/load", "/version")
"""Asked every few seconds by machines: not counted, and logged only at level debug."""
NO_ROUTE = "none"
CLIENT_GONE = 499
"""Stands for the status where the client left before there was one; nginx's number."""


class CallObserver:
    """The outermost layer: measures each call until its last byte is sent.

    Args:
        routes: of the app; a call counts under the path of its route, so that paths make no series of their own.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[Any], metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = [route for route in routes if isinstance(route, Route)]
        self._paths = {route.path for route in self._routes}
        for route in self._routes:
            if route.path not in PROBES:
                for method in sorted((route.methods or set()) - {"HEAD"}):
                    metrics.expect(method, [route.path])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s, status = time.monotonic(), CLIENT_GONE
        # All layers look at the start of an answer alone; the pieces of a stream need not pass them one by one.
        scope.setdefault("state", {})["send_body"] = send

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        finally:
            self._note(scope, status, time.monotonic() - started_s)

    def _note(self, scope: Scope, status: int, duration_s: float) -> None:
        handler = self._handler(scope)
        is_probe = handler in PROBES
        if not is_probe:
            self._metrics.called(scope["method"], status, handler, duration_s)
        level = logging.DEBUG if is_probe else logging.INFO
        if not logger.isEnabledFor(level):
            return
        client = scope.get("client")
        fields = {
            "request_id": scope.get("state", {}).get("request_id", ""),
            "method": scope["method"],
            "path": _printable(scope["path"]),
            "status": status,
            "duration_ms": round(1000 * duration_s, 1),
            "client": f"{client[0]}:{client[1]}" if client else "",
        }
        text = "{client} {method} {path} {status} in {duration_ms} ms, request {request_id}".format(**fields)
        logger.log(level, "%s", text.lstrip(), extra=fields)

    def _handler(self, scope: Scope) -> str:
        if scope["path"] in self._paths:  # what is asked for most has no parameters, and no path in front
            return scope["path"]
        for route in self._routes:
            if route.matches(scope)[0] is not Match.NONE:
                return route.path
        return NO_ROUTE


def _printable(path: str) -> str:
    """A path cannot end a line of the log and begin one of its own."""
    return "".join(c if c.isprintable() else f"%{ord(c):02X}" for c in path[:1000])
