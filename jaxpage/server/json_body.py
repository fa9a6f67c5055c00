"""Owns reading a request's body: byte limit, content type and strict JSON.

It does not know which fields an endpoint takes.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request

from jaxpage.errors import shown
from jaxpage.server.errors import ApiError, ClientGoneError

BODY_TIMEOUT_S = 60.0
"""Longest silence within a body; a client that stalls longer is cut off."""

_SURROGATE = re.compile(rb"\\u[dD][89abcdefABCDEF]")
_CLOSE = {"Connection": "close"}  # the rest of the body is never read, so the connection cannot be used again


class _NotFinite:
    """Stands for NaN, Infinity or a number beyond a double until its place in the document is known."""

    def __init__(self, literal: str) -> None:
        self.literal = literal


async def read_body(request: Request, max_body_bytes: int) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413 as soon as more than ``max_body_bytes`` are announced or have arrived; 400 if it stalls.
        ClientGoneError: if the connection closes half-way.
    """
    too_large = ApiError(413, f"the body is larger than {max_body_bytes} bytes", headers=_CLOSE)
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_body_bytes:
        raise too_large
    body = bytearray()
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S) as silence:
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                body += message.get("body", b"")
                if len(body) > max_body_bytes:
                    raise too_large
                if not message.get("more_body"):
                    return bytes(body)
                silence.reschedule(loop.time() + BODY_TIMEOUT_S)
    except TimeoutError:
        raise ApiError(400, f"the body did not arrive within {BODY_TIMEOUT_S:g} s", headers=_CLOSE) from None


def check_content_type(request: Request) -> None:
    """Raises ApiError 400 unless the body is declared as JSON."""
    declared = request.headers.get("content-type", "")
    if declared.split(";")[0].strip().lower() != "application/json":
        raise ApiError(400, f"Content-Type must be application/json, got {shown(declared)}")


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in ``raw``.

    Raises:
        ApiError: 400 for anything that is not one UTF-8 JSON object of finite numbers and valid characters. Where a
            bad number or character can be told apart, ``param`` is the path of its field.
    """
    odd: list[_NotFinite] = []

    def not_finite(literal: str) -> _NotFinite:
        odd.append(_NotFinite(literal))
        return odd[-1]

    def number(literal: str) -> float | _NotFinite:
        value = float(literal)
        return value if math.isfinite(value) else not_finite(literal)

    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=not_finite, parse_float=number)
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not valid UTF-8") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not valid JSON: a number is too long or the nesting too deep") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    if odd or _SURROGATE.search(raw):
        _refuse_odd_values(body)
    return body


def _refuse_odd_values(body: dict[str, Any]) -> None:
    for path, value in _leaves(body):
        if isinstance(value, _NotFinite):
            raise ApiError(400, f"the body is not valid JSON: {shown(value.literal)} is not a finite number", path)
        if isinstance(value, str) and not _is_encodable(value):
            raise ApiError(400, "a string holds half of a surrogate pair", path)


def _is_encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _leaves(body: dict[str, Any]) -> Iterator[tuple[str | None, Any]]:
    """Every scalar and key with the top-level field it is in (paths further down add nothing a client needs)."""
    for field, top in body.items():
        yield None, field
        pending = [top]
        while pending:
            value = pending.pop()
            if isinstance(value, dict):
                pending.extend(value.values())
                pending.extend(value.keys())
            elif isinstance(value, list):
                pending.extend(value)
            else:
                yield field[:200], value
