"""Owns GET /metrics, and POST /start_profile and /stop_profile.

It must not know what is measured, or how.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxpage.errors import ParameterError
from jaxpage.metrics.prometheus import CONTENT_TYPE, Exporter
from jaxpage.server.errors import ApiError
from jaxpage.server.state import ApiServer


def routes(server: ApiServer) -> list[Route]:
    """The endpoints. Everybody may read the metrics; profiles, which slow everybody down, ask for the key."""
    exporter = Exporter(server.model_names[0], server.engine.all_metrics, server.metrics)

    async def metrics(request: Request) -> Response:
        return Response(exporter.text(), headers={"Content-Type": CONTENT_TYPE})

    async def start_profile(request: Request) -> Response:
        return await _profiled(server, lambda directory: server.engine.start_profile(directory))

    async def stop_profile(request: Request) -> Response:
        return await _profiled(server, lambda directory: server.engine.stop_profile())

    return [
        Route("/metrics", metrics),
        Route("/start_profile", server.guarded(start_profile), methods=["POST"]),
        Route("/stop_profile", server.guarded(stop_profile), methods=["POST"]),
    ]


async def _profiled(server: ApiServer, action: Callable[[Path], Awaitable[None]]) -> Response:
    directory = server.options.profiler_dir
    if directory is None:
        raise ApiError(404, "profiling is off: the server was started without --profiler-dir")
    try:
        await action(Path(directory))
    except ParameterError as error:
        raise ApiError(400, str(error)) from None
    return Response(status_code=200)
