"""One stage of a worker: its parameters, cache and sampling state, and the programs that change these.

Knows slots, blocks and packed numbers; other stages are the pipeline's business.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.batch import SamplingState
from jaxpage.layers.kv_cache import KVCache
from jaxpage.models.decoder import Params
from jaxpage.runner.block_ops import BlockMover
from jaxpage.runner.commands import Command, StateFill
from jaxpage.runner.programs import StagePrograms, fill_slot, set_masks

MASK_ROWS = 8
"""Masks sent to the device at a time."""


class StageWorker:
    """One stage on its devices. The whole model, where it has no others.

    Of a stage on devices of other processes, ``programs`` is all that is here.
    """

    def __init__(self, programs: StagePrograms, params: Params) -> None:
        self.programs, self.params = programs, params
        self.kv_cache: KVCache = []
        self.state: SamplingState | None = None
        self._cache_shapes: KVCache = []
        self._state_shapes: SamplingState | None = None
        self.steps: dict[int, Any] = {}
        self._mover: BlockMover | None = None

    @property
    def is_here(self) -> bool:
        """This process has one of its devices."""
        return self.programs.placement.is_here

    def compile(self, num_tokens: int, num_blocks: int) -> Any:
        """The stage's part of a step of ``num_tokens`` tokens."""
        with jax.default_device(self.programs.placement.first_device):
            return self.programs.lower(num_tokens, self.params, num_blocks).compile()

    def allocate(self, num_blocks: int, num_host: int) -> None:
        """Makes cache, host blocks and, in the last stage, the sampling state."""
        self._cache_shapes = self.programs.cache_shapes(num_blocks)
        self._mover = BlockMover(self._cache_shapes, num_host, self.programs.placement.first_device)
        if self.programs.is_last:
            self._state_shapes = self.programs.state_shapes()
            kept = jax.tree.map(lambda shape: shape.sharding, self._state_shapes)
            self._fill = jax.jit(fill_slot, donate_argnums=0, out_shardings=kept)
            self._set_masks = jax.jit(set_masks, donate_argnums=0, out_shardings=kept)
        self.clear()

    def clear(self) -> None:
        """Cache, host blocks and sampling state are as at the start."""
        assert self._mover is not None, "the cache is not allocated"
        self.kv_cache, self.state = [], None  # there is not room for two
        self._mover.forget()
        self.kv_cache = zeros(self._cache_shapes)
        if self._state_shapes is not None:
            self.state = zeros(self._state_shapes)

    def move(self, command: Command) -> None:
        """Copies and swaps blocks."""
        assert self._mover is not None, "the cache is not allocated"
        self.kv_cache = self._mover.run(self.kv_cache, command.block_ops)

    def warm_up_mover(self) -> None:
        """Raises StartupError if blocks cannot be swapped. The cache may then be gone: ``allocate`` makes it anew."""
        assert self._mover is not None, "the cache is not allocated"
        self.kv_cache = self._mover.warm_up(self.kv_cache)

    def fill(self, fill: StateFill) -> None:
        """Fills the row of a slot."""
        self.state = self._fill(
            self.state, np.int32(fill.slot), fill.token_ids, np.int32(fill.num_prompt_tokens), fill.bias, fill.stop_ids
        )

    def set_masks(self, masks: dict[int, np.ndarray]) -> None:
        """Writes masks a few rows at a time, so that one program does for any number of them."""
        items = list(masks.items())
        for start in range(0, len(items), MASK_ROWS):
            slots = np.full(MASK_ROWS, self.programs.config.max_num_seqs, np.int32)
            words = np.zeros((MASK_ROWS, self.programs.num_mask_words), np.int32)
            for row, (slot, mask) in enumerate(items[start : start + MASK_ROWS]):
                slots[row], words[row] = slot, mask
            self.state = self._set_masks(self.state, slots, words)

    def run(self, num_tokens: int, packed: np.ndarray, arrived: jax.Array | None) -> Any:
        """Starts the stage's part of a step; gives what the next stage takes, or the step's output."""
        state = (self.state,) if self.programs.is_last else ()
        takes = () if arrived is None else (arrived,)
        self.kv_cache, *new_state, output = self.steps[num_tokens](self.params, self.kv_cache, *state, *takes, packed)
        if new_state:
            (self.state,) = new_state
        return output


def zeros(shapes: Any) -> Any:
    """Arrays full of zeros, each where its shape says."""
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype, device=shape.sharding), shapes)
