"""How the commands write their log: on stderr, a line an event. As a library jaxpage leaves logging to its user."""

from __future__ import annotations

import argparse
import datetime
import io
import json
import logging
import sys
from typing import Any

from jaxpage.errors import ParameterError

TRACE = 5
"""uvicorn's level below debug."""
LOG_FORMATS = ("text", "json")
SERVER_LOGGERS = ("uvicorn", "jaxpage.access")
"""Of what happens on connections: uvicorn's own log, and a line for each call."""
_OWN_FIELDS = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger and message, then what the caller put into ``extra``."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _OWN_FIELDS}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def show_log(level: str, log_format: str = "text", server_level: str | None = None) -> None:
    """Shows jaxpage's log lines of ``level`` (a name of the logging module, any case) and above.

    Args:
        log_format: one of LOG_FORMATS.
        server_level: the same for SERVER_LOGGERS; None leaves these alone.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter("jaxpage: %(message)s"))
    _show("jaxpage", handler, level)
    _show("opentelemetry", handler, level)  # it says so when its collector is not there
    if server_level is not None:
        for name in SERVER_LOGGERS:
            _show(name, handler, server_level)


def _show(name: str, handler: logging.Handler, level: str) -> None:
    logger = logging.getLogger(name)
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(TRACE if level.upper() == "TRACE" else level.upper())


def fail(message: object, options: argparse.Namespace | None = None) -> int:
    """Says on stderr, in one line, why a command ends; gives its exit code, 1.

    An error about one of ``options``, the command's own, is shown under the name of its flag.
    """
    if isinstance(message, ParameterError) and hasattr(options, message.parameter.partition("[")[0]):
        message = flag_error(message)
    print("jaxpage: error: " + " ".join(str(message).split()), file=sys.stderr)
    return 1


def check_text(name: str, text: str | None) -> None:
    """Raises ParameterError for an option or an input that came as bytes which are no UTF-8."""
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        raise ParameterError(name, "is not UTF-8 text") from None


def read_input_as_utf8() -> None:
    """Lets standard input be read as UTF-8 whatever the locale says; bytes that are none are left to ``check_text``."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")


def flag_error(error: ParameterError) -> str:
    """An error about an option under the name of its flag."""
    return f"--{error.parameter.partition('[')[0].replace('_', '-')}: {error.reason}"


class NoTerminal:
    """A stream that is written to as before, and says that it is no terminal: nothing draws progress on it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def isatty(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
