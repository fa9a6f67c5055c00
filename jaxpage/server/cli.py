"""Owns the flags of the server: where it listens, who may come in, what it limits and what it logs.

It must not know what the flags lead to, or the engine's flags. Names and meaning are vLLM's where it has the same.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from jaxpage.console import LOG_FORMATS
from jaxpage.server.chat_cli import add_chat_args
from jaxpage.server.options import DEFAULT_OPTIONS

LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
POOLINGS = ("last", "mean")
API_KEY_VARIABLE = "JAXPAGE_API_KEY"
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Adds all groups of flags to ``parser``."""
    _add_listening(parser.add_argument_group("listening"))
    _add_access(parser.add_argument_group("who may come in"))
    _add_limits(parser.add_argument_group("limits"))
    add_chat_args(parser.add_argument_group("chat"))
    _add_answers(parser.add_argument_group("other answers"))
    _add_logging(parser.add_argument_group("logging"))


def check_cli_args(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Fills in what comes from the environment; exits with a usage error for flags that contradict each other."""
    options.api_key = tuple(options.api_key)
    if not options.api_key and API_KEY_VARIABLE in os.environ:
        options.api_key = (os.environ[API_KEY_VARIABLE],)
    if not all(key.strip() for key in options.api_key):
        parser.error(f"argument --api-key: must not be empty (nor {API_KEY_VARIABLE})")
    if options.ssl_keyfile and not options.ssl_certfile:
        parser.error("argument --ssl-keyfile: needs --ssl-certfile")
    if not options.ssl_certfile and (options.ssl_ca_certs or options.ssl_cert_reqs):
        parser.error("arguments --ssl-ca-certs and --ssl-cert-reqs: need --ssl-certfile")
    if options.uds and (options.host, options.port) != (DEFAULT_HOST, DEFAULT_PORT):
        parser.error("argument --uds: takes the place of --host and --port")
    endpoint = options.otlp_traces_endpoint
    if endpoint is not None and not _is_endpoint(endpoint):
        parser.error(f"argument --otlp-traces-endpoint: must be a URL or HOST:PORT, got {endpoint[:200]!r}")
    if options.profiler_dir is not None:
        try:
            os.makedirs(options.profiler_dir, exist_ok=True)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            parser.error(f"argument --profiler-dir: cannot be made: {options.profiler_dir[:200]!r}: {reason}")
    if options.root_path and (not options.root_path.startswith("/") or options.root_path.endswith("/")):
        parser.error(f"argument --root-path: must start and not end with /, got {options.root_path[:200]!r}")


def _is_endpoint(text: str) -> bool:
    """Whether a collector can be there: an HTTP URL, or HOST:PORT for gRPC."""
    try:
        parts = urlsplit(text if "://" in text else f"//{text}")
        has_place = bool(parts.hostname) and (parts.scheme != "" or parts.port is not None)
    except ValueError:
        return False
    return has_place and parts.scheme in ("", "http", "https") and not any(character.isspace() for character in text)


def number(kind: type[int] | type[float], low: float, high: float = math.inf) -> Callable[[str], Any]:
    """A parser of command line values in [low, high]."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or math.isinf(value):
            limits = f"in [{low}, {high}]" if high < math.inf else f"at least {low}"
            raise argparse.ArgumentTypeError(f"must be a number {limits}, got {text[:200]!r}")
        return value

    return parse


def _add_listening(group: Any) -> None:
    group.add_argument("--host", default=DEFAULT_HOST, help="address to listen on (default: %(default)s)")
    group.add_argument(
        "--port", type=number(int, 0, 65535), default=DEFAULT_PORT, help="0 picks a free one (default: %(default)s)"
    )
    group.add_argument("--uds", metavar="PATH", help="listen on this Unix socket instead")
    group.add_argument("--root-path", default="", metavar="/PATH", help="prefix that a proxy in front takes away")
    group.add_argument("--ssl-certfile", metavar="FILE", help="certificates (PEM); turns HTTPS on")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="private key, if it is not in --ssl-certfile")
    group.add_argument("--ssl-ca-certs", metavar="FILE", help="who may sign the certificates of clients")
    group.add_argument(
        "--ssl-cert-reqs",
        type=int,
        choices=[int(each) for each in ssl.VerifyMode],
        default=int(ssl.CERT_NONE),
        help="certificates of clients: 0 none, 1 optional, 2 required (default: 0)",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=number(float, 0),
        default=30.0,
        metavar="S",
        help="seconds that running requests get to end after SIGTERM or Ctrl-C (default: %(default)g)",
    )


def _add_access(group: Any) -> None:
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"key that /v1 and the cache's reset ask for; may be repeated (default: ${API_KEY_VARIABLE})",
    )
    group.add_argument(
        "--allowed-origins",
        type=_strings,
        default=DEFAULT_OPTIONS.allowed_origins,
        metavar="JSON",
        help='web pages that may use the API, a list such as ["https://a.example"] or ["*"] (default: none)',
    )
    group.add_argument(
        "--allowed-methods",
        type=_strings,
        default=DEFAULT_OPTIONS.allowed_methods,
        metavar="JSON",
        help="of those pages",
    )
    group.add_argument(
        "--allowed-headers",
        type=_strings,
        default=DEFAULT_OPTIONS.allowed_headers,
        metavar="JSON",
        help="of those pages",
    )
    group.add_argument("--allow-credentials", action="store_true", help="let those pages send cookies")


def _add_limits(group: Any) -> None:
    group.add_argument(
        "--max-body-bytes",
        type=number(int, 1),
        default=DEFAULT_OPTIONS.max_body_bytes,
        metavar="BYTES",
        help="largest request body (default: %(default)s)",
    )
    group.add_argument(
        "--max-num-queued-reqs",
        type=number(int, 1),
        metavar="N",
        help="running and waiting samples from which on new calls get a 503",
    )
    group.add_argument(
        "--max-num-queued-tokens",
        type=number(int, 1),
        metavar="N",
        help="prompt tokens without a first output from which on new calls get a 503",
    )
    group.add_argument(
        "--max-n",
        type=number(int, 1, DEFAULT_OPTIONS.max_n),
        default=DEFAULT_OPTIONS.max_n,
        metavar="N",
        help="largest n of a call",
    )
    group.add_argument(
        "--max-stop-strings",
        type=number(int, 0, DEFAULT_OPTIONS.max_stop_strings),
        default=DEFAULT_OPTIONS.max_stop_strings,
        metavar="N",
        help="most stop strings of a call (default: %(default)s)",
    )


def _add_answers(group: Any) -> None:
    group.add_argument(
        "--pooling",
        choices=POOLINGS,
        default=DEFAULT_OPTIONS.pooling,
        help="embeddings are the state of the last token, or the mean of all (default: %(default)s)",
    )
    group.add_argument(
        "--sse-keep-alive-interval",
        type=number(float, 0.1),
        metavar="S",
        help="send a comment into streams that are silent for so long (default: never)",
    )


def _add_logging(group: Any) -> None:
    group.add_argument(
        "--log-format", choices=LOG_FORMATS, default="text", help="json: an object a line (default: %(default)s)"
    )
    group.add_argument(
        "--log-level", choices=LOG_LEVELS, default="info", help="of jaxpage's own log (default: %(default)s)"
    )
    group.add_argument(
        "--uvicorn-log-level", choices=LOG_LEVELS, default="info", help="info logs each call (default: %(default)s)"
    )
    group.add_argument("--disable-uvicorn-access-log", action="store_true", help="do not log each call")
    group.add_argument(
        "--otlp-traces-endpoint", metavar="URL", help="OpenTelemetry collector that gets a span for each prompt"
    )
    group.add_argument(
        "--profiler-dir", metavar="DIR", help="lets POST /start_profile and /stop_profile write JAX profiles there"
    )


def _strings(text: str) -> tuple[str, ...]:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise argparse.ArgumentTypeError(f"must be a JSON list of strings, got {text[:200]!r}")
    return tuple(values)
