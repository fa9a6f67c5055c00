"""Owns ``python -m jaxpage.serve``: its options, the port, and the exit code.

It must not know routes, fields or how the engine works.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxpage.config import AsyncEngineArgs
from jaxpage.console import show_log
from jaxpage.errors import ParameterError, StartupError

LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


def build_parser() -> argparse.ArgumentParser:
    """The command line of the server: its own flags and those of the engine."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxpage.serve",
        usage="%(prog)s [MODEL] [options]",
        description="Serve a model over an OpenAI-compatible HTTP API.",
    )
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help="the same as --model")
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument(
        "--port", type=_number(int, 0, 65535), default=8000, help="0 picks a free one (default: %(default)s)"
    )
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="key that /v1 and the cache's reset ask for; may be repeated",
    )
    group.add_argument(
        "--max-body-bytes",
        type=_number(int, 1),
        default=32 * 1024 * 1024,
        metavar="BYTES",
        help="largest request body (default: %(default)s)",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=_number(float, 0),
        default=30.0,
        metavar="S",
        help="seconds that running requests get to end after SIGTERM or Ctrl-C (default: %(default)g)",
    )
    group.add_argument(
        "--log-level", choices=LOG_LEVELS, default="info", help="of jaxpage's own log (default: %(default)s)"
    )
    group.add_argument(
        "--uvicorn-log-level", choices=LOG_LEVELS, default="info", help="info logs each request (default: %(default)s)"
    )
    AsyncEngineArgs.add_cli_args(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server until a signal ends it.

    Returns:
        The exit code: 0 after an orderly end, 1 if the server cannot start; usage errors exit with 2.
    """
    parser = build_parser()
    options = parser.parse_args(argv)
    if not all(options.api_key):
        parser.error("argument --api-key: must not be empty")
    if options.model_name is not None:
        if options.model not in (AsyncEngineArgs.model, options.model_name):
            return _fail(f"two models are given: {options.model_name} and --model {options.model}")
        options.model = options.model_name
    try:
        engine_args = AsyncEngineArgs.from_cli_args(options)
    except ParameterError as error:
        return _fail(f"--{error.parameter.replace('_', '-')}: {error.reason}")
    show_log(options.log_level)
    # The port first: whoever loads a model for a minute should not learn then that the port is taken.
    try:
        listener = bind(options.host, options.port)
    except OSError as error:
        return _fail(f"cannot listen on {options.host}:{options.port}: {error.strerror or error}")
    with contextlib.closing(listener):
        # Imported late, so that --help and wrong options need no jax.
        from jaxpage.engine.async_engine import AsyncLLMEngine

        try:
            engine = AsyncLLMEngine.from_engine_args(engine_args)
        except (ValueError, OSError, StartupError) as error:
            return _fail(str(error))
        except KeyboardInterrupt:
            return 130
        try:
            serve(engine, listener, options)
        finally:
            engine.shutdown()
    return 0


def serve(engine: Any, listener: socket.socket, options: argparse.Namespace) -> None:
    """Serves ``engine`` on the bound socket ``listener`` until a signal ends it."""
    import uvicorn

    from jaxpage.server.app import create_app
    from jaxpage.server.lifecycle import ABORT_GRACE_S, DrainingServer

    app = create_app(engine, api_keys=options.api_key, max_body_bytes=options.max_body_bytes)
    config = uvicorn.Config(
        app,
        log_level=options.uvicorn_log_level,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=ABORT_GRACE_S,
        server_header=False,
    )
    DrainingServer(config, app.state.server, engine, options.shutdown_timeout).run(sockets=[listener])


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to ``host`` and ``port`` that does not listen yet: clients are refused until the model is ready.

    Raises:
        OSError: if the host is unknown, or the port is taken or not allowed.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def _fail(message: str) -> int:
    print("jaxpage: error: " + " ".join(message.split()), file=sys.stderr)
    return 1


def _number(kind: type[int] | type[float], low: float, high: float = math.inf) -> Callable[[str], Any]:
    """A parser of command line values in [low, high]."""

    def parse(text: str) -> Any:
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if not low <= number <= high or math.isinf(number):
            limits = f"in [{low}, {high}]" if high < math.inf else f"at least {low}"
            raise argparse.ArgumentTypeError(f"must be a number {limits}, got {text[:200]!r}")
        return number

    return parse


if __name__ == "__main__":
    sys.exit(main())
