"""Continuous batching by a token budget: who computes how many tokens in the next step, and who gives way to whom.

There is no prefill phase and no decode phase: each step lets ``num_computed_tokens`` catch up with ``num_tokens``. The
scheduler may be one step ahead of what the host knows: tokens of a step in flight exist as ``num_pending_tokens``.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
from collections.abc import Mapping, Sequence
from operator import attrgetter

from jaxpage.kv.manager import KVCacheManager, KVCacheStats
from jaxpage.request import FinishReason, Request, RequestStatus
from jaxpage.scheduler.beam import BeamSearch
from jaxpage.scheduler.group import RequestGroup
from jaxpage.scheduler.preemption import PreemptionPolicy
from jaxpage.scheduler.queue import WaitingQueue
from jaxpage.scheduler.schedule import Schedule, ScheduledRequest

LOOKAHEAD = 16
"""Groups of the queue a step looks at: the head may not fit while a smaller one does."""
MAX_OVERTAKES = 32
"""Groups that may be admitted before an older one that does not fit; then nobody passes it any more."""
WATERMARK = 0.01
"""Share of the pool left free when a group is admitted beside others, for their growth."""

Candidates = Sequence[tuple[int, float]]
"""The most likely (token id, logprob) of a beam, best first."""


@dataclasses.dataclass(slots=True)
class SchedulerStats:
    """Counters since the start. A prompt counts once, whatever its number of samples and preemptions."""

    num_swap_preemptions: int = 0
    num_recompute_preemptions: int = 0
    num_finished: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0

    @property
    def num_preemptions(self) -> int:
        """Requests that lost their blocks before they ended."""
        return self.num_swap_preemptions + self.num_recompute_preemptions


@dataclasses.dataclass(slots=True)
class _Step:
    """A schedule in the making."""

    budget: int
    items: list[ScheduledRequest] = dataclasses.field(default_factory=list)
    forks: list[ScheduledRequest] = dataclasses.field(default_factory=list)
    is_short_of_blocks: bool = False

    def taken(self) -> set[Request]:
        """Requests whose tokens are in the step already: they can no longer give their blocks away."""
        return {item.request for item in (*self.items, *self.forks)}


class _Outcome(enum.Enum):
    ADMITTED = enum.auto()
    NOT_YET = enum.auto()  # waits for something of its own; others are welcome
    NO_ROOM = enum.auto()


class Scheduler:
    """Owns all requests between arrival and end, and the order in which they are served.

    Order: by priority (if that is the policy), then by arrival. In a step

    1. every running request that computes one token gets it, so a long prompt never delays a decode;
    2. prompts under way and new ones share the rest. While a prompt of more than ``long_prefill_token_threshold``
       tokens is under way, half of that rest is for shorter ones. So a short prompt of s tokens, with w tokens of short
       prompts before it, has its first token at most 2 + ceil((w + s) / (rest / 2)) steps after there are a slot and
       blocks for it, and the long one goes on in every step;
    3. a group that does not fit lets smaller ones pass, at most MAX_OVERTAKES of them. Preempted groups come first and
       are never passed.

    When the pool is short the group that is last in order gives its blocks back, all members at once, and one that
    nobody comes after waits until others end. The first in order always goes on, so everybody's turn comes.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_chunked_prefill: bool,
        policy: str = "fcfs",
        long_prefill_token_threshold: int = 0,
        preemption: PreemptionPolicy | None = None,
    ) -> None:
        """``long_prefill_token_threshold`` 0 means a quarter of ``max_num_batched_tokens``."""
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.enable_chunked_prefill = enable_chunked_prefill
        self.policy = policy
        self.long_prefill_token_threshold = long_prefill_token_threshold or max(1, max_num_batched_tokens // 4)
        self.preemption = preemption or PreemptionPolicy()
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        """In the order of ``Request.order``."""
        self.ended_while_scheduling: list[Request] = []
        self.ended_searches: list[RequestGroup] = []
        self.stats = SchedulerStats()
        self._group_of: dict[Request, RequestGroup] = {}
        self._num_groups = 0
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._admitted: list[Request] = []

    @property
    def has_requests(self) -> bool:
        return bool(self._group_of)

    @property
    def num_waiting(self) -> int:
        """Requests without blocks."""
        return len(self._group_of) - len(self.running)

    def group_of(self, request: Request) -> RequestGroup | None:
        """The group of a request that has not ended."""
        return self._group_of.get(request)

    def fits(self, num_prompt_tokens: int) -> bool:
        """Whether the pool can ever hold a prompt of this length."""
        return self.kv.blocks_for(num_prompt_tokens) <= self.kv.pool.num_usable

    def add(self, *requests: Request, priority: int = 0, search: BeamSearch | None = None) -> RequestGroup:
        """Queues a prompt that fits the pool (see ``fits``): its samples, or one request to begin a search with."""
        group = RequestGroup(list(requests), list(requests), priority, self._num_groups, search)
        self._num_groups += 1
        for place, request in enumerate(requests):
            assert request not in self._group_of, f"request {request.request_id} was added before"
            self._enter(request, group, place)
        self.waiting.add(group)
        return group

    def schedule(self) -> Schedule:
        """Decides the next step. Requests that end for lack of room go to ``ended_while_scheduling``."""
        self.kv.begin_step()
        num_preempted = self.stats.num_preemptions
        if self.policy == "priority":
            self._preempt_for_priority()
        step = _Step(self.max_num_batched_tokens)
        prefills = self._schedule_decodes(step)
        self._schedule_prefills(prefills, step)
        is_stalled = not step.items and not self._admitted and not any(each.num_pending_tokens for each in self.running)
        if self.running and is_stalled:
            self._break_stall()
        admitted, self._admitted = self._admitted, []
        return Schedule(
            step.items + step.forks,
            self.max_num_batched_tokens - step.budget,
            self.stats.num_preemptions - num_preempted,
            [request for request in admitted if request.slot >= 0],
            self.kv.take_block_ops(),
        )

    def update(
        self, schedule: Schedule, token_ids: Sequence[int], candidates: Mapping[int, Candidates] | None = None
    ) -> list[Request]:
        """Accepts the results of a step: ``token_ids[i]`` belongs to ``schedule.requests[i]``.

        Args:
            candidates: for each index that belongs to a beam, its most likely tokens.

        Returns:
            The requests that got a new token, ended ones included. A request that ended while the step was in flight
            gets nothing. Beams are not among them; searches that are over go to ``ended_searches``.
        """
        accepted: list[Request] = []
        searches: dict[RequestGroup, list[Candidates]] = {}
        for row, (item, token_id) in enumerate(zip(schedule.requests, token_ids, strict=True)):
            request = item.request
            if not item.samples or request.status is RequestStatus.FINISHED:
                continue
            request.num_pending_tokens -= 1
            if request.is_beam:
                assert candidates is not None, "a beam needs the step's candidates"
                searches.setdefault(self._group_of[request], []).append(candidates[row])
                continue
            accepted.append(request)
            if request.max_tokens == 0:  # only the prompt was to be scored
                self.finish(request, FinishReason.LENGTH)
                continue
            tokens = request.token_ids
            tokens.append(token_id)
            self.stats.num_generated_tokens += 1
            num_known = len(tokens)  # a later step's pending token does not count yet
            if token_id in request.end_token_ids and num_known - request.num_prompt_tokens > request.params.min_tokens:
                named = token_id in (request.params.stop_token_ids or ())
                self.finish(request, FinishReason.STOP, token_id if named else None)
            elif num_known >= request.max_total_tokens:
                self.finish(request, FinishReason.LENGTH)
        for group, beams in searches.items():
            self._advance(group, beams)
        return accepted

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a request in whatever state it is; its blocks and slot are free at once. A beam ends with its search."""
        if request.status is RequestStatus.FINISHED:
            return
        group = self._group_of[request]
        for each in list(group.requests) if group.search is not None else [request]:
            self._leave(each, group)
            each.status = RequestStatus.FINISHED
            each.finish_reason = reason
            each.stop_reason = stop_reason
        self.stats.num_finished += 1
        self._tidy(group)

    def kv_cache_stats(self) -> KVCacheStats:
        """What the cache holds now, and what has happened in it since the start."""
        kv = self.kv
        return KVCacheStats(
            num_free_blocks=kv.pool.num_free,
            num_used_blocks=kv.pool.num_used,
            num_cached_blocks=len(kv.pool.index),
            num_shared_blocks=kv.pool.num_shared,
            num_allocated_slots=kv.pool.num_used * kv.block_size,
            num_wasted_slots=kv.num_wasted_slots(self.running),
            num_swapped_blocks=kv.num_host_blocks - kv.num_free_host_blocks,
            num_swap_preemptions=self.stats.num_swap_preemptions,
            num_recompute_preemptions=self.stats.num_recompute_preemptions,
            counters=dataclasses.replace(kv.counters),
        )

    def check_integrity(self) -> None:
        """Raises AssertionError if an idle scheduler holds blocks or slots, or the books contradict each other."""
        self.kv.check_integrity(is_idle=not self._group_of)
        if not self._group_of:
            assert len(self._free_slots) == self.max_num_seqs, "slots are held by nobody"
            assert not self.running and not len(self.waiting), "ended requests are still in a queue"

    # Step 1: one token for everybody who needs just one.

    def _schedule_decodes(self, step: _Step) -> list[Request]:
        """Schedules the running requests that compute one token; returns the others."""
        others: list[Request] = []
        kv = self.kv
        block_size, ref_counts, names_blocks = kv.block_size, kv.pool.ref_counts, kv.enable_prefix_caching
        for request in tuple(self.running):
            if request.slot < 0:  # preempted for one before it
                continue
            start, num_known, pending = request.num_computed_tokens, len(request.token_ids), request.num_pending_tokens
            num_tokens = num_known + pending
            if request.is_beam or num_tokens - start != 1:
                others.append(request)
                continue
            if pending and num_tokens >= request.max_total_tokens:
                continue  # the token in flight is the last one allowed
            index = start // block_size
            table = request.block_ids
            has_room = index < len(table) and ref_counts[table[index]] == 1  # the common case must not pay for a call
            if not has_room and not self._make_room(request, start + 1, step):
                continue
            if num_tokens == request.num_prompt_tokens:
                self._take(request, 1, step)
                continue
            request.num_computed_tokens = start + 1
            request.num_pending_tokens = pending + 1
            step.budget -= 1
            if names_blocks and num_known // block_size > request.num_named_blocks:
                kv.name_blocks(request, being_written=True)
            step.items.append(ScheduledRequest(request, start, 1, True, num_tokens - request.num_prompt_tokens))
        for group in dict.fromkeys(self._group_of[each] for each in others if each.is_beam and each.slot >= 0):
            self._schedule_beams(group, step)
        return [each for each in others if each.slot >= 0 and not (each.is_beam and each.num_pending_tokens)]

    def _schedule_beams(self, group: RequestGroup, step: _Step) -> None:
        """Beams move on together: all or none of them are in a step."""
        beams = group.requests
        is_level = all(each.num_tokens - each.num_computed_tokens == 1 for each in beams)
        if group.waiting or group.has_pending_tokens or not is_level or len(beams) > step.budget:
            return
        if not all(self._make_room(each, each.num_computed_tokens + 1, step) for each in tuple(beams)):
            return
        for request in beams:
            self._take(request, 1, step)

    # Step 2: prompts.

    def _schedule_prefills(self, prefills: list[Request], step: _Step) -> None:
        longs = [each for each in prefills if self._num_left(each) > self.long_prefill_token_threshold]
        shorts = [each for each in prefills if each not in longs]
        kept = 0
        if longs:
            demand = sum(self._num_left(each) for each in shorts) + self._waiting_short_tokens()
            wanted = sum(self._num_left(each) for each in longs)
            kept = min(wanted, step.budget - min(step.budget // 2, demand))
        step.budget -= kept
        for request in shorts:
            self._prefill(request, step)
        self._admit(step, shorts_only=bool(longs))
        step.budget += kept
        for request in longs:
            self._prefill(request, step)
        if longs:
            self._admit(step, shorts_only=False)

    def _num_left(self, request: Request) -> int:
        """Tokens to compute before the request is level with its group: beams sample together or not at all."""
        left = request.num_tokens - request.num_computed_tokens
        return left - 1 if request.is_beam and len(self._group_of[request].requests) > 1 else left

    def _waiting_short_tokens(self) -> int:
        if not self._free_slots:
            return 0
        lengths = [len(group.waiting[0].token_ids) for group in self.waiting.first(LOOKAHEAD)]
        return sum(length for length in lengths if length <= self.long_prefill_token_threshold)

    def _prefill(self, request: Request, step: _Step) -> None:
        if request.slot < 0:  # preempted for one before it
            return
        count = min(self._num_left(request), step.budget)
        if count > 0 and self._make_room(request, request.num_computed_tokens + count, step):
            self._take(request, count, step)

    def _take(self, request: Request, count: int, step: _Step) -> None:
        """Puts the request's next ``count`` tokens into the step; there is room for them."""
        start, num_tokens = request.num_computed_tokens, request.num_tokens
        request.num_computed_tokens = start + count
        samples = start + count == num_tokens
        if samples:
            request.num_pending_tokens += 1
        self.kv.name_blocks(request, being_written=True)
        item = ScheduledRequest(request, start, count, samples, num_tokens - request.num_prompt_tokens)
        step.items.append(item)
        step.budget -= count
        if samples and num_tokens == request.num_prompt_tokens:
            self.kv.name_tail(request, being_written=True)
            self._fork_samples(item, step)

    def _fork_samples(self, parent: ScheduledRequest, step: _Step) -> None:
        """The prompt is computed: its other samples begin with the same blocks and the same logits."""
        group, num_prompt_tokens = self._group_of[parent.request], parent.request.num_prompt_tokens
        for request in [each for each in group.waiting if each.num_tokens == num_prompt_tokens]:
            # Each of them will want a block of its own in the next step.
            if not self._free_slots or self.kv.pool.num_free <= len(step.forks) + 1:
                return
            self.kv.fork(parent.request, request, num_prompt_tokens)
            self._start(request, group, num_prompt_tokens, max(0, parent.request.num_cached_tokens))
            request.num_pending_tokens += 1
            step.forks.append(ScheduledRequest(request, num_prompt_tokens, 0, True, 0, parent))

    # Step 3: admission.

    def _admit(self, step: _Step, *, shorts_only: bool) -> None:
        if step.is_short_of_blocks:
            return
        passed: list[RequestGroup] = []
        for group in self.waiting.first(LOOKAHEAD):
            if step.budget <= 0:
                return
            if not self._free_slots and not group.slots:
                continue
            outcome = self._admit_group(group, step, shorts_only)
            if outcome is _Outcome.NO_ROOM:
                if group.was_preempted or group.num_overtakes >= MAX_OVERTAKES:
                    return
                passed.append(group)
            elif outcome is _Outcome.ADMITTED:
                for each in passed:
                    each.num_overtakes += 1

    def _admit_group(self, group: RequestGroup, step: _Step, shorts_only: bool) -> _Outcome:
        """Admits as many members as there is room for."""
        if any(request.num_pending_tokens for request in group.waiting):
            return _Outcome.NO_ROOM  # preempted while a step was in flight: its tokens come first
        num_slots = 1 if group.search is None else group.search.params.beam_width
        if not group.slots and len(self._free_slots) < num_slots:
            return _Outcome.NO_ROOM
        if group.swapped is not None:
            return self._resume(group, step)
        outcome = _Outcome.NOT_YET
        while group.waiting and step.budget > 0 and (self._free_slots or group.slots):
            result = self._admit_request(group.waiting[0], group, step, shorts_only)
            if result is not _Outcome.ADMITTED:
                return result if outcome is _Outcome.NOT_YET else outcome
            outcome = result
        return outcome

    def _admit_request(self, request: Request, group: RequestGroup, step: _Step, shorts_only: bool) -> _Outcome:
        kv, num_spare_blocks = self.kv, self._num_spare_blocks(request)
        prefix = kv.find_prefix(request)
        parent, num_shared = self._closest(request, group.running)
        if parent is not None and num_shared > prefix.num_tokens:
            item = next((item for item in step.items if item.request is parent), None)
            if num_shared > (parent.num_computed_tokens if item is None else item.start):
                return (
                    _Outcome.NOT_YET
                )  # a block is copied before a step writes, so the parent's come from steps before
            needed = kv.blocks_for(len(request.token_ids)) - num_shared // kv.block_size
            if needed + num_spare_blocks > kv.pool.num_free:
                return _Outcome.NO_ROOM
            kv.fork(parent, request, num_shared)
            self._start(request, group, num_shared, num_shared)
            self._prefill(request, step)
            return _Outcome.ADMITTED
        left = request.num_tokens - prefix.num_tokens - (request.is_beam and len(group.requests) > 1)
        if shorts_only and left > self.long_prefill_token_threshold:
            return _Outcome.NOT_YET
        count = min(left, step.budget)
        if count < left and not self.enable_chunked_prefill:
            return _Outcome.NO_ROOM
        if not kv.allocate(request, prefix, prefix.num_tokens + count, num_spare_blocks):
            if not self.running:  # all blocks are free: it had grown as long as the pool, and can go no further
                self._end_for_lack_of_room(request)
            return _Outcome.NO_ROOM
        self._start(request, group, prefix.num_tokens, prefix.num_tokens)
        if count > 0:
            self._take(request, count, step)
        return _Outcome.ADMITTED

    def _resume(self, group: RequestGroup, step: _Step) -> _Outcome:
        """Brings a swapped group back, as a whole."""
        assert group.swapped is not None
        members = list(group.swapped.tables)
        num_spare_blocks = max(map(self._num_spare_blocks, members)) + len(members) if self.running else 0
        if len(members) > len(self._free_slots) or not self.kv.swap_in(group.swapped, num_spare_blocks):
            return _Outcome.NO_ROOM
        group.swapped = None
        for request in members:
            self._start(request, group, request.num_computed_tokens, 0)
        if group.search is not None:
            self._schedule_beams(group, step)
        else:
            for request in members:
                self._prefill(request, step)
        return _Outcome.ADMITTED

    def _num_spare_blocks(self, request: Request) -> int:
        """Blocks that must stay free beside the request's own: the more often it was preempted, the more."""
        own = self._group_of[request]
        if not self.running or self._group_of[self.running[0]] is own is self._group_of[self.running[-1]]:
            return 0  # nobody else is there who might grow
        return request.num_preemptions + int(WATERMARK * self.kv.pool.num_usable)

    def _closest(self, request: Request, siblings: list[Request]) -> tuple[Request | None, int]:
        """The running member that shares most leading tokens, and how many; one token is left to compute."""
        best, most = None, 0
        for sibling in siblings:
            limit = min(len(request.token_ids) - 1, len(sibling.token_ids))
            shared = min(request.num_prompt_tokens, limit)
            while shared < limit and request.token_ids[shared] == sibling.token_ids[shared]:
                shared += 1
            if shared > most:
                best, most = sibling, shared
        return best, most

    # Giving way.

    def _make_room(self, request: Request, num_tokens: int, step: _Step) -> bool:
        """Grows the request's blocks at the expense of what comes after it; False if it has to pause or has ended."""
        while not self.kv.append_slots(request, num_tokens):
            step.is_short_of_blocks = True
            if not self._preempt_behind(request, step):
                return False
        return True

    def _preempt_behind(self, request: Request, step: _Step) -> bool:
        own, taken = self._group_of[request], step.taken()
        for other in reversed(self.running):
            group = self._group_of[other]
            if group is own:
                break
            if group.can_be_preempted and taken.isdisjoint(group.requests):
                self._preempt(group, group.running)
                return True
        if own.search is None:
            for sibling in reversed(own.running):
                if sibling is request:
                    break
                if sibling not in taken:
                    self._preempt(own, [sibling])
                    return True
        members = own.running if own.search is not None else [request]
        if len(members) == len(self.running) and not own.has_pending_tokens:
            self._end_for_lack_of_room(request)  # alone, and the pool holds no more
        return False

    def _preempt(self, group: RequestGroup, members: list[Request]) -> None:
        """Takes the blocks of some members. Only a whole group can be swapped: a part of it shares what stays."""
        num_blocks = len({block for request in members for block in request.block_ids})
        if len(members) == len(group.running) and self.preemption.prefers_swap(
            num_blocks * self.kv.block_size, num_blocks
        ):
            group.swapped = self.kv.swap_out(members)
        if group.swapped is not None:
            self.stats.num_swap_preemptions += len(members)
        else:
            self.stats.num_recompute_preemptions += len(members)
            for request in reversed(members):
                self.kv.free(request)
                request.num_computed_tokens = 0
        if group.is_queued:
            self.waiting.remove(group)
        for request in members:
            self._stop(request, group)
            request.num_preemptions += 1
        self._free_slots += group.slots
        group.slots = []
        group.waiting = [request for request in group.requests if request.slot < 0]
        group.was_preempted = True
        self.waiting.add(group)

    def _preempt_for_priority(self) -> None:
        """Makes room for the head of the queue where running groups of lower priority can give it."""
        head = next(iter(self.waiting), None)
        if head is None:
            return
        num_slots = 1 if head.search is None else head.search.params.beam_width
        num_blocks = self.kv.blocks_for(len(head.waiting[0].token_ids))
        behind = dict.fromkeys(self._group_of[request] for request in reversed(self.running))
        behind = [group for group in behind if group.priority > head.priority and group.can_be_preempted]
        can_give = sum(len(request.block_ids) for group in behind for request in group.running)
        if self.kv.pool.num_free + can_give < num_blocks:
            return
        for group in behind:
            if self.kv.pool.num_free >= num_blocks and len(self._free_slots) >= num_slots:
                return
            self._preempt(group, group.running)

    def _break_stall(self) -> None:
        """Nothing could be scheduled and nothing is under way: the last group gives way to those before it."""
        last = self._group_of[self.running[-1]]
        if last is not self._group_of[self.running[0]]:
            self._preempt(last, last.running)
        elif last.search is None and len(self.running) > 1:
            self._preempt(last, [self.running[-1]])
        else:
            self._end_for_lack_of_room(self.running[-1])

    def _end_for_lack_of_room(self, request: Request) -> None:
        group = self._group_of[request]
        if group.search is not None:
            group.search.cut()
            self._end_search(group)
        else:
            self.finish(request, FinishReason.LENGTH)
            self.ended_while_scheduling.append(request)

    # Beams.

    def _advance(self, group: RequestGroup, candidates: list[Candidates]) -> None:
        """Moves a search one token on: beams that are chosen twice fork, those that are not end."""
        assert group.search is not None
        chosen = group.search.advance(candidates)
        self.stats.num_generated_tokens += len(chosen)
        if group.search.is_over:
            self._end_search(group)
            return
        old, parents = list(group.requests), {parent for parent, _ in chosen}
        for place, request in enumerate(old):
            if place not in parents:
                self._leave(request, group)
                request.status = RequestStatus.FINISHED
        beams: list[Request] = []
        for parent, _ in chosen:
            beams.append(self._fork_beam(old[parent], group) if old[parent] in beams else old[parent])
        for place, (request, (_, token_id)) in enumerate(zip(beams, chosen, strict=True)):
            request.token_ids.append(token_id)
            request.order = (group.priority, group.arrival, place)
        group.requests = beams
        self.running.sort(key=_ORDER)

    def _fork_beam(self, parent: Request, group: RequestGroup) -> Request:
        child = Request(
            f"{parent.request_id}'",
            parent.prompt_token_ids,
            parent.params,
            parent.max_tokens,
            end_token_ids=parent.end_token_ids,
            cache_salt=parent.cache_salt,
            token_ids=parent.token_ids,
        )
        self._enter(child, group, 0)
        group.waiting.append(child)
        self.kv.fork(parent, child, parent.num_computed_tokens)
        self._start(child, group, parent.num_computed_tokens, 0)
        return child

    def _end_search(self, group: RequestGroup) -> None:
        first = group.requests[0]
        best = group.search.ended[0] if group.search is not None and group.search.ended else None
        stopped = best is not None and best.finish_reason == "stop"
        self.finish(first, FinishReason.STOP if stopped else FinishReason.LENGTH)
        self.ended_searches.append(group)

    # Book-keeping.

    def _enter(self, request: Request, group: RequestGroup, place: int) -> None:
        request.order = (group.priority, group.arrival, place)
        request.is_beam = group.search is not None
        request.max_total_tokens = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        self._group_of[request] = group

    def _start(self, request: Request, group: RequestGroup, num_computed_tokens: int, num_cached_tokens: int) -> None:
        """The request has blocks that hold ``num_computed_tokens``; now it gets a slot and runs."""
        if group.search is not None and not group.slots and not group.running:
            group.slots = [self._free_slots.pop() for _ in range(group.search.params.beam_width)]
        request.slot = group.slots.pop() if group.search is not None else self._free_slots.pop()
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_computed_tokens
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_cached_tokens
            if request is group.requests[0]:
                self.stats.num_prompt_tokens += request.num_prompt_tokens
        bisect.insort(self.running, request, key=_ORDER)
        self._admitted.append(request)
        group.waiting.remove(request)
        group.num_overtakes = 0
        self._tidy(group)

    def _stop(self, request: Request, group: RequestGroup) -> None:
        """The request gives its slot back."""
        self.running.remove(request)
        (self._free_slots if group.search is None else group.slots).append(request.slot)
        request.slot = -1
        request.status = RequestStatus.WAITING

    def _leave(self, request: Request, group: RequestGroup) -> None:
        """Takes a member out of its group, with all it holds."""
        if request.slot >= 0:
            self.kv.free(request)
            self._stop(request, group)
        else:
            group.waiting.remove(request)
            if group.swapped is not None and request in group.swapped.tables:
                self.kv.drop_swapped(group.swapped, request)
        group.requests.remove(request)
        del self._group_of[request]

    def _tidy(self, group: RequestGroup) -> None:
        """A group is in the queue as long as a member waits, and keeps slots as long as a beam is left."""
        if group.swapped is not None and not group.swapped.tables:
            group.swapped = None
        if not group.waiting and group.is_queued:
            self.waiting.remove(group)
            group.was_preempted = False
        if not group.requests:
            self._free_slots += group.slots
            group.slots = []


_ORDER = attrgetter("order")
