"""Owns every block id: which are free, how many requests hold each, and which full blocks can be found by content.

Knows nothing about requests or tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

SCRATCH_BLOCK = 0
"""Never handed out: padding tokens write here."""


class BlockPool:
    """Reference-counted blocks with a free list in order of eviction.

    A freed block keeps its content and its name until it is handed out again, so it can be found and revived. Blocks
    without a name are handed out first, then the named one that was freed longest ago.
    """

    def __init__(self, num_blocks: int) -> None:
        """``num_blocks`` counts the scratch block."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks: needs a scratch block and at least one other, got {num_blocks}")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._block_of_name: dict[bytes, int] = {}
        self._name_of_block: dict[int, bytes] = {}

    @property
    def num_usable(self) -> int:
        """Blocks that requests can hold."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks nobody holds, cached ones included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by content, held or not."""
        return len(self._block_of_name)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` blocks, forgetting the names they had. The caller has checked ``num_free``."""
        assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        blocks = []
        for _ in range(count):
            block_id, _ = self._free.popitem(last=False)
            name = self._name_of_block.pop(block_id, None)
            if name is not None:
                del self._block_of_name[name]
            self._ref_counts[block_id] = 1
            blocks.append(block_id)
        return blocks

    def find(self, names: Iterable[bytes]) -> list[int]:
        """The blocks of the longest prefix of ``names`` that is known. They are not held yet."""
        blocks = []
        for name in names:
            block_id = self._block_of_name.get(name)
            if block_id is None:
                break
            blocks.append(block_id)
        return blocks

    def num_unheld(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks are in the free list: holding them shrinks it by as many."""
        return sum(self._ref_counts[block_id] == 0 for block_id in block_ids)

    def hold(self, block_ids: Iterable[int]) -> None:
        """Adds one holder to each block."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Takes one holder from each block, last block first: the tail of a sequence is evicted before its head."""
        for block_id in reversed(block_ids):
            count = self._ref_counts[block_id] - 1
            assert count >= 0, f"block {block_id} is freed more often than it is held"
            self._ref_counts[block_id] = count
            if count == 0:
                self._free[block_id] = None
                if block_id not in self._name_of_block:
                    self._free.move_to_end(block_id, last=False)

    def name(self, block_id: int, name: bytes) -> None:
        """Makes a full, held block findable; if another block has this name already, that one stays the one found."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is named while nobody holds it"
        if name not in self._block_of_name and block_id not in self._name_of_block:
            self._block_of_name[name] = block_id
            self._name_of_block[block_id] = name

    def forget_names(self) -> None:
        """Drops all names: nothing computed so far is found again. Held blocks stay held."""
        self._block_of_name.clear()
        self._name_of_block.clear()

    def check_integrity(self) -> None:
        """Raises AssertionError if counts, free list and names contradict each other."""
        free = {block for block in range(1, self.num_blocks) if self._ref_counts[block] == 0}
        assert free == set(self._free), "the free list is not the set of blocks with count 0"
        assert self._ref_counts[SCRATCH_BLOCK] == 0, "the scratch block is held"
        assert {block: name for name, block in self._block_of_name.items()} == self._name_of_block, "names differ"
