"""Processes that meet before jax does: all go on together, or each says what is wrong, soon."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import re
import socket
import time
from collections.abc import Iterator

import pytest
from addresses import needs_ipv6

from jaxpage.errors import ParameterError, StartupError
from jaxpage.parallel import meeting
from jaxpage.parallel.meeting import Attendee, bind_address, meet

OPTIONS = ("tensor_parallel_size 2", "block_size 32", "seed None")
PATIENCE_S = 20.0


def free_port(host: str = "127.0.0.1") -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        return server.getsockname()[1]


@pytest.fixture
def coordinator() -> str:
    return f"127.0.0.1:{free_port()}"


def come(coordinator: str, *attendees: Attendee, timeout_s: float = PATIENCE_S) -> list[str | None]:
    """What each is told; None if it goes on."""

    def one(attendee: Attendee) -> str | None:
        try:
            return meet(coordinator, attendee, timeout_s)
        except (StartupError, ParameterError) as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(len(attendees)) as pool:
        return list(pool.map(one, attendees))


@contextlib.contextmanager
def stranger(coordinator: str, says: bytes) -> Iterator[None]:
    """Another program at the coordinator's address."""
    host, _, port = coordinator.rpartition(":")
    with socket.create_server((host, int(port))) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(1000)
                        connection.sendall(says)

        pool.submit(answer)
        yield
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", pytest.param("[::1]", marks=needs_ipv6)])
@pytest.mark.parametrize("count", [2, 4])
def test_all_go_on_and_the_port_is_free(host: str, count: int) -> None:
    coordinator = f"{host}:{free_port(host.strip('[]'))}"
    attendees = [Attendee(index, count, OPTIONS) for index in reversed(range(count))]
    assert come(coordinator, *attendees) == [None] * count
    meeting._listen(coordinator).close()


def test_who_does_not_come_is_named(coordinator: str, caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr(meeting, "NOTICE_AFTER_S", 0.2)
    caplog.set_level(logging.INFO, "jaxpage")
    told = come(coordinator, Attendee(0, 4, OPTIONS), Attendee(2, 4, OPTIONS), timeout_s=3.0)
    assert told == [f"process 1, 3 has not come to {coordinator} within 3 s"] * 2
    # Whether the other one has come by then is a matter of luck.
    assert re.search(rf"Waiting for process 1, (2, )?3 at {coordinator}, up to 3 s", caplog.text)


def test_a_leader_who_does_not_come_is_named(coordinator: str, caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr(meeting, "NOTICE_AFTER_S", 0.2)
    caplog.set_level(logging.INFO, "jaxpage")
    assert come(coordinator, Attendee(1, 2, OPTIONS), timeout_s=1.0) == [
        f"process 0 at {coordinator} is not there after 1 s"
    ]
    assert f"Waiting for process 0 at {coordinator}" in caplog.text and "refused" in caplog.text


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            Attendee(1, 2, ("tensor_parallel_size 2", "block_size 16", "seed None")),
            "process 1 has --block-size 16, process 0 --block-size 32",
        ),
        (Attendee(1, 2, (*OPTIONS, "new 1")), "process 1 has --new 1, process 0 no --new"),
        (Attendee(1, 3, OPTIONS), "process 1 has --num-processes 3, process 0 2"),
        (Attendee(2, 2, OPTIONS), "process 2 comes to an engine of 2 processes"),
    ],
)
def test_who_was_started_with_something_else_is_told_and_so_is_the_leader(
    other: Attendee, message: str, coordinator: str
) -> None:
    started = time.monotonic()
    assert come(coordinator, Attendee(0, 2, OPTIONS), other) == [message] * 2
    assert time.monotonic() - started < PATIENCE_S / 2, "nobody waits for the deadline"


def test_two_that_say_they_are_the_same(coordinator: str) -> None:
    twice = [Attendee(1, 3, OPTIONS)] * 2
    told = come(coordinator, Attendee(0, 3, OPTIONS), *twice)
    assert told[0] == "process 1 has come twice" and "process 1 has come twice" in told[1:]


def test_a_port_that_is_taken(coordinator: str) -> None:
    with stranger(coordinator, b""):
        (told,) = come(coordinator, Attendee(0, 2, OPTIONS))
    assert told == f"coordinator: cannot listen on {coordinator}: Address already in use"


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"[1]\n", b'{"go": 1}\n'])
def test_a_stranger_at_the_coordinators_address(says: bytes, coordinator: str) -> None:
    with stranger(coordinator, says):
        (told,) = come(coordinator, Attendee(1, 2, OPTIONS))
    assert told == f"who answers at {coordinator} is not process 0 of this engine, or has ended"


def test_strangers_who_call_do_not_count(coordinator: str) -> None:
    host, _, port = coordinator.rpartition(":")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        leader = pool.submit(come, coordinator, Attendee(0, 2, OPTIONS))
        for says in (b"", b"GET / HTTP/1.1\r\n\r\n\n", b'{"name": "jaxpage", "process_id": "1"}\n'):
            deadline = time.monotonic() + PATIENCE_S
            while time.monotonic() < deadline:
                with contextlib.suppress(ConnectionRefusedError), socket.create_connection((host, int(port))) as caller:
                    caller.sendall(says)
                    break
        assert come(coordinator, Attendee(1, 2, OPTIONS)) == [None]
        assert leader.result() == [None]


def test_only_an_address_of_this_machine_alone_is_bound_alone() -> None:
    assert bind_address("127.0.0.1:8476") == "127.0.0.1:8476" and bind_address("[::1]:1") == "[::1]:1"
    assert bind_address("10.0.0.1:8476") is None and bind_address("localhost:8476") is None
