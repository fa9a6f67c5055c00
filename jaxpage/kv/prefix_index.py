"""Finds blocks by what they hold: full blocks by name, and the block that goes on longest with given tokens.

Knows names, tokens and block ids; who holds a block and when it is evicted is the pool's business.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class _Entry(NamedTuple):
    parent: bytes
    token_ids: tuple[int, ...]
    name: bytes | None


_Child = tuple[tuple[int, ...], int]
"""A block's tokens and its id."""


class PrefixIndex:
    """Blocks with known content. ``parent`` is the name of everything before a block, ``name`` that of a full block.

    Blocks that follow the same parent lie sorted by their tokens, so the one that shares most leading tokens with a
    query is a neighbour of the place where the query would lie: a hit inside a block costs one bisection.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._block_of_name: dict[bytes, int] = {}
        # Nearly all blocks are only children. A bare tuple is not a list that the garbage collector visits each time.
        self._children: dict[bytes, _Child | list[_Child]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._entries

    def __iter__(self) -> Iterator[int]:
        """The blocks that can be found."""
        return iter(self._entries)

    def add(self, block_id: int, parent: bytes, token_ids: Sequence[int], name: bytes | None) -> None:
        """Makes a block findable, if nothing findable holds the same or more. ``name`` is None for a partial block.

        A block that was findable with fewer tokens is now found with these.
        """
        tokens = tuple(token_ids)
        if name is not None:
            if name in self._block_of_name:
                return
        elif self._longest(parent, tokens, ())[1] == len(tokens):
            return
        self.forget(block_id)
        self._entries[block_id] = _Entry(parent, tokens, name)
        child, siblings = (tokens, block_id), self._children.get(parent)
        if siblings is None:
            self._children[parent] = child
        elif isinstance(siblings, list):
            bisect.insort(siblings, child)
        else:
            self._children[parent] = sorted([siblings, child])
        if name is not None:
            self._block_of_name[name] = block_id

    def forget(self, block_id: int) -> None:
        """The block no longer holds what it held."""
        entry = self._entries.pop(block_id, None)
        if entry is None:
            return
        siblings = self._children[entry.parent]
        if isinstance(siblings, list):
            del siblings[bisect.bisect_left(siblings, (entry.token_ids, block_id))]
            if len(siblings) == 1:
                [self._children[entry.parent]] = siblings
        else:
            del self._children[entry.parent]
        if entry.name is not None:
            del self._block_of_name[entry.name]

    def clear(self) -> None:
        """Forgets all."""
        self._entries.clear()
        self._block_of_name.clear()
        self._children.clear()

    def find(self, names: Iterable[bytes]) -> list[int]:
        """The blocks of the longest prefix of ``names`` that is known."""
        blocks = []
        for name in names:
            block_id = self._block_of_name.get(name)
            if block_id is None:
                break
            blocks.append(block_id)
        return blocks

    def find_inside(
        self, parent: bytes, token_ids: Sequence[int], excluded: Iterable[int] = ()
    ) -> tuple[int, int] | None:
        """The block after ``parent`` that shares most leading tokens with ``token_ids``, and how many; None if none."""
        block_id, count = self._longest(parent, tuple(token_ids), excluded)
        return (block_id, count) if count else None

    def _longest(self, parent: bytes, tokens: tuple[int, ...], excluded: Iterable[int]) -> tuple[int, int]:
        siblings = self._siblings(parent)
        best = (-1, 0)
        right = bisect.bisect_left(siblings, (tokens,))
        for place, step in ((right - 1, -1), (right, 1)):
            while 0 <= place < len(siblings) and siblings[place][1] in excluded:
                place += step
            if 0 <= place < len(siblings):
                other, block_id = siblings[place]
                count = _num_shared(other, tokens)
                if count > best[1]:
                    best = (block_id, count)
        return best

    def _siblings(self, parent: bytes) -> list[_Child]:
        found = self._children.get(parent, [])
        return found if isinstance(found, list) else [found]

    def check_integrity(self) -> None:
        """Raises AssertionError if names, children and entries contradict each other."""
        names = {block: entry.name for block, entry in self._entries.items() if entry.name is not None}
        assert {block: name for name, block in self._block_of_name.items()} == names, "names differ"
        lists = {parent: self._siblings(parent) for parent in self._children}
        children = {block: (parent, tokens) for parent, siblings in lists.items() for tokens, block in siblings}
        assert children == {block: entry[:2] for block, entry in self._entries.items()}, "children differ"
        assert all(siblings == sorted(siblings) for siblings in lists.values()), "children are not sorted"


def _num_shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Leading tokens that two blocks have in common."""
    count = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        count += 1
    return count
