"""Owns ``python -m jaxpage.serve``: the order of its start, and the exit code.

It must not know routes, fields or how the engine works.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import socket
import sys
from collections.abc import Sequence
from typing import Any

from jaxpage.config import AsyncEngineArgs
from jaxpage.config_file import add_config_flag, expand_config
from jaxpage.console import fail, show_log
from jaxpage.errors import ParameterError, StartupError
from jaxpage.parallel.cluster import joins_others
from jaxpage.server import cli
from jaxpage.server.listener import UnixSocket, bind, check_tls
from jaxpage.server.options import ServerOptions
from jaxpage.server.tracing import check_tracing


def build_parser(prog: str = "python -m jaxpage.serve") -> argparse.ArgumentParser:
    """The command line of the server: its own flags and those of the engine."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [MODEL] [options]",
        description="Serve a model over an OpenAI-compatible HTTP API.",
    )
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help="the same as --model")
    add_config_flag(parser)
    cli.add_cli_args(parser)
    AsyncEngineArgs.add_cli_args(parser)
    return parser


def main(argv: Sequence[str] | None = None, prog: str = "python -m jaxpage.serve") -> int:
    """Runs the server until a signal ends it.

    Returns:
        The exit code: 0 after an orderly end, 1 if the server cannot start; usage errors exit with 2.
    """
    parser = build_parser(prog)
    options = parser.parse_args(expand_config(parser, argv))
    cli.check_cli_args(parser, options)
    if options.model_name is not None:
        if options.model not in (AsyncEngineArgs.model, options.model_name):
            return fail(f"two models are given: {options.model_name} and --model {options.model}")
        options.model = options.model_name
    try:
        engine_args = AsyncEngineArgs.from_cli_args(options)
    except ParameterError as error:
        return fail(error, options)
    show_log(options.log_level, options.log_format, options.uvicorn_log_level)
    logging.getLogger("jaxpage.access").disabled = options.disable_uvicorn_access_log
    try:
        if joins_others(engine_args):
            from jaxpage.engine.build import lead_or_follow  # needs jax, which --help and wrong options should not

            if not lead_or_follow(engine_args):
                return 0
    except (ValueError, OSError, StartupError) as error:
        return fail(error, options)
    with contextlib.ExitStack() as resources:
        # Files and port first: whoever loads a model for a minute should not learn then that the port is taken.
        try:
            if options.otlp_traces_endpoint is not None:
                check_tracing()
            listener = resources.enter_context(open_listener(options))
        except (ParameterError, StartupError) as error:
            return fail(error, options)
        from jaxpage.engine.async_engine import AsyncLLMEngine

        try:
            engine = AsyncLLMEngine.from_engine_args(engine_args)
        except (ValueError, OSError, StartupError) as error:
            return fail(error, options)
        except KeyboardInterrupt:
            return 130
        try:
            serve(engine, listener, options)
        finally:
            engine.shutdown()
    return 0


def serve(engine: Any, listener: socket.socket, options: argparse.Namespace) -> None:
    """Serves ``engine`` on the bound socket ``listener`` until a signal ends it."""
    from jaxpage.engine.settling import settle
    from jaxpage.server.app import create_app
    from jaxpage.server.lifecycle import DrainingServer, server_config

    app = create_app(engine, ServerOptions.from_cli_args(options))
    config = server_config(app, options)
    settle()
    DrainingServer(config, app.state.server, engine, options.shutdown_timeout).run(sockets=[listener])


def open_listener(options: argparse.Namespace) -> socket.socket:
    """The bound socket, once the files of its TLS are known to be good; raises ParameterError."""
    if options.ssl_certfile:
        check_tls(options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs)
    try:
        return UnixSocket(options.uds) if options.uds else bind(options.host, options.port)
    except (OSError, ValueError) as error:
        is_port = getattr(error, "errno", None) in (errno.EACCES, errno.EADDRINUSE)
        name, address = "port" if is_port else "host", f"{options.host}:{options.port}"
        if options.uds:
            name, address = "uds", options.uds
        reason = getattr(error, "strerror", None) or error
        raise ParameterError(name, f"cannot listen on {address}: {reason}") from None


if __name__ == "__main__":
    sys.exit(main())
