"""Who is in the engine, and where: waiting or running, with which slot, in which group.

Every change of a request's place goes through here, so that queue, slots and blocks always agree; when to make one is
the business of ``scheduler``, ``admission``, ``preemption`` and ``search``.
"""

from __future__ import annotations

import bisect
import dataclasses
import time
from operator import attrgetter

from jaxpage.kv.manager import KVCacheManager
from jaxpage.request import FinishReason, Request, RequestStatus
from jaxpage.scheduler.beam import BeamSearch
from jaxpage.scheduler.group import RequestGroup
from jaxpage.scheduler.queue import WaitingQueue

WATERMARK = 0.01
"""Share of the pool left free when a request is let in beside others, for their growth."""
_ORDER = attrgetter("order")


@dataclasses.dataclass(slots=True)
class SchedulerStats:
    """Counters since the start. A prompt counts once, whatever its number of samples and preemptions.

    Attributes:
        num_queried_prompt_tokens: of the prompts that were looked up in the prefix cache; num_cached_prompt_tokens:
            what it had of them.
        num_preempted_samples: preemptions, where all beams of a search count as one.
        num_swap_preempted_tokens, num_recompute_preempted_tokens: tokens whose blocks were taken.
        num_recomputed_tokens: tokens prefilled again after that.
        num_corrupted: samples that ended because their logits were no numbers.
    """

    num_swap_preemptions: int = 0
    num_recompute_preemptions: int = 0
    num_finished: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_queried_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_preempted_samples: int = 0
    num_swap_preempted_tokens: int = 0
    num_recompute_preempted_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_corrupted: int = 0

    @property
    def num_preemptions(self) -> int:
        """Requests that lost their blocks before they ended."""
        return self.num_swap_preemptions + self.num_recompute_preemptions


class Roster:
    """All requests between arrival and end.

    Attributes:
        running: in the order of ``Request.order``.
        started: those that got a slot since the last schedule.
        ended: those that ended for lack of room since the last schedule.
        ended_searches: groups whose beam search is over and not yet reported.
        num_deferred: waiting samples whose prompt another one is just computing.
    """

    def __init__(self, kv: KVCacheManager, max_num_seqs: int, max_model_len: int) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.started: list[Request] = []
        self.ended: list[Request] = []
        self.ended_searches: list[RequestGroup] = []
        self.free_slots = list(range(max_num_seqs - 1, -1, -1))
        self.group_of: dict[Request, RequestGroup] = {}
        self.num_deferred = 0
        self.stats = SchedulerStats()
        self._num_groups = 0

    def add_group(self, requests: list[Request], priority: int, search: BeamSearch | None) -> RequestGroup:
        """Queues new requests."""
        group = RequestGroup(requests, list(requests), priority, self._num_groups, search)
        self._num_groups += 1
        for place, request in enumerate(requests):
            assert request not in self.group_of, f"request {request.request_id} was added before"
            self.enter(request, group, place)
        self.waiting.add(group)
        return group

    def enter(self, request: Request, group: RequestGroup, place: int) -> None:
        """Makes a request a member of the group; the caller has put it among ``waiting``."""
        request.order = (group.priority, group.arrival, place)
        request.is_beam = group.search is not None
        request.max_total_tokens = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        self.group_of[request] = group

    def start(self, request: Request, group: RequestGroup, num_computed_tokens: int, num_cached_tokens: int) -> None:
        """A waiting member has blocks that hold ``num_computed_tokens``; now it gets a slot and runs.

        ``num_cached_tokens`` counts if this is the first time.
        """
        if group.search is not None and not group.slots and not group.running:
            group.slots = [self.free_slots.pop() for _ in range(group.num_slots)]
        request.slot = group.slots.pop() if group.search is not None else self.free_slots.pop()
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_computed_tokens
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_cached_tokens
        if not group.is_counted:
            self._count_prompt(request, group)
        bisect.insort(self.running, request, key=_ORDER)
        self.started.append(request)
        group.waiting.remove(request)
        group.num_overtakes = 0
        self._tidy(group)

    def stop(self, group: RequestGroup, members: list[Request]) -> None:
        """Running members whose blocks are gone wait again, before everybody who has not run yet."""
        if group.is_queued:
            self.waiting.remove(group)
        for request in members:
            self._take_slot(request, group)
            request.num_preemptions += 1
        if not group.running:
            self.free_slots += group.slots
            group.slots = []
        group.waiting = [request for request in group.requests if request.slot < 0]
        group.was_preempted = True
        self.defer(group, 0)
        self.waiting.add(group)

    def leave(self, request: Request, group: RequestGroup) -> None:
        """Takes a member out, with all it holds."""
        if request.slot >= 0:
            self.kv.free(request)
            self._take_slot(request, group)
        else:
            group.waiting.remove(request)
            if group.swapped is not None and request in group.swapped.tables:
                self.kv.drop_swapped(group.swapped, request)
        group.requests.remove(request)
        del self.group_of[request]
        request.status = RequestStatus.FINISHED

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a request in whatever state it is. A beam ends with its search."""
        if request.status is RequestStatus.FINISHED:
            return
        group = self.group_of[request]
        for each in list(group.requests) if group.search is not None else [request]:
            self.leave(each, group)
            each.finish_reason = reason
            each.stop_reason = stop_reason
        self.stats.num_finished += 1
        self._tidy(group)

    def end_search(self, group: RequestGroup) -> None:
        """Ends the group of a search that is over; its result stays in ``group.search``."""
        assert group.search is not None and group.search.is_over, "the search goes on"
        stopped = bool(group.search.ended) and group.search.ended[0].finish_reason is FinishReason.STOP
        self.finish(group.requests[0], FinishReason.STOP if stopped else FinishReason.LENGTH)
        self.ended_searches.append(group)

    def end_for_lack_of_room(self, request: Request) -> None:
        """Ends a request, or its search, with what it has: the pool holds no more."""
        group = self.group_of[request]
        if group.search is not None:
            group.search.cut()
            self.end_search(group)
        else:
            self.finish(request, FinishReason.LENGTH)
            self.ended.append(request)

    def num_spare_blocks(self, request: Request) -> int:
        """Blocks that must stay free when the request is let in: the more often it was preempted, the more."""
        own = self.group_of[request]
        if not self.running or self.group_of[self.running[0]] is own is self.group_of[self.running[-1]]:
            return 0  # nobody else is there who might grow
        return request.num_preemptions + int(WATERMARK * self.kv.pool.num_usable)

    def defer(self, group: RequestGroup, count: int) -> None:
        """Notes that ``count`` waiting members wait for another one and not for room."""
        self.num_deferred += count - group.num_deferred
        group.num_deferred = count

    def sort(self) -> None:
        """Restores the order of ``running`` after orders changed."""
        self.running.sort(key=_ORDER)

    def check_integrity(self) -> None:
        """Raises AssertionError if anything is held while nobody is there."""
        if not self.group_of:
            assert len(self.free_slots) == self.max_num_seqs, "slots are held by nobody"
            assert not self.running and not len(self.waiting), "ended requests are still in a queue"
            assert self.num_deferred == 0 == self.kv.num_swapped_requests, "ended requests are still counted"

    def _count_prompt(self, request: Request, group: RequestGroup) -> None:
        group.is_counted = True
        group.admitted_s = time.monotonic()
        self.stats.num_prompt_tokens += request.num_prompt_tokens
        self.stats.num_cached_prompt_tokens += request.num_cached_tokens
        if self.kv.enable_prefix_caching and not request.needs_whole_prompt:
            self.stats.num_queried_prompt_tokens += request.num_prompt_tokens
        self.defer(group, len(group.waiting))

    def _take_slot(self, request: Request, group: RequestGroup) -> None:
        self.running.remove(request)
        (self.free_slots if group.search is None else group.slots).append(request.slot)
        request.slot = -1
        request.status = RequestStatus.WAITING

    def _tidy(self, group: RequestGroup) -> None:
        """A group is in the queue as long as a member waits, and keeps slots as long as a beam is left."""
        if group.num_deferred > len(group.waiting):
            self.defer(group, len(group.waiting))
        if group.swapped is not None and not group.swapped.tables:
            group.swapped = None
        if not group.waiting and group.is_queued:
            self.waiting.remove(group)
            group.was_preempted = False
        if not group.requests:
            self.free_slots += group.slots
            group.slots = []
