"""Owns how an engine in another process is talked to: messages as bytes (msgpack), and a connection that carries them.

It must not know what the messages mean. Only what ``CLASSES`` names can come out of one: no code, no other objects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import numpy as np

from jaxpage.config import AsyncEngineArgs, EngineArgs, EngineConfig
from jaxpage.engine.facts import EngineFacts
from jaxpage.kv.manager import KVCacheStats, KVCounters
from jaxpage.metrics import CacheInfo, EngineCounts
from jaxpage.params import BeamSearchParams, PoolingParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
from jaxpage.scheduler.snapshot import EngineSnapshot, RequestSnapshot

logger = logging.getLogger("jaxpage")

CLASSES: tuple[type, ...] = (
    EngineArgs, AsyncEngineArgs, EngineConfig, EngineFacts, CacheInfo, EngineCounts, SamplingParams, BeamSearchParams,
    PoolingParams, StructuredOutputsParams, RequestOutputKind, EngineSnapshot, RequestSnapshot, KVCacheStats,
    KVCounters,
)  # fmt: skip
"""What may be in a message beside plain values, by its code: dataclasses, named tuples and enumerations."""
TUPLE, ARRAY = 100, 101
"""Codes of tuples and of numpy arrays."""
LENGTH_BYTES = 4
"""Of the length before each message."""
_CODES = {kind: code for code, kind in enumerate(CLASSES)}
_FIELDS = {
    kind: [field.name for field in dataclasses.fields(kind) if field.init]
    for kind in CLASSES
    if dataclasses.is_dataclass(kind)
}


def encode(message: Any) -> bytes:
    """The bytes of a message.

    Raises:
        OverflowError: for integers of more than 64 bits.
        TypeError: for what has no place in a message.
    """
    # Strict types: a tuple is not taken for a list, nor an enumeration for its value.
    content: Any = msgpack.packb(message, default=_packed, strict_types=True, unicode_errors="surrogatepass")
    return content


def decode(content: bytes) -> Any:
    """The message in ``content``."""
    return msgpack.unpackb(content, ext_hook=_unpacked, strict_map_key=False, unicode_errors="surrogatepass")


def _packed(value: Any) -> Any:
    kind: type = type(value)
    if isinstance(value, StructuredOutputsParams) and not isinstance(value.json, str | None):
        # A schema may hold numbers of any size, which text can carry.
        value = dataclasses.replace(value, json=json.dumps(value.json))
    if kind in _FIELDS:
        return msgpack.ExtType(_CODES[kind], encode([getattr(value, name) for name in _FIELDS[kind]]))
    if isinstance(value, enum.Enum) and kind in _CODES:
        return msgpack.ExtType(_CODES[kind], encode(value.value))
    if isinstance(value, tuple):
        return msgpack.ExtType(_CODES.get(kind, TUPLE), encode(list(value)))
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(ARRAY, encode([value.dtype.str, list(value.shape), value.tobytes()]))
    # What is strictly none of msgpack's own types, but as good as one: paths, enumerations of strings, other mappings.
    plain: Any
    for plain in (bool, int, float, str, bytes, list, dict):
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{kind.__name__} has no place in a message")


def _unpacked(code: int, content: bytes) -> Any:
    fields = decode(content)
    if code == TUPLE:
        return tuple(fields)
    if code == ARRAY:
        kind, shape, numbers = fields
        return np.frombuffer(numbers, np.dtype(kind)).reshape(shape).copy()
    kind = CLASSES[code]
    if kind in _FIELDS:
        return kind(**dict(zip(_FIELDS[kind], fields, strict=True)))
    return kind(fields) if issubclass(kind, enum.Enum) else kind(*fields)


class Connection:
    """Messages both ways over a stream socket. One thread may receive; any may post, which never blocks."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._outgoing: queue.SimpleQueue[bytes | Callable[[], Any] | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="jaxpage-sender", daemon=True)
        self._sender.start()

    def post(self, message: Any) -> None:
        """Sends a message. One that cannot be encoded raises here, one that nobody receives any more is dropped."""
        self._outgoing.put(encode(message))

    def post_later(self, make: Callable[[], Any]) -> None:
        """Sends what ``make`` gives, which is called in the thread that sends."""
        self._outgoing.put(make)

    def receive(self) -> Any:
        """The next message; waits for it.

        Raises:
            EOFError: if the other side has ended.
        """
        length = int.from_bytes(self._read(LENGTH_BYTES), "big")
        return decode(self._read(length))

    def close(self, timeout_s: float = 1.0) -> None:
        """Sends what is still to be sent, for a while, and ends the connection."""
        self._outgoing.put(None)
        self._sender.join(timeout_s)
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Gives the socket back, once nobody receives any more."""
        self._stream.close()

    def _read(self, count: int) -> bytes:
        content = bytearray(count)
        view = memoryview(content)
        while view:
            try:
                num_read = self._stream.recv_into(view)
            except OSError:
                num_read = 0
            if num_read == 0:
                raise EOFError("the connection has ended")
            view = view[num_read:]
        return bytes(content)

    def _send_all(self) -> None:
        try:
            self._send_until_closed()
        except OSError:
            pass  # the other side is gone; whoever receives will notice
        except Exception:
            logger.exception("a message cannot be sent")
            with contextlib.suppress(OSError):
                self._stream.shutdown(socket.SHUT_RDWR)

    def _send_until_closed(self) -> None:
        """What has gathered meanwhile goes out together."""
        is_open = True
        while is_open:
            waiting = [self._outgoing.get()]
            while not self._outgoing.empty():
                waiting.append(self._outgoing.get())
            if None in waiting:
                is_open = False
                waiting = waiting[: waiting.index(None)]
            frames = [encode(each()) if callable(each) else each for each in waiting if each is not None]
            self._stream.sendall(b"".join(_framed(frames)))


def _framed(frames: Sequence[bytes]) -> list[bytes]:
    return [piece for frame in frames for piece in (len(frame).to_bytes(LENGTH_BYTES, "big"), frame)]
