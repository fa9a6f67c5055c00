"""Owns every block id: which are free, how many requests hold each, and in which order free ones are handed out.

Knows nothing about requests or tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from jaxpage.kv.prefix_index import PrefixIndex

SCRATCH_BLOCK = 0
"""Never handed out: padding tokens write here."""


class BlockPool:
    """Reference-counted blocks with a free list in order of eviction.

    A freed block keeps its content, and its place in ``index``, until it is handed out again, so it can be found and
    revived. Blocks that cannot be found are handed out first, then the one that was freed longest ago. Everything on
    one block takes constant time.
    """

    def __init__(self, num_blocks: int) -> None:
        """``num_blocks`` counts the scratch block."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks: needs a scratch block and at least one other, got {num_blocks}")
        self.num_blocks = num_blocks
        self.index = PrefixIndex()
        self.ref_counts = [0] * num_blocks
        """Holders of each block; for reading only."""
        self.num_shared = 0
        """Blocks with more than one holder."""
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_usable(self) -> int:
        """Blocks that requests can hold."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks nobody holds, cached ones included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks somebody holds."""
        return self.num_usable - self.num_free

    def is_free(self, block_id: int) -> bool:
        """True if nobody holds the block."""
        return block_id >= 1 and self.ref_counts[block_id] == 0

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` blocks, which can no longer be found. The caller has checked ``num_free``."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        blocks = []
        for _ in range(count):
            block_id, _ = self._free.popitem(last=False)
            self.index.forget(block_id)
            self.ref_counts[block_id] = 1
            blocks.append(block_id)
        return blocks

    def hold(self, block_ids: Iterable[int]) -> None:
        """Adds one holder to each block."""
        for block_id in block_ids:
            count = self.ref_counts[block_id] + 1
            self.ref_counts[block_id] = count
            if count == 1:
                del self._free[block_id]
            elif count == 2:
                self.num_shared += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Takes one holder from each block, last block first: the tail of a sequence is evicted before its head."""
        for block_id in reversed(block_ids):
            count = self.ref_counts[block_id] - 1
            assert count >= 0, f"block {block_id} is freed more often than it is held"
            self.ref_counts[block_id] = count
            if count == 1:
                self.num_shared -= 1
            elif count == 0:
                self._free[block_id] = None
                if block_id not in self.index:
                    self._free.move_to_end(block_id, last=False)

    def touch(self, block_id: int) -> None:
        """The block was of use: if nobody holds it, it is now the last one to be evicted."""
        if self.is_free(block_id):
            self._free.move_to_end(block_id)

    def num_unheld(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks are in the free list: holding them shrinks it by as many."""
        return sum(self.ref_counts[block_id] == 0 for block_id in block_ids)

    def check_integrity(self) -> None:
        """Raises AssertionError if counts, free list and index contradict each other."""
        free = {block for block in range(1, self.num_blocks) if self.ref_counts[block] == 0}
        assert free == self._free.keys(), "the free list is not the set of blocks with count 0"
        assert self.ref_counts[SCRATCH_BLOCK] == 0, "the scratch block is held"
        assert self.num_shared == sum(count > 1 for count in self.ref_counts), "shared blocks are miscounted"
        assert SCRATCH_BLOCK not in self.index, "the scratch block can be found"
        self.index.check_integrity()
