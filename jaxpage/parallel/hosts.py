"""The processes of an engine that spans several hosts, and the lines between them.

Process 0 leads: it sends, the others obey and answer. Must not know what is sent.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxpage.errors import StartupError
from jaxpage.parallel.cluster import find_launch
from jaxpage.parallel.meeting import Attendee, bind_address, different_option, meet

logger = logging.getLogger("jaxpage")

CONNECT_TIMEOUT_S = 60.0
MEETING_TIMEOUT_S = 300.0
"""How long processes wait for each other at the start: hosts of a pod do not boot at the same time."""
PARTING_TIMEOUT_S = 5.0
HELLO_BYTES = 32
HEAD = struct.Struct("<I")
MAX_MESSAGE_BYTES = 1 << 30
_KEY = "jaxpage/leader"
_REFUSALS = "jaxpage/refusals"
REFUSALS_INTERVAL_S = 1.0


class LostHostError(Exception):
    """A process of the group is gone, or computes something else than the others."""


def join(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    options: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
) -> int:
    """Joins the other processes of this engine; gives their number. To be called before jax runs anything.

    A process that is alone on its host has all devices there; of several on a host that SLURM or MPI has started, each
    has one.

    Args:
        coordinator, num_processes, process_id: all or none; without them the environment's TPU pod, SLURM or MPI job.
        options: what all must have been started with; a line each: name, blank, value.

    Raises:
        StartupError: if the others are not there in time, or were started with other options.
        ParameterError: if the coordinator's port is taken.
    """
    if jax.distributed.is_initialized():
        return _state().num_processes
    launch = find_launch(environment)
    where, advice = f"coordinator {coordinator}", ""
    if coordinator is None:
        where = "the processes of the TPU pod"
        if launch is not None:
            num_processes, process_id = launch.num_processes, launch.process_id
            where = f"the {num_processes} processes that {launch.launcher} has started"
        advice = "; coordinator, num_processes and process_id say where they are, num_processes 1 that this is alone"
    else:
        assert num_processes is not None and process_id is not None, "they come with the coordinator"
        meet(coordinator, Attendee(process_id, num_processes, tuple(options)), MEETING_TIMEOUT_S)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # of no effect elsewhere
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            # Else jax would give each process the device of its number on the host, be there others or not.
            local_device_ids=[] if _has_all_devices(environment) else None,
            initialization_timeout=int(MEETING_TIMEOUT_S),
            coordinator_bind_address=None if coordinator is None else bind_address(coordinator),
        )
    except (ValueError, RuntimeError) as error:
        raise StartupError(f"cannot join {where}: {_first_line(error)}{advice}") from error
    theirs = agree_on("options", "\n".join(options)).split("\n")
    problem = different_option(f"process {_state().process_id}", options, theirs)
    if problem is not None:
        refuse(problem)
        raise StartupError(problem)
    return _state().num_processes


def refuse(reason: str) -> None:
    """Tells the leader, which waits for this process to call, that it will not."""
    if jax.distributed.is_initialized():
        with contextlib.suppress(RuntimeError):
            _client().key_value_set(f"{_REFUSALS}/{_state().process_id}", reason)


def _has_all_devices(environment: Mapping[str, str]) -> bool:
    launch = find_launch(environment)
    return launch is not None and launch.is_alone_on_host and "JAX_LOCAL_DEVICE_IDS" not in environment


class Line:
    """Messages over a connection: their length, then their bytes."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes) -> None:
        """Raises OSError if the other end is gone."""
        with self._sending:
            self._connection.sendall(HEAD.pack(len(data)) + data)

    def receive(self) -> bytes:
        """Waits for a message; raises EOFError or another OSError when the other end is gone."""
        (size,) = HEAD.unpack(self._exactly(HEAD.size))
        if size > MAX_MESSAGE_BYTES:
            raise OSError(f"a message of {size} bytes")
        return self._exactly(size)

    def finish(self) -> None:
        """Nothing more is sent; what is under way in both directions still arrives."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Both ends see the end."""
        with contextlib.suppress(OSError):  # it may be closed already
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._connection.recv_into(view)
            if not count:
                raise EOFError("the connection was closed")
            view = view[count:]
        return bytes(data)


class Followers:
    """The leader's lines to all others.

    ``on_answer`` gets what they send, ``on_loss`` the first that is gone, with words for people; both in threads.
    """

    def __init__(self, on_answer: Callable[[int, bytes], None], on_loss: Callable[[str], None]) -> None:
        """Waits until all others have called.

        Raises:
            StartupError: if one does not come in time, or came for another engine before.
        """
        self._on_answer, self._on_loss = on_answer, on_loss
        self._is_closed = False
        secret = secrets.token_bytes(HELLO_BYTES)
        self._lines: dict[int, Line] = {}
        with listen() as listener:
            deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
            listener.settimeout(REFUSALS_INTERVAL_S)
            _say_once(_KEY, f"{_own_address()} {listener.getsockname()[1]} {secret.hex()}")
            wanted = set(range(1, jax.process_count()))
            while wanted:
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    for _, reason in _client().key_value_dir_get(f"{_REFUSALS}/"):
                        raise StartupError(reason) from None
                    if time.monotonic() < deadline_s:
                        continue
                    raise StartupError(
                        f"process {min(wanted)} has not called within {CONNECT_TIMEOUT_S:.0f} s"
                    ) from None
                process_id = _greet(connection, secret)
                if process_id in wanted:
                    wanted.discard(process_id)
                    self._lines[process_id] = Line(connection)
                else:
                    connection.close()
        self._threads = [
            threading.Thread(target=self._listen, args=item, name=f"jaxpage-host-{item[0]}", daemon=True)
            for item in self._lines.items()
        ]
        for thread in self._threads:
            thread.start()

    @property
    def ids(self) -> list[int]:
        return list(self._lines)

    def send(self, data: bytes) -> None:
        """Sends to all; one that is gone is heard of by ``on_loss``."""
        for line in self._lines.values():
            with contextlib.suppress(OSError):  # its thread sees the end too, and says so
                line.send(data)

    def part(self, last_message: bytes) -> None:
        """Sends a last message, and closes the lines when the others have closed theirs, or after a while."""
        self._is_closed = True
        self.send(last_message)
        for line in self._lines.values():
            line.finish()
        for thread in self._threads:
            thread.join(PARTING_TIMEOUT_S)
        self.close()

    def close(self) -> None:
        """Ends all lines at once."""
        self._is_closed = True
        for line in self._lines.values():
            line.close()

    def _listen(self, process_id: int, line: Line) -> None:
        try:
            while True:
                self._on_answer(process_id, line.receive())
        except Exception as error:  # the end of the line, or something that is no answer
            if not self._is_closed:
                self._on_loss(f"host {process_id} is gone ({error})")


def agree_on(name: str, value: str) -> str:
    """What the leader says about ``name``; ``value`` is said if this process leads.

    Raises:
        StartupError: if it says nothing.
    """
    key = f"jaxpage/{name}"
    if _state().process_id == 0:  # jax.process_index() would begin to use the devices
        _client().key_value_set(key, value, allow_overwrite=True)
        return value
    try:
        return _client().blocking_key_value_get(key, int(MEETING_TIMEOUT_S * 1000))
    except RuntimeError as error:
        raise StartupError(f"the leading process said nothing: {_first_line(error)}") from error


def least_of_all(number: int, occasion: str) -> int:
    """The least that any process says; each comes here once for each occasion, and waits for the others.

    Raises:
        StartupError: if one does not come.
    """
    if jax.process_count() == 1:
        return number
    try:
        _client().key_value_set(f"jaxpage/{occasion}/{jax.process_index()}", str(number))
        _client().wait_at_barrier(f"jaxpage/{occasion}", int(MEETING_TIMEOUT_S * 1000))
        return min(int(value) for _, value in _client().key_value_dir_get(f"jaxpage/{occasion}/"))
    except RuntimeError as error:
        raise StartupError(f"another process has not come to {occasion}: {_first_line(error)}") from error


def listen() -> socket.socket:
    """A listener on a free port of all addresses, of whichever kind the others know this host by."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 can be there and have no address
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def call_leader() -> Line:
    """A follower's line to the leader.

    Raises:
        StartupError: if it is not reached, or has been called for another engine before.
    """
    _say_once(f"jaxpage/follower/{jax.process_index()}", "called")
    try:
        host, port, secret = _client().blocking_key_value_get(_KEY, int(MEETING_TIMEOUT_S * 1000)).split()
        connection = socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S)
        connection.settimeout(None)
        connection.sendall(HEAD.pack(jax.process_index()) + bytes.fromhex(secret))
    except (OSError, RuntimeError) as error:
        raise StartupError(f"the leading process cannot be reached: {str(error)[:200]}") from error
    return Line(connection)


def _greet(connection: socket.socket, secret: bytes) -> int | None:
    """Who calls; None for a stranger."""
    connection.settimeout(CONNECT_TIMEOUT_S)
    data = b""
    try:
        while len(data) < HEAD.size + HELLO_BYTES and (part := connection.recv(HEAD.size + HELLO_BYTES - len(data))):
            data += part
    except OSError:
        return None
    if not hmac.compare_digest(data[HEAD.size :], secret):
        return None
    connection.settimeout(None)
    return HEAD.unpack(data[: HEAD.size])[0]


def _say_once(key: str, value: str) -> None:
    """Raises StartupError if it was said before: followers end with their engine, so that there is no second one."""
    client = _client()
    try:
        client.key_value_set(key, value)
    except RuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise StartupError(f"the processes of this engine cannot meet: {_first_line(error)}") from error
        raise StartupError(
            "these processes have been an engine before, and those that follow end with it: "
            "start all of them again for another engine"
        ) from None


def _own_address() -> str:
    """The address under which others reach the leader, which is where jax's coordinator is."""
    return _joined().coordinator_address.rpartition(":")[0].strip("[]")


def _client() -> Any:
    return _joined().client


def _joined() -> Any:
    state = _state()
    if state.client is None:
        raise StartupError(
            f"the devices here belong to {jax.process_count()} processes, which num_processes 1 does not join"
        )
    return state


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200].rstrip(".") if str(error) else repr(error)


def _state() -> Any:
    from jax._src import distributed  # jax has no public name for the store that its processes share

    return distributed.global_state
