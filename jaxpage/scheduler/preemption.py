"""What to do with the blocks of a preempted group: keep them on the host, or compute them again."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class PreemptionPolicy:
    """Compares the time of the two ways.

    Attributes:
        mode: "swap" and "recompute" force one way; where the host pool is full, "swap" computes again, too.
        seconds_per_token: to compute a token of a prompt again.
        seconds_per_block: to move a block one way between device and host.
    """

    mode: str = "auto"
    seconds_per_token: float = 0.0
    seconds_per_block: float = 0.0

    def prefers_swap(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether blocks that hold ``num_tokens`` tokens are better moved out and in again than computed again."""
        if self.mode != "auto":
            return self.mode == "swap"
        return 2 * num_blocks * self.seconds_per_block < num_tokens * self.seconds_per_token
