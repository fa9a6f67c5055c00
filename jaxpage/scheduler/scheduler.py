"""Continuous batching by a token budget: first come, first served, with chunked prefill and recompute preemption.

There is no prefill phase and no decode phase: each step lets ``num_computed_tokens`` catch up with ``num_tokens``. The
scheduler may be one step ahead of what the host knows: tokens of a step in flight exist as ``num_pending_tokens``.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

from jaxpage.kv.manager import KVCacheManager
from jaxpage.request import FinishReason, Request, RequestStatus
from jaxpage.scheduler.schedule import Schedule, ScheduledRequest


@dataclasses.dataclass(slots=True)
class SchedulerStats:
    """Counters since the start."""

    num_preemptions: int = 0
    num_finished: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0


class Scheduler:
    """Owns all requests between arrival and end, and the order in which they are served.

    Running requests keep their order of admission. Within a step those that compute one token come first, so a long
    prompt never delays a decode; then prompts under way, then new requests while slots, budget and blocks last. When
    the pool is short the youngest running request gives its blocks back and is computed again later.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_chunked_prefill: bool,
    ) -> None:
        self.kv = kv
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.enable_chunked_prefill = enable_chunked_prefill
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.ended_while_scheduling: list[Request] = []
        self.stats = SchedulerStats()
        self._requests: dict[str, Request] = {}
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queues a request that fits the pool (see ``fits``)."""
        assert request.request_id not in self._requests, f"request id {request.request_id} is in use"
        self._requests[request.request_id] = request
        self.waiting.append(request)

    def fits(self, num_prompt_tokens: int) -> bool:
        """Whether the pool can ever hold a prompt of this length."""
        return self.kv.blocks_for(num_prompt_tokens) <= self.kv.pool.num_usable

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def schedule(self) -> Schedule:
        """Decides the next step. Requests that end for lack of room go to ``ended_while_scheduling``."""
        budget = self.max_num_batched_tokens
        scheduled: list[ScheduledRequest] = []
        preempted: set[Request] = set()
        # Sorting is stable: decodes first, each group in order of admission.
        for request in sorted(self.running, key=lambda request: request.num_tokens - request.num_computed_tokens > 1):
            if budget == 0:
                break
            if request in preempted or self._awaits_last_token(request):
                continue
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            if not self._make_room(request, request.num_computed_tokens + count, preempted, scheduled):
                continue
            scheduled.append(self._take(request, count, is_admitted=False))
            budget -= count
        scheduled = [item for item in scheduled if item.request not in preempted]
        if not preempted:
            self._admit(budget, scheduled)
        return Schedule(scheduled, sum(item.num_tokens for item in scheduled), len(preempted))

    def update(self, schedule: Schedule, token_ids: Sequence[int]) -> list[Request]:
        """Accepts the sampled tokens of a step: ``token_ids[i]`` belongs to ``schedule.requests[i]``.

        Returns:
            The requests that got a new token, ended ones included. A request that ended while the step was in flight
            gets nothing.
        """
        accepted = []
        for item, token_id in zip(schedule.requests, token_ids, strict=True):
            request = item.request
            if not item.samples or request.is_finished:
                continue
            request.num_pending_tokens -= 1
            accepted.append(request)
            if request.max_tokens == 0:  # only the prompt was to be scored
                self.finish(request, FinishReason.LENGTH)
                continue
            request.token_ids.append(token_id)
            self.stats.num_generated_tokens += 1
            num_known = len(request.token_ids)  # a later step's pending token does not count yet
            num_generated = num_known - request.num_prompt_tokens
            if token_id in request.end_token_ids and num_generated > request.params.min_tokens:
                named = token_id in (request.params.stop_token_ids or ())
                self.finish(request, FinishReason.STOP, token_id if named else None)
            elif self._is_at_limit(request, num_known):
                self.finish(request, FinishReason.LENGTH)
        return accepted

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a request in whatever state it is; its blocks and slot are free at once."""
        if request.is_finished:
            return
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._release(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        del self._requests[request.request_id]
        self.stats.num_finished += 1

    def check_integrity(self) -> None:
        """Raises AssertionError if an idle scheduler still holds blocks or slots, or the pool contradicts itself."""
        self.kv.pool.check_integrity()
        if not self._requests:
            assert self.kv.pool.num_free == self.kv.pool.num_usable, "blocks are held by nobody"

    def _admit(self, budget: int, scheduled: list[ScheduledRequest]) -> None:
        while self.waiting and budget > 0 and self._free_slots:
            request = self.waiting[0]
            if request.num_pending_tokens:  # preempted while a step was in flight: its token comes first
                break
            prefix = self.kv.find_prefix(request)
            num_cached = len(prefix) * self.kv.block_size
            count = request.num_tokens - num_cached
            if count > budget:
                if not self.enable_chunked_prefill:
                    break
                count = budget
            if not self.kv.admit(request, prefix, num_cached + count):
                if self.running:
                    break
                # All blocks are free: it was preempted when it had grown as long as the pool, and can go no further.
                self.finish(request, FinishReason.LENGTH)
                self.ended_while_scheduling.append(request)
                continue
            self.waiting.popleft()
            request.status = RequestStatus.RUNNING
            request.slot = self._free_slots.pop()
            request.num_computed_tokens = num_cached
            if request.num_cached_tokens < 0:
                request.num_cached_tokens = num_cached
                self.stats.num_prompt_tokens += request.num_prompt_tokens
            self.running.append(request)
            scheduled.append(self._take(request, count, is_admitted=True))
            budget -= count

    def _take(self, request: Request, count: int, *, is_admitted: bool) -> ScheduledRequest:
        start = request.num_computed_tokens
        output_index = request.num_output_tokens
        request.num_computed_tokens += count
        samples = request.num_computed_tokens == request.num_tokens
        if samples:
            request.num_pending_tokens += 1
        self.kv.name_full_blocks(request)
        return ScheduledRequest(request, start, count, samples, is_admitted, output_index)

    def _make_room(
        self, request: Request, num_tokens: int, preempted: set[Request], scheduled: list[ScheduledRequest]
    ) -> bool:
        """Grows the request's blocks, preempting the youngest others; False if the request has to pause."""
        taken = {item.request for item in scheduled}
        while not self.kv.append_slots(request, num_tokens):
            victim = next((other for other in reversed(self.running) if other not in taken), request)
            if victim is request and len(self.running) == 1:
                # Alone and still short: the pool holds no more. What is in flight is waited for first.
                if request.num_pending_tokens == 0:
                    self.finish(request, FinishReason.LENGTH)
                    self.ended_while_scheduling.append(request)
                return False
            self._preempt(victim)
            preempted.add(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        # The last full block may hold a token that was not known yet when it was scheduled.
        self.kv.name_full_blocks(request)
        self.kv.free(request)
        self._free_slots.append(request.slot)
        request.slot = -1

    def _is_at_limit(self, request: Request, num_tokens: int) -> bool:
        return num_tokens >= min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)

    def _awaits_last_token(self, request: Request) -> bool:
        """The token in flight is the last one allowed: nothing is left to compute."""
        return request.num_pending_tokens > 0 and self._is_at_limit(request, request.num_tokens)
