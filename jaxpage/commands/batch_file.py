"""OpenAI's batch files: requests in, answers out, both one JSON object a line; and what a broken run has left to do.

It must not know how requests are answered.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from jaxpage.errors import shown

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
LONGEST_ID = 512


class BatchFileError(ValueError):
    """A file cannot be used at all; the message names it."""


@dataclass(frozen=True)
class BatchRequest:
    """A good line of the input."""

    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True)
class BadLine:
    """A line that holds no request that could be run; ``custom_id`` where it has one."""

    number: int
    custom_id: str | None
    code: str
    message: str

    def result(self) -> dict[str, Any]:
        """The line of the output that says so."""
        error = {"code": self.code, "message": f"line {self.number}: {self.message}"}
        return {"id": result_id(), "custom_id": self.custom_id, "response": None, "error": error}


def result_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


def read_requests(path: Path) -> tuple[list[BatchRequest], list[BadLine]]:
    """The requests of a file in its order, and the lines that hold none. Blank lines are passed over.

    Raises:
        OSError: it cannot be read.
    """
    good: list[BatchRequest] = []
    bad: list[BadLine] = []
    seen: dict[str, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            read = _read_line(number, line)
            if isinstance(read, BatchRequest) and read.custom_id in seen:
                first = seen[read.custom_id]
                read = BadLine(number, read.custom_id, "duplicate_custom_id", f"custom_id stands in line {first} too")
            if isinstance(read, BadLine):
                bad.append(read)
            else:
                seen[read.custom_id] = number
                good.append(read)
    return good, bad


def _read_line(number: int, line: bytes) -> BatchRequest | BadLine:
    try:
        entry = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        return BadLine(number, None, "invalid_json_line", f"is no JSON object: {shown(line.decode(errors='replace'))}")
    custom_id = entry.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= LONGEST_ID:
        message = f"custom_id must be a string of 1 to {LONGEST_ID} characters, got {shown(custom_id)}"
        return BadLine(number, None, "invalid_custom_id", message)

    def bad(field: str, must: str) -> BadLine:
        return BadLine(number, custom_id, f"invalid_{field}", f"{field} must be {must}, got {shown(entry.get(field))}")

    if entry.get("method") != "POST":
        return bad("method", '"POST"')
    if entry.get("url") not in URLS:
        return bad("url", f"one of {', '.join(URLS)}")
    body = entry.get("body")
    if not isinstance(body, dict):
        return bad("body", "an object")
    if body.get("stream"):
        return BadLine(number, custom_id, "invalid_body", "body.stream must be false: a batch has whole answers only")
    return BatchRequest(custom_id, entry["url"], json.dumps(body).encode())


def take_up(path: Path, custom_ids: Iterable[str]) -> set[str]:
    """Readies the output of an earlier run to be gone on with; gives the custom_ids it has answered.

    What has no answer yet goes from the file: a last line that was cut off, errors of lines that may have been mended
    since, and faults of the server (status 500 and above), which are tried again.

    Raises:
        BatchFileError: the file is not the output of these requests.
        OSError: it cannot be read or written.
    """
    if not path.exists():
        return set()
    known = set(custom_ids)
    answered: set[str] = set()
    kept: list[bytes] = []
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        if number == len(lines) and not line.endswith(b"\n"):
            break
        try:
            result = json.loads(line)
            custom_id, response = result["custom_id"], result["response"]
        except (ValueError, KeyError, TypeError):
            raise BatchFileError(f"{path}: line {number} is no result of a batch; name another output") from None
        if response is None or response["status_code"] >= 500:
            continue
        if custom_id not in known:
            raise BatchFileError(f"{path}: answers {shown(custom_id)}, which is not in the input; name another output")
        answered.add(custom_id)
        kept.append(line)
    if kept != lines:
        _replace(path, b"".join(kept))
    return answered


def _replace(path: Path, content: bytes) -> None:
    """In one step: a run that is killed here loses nothing."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class ResultWriter:
    """Appends results to a file; what ``write`` has returned from survives a crash of the machine."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")

    def write(self, results: Iterable[dict[str, Any]]) -> None:
        """Writes whole lines and waits until the disk has them."""
        self._file.write(b"".join(json.dumps(result, ensure_ascii=False).encode() + b"\n" for result in results))
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> ResultWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
