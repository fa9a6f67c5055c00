"""What a model step gives a simulation: tokens, candidates for beams, and how long the step takes on a virtual clock.

Knows schedules; nothing about arrays, devices or how requests are served.
"""

from __future__ import annotations

import dataclasses
import math
import random

from jaxpage.benchmarks.traces import OUTPUT_TOKEN_ID
from jaxpage.scheduler.schedule import Schedule, ScheduledRequest


@dataclasses.dataclass(frozen=True, slots=True)
class StepTime:
    """Virtual seconds of a step: a part that every step has, and a part by tokens computed and blocks moved.

    The defaults are those of 8 billion bfloat16 parameters and 128 KiB of KV cache a token on a chip that reads 2 TB/s,
    computes 400 TFLOP/s, and reaches the host at 25 GB/s: 16 GB / 2 TB/s = 8 ms, 16 GFLOP / 400 TFLOP/s = 40 us,
    128 KiB / 25 GB/s = 5 us.

    Attributes:
        swap_s_per_token: for each slot of a block that goes to or comes from the host.
    """

    base_s: float = 8e-3
    s_per_token: float = 40e-6
    swap_s_per_token: float = 5e-6

    def of(self, schedule: Schedule, num_swapped_blocks: int, block_size: int) -> float:
        """Seconds one step takes."""
        swapped = num_swapped_blocks * block_size * self.swap_s_per_token
        return self.base_s + schedule.num_tokens * self.s_per_token + swapped


TOP_PROBABILITIES = (0.06, 0.219, 0.319, 0.411, 0.506, 0.611, 0.734, 0.866, 0.961, 0.996, 1.0)
"""Deciles, from least to greatest, of the likeliest token's probability, recorded from SmolLM2-135M-Instruct."""
NEXT_SHARES = (0.41, 0.29, 0.23, 0.19)
"""Mean shares that the second to fifth likeliest token had in what those before them left; the last one goes on."""


class FakeModel:
    """Samples of one prompt get different tokens; beams get candidates as uneven as a language model's.

    How much beams share depends on how soon those that fall behind die out, and so on how sure the model is. The
    numbers above were recorded in beam searches of width 6 over 10 instructions and 100 tokens each. Each beam draws
    from them at each step, independently of the others. Sharing saved 65% in the recorded searches and saves 62% here.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def token_id(self, item: ScheduledRequest) -> int:
        """The token a request gets from a step."""
        return OUTPUT_TOKEN_ID - item.request.sample_index

    def candidates(self, count: int) -> list[tuple[int, float]]:
        """The ``count`` most likely (token id, log probability) of one beam, best first."""
        decile, rest = divmod(self._random.random() * (len(TOP_PROBABILITIES) - 1), 1)
        low, high = TOP_PROBABILITIES[int(decile)], TOP_PROBABILITIES[int(decile) + 1]
        share = low + rest * (high - low)
        left, probabilities = 1.0, []
        for rank in range(count):
            probabilities.append(max(left * share, 1e-30))
            left *= 1 - share
            share = NEXT_SHARES[min(rank, len(NEXT_SHARES) - 1)]
        probabilities.sort(reverse=True)
        return [(OUTPUT_TOKEN_ID - rank, math.log(each)) for rank, each in enumerate(probabilities)]
