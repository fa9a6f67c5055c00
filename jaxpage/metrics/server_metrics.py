"""The numbers of the HTTP side: calls by route, and calls refused because the queue was full. Event loop only."""

from __future__ import annotations

from collections.abc import Iterable

from jaxpage.metrics.histogram import Histogram

CALL_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")
STATUS_CLASSES = ("2xx", "4xx", "5xx")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
OTHER = "other"
"""Stands for whatever else clients write where the method belongs: a series each would fill the memory."""


class ServerMetrics:
    """Counts calls.

    Attributes:
        num_rejections: by the option whose limit was reached.
        num_calls: by (method, class of the status, route).
        durations: by (method, route), until the last byte was sent.
    """

    def __init__(self) -> None:
        self.num_rejections: dict[str, int] = dict.fromkeys(REJECTIONS, 0)
        self.num_calls: dict[tuple[str, str, str], int] = {}
        self.durations: dict[tuple[str, str], Histogram] = {}

    def expect(self, method: str, handlers: Iterable[str]) -> None:
        """Makes the series of some routes exist before anybody calls them."""
        for handler in handlers:
            self.durations.setdefault((method, handler), Histogram(CALL_BOUNDS_S))
            for status in STATUS_CLASSES:
                self.num_calls.setdefault((method, status, handler), 0)

    def reject(self, reason: str) -> None:
        """Counts a call that was refused with 503 because the limit ``reason``, one of ``REJECTIONS``, was reached."""
        self.num_rejections[reason] += 1

    def called(self, method: str, status: int, handler: str, duration_s: float) -> None:
        """Counts a call that has been answered."""
        if method not in METHODS:
            method = OTHER
        key = (method, f"{status // 100}xx", handler)
        self.num_calls[key] = self.num_calls.get(key, 0) + 1
        if (method, handler) not in self.durations:
            self.durations[method, handler] = Histogram(CALL_BOUNDS_S)
        self.durations[method, handler].observe(duration_s)
