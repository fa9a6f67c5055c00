"""What holds for every schedule, and for the books of scheduler and cache after every step.

Judges; changes nothing.
"""

from __future__ import annotations

from collections import Counter

from fake_device import FakeDevice
from fake_model import chain

from jaxpage.kv.block_hash import root_hash
from jaxpage.request import Request, RequestStatus
from jaxpage.scheduler.group import RequestGroup
from jaxpage.scheduler.schedule import Schedule
from jaxpage.scheduler.scheduler import Scheduler


class Checks:
    """The rules, beside one scheduler and its device."""

    def __init__(self, scheduler: Scheduler, device: FakeDevice) -> None:
        self.scheduler = scheduler
        self.device = device
        self._chains: dict[Request, list[int]] = {}
        self._state_after: dict[bytes, int] = {}
        self._decodes: list[Request] = []
        self._valid: dict[Request, tuple[int, int, list[int]]] = {}

    def before_schedule(self) -> None:
        """Notes who has to get a token, and what may not be written."""
        running, call, num_stages = self.scheduler.running, self.scheduler.num_calls, self.scheduler.num_stages
        self._decodes = [
            request
            for request in running
            if not request.is_beam
            and request.num_tokens == request.num_computed_tokens + 1
            and not (request.num_pending_tokens and request.num_tokens >= request.max_total_tokens)
            and (not request.num_pending_tokens or request.sampled_in == call - num_stages)
        ]
        self._valid = {
            request: (request.num_preemptions, request.num_computed_tokens, list(request.block_ids))
            for request in running
        }

    def schedule(self, schedule: Schedule) -> None:
        """Budget, rows, and that nobody writes where another reads or writes."""
        scheduler, items = self.scheduler, schedule.requests
        for request in scheduler.running:
            self._chains.setdefault(request, [])
        assert schedule.num_tokens == sum(item.num_tokens for item in items)
        assert schedule.num_tokens <= scheduler.max_num_batched_tokens
        assert len(items) <= scheduler.roster.max_num_seqs
        assert [item.num_tokens == 0 for item in items] == [item.parent is not None for item in items]
        assert [item.parent is not None for item in items] == sorted(item.parent is not None for item in items)
        assert all(item.parent is None or (item.samples and item.parent in items) for item in items)
        requests = [item.request for item in items]
        assert len(set(requests)) == len(requests)
        assert set(requests) <= set(scheduler.running)
        assert set(schedule.admitted) <= set(scheduler.running)
        if not scheduler.admission.enable_chunked_prefill:
            assert all(item.samples or item.request.is_beam for item in items), "a prompt was cut"
        paused = [each for each in self._decodes if each.slot >= 0 and each not in requests and not each.is_finished]
        paused = [each for each in paused if self._valid[each][0] == each.num_preemptions]
        alone = scheduler.quarantine.current()
        if alone is not None:
            assert {scheduler.group_of(each) for each in requests} <= {alone}, "somebody runs beside a suspect"
            paused = [each for each in paused if scheduler.group_of(each) is alone]
        # What is their share at least: some may have been preempted after it was counted.
        share = max(1, sum(each.slot >= 0 for each in self._valid) // scheduler.num_stages)
        has_room = scheduler.kv.pool.num_free > 0 and len(set(requests) & set(self._decodes)) < share
        assert not paused or not has_room, f"no token for {paused[0].request_id}"
        self._writes(schedule)

    def _writes(self, schedule: Schedule) -> None:
        size = self.device.block_size
        start_of = {item.request: item.start for item in schedule.requests}
        holders: dict[int, list[tuple[Request, int]]] = {}
        for request in self.scheduler.running:
            for index, block in enumerate(request.block_ids):
                holders.setdefault(block, []).append((request, index))
        written: set[tuple[int, int]] = set()
        for item in schedule.requests:
            for position in range(item.start, item.start + item.num_tokens):
                index, offset = divmod(position, size)
                block = item.request.block_ids[index]
                assert (block, offset) not in written, "two tokens in one place"
                written.add((block, offset))
                for other, other_index in holders[block]:
                    if other is item.request:
                        continue
                    # Others may hold the block only to read what is written here.
                    assert other_index == index, "a block stands at two places"
                    assert position < start_of.get(other, other.num_computed_tokens), "a block has two writers"
                    if other in self._valid:
                        num_preemptions, num_computed, table = self._valid[other]
                        held = other.num_preemptions == num_preemptions and table[index : index + 1] == [block]
                        assert not (held and position < num_computed), "what another computed is written again"

    def books(self) -> None:
        """Blocks, host blocks and slots: each is free or held, by as many as are counted."""
        scheduler, kv, pool = self.scheduler, self.scheduler.kv, self.scheduler.kv.pool
        groups = self.groups()
        owners = Counter(block for request in scheduler.running for block in request.block_ids)
        assert pool.ref_counts == [owners[block] for block in range(pool.num_blocks)]
        assert pool.num_free + len(owners) == pool.num_usable == pool.num_free + pool.num_used
        for request in scheduler.running:
            assert len(request.block_ids) >= kv.blocks_for(request.num_computed_tokens)
            assert request.status is RequestStatus.RUNNING
        host = [block for group in groups if group.swapped is not None for block in group.swapped.host_blocks]
        assert len(set(host)) == len(host), "a host block is held by two groups"
        assert kv.num_free_host_blocks + len(host) == kv.num_host_blocks
        slots = [request.slot for request in scheduler.running] + [slot for group in groups for slot in group.slots]
        assert sorted(slots + scheduler.roster.free_slots) == list(range(scheduler.roster.max_num_seqs)), "slots"
        for group in groups:
            assert set(group.waiting) == {each for each in group.requests if each.slot < 0}
            assert all(not each.block_ids and each.status is RequestStatus.WAITING for each in group.waiting)
            assert group.is_queued == bool(group.waiting) == (group in list(scheduler.waiting))
            assert group.swapped is None or set(group.swapped.tables) <= set(group.waiting)
        queued = list(scheduler.waiting)
        assert len(set(queued)) == len(queued) and set(queued) <= set(groups), "the queue holds strangers"
        orders = [request.order for request in scheduler.running]
        assert orders == sorted(orders)
        scheduler.check_integrity()

    def content(self) -> None:
        """Every computed position, and every block that can be found, holds what it should."""
        size, blocks = self.device.block_size, self.device.blocks
        for request, states in list(self._chains.items()):
            states += chain(request.token_ids[len(states) :], states[-1] if states else 0)
            self._state_after.setdefault(root_hash(cache_salt=request.cache_salt), 0)
            for index, name in enumerate(request.block_hashes):
                state = self._state_after.setdefault(name, states[(index + 1) * size - 1])
                assert state == states[(index + 1) * size - 1], "one name for two contents"
            if request.is_finished:
                del self._chains[request]
            for position in range(min(request.num_computed_tokens, len(states)) if request.slot >= 0 else 0):
                assert self.device.read(request, position) == states[position], (
                    f"{request.request_id}: position {position} is overwritten"
                )
        for block, (parent, tokens, _) in self.scheduler.kv.pool.index._entries.items():
            expected = chain(tokens, self._state_after[parent])
            assert blocks[block][: len(tokens)] == expected, f"block {block} does not hold what it is found for"

    def groups(self) -> list[RequestGroup]:
        """All that have not ended."""
        return list(dict.fromkeys(self.scheduler.roster.group_of.values()))
