"""Owns the server as a deployment of Ray Serve: ``serve run configs/ray/serve.yaml``.

It must not know routes, fields or how the engine works. Ray Serve listens, spreads calls over replicas, starts and ends
these; each replica is an engine and the app around it.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from ray import serve

from jaxpage.config import AsyncEngineArgs, EngineArgs
from jaxpage.config_file import arguments
from jaxpage.console import show_log
from jaxpage.errors import ParameterError
from jaxpage.serve import build_parser
from jaxpage.server.cli import check_cli_args
from jaxpage.server.options import ServerOptions

if TYPE_CHECKING:
    from jaxpage.engine.async_engine import AsyncLLMEngine

LISTENING = ("host", "port", "uds", "root-path", "ssl-certfile", "ssl-keyfile", "ssl-ca-certs", "ssl-cert-reqs")
"""Options of a server that listens itself; Ray Serve has its own ones for that."""
STOPPING = ("shutdown-timeout",)
MAX_ONGOING_REQUESTS = 256
"""Calls that a replica has at once: Ray Serve's own 5 would leave the engine's batches empty."""


def app(args: Mapping[str, Any]) -> serve.Application:
    """The application for a config file of Ray Serve.

    Args:
        args: options of ``jaxpage serve``, as in a file for its ``--config``.

    Raises:
        ValueError: in one line, for an option that is wrong or of no use here.
    """
    engine_args, options = _parsed(args)
    server_options = ServerOptions.from_cli_args(options)

    def load() -> Any:
        """The ASGI app of a replica; runs there."""
        from jaxpage.engine.async_engine import AsyncLLMEngine
        from jaxpage.server.app import create_app

        show_log(options.log_level, options.log_format, options.uvicorn_log_level)
        logging.getLogger("jaxpage.access").disabled = options.disable_uvicorn_access_log
        return create_app(AsyncLLMEngine.from_engine_args(engine_args), server_options)

    deployment = serve.deployment(name="jaxpage", max_ongoing_requests=MAX_ONGOING_REQUESTS)
    return deployment(serve.ingress(load)(Ingress)).bind()


class Ingress:
    """What Ray Serve asks of a replica beside its ASGI app, which it keeps in ``app``."""

    app: Any

    async def check_health(self) -> None:
        """Raises EngineDeadError if no engine serves; the replica is then replaced."""
        await self._engine.check_health()

    def __del__(self) -> None:
        """Ray Serve calls this when the replica has answered its last call."""
        if hasattr(self, "app"):  # else it could not load
            self._engine.shutdown()

    @property
    def _engine(self) -> AsyncLLMEngine:
        return self.app.state.server.engine


def _parsed(args: Mapping[str, Any]) -> tuple[EngineArgs, argparse.Namespace]:
    for key in args:
        name = str(key).replace("_", "-")
        if name in LISTENING:
            raise ParameterError(str(key), "is Ray Serve's to say: see http_options and proxy_location of its config")
        if name in STOPPING:
            raise ParameterError(str(key), "is Ray Serve's to say: see graceful_shutdown_timeout_s of its deployment")
    parser = build_parser("jaxpage serve")
    parser.error = _refuse
    options = parser.parse_args(arguments(parser, "args", dict(args)))
    check_cli_args(parser, options)
    return AsyncEngineArgs.from_cli_args(options), options


def _refuse(message: str) -> NoReturn:
    raise ValueError(f"args: {message}")
