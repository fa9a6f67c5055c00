"""Random use of pool, index and manager beside a model that knows for each block what it holds, in plain dicts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxpage.kv.block_ops import BlockOpKind
from jaxpage.kv.manager import KVCacheManager, SwappedBlocks
from jaxpage.params import SamplingParams
from jaxpage.request import Request

pytestmark = pytest.mark.timeout(0)  # the nightly profile runs long
PIECES = [(0, 1, 2, 3), (0, 1, 2, 4, 5), (6, 7, 8), (9,), (0, 1)]
History = tuple[str | None, tuple[int, ...]]
"""The salt, and all tokens up to a position, that one's included: what keys and values there depend on."""


class ManagerMachine(RuleBasedStateMachine):
    """Everything is computed at once: a block's content is what was written into it, copied or swapped.

    Attributes:
        held: requests with blocks. swapped: tables on the host.
        content: the history behind each place of each device block; host: the same of host blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ids = itertools.count()
        self.held: list[Request] = []
        self.swapped: list[SwappedBlocks] = []
        self.content: dict[int, dict[int, History]] = {}
        self.host: dict[int, dict[int, History]] = {}
        self.num_hits = 0

    @initialize(
        num_usable=st.sampled_from([6, 8, 4, 2, 12]),
        block_size=st.sampled_from([4, 2, 1, 8]),
        caching=st.sampled_from([True, True, False]),
        num_host_blocks=st.sampled_from([0, 3, 20]),
    )
    def start(self, num_usable: int, block_size: int, caching: bool, num_host_blocks: int) -> None:
        self.kv = KVCacheManager(num_usable + 1, block_size, caching, num_host_blocks=num_host_blocks)

    def move(self) -> None:
        for kind, source, destination in self.kv.take_block_ops():
            if kind is BlockOpKind.COPY:
                self.content[destination] = dict(self.content[source])
            elif kind is BlockOpKind.SWAP_OUT:
                self.host[destination] = dict(self.content[source])
            else:
                self.content[destination] = dict(self.host[source])

    def history(self, request: Request, position: int) -> History:
        return request.cache_salt, tuple(request.token_ids[: position + 1])

    def compute(self, request: Request, start: int, end: int) -> None:
        """Writes the tokens as a step would: after the block operations, and only into blocks of its own."""
        self.move()
        for position in range(start, end):
            index, offset = divmod(position, self.kv.block_size)
            block = request.block_ids[index]
            assert self.kv.pool.ref_counts[block] == 1, "a shared block is written"
            self.content.setdefault(block, {})[offset] = self.history(request, position)
        request.num_computed_tokens = end
        self.kv.name_blocks(request, being_written=False)

    def pick(self, data: st.DataObject) -> Request:
        return self.held[data.draw(st.integers(0, len(self.held) - 1), "request")]

    @rule(
        pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=5),
        salt=st.sampled_from([None, None, "a"]),
        spare=st.sampled_from([0, 0, 1]),
        some=st.integers(1, 30),
    )
    def allocate(self, pieces: list[tuple[int, ...]], salt: str | None, spare: int, some: int) -> None:
        tokens = [token for piece in pieces for token in piece]
        request = Request(f"{next(self.ids)}", tokens, SamplingParams(), 99, cache_salt=salt)
        kv, pool = self.kv, self.kv.pool
        prefix = kv.find_prefix(request)
        assert prefix.num_tokens == self.longest_prefix(request)
        self.num_hits += prefix.num_tokens > 0
        num_tokens = min(len(tokens), prefix.num_tokens + some)
        free_before = pool.num_free
        revived = sum(pool.is_free(block) for block in prefix.block_ids)
        needed = -(-len(tokens) // kv.block_size) - len(prefix.block_ids) + revived + spare
        was_done = kv.allocate(request, prefix, num_tokens, spare)
        assert was_done == (needed <= free_before)
        if not was_done:
            assert (request.block_ids, pool.num_free, kv.block_ops) == ([], free_before, [])
            return
        assert len(request.block_ids) == -(-num_tokens // kv.block_size)
        self.held.append(request)
        self.compute(request, prefix.num_tokens, num_tokens)

    def longest_prefix(self, request: Request) -> int:
        """Tokens whose histories lie in blocks that can be found, the last one in one block with all before it."""
        if not self.kv.enable_prefix_caching:
            return 0
        size, found = self.kv.block_size, 0
        sizes = {block: len(entry.token_ids) for block, entry in self.kv.pool.index._entries.items()}
        wanted = [self.history(request, position) for position in range(len(request.token_ids) - 1)]
        for start in range(0, len(wanted), size):
            part = wanted[start : start + size]
            best = 0
            for block, length in sizes.items():
                held = [self.content[block].get(offset) for offset in range(length)]
                same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(part, held, strict=False))
                best = max(best, sum(1 for _ in same))
            found += best
            if best < size:
                break
        return found

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.integers(1, 5), token=st.integers(0, 3))
    def append(self, data: st.DataObject, count: int, token: int) -> None:
        """Goes on with what is there, or with new tokens."""
        request, pool = self.pick(data), self.kv.pool
        start = request.num_computed_tokens
        end = start + count
        missing = max(0, -(-end // self.kv.block_size) - len(request.block_ids))
        index = start // self.kv.block_size
        is_shared = index < len(request.block_ids) and pool.ref_counts[request.block_ids[index]] > 1
        before, num_copied = (list(request.block_ids), pool.num_free), self.kv.counters.num_copied_blocks
        was_done = self.kv.append_slots(request, end)
        assert was_done == (missing + is_shared <= before[1])
        if not was_done:
            assert before == (request.block_ids, pool.num_free)
            return
        assert self.kv.counters.num_copied_blocks == num_copied + is_shared
        assert pool.num_free == before[1] - missing - is_shared
        request.token_ids += [(token + place) % 4 for place in range(max(0, end - len(request.token_ids)))]
        self.compute(request, start, end)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.pick(data)
        num_tokens = data.draw(st.integers(1, parent.num_computed_tokens), "tokens")
        child = Request(
            f"{next(self.ids)}", parent.token_ids[:num_tokens], parent.params, 99, cache_salt=parent.cache_salt
        )
        num_free = self.kv.pool.num_free
        self.kv.fork(parent, child, num_tokens)
        child.num_computed_tokens = num_tokens
        assert (self.kv.pool.num_free, self.kv.block_ops) == (num_free, [])
        assert child.block_ids == parent.block_ids[: -(-num_tokens // self.kv.block_size)]
        holds_more = num_tokens < parent.num_computed_tokens and num_tokens % self.kv.block_size > 0
        if holds_more and not self.kv.append_slots(child, num_tokens + 1):
            self.kv.free(child)
        else:
            self.held.append(child)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = self.pick(data)
        self.held.remove(request)
        self.kv.free(request)
        assert request.block_ids == []

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.integers(1, 3))
    def swap_out(self, data: st.DataObject, count: int) -> None:
        members = [self.pick(data) for _ in range(count)]
        members = list(dict.fromkeys(members))
        blocks = {block for request in members for block in request.block_ids}
        num_free = self.kv.num_free_host_blocks
        swapped = self.kv.swap_out(members)
        assert (swapped is not None) == (len(blocks) <= num_free)
        if swapped is None:
            return
        self.held = [request for request in self.held if request not in members]
        self.swapped.append(swapped)
        assert num_free - self.kv.num_free_host_blocks == len(blocks) == len(swapped.host_blocks)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data(), spare=st.sampled_from([0, 0, 1]))
    def swap_in(self, data: st.DataObject, spare: int) -> None:
        swapped = self.swapped[data.draw(st.integers(0, len(self.swapped) - 1), "swapped")]
        num_free, num_host = self.kv.pool.num_free, self.kv.num_free_host_blocks
        if not self.kv.swap_in(swapped, spare):
            assert len(swapped.host_blocks) + spare > num_free
            assert (self.kv.pool.num_free, self.kv.num_free_host_blocks) == (num_free, num_host)
            return
        for request, table in swapped.tables.items():
            for other, other_table in swapped.tables.items():
                same = [a == b for a, b in zip(request.block_ids, other.block_ids, strict=False)]
                for is_same, host, other_host in zip(same, table, other_table, strict=False):
                    assert is_same or host != other_host, "what was shared is no longer"
        self.swapped.remove(swapped)
        self.held += swapped.tables
        self.move()

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def drop_swapped(self, data: st.DataObject) -> None:
        swapped = self.swapped[data.draw(st.integers(0, len(self.swapped) - 1), "swapped")]
        request = next(iter(swapped.tables))
        self.kv.drop_swapped(swapped, request)
        if not swapped.tables:
            self.swapped.remove(swapped)

    @rule()
    def reset(self) -> None:
        self.kv.reset_prefix_cache()
        assert len(self.kv.pool.index) == 0

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.move()
        kv, pool = self.kv, self.kv.pool
        kv.check_integrity(is_idle=not self.held and not self.swapped)
        counts = [sum(request.block_ids.count(block) for request in self.held) for block in range(pool.num_blocks)]
        assert pool.ref_counts == counts
        assert pool.num_free == counts[1:].count(0)
        host = [block for swapped in self.swapped for block in swapped.host_blocks]
        assert len(set(host)) == len(host) == kv.num_host_blocks - kv.num_free_host_blocks
        for request in self.held:
            for position in range(request.num_computed_tokens):
                index, offset = divmod(position, kv.block_size)
                assert self.content[request.block_ids[index]][offset] == self.history(request, position)
        for block, entry in pool.index._entries.items():
            held = [self.content[block][offset][1][-1] for offset in range(len(entry.token_ids))]
            assert tuple(held) == entry.token_ids

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        event(f"hits: {min(self.num_hits, 3)}")
        for swapped in self.swapped:
            for request in list(swapped.tables):
                self.kv.drop_swapped(swapped, request)
        for request in self.held:
            self.kv.free(request)
        self.kv.check_integrity(is_idle=True)


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=max(150, settings().max_examples), stateful_step_count=30)
