"""Clients that cost as little as possible, for processes of their own: many streams on raw sockets, and a health probe.

Knows HTTP and server-sent events by their last bytes only; nothing about models or what is measured with it.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from typing import Any

END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
"""What the answer to a stream ends with, its chunked framing included."""
RECEIVE_BYTES = 65536
"""Room for what has come meanwhile. Much more of it, and getting memory for it would cost more than all the rest."""
Address = tuple[str, int]


def connect(address: Address, body: dict[str, Any]) -> socket.socket:
    """A socket that has sent a completions request."""
    content = json.dumps(body).encode()
    client = socket.create_connection(address)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(content)}\r\n"
    client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
    return client


def read_streams(address: Address, bodies: list[dict[str, Any]]) -> dict[str, float]:
    """Sends all ``bodies`` at once and reads their streams to the end.

    Returns:
        wall_s from the first request to the last end; frames and bytes received.

    Raises:
        RuntimeError: if a stream breaks off.
    """
    tails: dict[socket.socket, bytes] = {}
    num_frames = num_bytes = 0
    with selectors.DefaultSelector() as selector:
        started_s = time.perf_counter()
        for body in bodies:
            client = connect(address, body)
            client.setblocking(False)
            tails[client] = b""
            selector.register(client, selectors.EVENT_READ)
        while tails:
            for key, _ in selector.select():
                client: Any = key.fileobj
                data = client.recv(RECEIVE_BYTES)
                num_bytes += len(data)
                num_frames += data.count(b"data: ")
                tail = tails[client] = (tails[client] + data)[-len(END) :]
                if tail == END or not data:
                    selector.unregister(client)
                    client.close()
                    del tails[client]
                    if tail != END:
                        raise RuntimeError(f"a stream broke off after {tail!r}")
        wall_s = time.perf_counter() - started_s
    return {"wall_s": wall_s, "frames": num_frames, "bytes": num_bytes}


def vanish(address: Address, bodies: list[dict[str, Any]], wait: bool = True) -> float:
    """Opens a stream for each of ``bodies``, waits for the first bytes of each if wanted, and closes all.

    Returns:
        The time when the last one was closed, on the clock of ``time.monotonic``, which all processes share.
    """
    clients = [connect(address, body) for body in bodies]
    if wait:
        for client in clients:
            client.recv(1)
    for client in clients:
        client.close()
    return time.monotonic()


def probe_health(address: Address, seconds: float, interval_s: float = 0.02) -> list[float]:
    """Seconds that each answer of GET /health took, over one connection kept open.

    Raises:
        RuntimeError: for an answer other than 200.
    """
    times = []
    until_s = time.perf_counter() + seconds
    with socket.create_connection(address) as client:
        while time.perf_counter() < until_s:
            begun_s = time.perf_counter()
            client.sendall(b"GET /health HTTP/1.1\r\nHost: bench\r\n\r\n")
            answer = client.recv(4096)
            times.append(time.perf_counter() - begun_s)
            if not answer.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"/health answered {answer[:100]!r}")
            time.sleep(interval_s)
    return times
