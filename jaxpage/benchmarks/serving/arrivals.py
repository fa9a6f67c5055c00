"""When requests are sent. Knows nothing of what they ask."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt


def arrival_times(
    count: int, request_rate: float, burstiness: float, generator: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Seconds from the start at which ``count`` requests are sent.

    Gaps follow a gamma distribution of shape ``burstiness`` and mean 1 / ``request_rate``: 1 is a Poisson process,
    less comes in bursts, more is closer to a clock. All gaps are then stretched alike so that the last request is sent
    at exactly count / request_rate: two runs at the same rate offer the same load whatever their seed.

    Args:
        request_rate: requests a second; ``inf`` sends all at once.
    """
    if math.isinf(request_rate):
        return np.zeros(count)
    times = np.cumsum(generator.gamma(burstiness, 1 / burstiness, count))
    return times * (count / request_rate / times[-1]) if count else times
