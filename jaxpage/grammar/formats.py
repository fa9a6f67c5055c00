"""Owns which values of the schema keyword ``format`` are enforced, and how.

It must not know schemas beyond that. Everything here is at most as wide as the standard behind the format: what a
consumer parses with a strict library must not fail.
"""

from __future__ import annotations

from typing import Final

_LEAP_YEAR: Final = (
    r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"  # the year 0 is not among them
)
_YEAR: Final = r"(?:[1-9][0-9]{3}|0(?:[1-9][0-9]{2}|0(?:[1-9][0-9]|0[1-9])))"
_DATE: Final = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    rf"|{_LEAP_YEAR}-02-29)"
)
_TIME: Final = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL: Final = r"[0-9A-Za-z](?:-?[0-9A-Za-z]){0,31}"

PATTERNS: Final = {
    "date": f"^{_DATE}$",
    # Without leap seconds: whether 23:59:60 is one depends on the offset and on the day.
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    # At most 63 characters a label, no two hyphens in a row (they mark encoded names, which have rules of their own).
    "hostname": rf"^{_LABEL}(?:\.{_LABEL}){{0,2}}$",
}
"""Formats that are enforced by a pattern of ours, in llguidance's regex dialect."""

NATIVE: Final = frozenset({"duration", "email", "ipv4", "ipv6", "uuid", "uri"})
"""Formats that llguidance enforces rightly by itself."""
