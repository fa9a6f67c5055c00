"""Memory that samples and beams of one prompt save by sharing blocks, on lengths like the PagedAttention paper's.

Knows the replay and the paper's figures; nothing about traces in files.
"""

from __future__ import annotations

import math
import random
from typing import Any

from jaxpage.benchmarks.replay import Replay, Settings
from jaxpage.benchmarks.traces import TraceRow

MEAN_LENGTHS = {"Alpaca": (19.31, 58.45), "ShareGPT": (161.31, 337.99)}
"""Mean tokens of prompts and outputs (Kwon et al., 2023, figure 11)."""
PAPER = {
    ("Alpaca", "samples"): "6.1-9.8",
    ("Alpaca", "beams"): "37.6-55.2",
    ("ShareGPT", "samples"): "16.2-30.5",
    ("ShareGPT", "beams"): "44.3-66.3",
}
"""Per cent of memory saved at widths 2 to 6 (the same, section 6.3)."""
WIDTHS = (2, 4, 6)
NUM_PROMPTS = 200
MAX_LENGTH = 2048


def measure_all(block_size: int = 16, num_prompts: int = NUM_PROMPTS) -> list[dict[str, Any]]:
    """One row for each length mix and way of sampling."""
    return [
        {
            "lengths": lengths,
            "of one prompt": kind,
            **{f"{width}: saved %": 100 * saved(lengths, kind, width, block_size, num_prompts) for width in WIDTHS},
            "paper, 2 to 6 %": PAPER[lengths, kind],
        }
        for lengths in MEAN_LENGTHS
        for kind in ("samples", "beams")
    ]


def saved(lengths: str, kind: str, width: int, block_size: int, num_prompts: int) -> float:
    """Share of the blocks in all block tables that need no memory, averaged over a replay without prefix cache."""
    rows = draw_rows(lengths, num_prompts)
    settings = Settings(
        block_size=block_size,
        num_blocks=width * sum(-(-(row.num_prompt_tokens + row.num_output_tokens) // block_size) + 1 for row in rows),
        max_model_len=2 * MAX_LENGTH,
        enable_prefix_caching=False,
        n=width if kind == "samples" else 1,
        beam_width=width if kind == "beams" else 0,
    )
    return Replay(settings).run(rows).shares.saved


def draw_rows(lengths: str, count: int, seed: int = 0) -> list[TraceRow]:
    """Geometric lengths of the given means, which need no further parameter, cut at MAX_LENGTH; all arrive at once."""
    source = random.Random(f"{lengths} {seed}")

    def draw(mean: float) -> int:
        length = math.log(1 - source.random()) / math.log(1 - 1 / mean)
        return min(MAX_LENGTH, 1 + int(length))

    means = MEAN_LENGTHS[lengths]
    return [TraceRow(0.0, draw(means[0]), draw(means[1])) for _ in range(count)]
