"""Gives requests the blocks they need, finds prefixes that are cached, and names blocks that became full.

Changes ``Request.block_ids`` and ``block_hashes`` only; when to allocate or free is the scheduler's business.
"""

from __future__ import annotations

from jaxpage.kv.block_hash import block_hash, root_hash
from jaxpage.kv.block_pool import BlockPool
from jaxpage.request import Request


class KVCacheManager:
    """Block tables of all requests over one pool."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, request: Request) -> list[int]:
        """Cached blocks that begin the request's tokens; at least one token is left to compute.

        A request that scores its prompt needs logits at every position, so it takes nothing from the cache.
        """
        if not self.enable_prefix_caching or request.params.prompt_logprobs is not None:
            return []
        self._extend_hashes(request)
        limit = (len(request.token_ids) - 1) // self.block_size
        return self.pool.find(request.block_hashes[:limit])

    def admit(self, request: Request, prefix: list[int], num_tokens: int) -> bool:
        """Gives a request without blocks its cached ``prefix`` and room for ``num_tokens`` in all, or nothing.

        The pool must have room for all tokens the request has, though later chunks take theirs later: a prompt that is
        admitted for its first chunk alone would soon be preempted and begin again.
        """
        assert not request.block_ids, f"request {request.request_id} is admitted while it holds blocks"
        needed = self.blocks_for(max(num_tokens, len(request.token_ids))) - len(prefix)
        if needed + self.pool.num_unheld(prefix) > self.pool.num_free:
            return False
        new = self.blocks_for(num_tokens) - len(prefix)
        self.pool.hold(prefix)
        request.block_ids = prefix + self.pool.allocate(new)
        self.num_queried_tokens += len(request.token_ids)
        self.num_hit_tokens += len(prefix) * self.block_size
        return True

    def append_slots(self, request: Request, num_tokens: int) -> bool:
        """Makes the request's blocks hold ``num_tokens`` tokens in all; False, and no change, if the pool is short."""
        new = self.blocks_for(num_tokens) - len(request.block_ids)
        if new > self.pool.num_free:
            return False
        if new > 0:
            request.block_ids += self.pool.allocate(new)
        return True

    def name_full_blocks(self, request: Request) -> None:
        """Makes the blocks findable whose tokens are all known and scheduled.

        Steps run in order on the device, so a block may be found from the moment its tokens are scheduled: whoever
        reads it does so in the same step, after the write, or later.
        """
        if not self.enable_prefix_caching:
            return
        self._extend_hashes(request)
        full = min(request.num_computed_tokens // self.block_size, len(request.block_hashes))
        for index in range(request.num_named_blocks, full):
            self.pool.name(request.block_ids[index], request.block_hashes[index])
        request.num_named_blocks = max(request.num_named_blocks, full)

    def free(self, request: Request) -> None:
        """Takes all blocks from the request; named ones can still be found until they are handed out again."""
        self.pool.free(request.block_ids)
        request.block_ids = []
        request.num_named_blocks = 0

    def _extend_hashes(self, request: Request) -> None:
        size, hashes = self.block_size, request.block_hashes
        for start in range(len(hashes) * size, len(request.token_ids) - size + 1, size):
            parent = hashes[-1] if hashes else root_hash(request.cache_salt)
            hashes.append(block_hash(parent, request.token_ids[start : start + size]))
