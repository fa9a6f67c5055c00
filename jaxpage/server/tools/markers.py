"""Owns looking for markers in a text that arrives in pieces.

It must not know what the markers mean.
"""

from __future__ import annotations

from collections.abc import Sequence


def split_at_marker(text: str, markers: Sequence[str]) -> tuple[str, str | None, str]:
    """Splits ``text`` at the first marker.

    Returns:
        The text before it, the marker, and the text behind it. Where there is none: what cannot be part of a marker
        any more, None, and the end that may still become one.
    """
    found = [(position, marker) for marker in markers if (position := text.find(marker)) >= 0]
    if found:
        position, marker = min(found)
        return text[:position], marker, text[position + len(marker) :]
    longest = max(map(len, markers)) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return text[:-size], None, text[-size:]
    return text, None, ""
