"""Histograms as plain numbers, and vLLM's bucket bounds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

LATENCY_BOUNDS_S = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
FIRST_TOKEN_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
TOKEN_BOUNDS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
STEP_TOKENS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
NUM_SAMPLES_BOUNDS = (1, 2, 5, 10, 20)
PREEMPTION_BOUNDS = (1, 2, 3, 4, 5, 10, 20)


def token_count_bounds(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to ``largest``."""
    bounds: list[int] = []
    decade = 1
    while decade <= largest:
        bounds += [digit * decade for digit in (1, 2, 5) if digit * decade <= largest]
        decade *= 10
    return tuple(bounds)


class Histogram:
    """Counts observations by upper bound, bounds included; not yet summed up as Prometheus shows them.

    Attributes:
        counts: one for each bound, and one for what is above the last.
        total: sum of the observations.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    @property
    def num_observations(self) -> int:
        return sum(self.counts)

    @classmethod
    def summed(cls, histograms: Sequence[Histogram]) -> Histogram:
        """All observations of histograms with the same bounds."""
        whole = cls(histograms[0].bounds)
        whole.counts = [sum(counts) for counts in zip(*(each.counts for each in histograms), strict=True)]
        whole.total = sum(each.total for each in histograms)
        return whole

    def observe(self, value: float, count: int = 1) -> None:
        """Adds ``count`` observations of ``value``."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def copy(self) -> Histogram:
        """The same numbers, which no longer change."""
        same = Histogram(self.bounds)
        same.counts, same.total = list(self.counts), self.total
        return same
