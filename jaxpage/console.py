"""How the commands write their log: on stderr, a line an event. As a library jaxpage leaves logging to its user."""

from __future__ import annotations

import logging


def show_log(level: str) -> None:
    """Shows jaxpage's log lines of ``level`` (a name of the logging module, any case) and above."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("jaxpage: %(message)s"))
    logger = logging.getLogger("jaxpage")
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel({"TRACE": "DEBUG"}.get(level.upper(), level.upper()))
