"""Owns reading answers that are nothing but calls in JSON: ``{"name": ..., "arguments": {...}}``, or an array of them.

Forced calls are written so, whatever the model's own format. It must not know what calls are for.
"""

from __future__ import annotations

from collections.abc import Collection

from jaxpage.server.tools.call_reader import CallReader, CallsReader, Progress
from jaxpage.server.tools.parts import CallArguments, CallStart, Content, Part

SEPARATORS = "[],"


class JsonReader(CallsReader):
    """Reads an answer as calls if it starts like one, and as content if it does not.

    - An object is a call only if it names one of ``names`` and has no keys that calls do not have: a model may also
      just answer in JSON.
    - The first thing that is no call makes the rest content.
    - A call that stops being JSON after its arguments have begun passes all that follows on as arguments.

    Args:
        names: the tools on offer.
        prefix: what may stand before the first call; it is no content then.
        separators: what may stand between calls, beside blanks.
    """

    def __init__(self, names: Collection[str], prefix: str = "", separators: str = SEPARATORS) -> None:
        super().__init__()
        self._names = frozenset(names)
        self._prefix = prefix
        self._between = f"{separators} \t\r\n"
        self._held = ""  # what stands between calls, as long as it is not certain that a call follows
        self._awaits_prefix = bool(prefix)
        self._is_content = False

    def finish(self) -> list[Part]:
        """What was held back: an unfinished call is content as long as its arguments have not begun."""
        held = self._held + (self._call.text if self._call is not None else "") + self._pending
        is_noise = self._num_calls and not held.strip(self._between)
        self._held = self._pending = ""
        return [Content(held)] if held and not is_noise else []

    def _step(self, parts: list[Part]) -> bool:
        """Takes something off the pending text; False if that needs more text."""
        if self._is_content:
            parts.append(Content(self._pending))
            self._pending = ""
            return False
        if self._call is not None:
            return self._read_call(self._call, parts)
        if self._awaits_prefix:
            return self._read_prefix()
        rest = self._pending.lstrip(self._between)
        self._held += self._pending[: len(self._pending) - len(rest)]
        self._pending = rest
        if rest.startswith("{"):
            self._call = CallReader(self._num_calls, self._names)
        elif rest:
            self._give_up()
        return bool(rest)

    def _read_prefix(self) -> bool:
        text = self._pending.lstrip()
        if self._prefix.startswith(text) and text != self._prefix:
            return False
        self._awaits_prefix = False
        if text.startswith(self._prefix):
            self._held += self._pending[: len(self._pending) - len(text)] + self._prefix
            self._pending = text[len(self._prefix) :]
        return True

    def _read_call(self, call: CallReader, parts: list[Part]) -> bool:
        if call.progress is Progress.BROKEN:
            parts.append(CallArguments(self._num_calls - 1, self._pending))
            self._pending = ""
            return False
        new, self._pending = call.feed(self._pending)
        parts += new
        if any(isinstance(part, CallStart) for part in new):
            self._num_calls += 1
            self._held = ""
        if call.progress is Progress.REFUSED:
            self._held += call.text
            self._give_up()
        elif call.progress is Progress.COMPLETE:
            self._call = None
        return bool(self._pending)

    def _give_up(self) -> None:
        """No call can follow: all that was held back is content."""
        self._pending, self._held = self._held + self._pending, ""
        self._call = None
        self._is_content = True
