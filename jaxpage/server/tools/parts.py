"""Owns the parts that a chat answer consists of: reasoning, content and calls of tools, whole or piece by piece.

It must not know in which format a model writes them.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thought before it answered."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer's text."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins: the ``index``-th of its choice."""

    index: int
    call_id: str
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of call ``index``; the pieces of a call join to JSON text."""

    index: int
    text: str


Part = Reasoning | Content | CallStart | CallArguments


class AnswerReader(Protocol):
    """Reads the text of one choice into parts, in whatever pieces it arrives.

    However the text is cut into pieces, the parts join to the same message. What may still become a marker is held
    back; nothing else is.
    """

    @property
    def has_open_call(self) -> bool:
        """True while a call has begun and not ended."""
        ...

    def feed(self, text: str) -> list[Part]:
        """The parts that ``text`` makes certain."""
        ...

    def finish(self) -> list[Part]:
        """The parts that the end of the text makes certain; nothing may be fed afterwards."""
        ...


class ContentReader:
    """Reads everything as content."""

    has_open_call = False

    def feed(self, text: str) -> list[Part]:
        """``text`` as it is."""
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        """Nothing: nothing was held back."""
        return []


def new_call(index: int, name: str) -> CallStart:
    """The start of a call, under a fresh id."""
    return CallStart(index, f"call_{uuid.uuid4().hex[:24]}", name)


def joined(parts: Iterable[Part]) -> dict[str, Any]:
    """``parts`` as fields of a delta or, all together, of a message; fields without any part are absent.

    ``tool_calls`` hold ``index``, and id, type and name only in the delta that starts a call.
    """
    fields: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        match part:
            case Reasoning(text):
                fields["reasoning_content"] = fields.get("reasoning_content", "") + text
            case Content(text):
                fields["content"] = fields.get("content", "") + text
            case CallStart(index, call_id, name):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": call_id, "type": "function", "function": function}
            case CallArguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    if calls:
        fields["tool_calls"] = [calls[index] for index in sorted(calls)]
    return fields
