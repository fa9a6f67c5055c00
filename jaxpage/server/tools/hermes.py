"""Owns reading calls in the format of Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

It must not know what calls are for.
"""

from __future__ import annotations

from jaxpage.server.tools.call_reader import CallReader, CallsReader, Progress
from jaxpage.server.tools.markers import split_at_marker
from jaxpage.server.tools.parts import CallArguments, CallStart, Content, Part

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesReader(CallsReader):
    """Reads text with marked calls anywhere in it.

    - Blanks around calls are no content; those before a call stay between content before it and content behind it.
    - What stands behind ``<tool_call>`` and is no JSON object with a name is content, marker included.
    - A call that stops being JSON after its arguments have begun passes all up to ``</tool_call>`` on as arguments:
      only the client can judge them.
    - A marked call may name any tool: the client has to tell the model that it is unknown.
    """

    markers = (OPEN, CLOSE)

    def __init__(self) -> None:
        super().__init__()
        self._blanks = ""  # those at the end of the text so far
        self._has_text = False
        self._is_behind_call = False
        self._awaits_close = False

    def finish(self) -> list[Part]:
        """What was held back: an unfinished call is content as long as its arguments have not begun."""
        parts: list[Part] = []
        if self._call is not None and self._call.progress is Progress.BROKEN:
            parts.append(CallArguments(self._num_calls - 1, self._pending))
        elif self._call is not None and self._call.progress is Progress.UNCERTAIN:
            self._add_content(OPEN + self._call.text, parts)
        elif not self._awaits_close:
            self._add_content(self._pending, parts)
        if self._blanks and not self._is_behind_call:
            parts.append(Content(self._blanks))
        self._pending = self._blanks = ""
        return parts

    def _step(self, parts: list[Part]) -> bool:
        """Takes something off the pending text; False if that needs more text."""
        if self._call is not None:
            return self._read_call(self._call, parts)
        if self._awaits_close:
            return self._skip_close()
        before, marker, self._pending = split_at_marker(self._pending, (OPEN,))
        self._add_content(before, parts)
        if marker is not None:
            self._call = CallReader(self._num_calls)
        return marker is not None

    def _read_call(self, call: CallReader, parts: list[Part]) -> bool:
        if call.progress is Progress.BROKEN:
            before, marker, self._pending = split_at_marker(self._pending, (CLOSE,))
            if before:
                parts.append(CallArguments(self._num_calls - 1, before))
            if marker is not None:
                self._call = None
            return marker is not None
        new, self._pending = call.feed(self._pending)
        parts += new
        if any(isinstance(part, CallStart) for part in new):
            self._num_calls += 1
            self._blanks = self._blanks if self._has_text else ""
            self._is_behind_call = True
        if call.progress is Progress.REFUSED:
            self._call = None
            self._add_content(OPEN + call.text, parts)
        elif call.progress is Progress.COMPLETE:
            self._call, self._awaits_close = None, True
        return bool(self._pending)

    def _skip_close(self) -> bool:
        text = self._pending.lstrip()
        if text.startswith(CLOSE):
            self._pending = text[len(CLOSE) :]
        elif CLOSE.startswith(text):
            return False
        self._awaits_close = False
        return True

    def _add_content(self, text: str, parts: list[Part]) -> None:
        if self._is_behind_call:
            text = text.lstrip()
            self._is_behind_call = not text
        text = self._blanks + text
        content = text.rstrip()
        self._blanks = text[len(content) :]
        if content:
            self._has_text = True
            parts.append(Content(content))
