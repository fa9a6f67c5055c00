"""The lines between processes: over IPv4 and IPv6, by name, and for one engine only."""

from __future__ import annotations

import queue
import socket
import threading
import types
from collections.abc import Callable, Iterator

import jax
import pytest
from addresses import needs_ipv6

from jaxpage.errors import StartupError
from jaxpage.parallel import hosts
from jaxpage.parallel.hosts import Followers, Line, call_leader


class Store:
    """In the place of what jax's processes share. ``process_id`` is who asks, by thread."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._changed = threading.Condition()
        self.process_id = threading.local()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self._changed:
            if key in self.values and not allow_overwrite:
                raise RuntimeError(f"ALREADY_EXISTS: Config key {key} already exists.")
            self.values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self.values, 10)
            return self.values[key]


@pytest.fixture
def group_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Store]:
    """Lets two threads be two processes that meet at a coordinator."""

    def meet(coordinator: str) -> Store:
        store = Store()
        state = types.SimpleNamespace(client=store, coordinator_address=coordinator, num_processes=2)
        monkeypatch.setattr(hosts, "_state", lambda: state)
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(jax, "process_index", lambda: getattr(store.process_id, "value", 0))
        return store

    return meet


def follow(store: Store, lines: queue.SimpleQueue[Line | Exception]) -> None:
    store.process_id.value = 1
    try:
        lines.put(call_leader())
    except Exception as error:
        lines.put(error)


@pytest.fixture
def lines() -> Iterator[queue.SimpleQueue[Line | Exception]]:
    yield queue.SimpleQueue()


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", pytest.param("[::1]", marks=needs_ipv6), pytest.param("six", marks=needs_ipv6)]
)
def test_a_leader_is_reached_at_whatever_address_it_has(
    host: str,
    group_at: Callable[[str], Store],
    lines: queue.SimpleQueue[Line | Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolve = socket.getaddrinfo

    def resolve_six(name: str, *more: object, **named: object) -> object:
        return resolve("::1" if name == "six" else name, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", resolve_six)
    store = group_at(f"{host}:1")
    heard: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
    threading.Thread(target=follow, args=(store, lines), daemon=True).start()
    followers = Followers(lambda process_id, data: heard.put((process_id, data)), pytest.fail)
    line = lines.get(timeout=10)
    assert isinstance(line, Line), line
    followers.send(b"there")
    assert line.receive() == b"there"
    line.send(b"back")
    assert heard.get(timeout=10) == (1, b"back")
    followers.close()
    line.close()


def test_without_ipv6_there_is_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    create = socket.create_server

    def refuse_ipv6(address: tuple[str, int], *, family: int = socket.AF_INET, **more: bool) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(99, "Cannot assign requested address")
        return create(address, family=family, **more)

    monkeypatch.setattr(socket, "create_server", refuse_ipv6)
    for has_it in (True, False):
        monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda has_it=has_it: has_it)
        with hosts.listen() as listener:
            assert listener.family == socket.AF_INET
            socket.create_connection(("127.0.0.1", listener.getsockname()[1]), 5).close()


def test_the_same_processes_are_no_second_engine(
    group_at: Callable[[str], Store], lines: queue.SimpleQueue[Line | Exception]
) -> None:
    store = group_at("127.0.0.1:1")
    threading.Thread(target=follow, args=(store, lines), daemon=True).start()
    followers = Followers(lambda process_id, data: None, pytest.fail)
    line = lines.get(timeout=10)
    assert isinstance(line, Line), line
    with pytest.raises(StartupError, match=r"have been an engine before, .*: start all of them again"):
        Followers(lambda process_id, data: None, pytest.fail)
    follow(store, lines)
    assert "have been an engine before" in str(lines.get(timeout=10))
    followers.close()
    line.close()


def test_devices_of_processes_that_were_not_joined_are_no_engine(
    monkeypatch: pytest.MonkeyPatch, group_at: Callable[[str], Store]
) -> None:
    group_at("127.0.0.1:1")
    monkeypatch.setattr(hosts, "_state", lambda: types.SimpleNamespace(client=None, coordinator_address=None))
    with pytest.raises(StartupError, match="the devices here belong to 2 processes, which num_processes 1 does not"):
        Followers(lambda process_id, data: None, pytest.fail)
