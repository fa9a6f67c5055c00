"""Owns an engine's process where Ray has put it: either all of an engine, or one host's part of it.

It must not know why it is here, nor what other engines there are. ``ray_replica`` is the other side.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
from typing import NamedTuple

from jaxpage.config import EngineArgs
from jaxpage.console import show_log
from jaxpage.engine.replicas.devices import visibility
from jaxpage.engine.replicas.wire import Connection
from jaxpage.parallel.cluster import COUNTS, TPU_HOSTS

CALL_TIMEOUT_S = 60.0
"""How long the first process of an engine waits for the call of the program that it works for."""
GREETING_TIMEOUT_S = 5.0
SECRET_BYTES = 32


class Part(NamedTuple):
    """Which of several processes of an engine one is; the first is 0, and reached at ``coordinator``."""

    coordinator: str
    num_processes: int
    process_id: int


class Place(NamedTuple):
    """Where a process is, and the port on which it will wait for a call if it leads."""

    host: str
    port: int
    pid: int


class Host:
    """A process of an engine; Ray makes an actor of it. ``lead`` or ``follow`` is its life."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("", 0))

    def place(self) -> Place:
        """Where this is."""
        return Place(_host(), self._listener.getsockname()[1], os.getpid())

    def coordinator(self) -> str:
        """HOST:PORT where processes can meet whose first is this one."""
        with socket.create_server(("", 0)) as probe:
            return f"{_host()}:{probe.getsockname()[1]}"

    def lead(self, secret: bytes, num_devices: int, part: Part | None) -> None:
        """Serves an engine to whoever calls with the secret first, until one of both ends it."""
        connection = Connection(_answered(self._listener, secret))
        _settle_in(num_devices, part)
        # Imported once the variables are set that jax and the devices' libraries read.
        from jaxpage.engine.replicas.remote_child import RemoteChild

        # Ray ends the process when its program is gone, so that an end of the connection need not do it.
        RemoteChild(connection, end=lambda code: connection.close()).serve()
        _leave()

    def follow(self, args: EngineArgs, num_devices: int, part: Part) -> None:
        """Does the part of a host other than the first until that ends."""
        self._listener.close()
        show_log("info")  # Ray shows it where the engine is used
        _settle_in(num_devices, part)
        from jaxpage.engine.build import lead_or_follow

        lead_or_follow(args)
        _leave()


def call(place: Place, secret: bytes) -> socket.socket:
    """The connection to a process that leads; raises OSError if there is none."""
    connection = socket.create_connection((place.host, place.port), CALL_TIMEOUT_S)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(secret)
    return connection


def _answered(listener: socket.socket, secret: bytes) -> socket.socket:
    """The connection of the first who knows the secret; raises TimeoutError if nobody comes."""
    with listener:
        listener.settimeout(CALL_TIMEOUT_S)
        while True:
            connection, _ = listener.accept()
            connection.settimeout(GREETING_TIMEOUT_S)
            greeting = b""
            with contextlib.suppress(OSError):
                while len(greeting) < len(secret) and (part := connection.recv(len(secret) - len(greeting))):
                    greeting += part
            if hmac.compare_digest(greeting, secret):
                connection.settimeout(None)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return connection
            connection.close()


def _settle_in(num_devices: int, part: Part | None) -> None:
    """Lets jax see what belongs to this process: devices that Ray has given it, and others of its engine."""
    if part is not None:
        from jaxpage.parallel.hosts import join

        join(*part)
        return
    for name in (*COUNTS, TPU_HOSTS):
        os.environ.pop(name, None)  # of the job that Ray itself is started by
    os.environ.update(visibility(0, num_devices, os.environ))


def _host() -> str:
    import ray.util

    return ray.util.get_node_ip_address()


def _leave() -> None:
    """Ends the process in order, so that Ray does not report a crash."""
    import ray.actor

    ray.actor.exit_actor()
