"""Virtual memory of requests: gives them blocks, shares, copies and swaps blocks, finds prefixes that are cached.

Changes ``Request.block_ids``, ``block_hashes`` and ``num_named_blocks`` only; when to do what is the scheduler's
business. What the device has to move is left in ``block_ops``, in the order in which it has to happen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxpage.kv.block_hash import block_hash, root_hash
from jaxpage.kv.block_ops import BlockOp, BlockOpKind
from jaxpage.kv.block_pool import BlockPool
from jaxpage.request import Request


class Prefix(NamedTuple):
    """What the cache knows of the beginning of a request.

    Attributes:
        block_ids: full blocks to share.
        source: a block whose first tokens go on from there; it is copied before the request writes. -1: none.
        num_tokens: tokens found in all.
    """

    block_ids: list[int]
    source: int
    num_tokens: int


NO_PREFIX = Prefix([], -1, 0)


@dataclasses.dataclass(slots=True)
class SwappedBlocks:
    """Block tables of requests that were swapped out together, in host block ids. A shared block is there once."""

    tables: dict[Request, list[int]]

    @property
    def host_blocks(self) -> list[int]:
        """Each host block once, in the order of first use."""
        return list(dict.fromkeys(block for table in self.tables.values() for block in table))


@dataclasses.dataclass(slots=True)
class KVCounters:
    """What happened since the start.

    Attributes:
        num_queried_tokens: tokens of requests that asked the prefix cache; num_hit_tokens: those it had,
            num_full_block_hit_tokens: in full blocks.
        num_copied_blocks: copies before a write, and copies for hits inside a block.
    """

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_full_block_hit_tokens: int = 0
    num_copied_blocks: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class KVCacheStats:
    """The cache at a moment: blocks by state, and what happened since the start.

    Attributes:
        num_cached_blocks: blocks with known content, held or not; num_shared_blocks: held more than once.
        num_allocated_slots: slots in blocks somebody holds; num_wasted_slots: those of them without a token.
        num_swapped_blocks: host blocks in use.
        num_swap_preemptions, num_recompute_preemptions: requests that lost their blocks before they ended.
    """

    num_free_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_shared_blocks: int
    num_allocated_slots: int
    num_wasted_slots: int
    num_swapped_blocks: int
    num_swap_preemptions: int
    num_recompute_preemptions: int
    counters: KVCounters


class KVCacheManager:
    """Block tables of all requests over one pool, and the pool of host blocks they can be swapped to."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        *,
        num_host_blocks: int = 0,
        model: str = "",
    ) -> None:
        """``num_blocks`` counts the scratch block; ``model`` becomes part of every name."""
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_host_blocks = num_host_blocks
        self.counters = KVCounters()
        self.block_ops: list[BlockOp] = []
        self.num_swapped_requests = 0
        self._model = model
        self._root_without_salt = root_hash(model=model)
        self._free_host_blocks = list(range(num_host_blocks - 1, -1, -1))
        # Blocks whose last tokens are written by the step being scheduled: they can be shared, since writes come
        # before reads, but not copied, since copies come before writes.
        self._unwritten: set[int] = set()

    @property
    def num_free_host_blocks(self) -> int:
        return len(self._free_host_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def begin_step(self) -> None:
        """A new step is being scheduled: all steps before it count as written."""
        self._unwritten.clear()

    def take_block_ops(self) -> list[BlockOp]:
        """What the device has to do before the step's writes, since the last call."""
        ops, self.block_ops = self.block_ops, []
        return ops

    def find_prefix(self, request: Request) -> Prefix:
        """The longest cached beginning of the request's tokens; at least one token is left to compute.

        A request that scores its prompt needs logits at every position, so it takes nothing from the cache.
        """
        if not self.enable_prefix_caching or request.needs_whole_prompt:
            return NO_PREFIX
        self._extend_hashes(request)
        limit = len(request.token_ids) - 1
        blocks = self.pool.index.find(request.block_hashes[: limit // self.block_size])
        num_tokens = len(blocks) * self.block_size
        inside = self.pool.index.find_inside(
            self._parent(request, len(blocks)),
            request.token_ids[num_tokens : min(num_tokens + self.block_size, limit)],
            self._unwritten,
        )
        return Prefix(blocks, inside[0], num_tokens + inside[1]) if inside else Prefix(blocks, -1, num_tokens)

    def allocate(self, request: Request, prefix: Prefix, num_tokens: int, num_spare_blocks: int = 0) -> bool:
        """Gives a request without blocks its cached ``prefix`` and room for ``num_tokens`` in all, or nothing.

        The pool must have room for all tokens the request has, though later chunks take theirs later: a prompt that is
        admitted for its first chunk alone would soon be preempted and begin again. ``num_spare_blocks`` more must be
        free after that.
        """
        assert not request.block_ids, f"request {request.request_id} gets blocks while it holds some"
        pool, shared = self.pool, prefix.block_ids
        needed = self.blocks_for(max(num_tokens, len(request.token_ids))) - len(shared)
        if needed + pool.num_unheld(shared) + num_spare_blocks > pool.num_free:
            return False
        pool.hold(shared)
        new = pool.allocate(self.blocks_for(num_tokens) - len(shared))
        request.block_ids = shared + new
        if prefix.source >= 0:
            self._copy(prefix.source, new[0])
            pool.touch(prefix.source)
        if self.enable_prefix_caching and request.num_cached_tokens < 0:  # recomputing is not a new prompt
            self.counters.num_queried_tokens += len(request.token_ids)
            self.counters.num_hit_tokens += prefix.num_tokens
            self.counters.num_full_block_hit_tokens += len(shared) * self.block_size
        return True

    def append_slots(self, request: Request, num_tokens: int) -> bool:
        """Makes the request's blocks hold ``num_tokens`` tokens in all, and those it will write its own.

        A block that others hold too is copied before the write. False, and no change, if the pool is short.
        """
        table, pool = request.block_ids, self.pool
        index = request.num_computed_tokens // self.block_size
        is_shared = index < len(table) and pool.ref_counts[table[index]] > 1
        new = self.blocks_for(num_tokens) - len(table)
        if is_shared + max(new, 0) > pool.num_free:
            return False
        if is_shared:
            self._copy_on_write(request, index)
        if new > 0:
            table += pool.allocate(new)
        return True

    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        """Lets ``child`` share the first ``num_tokens`` tokens of ``parent``, the last, partial block included.

        Takes no block; whoever writes into a shared block first gets a copy of it. Where the last one holds more of
        the parent's tokens, the child has to take its copy (``append_slots``) before anybody frees the parent: the
        block can be found with all of them.
        """
        assert not child.block_ids, f"request {child.request_id} is forked while it holds blocks"
        child.block_ids = parent.block_ids[: self.blocks_for(num_tokens)]
        self.pool.hold(child.block_ids)
        full = num_tokens // self.block_size
        child.block_hashes = parent.block_hashes[:full]
        child.num_named_blocks = min(parent.num_named_blocks, full)

    def name_blocks(self, request: Request, *, being_written: bool) -> None:
        """Makes the blocks findable whose tokens are all known and computed or scheduled.

        Steps run in order on the device, so a block may be found from the moment its tokens are scheduled: whoever
        reads it does so in the same step, after the write, or later. ``being_written``: by the step being scheduled.
        """
        if not self.enable_prefix_caching:
            return
        self._extend_hashes(request)
        full = min(request.num_computed_tokens // self.block_size, len(request.block_hashes))
        for index in range(request.num_named_blocks, full):
            block_id, start = request.block_ids[index], index * self.block_size
            self.pool.index.add(
                block_id,
                self._parent(request, index),
                request.token_ids[start : start + self.block_size],
                request.block_hashes[index],
            )
            if being_written:
                self._unwritten.add(block_id)
        request.num_named_blocks = max(request.num_named_blocks, full)

    def name_tail(self, request: Request, *, being_written: bool) -> None:
        """Makes the last, partial block findable with the tokens it has so far."""
        num_tokens = min(request.num_computed_tokens, len(request.token_ids))
        full = num_tokens // self.block_size
        if not self.enable_prefix_caching or num_tokens == full * self.block_size or full > len(request.block_hashes):
            return
        block_id = request.block_ids[full]
        self.pool.index.add(
            block_id, self._parent(request, full), request.token_ids[full * self.block_size : num_tokens], None
        )
        if being_written:
            self._unwritten.add(block_id)

    def free(self, request: Request) -> None:
        """Takes all blocks from the request; those with known content can be found until they are handed out again."""
        self.name_blocks(request, being_written=False)
        self.name_tail(request, being_written=False)
        self.pool.free(request.block_ids)
        request.block_ids = []
        request.num_named_blocks = 0

    def swap_out(self, requests: Sequence[Request]) -> SwappedBlocks | None:
        """Moves the blocks of some requests to the host, each block once, and frees them; None if it has no room.

        What the requests share with others stays with these, and a copy goes to the host.
        """
        blocks = list(dict.fromkeys(block for request in requests for block in request.block_ids))
        if len(blocks) > len(self._free_host_blocks):
            return None
        host_block_of = {block: self._free_host_blocks.pop() for block in blocks}
        self.block_ops += [BlockOp(BlockOpKind.SWAP_OUT, block, host) for block, host in host_block_of.items()]
        self.counters.num_swapped_out_blocks += len(blocks)
        self.num_swapped_requests += len(requests)
        swapped = SwappedBlocks({})
        for request in requests:
            swapped.tables[request] = [host_block_of[block] for block in request.block_ids]
            self.free(request)
        return swapped

    def swap_in(self, swapped: SwappedBlocks, num_spare_blocks: int = 0) -> bool:
        """Gives the requests their blocks back, shared as before, or nothing if the pool is short.

        A full block that the device still has, or has again, is taken from there.
        """
        found: dict[int, int] = {}
        for request, table in swapped.tables.items():
            known = self.pool.index.find(request.block_hashes[: len(table)]) if self.enable_prefix_caching else []
            found |= dict(zip(table, known, strict=False))
        host_blocks = swapped.host_blocks
        missing = [host for host in host_blocks if host not in found]
        unheld = self.pool.num_unheld(set(found.values()))
        if len(missing) + unheld + num_spare_blocks > self.pool.num_free:
            return False
        # Found ones first: allocating might evict them.
        self.pool.hold(found.values())
        new = self.pool.allocate(len(missing))
        self.block_ops += [BlockOp(BlockOpKind.SWAP_IN, *pair) for pair in zip(missing, new, strict=True)]
        self.counters.num_swapped_in_blocks += len(missing)
        block_of_host = found | dict(zip(missing, new, strict=True))
        seen: set[int] = set()
        for request, table in swapped.tables.items():
            request.block_ids = [block_of_host[host] for host in table]
            self.pool.hold(block_of_host[host] for host in table if host in seen)  # the first holder has it already
            seen.update(table)
            self.name_blocks(request, being_written=False)
        self._free_host_blocks += host_blocks
        self.num_swapped_requests -= len(swapped.tables)
        return True

    def drop_swapped(self, swapped: SwappedBlocks, request: Request) -> None:
        """Frees what the host keeps for this request alone."""
        table = swapped.tables.pop(request)
        self.num_swapped_requests -= 1
        kept = set(swapped.host_blocks)
        self._free_host_blocks += [host for host in table if host not in kept]

    def reset_prefix_cache(self) -> None:
        """Makes everything computed so far unfindable. Requests keep what they hold."""
        self.pool.index.clear()

    def num_wasted_slots(self, requests: Iterable[Request]) -> int:
        """Slots in the blocks of ``requests`` that hold no token: the free ends of their last blocks."""
        filled: dict[int, int] = {}
        for request in requests:
            full, rest = divmod(request.num_computed_tokens, self.block_size)
            for block_id in request.block_ids[full:]:
                filled[block_id] = max(rest, filled.get(block_id, 0))
                rest = 0
        return len(filled) * self.block_size - sum(filled.values())

    def check_integrity(self, *, is_idle: bool) -> None:
        """Raises AssertionError if the books contradict each other, or something is held while nobody is there."""
        self.pool.check_integrity()
        if is_idle:
            assert self.pool.num_used == 0, "blocks are held by nobody"
            assert len(self._free_host_blocks) == self.num_host_blocks, "host blocks are held by nobody"
        assert len(set(self._free_host_blocks)) == len(self._free_host_blocks), "a host block is free twice"

    def _copy_on_write(self, request: Request, index: int) -> None:
        shared = request.block_ids[index]
        [own] = self.pool.allocate(1)
        self._copy(shared, own)
        self.pool.free([shared])
        request.block_ids[index] = own

    def _copy(self, source: int, destination: int) -> None:
        self.counters.num_copied_blocks += 1
        if source != destination:  # an unheld source may have been evicted to make room for its own copy
            self.block_ops.append(BlockOp(BlockOpKind.COPY, source, destination))

    def _parent(self, request: Request, index: int) -> bytes:
        """The name of everything before the request's block ``index``."""
        return request.block_hashes[index - 1] if index else self._root(request)

    def _root(self, request: Request) -> bytes:
        if request.cache_salt is None:
            return self._root_without_salt
        return root_hash(model=self._model, cache_salt=request.cache_salt)

    def _extend_hashes(self, request: Request) -> None:
        size, hashes = self.block_size, request.block_hashes
        for start in range(len(hashes) * size, len(request.token_ids) - size + 1, size):
            parent = hashes[-1] if hashes else self._root(request)
            hashes.append(block_hash(parent, request.token_ids[start : start + size]))
