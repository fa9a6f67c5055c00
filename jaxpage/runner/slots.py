"""Host-side rows of running requests: block tables and sampling settings, in the form the batch builder gathers."""

from __future__ import annotations

import numpy as np

from jaxpage.request import Request

SETTINGS: dict[str, tuple[type, float]] = {
    "temperature": (np.float32, 0.0),
    "top_k": (np.int32, 0),
    "top_p": (np.float32, 1.0),
    "min_p": (np.float32, 0.0),
    "presence_penalty": (np.float32, 0.0),
    "frequency_penalty": (np.float32, 0.0),
    "repetition_penalty": (np.float32, 1.0),
}
"""Per-row settings: dtype and neutral value."""


class SlotTable:
    """One row a slot, written when a request is admitted and read at every step; the last, spare row stays neutral."""

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.spare = max_num_seqs
        size = max_num_seqs + 1
        self.block_tables = np.zeros((size, max_blocks), np.int32)
        # Lists: single elements are read at every step.
        self._num_blocks = [0] * size
        self._written_block = [-1] * size
        self.seeds = np.zeros((size, 3), np.uint32)
        self.settings = {name: np.full(size, neutral, dtype) for name, (dtype, neutral) in SETTINGS.items()}
        self.has_bias = np.zeros(size, np.int32)
        self.has_mask = np.zeros(size, np.int32)
        self.has_penalties = np.zeros(size, bool)
        self.has_filters = np.zeros(size, bool)
        self.min_tokens = np.zeros(size, np.int32)

    def admit(self, request: Request) -> None:
        """Fills the row of a request that just got its slot."""
        slot, params = request.slot, request.params
        self._num_blocks[slot] = 0
        seed = request.seed & (2**64 - 1)
        self.seeds[slot] = (seed >> 32, seed & 0xFFFFFFFF, request.sample_index)
        for name, values in self.settings.items():
            # A top_k above what an int32 holds is above any vocabulary: off.
            values[slot] = getattr(params, name) if name != "top_k" or params.top_k < 2**31 else 0
        self.has_bias[slot] = bool(params.logit_bias) or params.allowed_token_ids is not None
        self.has_mask[slot] = request.constraint is not None
        self.has_penalties[slot] = params.has_penalties
        self.has_filters[slot] = not params.is_greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
        self.min_tokens[slot] = params.min_tokens

    def refresh_blocks(self, request: Request, start: int) -> None:
        """Copies the block ids that may be new: those not seen yet, and the one with position ``start``.

        The block that is written next may have been replaced by a copy of it; those before never change.
        """
        slot, table = request.slot, request.block_ids
        index, count, known = start // self.block_size, len(table), self._num_blocks[slot]
        if count == known and index < count and table[index] == self._written_block[slot]:
            return
        first = min(index, known)
        self.block_tables[slot, first:count] = table[first:]
        self._num_blocks[slot] = count
        self._written_block[slot] = table[index] if index < count else -1
