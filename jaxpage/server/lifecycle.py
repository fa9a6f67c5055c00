"""Owns how the server process starts listening and how it ends.

It must not know routes or fields.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import time
from types import FrameType
from typing import Any

import uvicorn

from jaxpage.server.connections import BoundedProtocol
from jaxpage.server.listener import where
from jaxpage.server.state import ApiServer

ABORT_GRACE_S = 2
"""Time that requests which were cut off get to send their last bytes."""
KEEP_ALIVE_S = 60
"""Time that an idle connection stays open."""


def server_config(app: Any, options: argparse.Namespace) -> uvicorn.Config:
    """How uvicorn serves ``app``, as the flags of ``server/cli.py`` say."""
    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        root_path=options.root_path,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
        ssl_ca_certs=options.ssl_ca_certs,
        ssl_cert_reqs=options.ssl_cert_reqs,
        log_config=None,  # the log is set up already
        access_log=False,  # the app has one of its own, with request ids
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=ABORT_GRACE_S,
        server_header=False,
    )


class DrainingServer(uvicorn.Server):
    """A uvicorn server that lets running requests end after a first signal, and waits for nothing after a second.

    The listener stays open while requests run, so that new ones get a 503 instead of a refused connection; and an
    orderly end is exit code 0, not death by the signal.

    Args:
        api: is told to refuse new work, and counts what runs.
        engine: is shut down when time is up, which ends what still runs with an error.
        shutdown_timeout_s: time for running requests after the first signal.
    """

    def __init__(self, config: uvicorn.Config, api: ApiServer, engine: Any, shutdown_timeout_s: float) -> None:
        super().__init__(config)
        self._api = api
        self._engine = engine
        self._shutdown_timeout_s = shutdown_timeout_s
        self._deadline_s: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens, then says where."""
        await super().startup(sockets)
        scheme = "https" if self.config.is_ssl else "http"
        for listener in sockets or []:
            print(f"jaxpage: ready: {self._engine.model_name} at {where(listener, scheme)}", flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Signal handler: the first one starts draining, the second one ends the server."""
        if self._api.is_draining:
            self.should_exit = self.force_exit = True
            return
        self._api.is_draining = True
        self._deadline_s = time.monotonic() + self._shutdown_timeout_s

    async def on_tick(self, counter: int) -> bool:
        """Ends the server once nothing runs any more or the time for it is over."""
        if self._deadline_s is not None and not self.should_exit:
            if time.monotonic() >= self._deadline_s and self._api.num_in_flight:
                await asyncio.to_thread(self._engine.shutdown)
                self.should_exit = True
            elif not self._api.num_in_flight:
                self.should_exit = True
        return await super().on_tick(counter)
