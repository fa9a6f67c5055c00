"""The processes of an engine meet at the coordinator's address before jax does: who is missing, or different, is named.

jax ends a process that waits in vain with a stack dump, and tells nobody what was wrong with another one. So process 0
listens there first. Each of the others says who it is and what it was started with; when all have come, and agree,
everybody goes on and jax takes over the port. Needs no jax.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from jaxpage.errors import ParameterError, StartupError

logger = logging.getLogger("jaxpage")

NOTICE_AFTER_S = 5.0
RETRY_S = 0.3
ANSWER_TIMEOUT_S = 10.0
MAX_LINE_BYTES = 1 << 16
NAME = "jaxpage"


@dataclasses.dataclass(frozen=True)
class Attendee:
    """What a process says of itself.

    Attributes:
        options: a line for each option that all must share: name, blank, value.
    """

    process_id: int
    num_processes: int
    options: tuple[str, ...]


def meet(coordinator: str, own: Attendee, timeout_s: float) -> None:
    """Returns when all processes have come to ``coordinator`` (HOST:PORT) and agree.

    Raises:
        ParameterError: the port is taken.
        StartupError: saying who has not come in time, or who was started with something else; all of them say it.
    """
    deadline_s = time.monotonic() + timeout_s
    if own.process_id == 0:
        _receive_all(coordinator, own, deadline_s, timeout_s)
    else:
        _call(coordinator, own, deadline_s, timeout_s)


def difference(theirs: Attendee, own: Attendee) -> str | None:
    """What keeps ``theirs`` from being one engine with process 0, which is ``own``; None: nothing."""
    who = f"process {theirs.process_id}"
    if theirs.num_processes != own.num_processes:
        return f"{who} has --num-processes {theirs.num_processes}, process 0 {own.num_processes}"
    if not 0 < theirs.process_id < own.num_processes:
        return f"{who} comes to an engine of {own.num_processes} processes"
    return different_option(who, theirs.options, own.options)


def different_option(who: str, theirs: Sequence[str], own: Sequence[str]) -> str | None:
    """The first option that ``who`` was started with and process 0, with ``own``, was not."""
    values = {name: value for name, _, value in (line.partition(" ") for line in own)}
    for name, _, value in (line.partition(" ") for line in theirs):
        if value != values.get(name):
            return f"{who} has {_shown(name, value)}, process 0 {_shown(name, values.get(name))}"
    return None


def _shown(name: str, value: str | None) -> str:
    option = f"--{name.replace('_', '-')}"
    return f"no {option}" if value in (None, "None") else f"{option} {value}"


def bind_address(coordinator: str) -> str | None:
    """Where process 0 listens: at the address itself if only this machine reaches it, else everywhere (None)."""
    host = coordinator.rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError):
        return coordinator if ipaddress.ip_address(host).is_loopback else None
    return None


def _receive_all(coordinator: str, own: Attendee, deadline_s: float, timeout_s: float) -> None:
    connections: dict[int, socket.socket] = {}
    notice_s = time.monotonic() + NOTICE_AFTER_S
    with contextlib.ExitStack() as resources:
        listener = resources.enter_context(_listen(coordinator))
        while missing := sorted(set(range(1, own.num_processes)) - connections.keys()):
            names = f"process {', '.join(map(str, missing))}"
            listener.settimeout(max(0.01, min(deadline_s, notice_s) - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if time.monotonic() >= deadline_s:
                    problem = f"{names} has not come to {coordinator} within {timeout_s:.0f} s"
                    _tell(connections, {"error": problem})
                    raise StartupError(problem) from None
                logger.info("Waiting for %s at %s, up to %.0f s", names, coordinator, timeout_s)
                notice_s = deadline_s
                continue
            resources.enter_context(connection)
            theirs = _attendee(_receive(connection))
            if theirs is None:  # a stranger
                continue
            problem = difference(theirs, own)
            if problem is None and theirs.process_id in connections:
                problem = f"process {theirs.process_id} has come twice"
            connections[theirs.process_id] = connection
            if problem is not None:
                _tell(connections, {"error": problem})
                raise StartupError(problem)
        listener.close()
        _tell(connections, {"go": True})
        for connection in connections.values():  # they close first, so that the port is free at once
            _receive(connection)


def _call(coordinator: str, own: Attendee, deadline_s: float, timeout_s: float) -> None:
    host, _, port = coordinator.rpartition(":")
    notice_s = time.monotonic() + NOTICE_AFTER_S
    waits = f"process 0 at {coordinator}"
    while time.monotonic() < deadline_s:
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), ANSWER_TIMEOUT_S)
        except OSError as error:
            if time.monotonic() >= notice_s:
                logger.info("Waiting for %s, up to %.0f s (%s)", waits, timeout_s, error.strerror or error)
                notice_s = deadline_s
            time.sleep(RETRY_S)
            continue
        with connection:
            _send(connection, {"name": NAME} | dataclasses.asdict(own))
            connection.settimeout(max(0.01, deadline_s - time.monotonic()) + ANSWER_TIMEOUT_S)
            answer = _receive(connection)
        if answer.get("go") is True:
            return
        if isinstance(answer.get("error"), str):
            raise StartupError(answer["error"])
        raise StartupError(f"who answers at {coordinator} is not process 0 of this engine, or has ended")
    raise StartupError(f"{waits} is not there after {timeout_s:.0f} s")


def _listen(coordinator: str) -> socket.socket:
    host, _, port = coordinator.rpartition(":")
    try:
        if bind_address(coordinator) is not None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host.strip("[]"), int(port)), family=family)
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):  # IPv6 can be there and have no address
                return socket.create_server(("", int(port)), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", int(port)))
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error  # Python's own text names the address again
        raise ParameterError("coordinator", f"cannot listen on {coordinator}: {reason}") from error


def _tell(connections: dict[int, socket.socket], answer: dict[str, Any]) -> None:
    for connection in connections.values():
        with contextlib.suppress(OSError):
            _send(connection, answer)


def _send(connection: socket.socket, content: dict[str, Any]) -> None:
    connection.sendall(json.dumps(content).encode() + b"\n")


def _receive(connection: socket.socket) -> dict[str, Any]:
    """A line of JSON; nothing if it is none, or if the other end says nothing more."""
    if connection.gettimeout() is None:
        connection.settimeout(ANSWER_TIMEOUT_S)
    data = b""
    try:
        while not data.endswith(b"\n") and len(data) < MAX_LINE_BYTES and (part := connection.recv(4096)):
            data += part
        content = json.loads(data)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _attendee(content: dict[str, Any]) -> Attendee | None:
    ids, options = (content.get("process_id"), content.get("num_processes")), content.get("options")
    if content.get("name") != NAME or not all(type(each) is int for each in ids) or not isinstance(options, list):
        return None
    return Attendee(ids[0], ids[1], tuple(map(str, options)))  # pyright: ignore[reportArgumentType]
