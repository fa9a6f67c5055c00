"""Continuous batching by a token budget: who computes how many tokens in the next step.

There is no prefill phase and no decode phase: each step lets ``num_computed_tokens`` catch up with ``num_tokens``. The
scheduler may be ahead of what the host knows, by as many steps as the pipeline has stages: tokens of steps in flight
exist as ``num_pending_tokens``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial

from jaxpage.kv.manager import KVCacheManager, KVCacheStats
from jaxpage.request import FinishReason, Request, RequestStatus
from jaxpage.scheduler.admission import Admission
from jaxpage.scheduler.beam import BeamSearch
from jaxpage.scheduler.group import RequestGroup
from jaxpage.scheduler.preemption import Preemption, PreemptionPolicy
from jaxpage.scheduler.quarantine import Quarantine
from jaxpage.scheduler.queue import WaitingQueue
from jaxpage.scheduler.roster import Roster, SchedulerStats
from jaxpage.scheduler.schedule import Draft, Schedule, ScheduledRequest
from jaxpage.scheduler.search import Candidates, advance


class Scheduler:
    """Decides every step, and takes in what it gave.

    Order: by priority (if that is the policy), then by arrival. In a step

    1. every running request that computes one token gets it, so a long prompt never delays a decode;
    2. prompts under way and new ones share the rest. While a prompt of more than ``long_prefill_token_threshold``
       tokens is under way, half of that rest is for shorter ones. So a short prompt of s tokens, with w tokens of short
       prompts before it, has its first token at most 2 + ceil((w + s) / (rest / 2)) steps after there are a slot and
       blocks for it, and the long one goes on in every step;
    3. waiting groups are let in (see ``admission``).

    When the pool is short, the last in order gives way (see ``preemption``).

    With ``num_stages`` = S > 1 steps are the micro-batches of a pipeline, and S of them are in flight. A request whose
    newest token the host does not know goes on S calls after the one that samples it: that step is then through the
    pipeline, and the token can be read on the device. The chunks of a prompt need no token and follow one another.
    Requests that decode are dealt out to S steps evenly (see ``_share``).

    After a step that failed on the device, what was in it is tried group by group (see ``Quarantine``); meanwhile
    everybody else waits.
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
        num_stages: int = 1,
    ) -> None:
        """``long_prefill_token_threshold`` 0 means a quarter of ``max_num_batched_tokens``."""
        self.kv = kv
        self.num_stages = num_stages
        self.num_calls = 0
        self.max_num_batched_tokens = max_num_batched_tokens
        self.policy = policy
        self.long_prefill_token_threshold = long_prefill_token_threshold or max(1, max_num_batched_tokens // 4)
        self.roster = Roster(kv, max_num_seqs, max_model_len)
        self.preemption = Preemption(self.roster, preemption or PreemptionPolicy())
        self.admission = Admission(
            self.roster,
            enable_chunked_prefill=enable_chunked_prefill,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
        )
        self.quarantine = Quarantine()

    @property
    def stats(self) -> SchedulerStats:
        """Counters since the start."""
        return self.roster.stats

    @property
    def running(self) -> list[Request]:
        """Requests with blocks and a slot, in the order in which they are served."""
        return self.roster.running

    @property
    def waiting(self) -> WaitingQueue:
        """Groups with members that hold no blocks."""
        return self.roster.waiting

    @property
    def has_requests(self) -> bool:
        return bool(self.roster.group_of)

    @property
    def num_waiting(self) -> int:
        """Requests without blocks."""
        return len(self.roster.group_of) - len(self.roster.running)

    def group_of(self, request: Request) -> RequestGroup | None:
        """The group of a request that has not ended."""
        return self.roster.group_of.get(request)

    def fits(self, num_prompt_tokens: int) -> bool:
        """Whether the pool can ever hold a prompt of this length."""
        return self.kv.blocks_for(num_prompt_tokens) <= self.kv.pool.num_usable

    def add(self, *requests: Request, priority: int = 0, search: BeamSearch | None = None) -> RequestGroup:
        """Queues a prompt that fits the pool (see ``fits``): its samples, or one request to begin a search with."""
        return self.roster.add_group(list(requests), priority, search)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a request in whatever state it is; its blocks and slot are free at once. A beam ends with its search."""
        self.roster.finish(request, reason, stop_reason)

    def schedule(self) -> Schedule:
        """Decides the next step. Requests that end for lack of room are left to ``take_ended``."""
        roster = self.roster
        self.kv.begin_step()
        num_preempted = roster.stats.num_preemptions
        alone = self.quarantine.current()
        if self.policy == "priority" and alone is None:
            self.preemption.make_room_by_priority()
        draft = Draft(self.max_num_batched_tokens, self.num_calls, alone)
        self.num_calls += 1
        prefills = self._schedule_decodes(draft)
        self._schedule_prefills(prefills, draft)
        admitted = [request for request in roster.started if request.slot >= 0]
        roster.started.clear()
        is_stalled = not draft.items and not admitted and not any(each.num_pending_tokens for each in roster.running)
        if roster.running and is_stalled:
            self.preemption.break_stall(alone)
        return Schedule(
            draft.items + draft.forks,
            self.max_num_batched_tokens - draft.budget,
            roster.stats.num_preemptions - num_preempted,
            admitted,
            self.kv.take_block_ops(),
            draft.num_prefill_tokens,
            draft.call,
        )

    def update(
        self, schedule: Schedule, token_ids: Sequence[int], candidates: Mapping[int, Candidates] | None = None
    ) -> list[Request]:
        """Accepts the results of a step: ``token_ids[i]`` belongs to ``schedule.requests[i]``.

        Args:
            token_ids: -1 where the logits were no numbers, which ends the request.
            candidates: for each index that belongs to a beam, its most likely tokens.

        Returns:
            The requests that got a new token, ended ones included. A request that ended while the step was in flight
            gets nothing. Beams are not among them: searches that are over are left to ``take_ended_searches``.
        """
        accepted: list[Request] = []
        searches: dict[RequestGroup, list[Candidates]] = {}
        corrupted: list[Request] = []
        for row, (item, token_id) in enumerate(zip(schedule.requests, token_ids, strict=True)):
            request = item.request
            if not item.samples or request.status is RequestStatus.FINISHED:
                continue
            request.num_pending_tokens -= 1
            if token_id < 0 and request.pooling is None:
                corrupted.append(request)
            if request.is_beam:
                assert candidates is not None, "a beam needs the step's candidates"
                searches.setdefault(self.roster.group_of[request], []).append(candidates[row])
                continue
            accepted.append(request)
            if request in corrupted:
                continue
            if request.max_tokens == 0:  # only the prompt was to be scored
                self.finish(request, FinishReason.LENGTH)
                continue
            tokens = request.token_ids
            tokens.append(token_id)
            self.roster.stats.num_generated_tokens += 1
            num_known = len(tokens)  # a later step's pending token does not count yet
            if token_id in request.end_token_ids and num_known - request.num_prompt_tokens > request.params.min_tokens:
                named = token_id in (request.params.stop_token_ids or ())
                self.finish(request, FinishReason.STOP, token_id if named else None)
            elif num_known >= request.max_total_tokens:
                self.finish(request, FinishReason.LENGTH)
            elif request.constraint is not None:
                request.constraint.accept(token_id)
        for request in corrupted:
            self._fail(request)
        for group, beams in searches.items():
            if group.requests:
                advance(self.roster, group, beams)
        return accepted

    def start_over(self, failed: Schedule) -> None:
        """The device failed in a step, and what it held is lost: everybody waits, and is computed again.

        No step in flight may be taken in any more. The groups in the failed step are tried one by one; one that was
        tried already and failed alone ends with an error (see ``take_ended``, ``take_ended_searches``).
        """
        roster = self.roster
        items = [item for item in failed.requests if not item.request.is_finished]
        # Those that are tried later come first in order, so that those that passed make room for them.
        groups = sorted({roster.group_of[item.request] for item in items}, key=lambda group: group.rank, reverse=True)
        at_fault = groups[0] if groups == [self.quarantine.current()] else None
        self.quarantine.admit(groups, items)
        for request in roster.group_of:
            request.num_pending_tokens = 0
        for group in dict.fromkeys(roster.group_of.values()):
            self.preemption.lose(group)
        roster.started.clear()
        self.kv.take_block_ops()
        self.kv.reset_prefix_cache()
        while at_fault is not None and at_fault.requests:
            request = at_fault.requests[0]
            if at_fault.search is None:
                roster.ended.append(request)
            self._end_with_error(request)

    def take_ended(self) -> list[Request]:
        """Requests that ended outside ``update``, for lack of room or a fault, since the last call."""
        ended, self.roster.ended = self.roster.ended, []
        return ended

    def take_ended_searches(self) -> list[RequestGroup]:
        """Beam searches that are over since the last call."""
        ended, self.roster.ended_searches = self.roster.ended_searches, []
        return ended

    def kv_cache_stats(self) -> KVCacheStats:
        """What the cache holds now, and what has happened in it since the start."""
        kv, stats = self.kv, self.roster.stats
        return KVCacheStats(
            num_free_blocks=kv.pool.num_free,
            num_used_blocks=kv.pool.num_used,
            num_cached_blocks=len(kv.pool.index),
            num_shared_blocks=kv.pool.num_shared,
            num_allocated_slots=kv.pool.num_used * kv.block_size,
            num_wasted_slots=kv.num_wasted_slots(self.roster.running),
            num_swapped_blocks=kv.num_host_blocks - kv.num_free_host_blocks,
            num_swap_preemptions=stats.num_swap_preemptions,
            num_recompute_preemptions=stats.num_recompute_preemptions,
            counters=dataclasses.replace(kv.counters),
        )

    def check_integrity(self) -> None:
        """Raises AssertionError if an idle scheduler holds blocks or slots, or the books contradict each other."""
        self.kv.check_integrity(is_idle=not self.has_requests)
        self.roster.check_integrity()

    def _fail(self, request: Request) -> None:
        """Ends a request, or the search it is in, because of its logits."""
        group = self.roster.group_of.get(request)
        if group is None:  # its search has ended already
            return
        self.roster.stats.num_corrupted += 1
        self._end_with_error(request)
        self.kv.reset_prefix_cache()  # nobody else shall find what led there

    def _end_with_error(self, request: Request) -> None:
        """Ends a request, or the search it is in."""
        group = self.roster.group_of[request]
        if group.search is not None:
            group.search.cut()
            for beam in group.search.ended:
                beam.finish_reason = FinishReason.ERROR
            self.roster.ended_searches.append(group)
        self.finish(request, FinishReason.ERROR)

    def _schedule_decodes(self, draft: Draft) -> list[Request]:
        """One token for every running request that needs just one and whose turn it is; returns the others."""
        others: list[Request] = []
        running = tuple(self.roster.running if draft.alone is None else draft.alone.running)
        items, share, call = draft.items, self._share(draft.call, len(running)), draft.call
        readable = call - self.num_stages  # the call whose tokens this step can read on the device
        kv, group_of = self.kv, self.roster.group_of
        block_size, ref_counts, names_blocks = kv.block_size, kv.pool.ref_counts, kv.enable_prefix_caching
        for request in running:
            if request.slot < 0:  # preempted for one before it
                continue
            start, num_known, pending = request.num_computed_tokens, len(request.token_ids), request.num_pending_tokens
            num_tokens = num_known + pending
            if request.is_beam or num_tokens - start != 1:
                others.append(request)
                continue
            if len(items) >= share:
                continue
            if pending and (
                request.sampled_in != readable
                or num_tokens >= request.max_total_tokens
                or request.constraint is not None
            ):
                continue  # the token in flight comes too late, or is the last one allowed, or says which may come next
            index = start // block_size
            table = request.block_ids
            has_room = index < len(table) and ref_counts[table[index]] == 1  # the common case must not pay for a call
            if not has_room and not self.preemption.make_room(request, start + 1, draft):
                continue
            if num_tokens <= request.num_prefill_tokens:
                self._take(request, 1, draft)
                continue
            request.num_computed_tokens = start + 1
            request.num_pending_tokens = pending + 1
            request.sampled_in = call
            if names_blocks and num_known // block_size > request.num_named_blocks:
                kv.name_blocks(request, being_written=True)
            items.append(ScheduledRequest(request, start, 1, True, num_tokens - request.num_prompt_tokens))
        draft.budget = self.max_num_batched_tokens - len(items)
        for group in dict.fromkeys(group_of[each] for each in others if each.is_beam and each.slot >= 0):
            if len(items) < share:
                self._schedule_beams(group, draft)
        return [each for each in others if each.slot >= 0 and not (each.is_beam and each.num_pending_tokens)]

    def _share(self, call: int, num_running: int) -> int:
        """How many of the requests that decode a step may take.

        The steps of any S consecutive calls take all of them, as evenly as can be, so nobody waits for longer than
        that. Where one step has too many (they came together, or others ended), the last in order move on to the next.
        """
        return max(1, (num_running + self.num_stages - 1 - call % self.num_stages) // self.num_stages)

    def _schedule_beams(self, group: RequestGroup, draft: Draft) -> None:
        """Beams move on together: all or none of them are in a step."""
        beams = group.requests
        is_level = all(each.num_tokens - each.num_computed_tokens == 1 for each in beams)
        if group.waiting or group.has_pending_tokens or not is_level or len(beams) > draft.budget:
            return
        if not all(self.preemption.make_room(each, each.num_computed_tokens + 1, draft) for each in tuple(beams)):
            return
        for request in beams:
            self._take(request, 1, draft)

    def _schedule_prefills(self, prefills: list[Request], draft: Draft) -> None:
        longs = [each for each in prefills if self._num_left(each) > self.long_prefill_token_threshold]
        shorts = [each for each in prefills if self._num_left(each) <= self.long_prefill_token_threshold]
        kept = 0
        if longs:
            demand = sum(map(self._num_left, shorts)) + self.admission.num_waiting_short_tokens()
            kept = min(sum(map(self._num_left, longs)), draft.budget - min(draft.budget // 2, demand))
        compute = partial(self._prefill, draft=draft)
        draft.budget -= kept
        for request in shorts:
            compute(request)
        self.admission.admit(draft, compute, shorts_only=bool(longs))
        draft.budget += kept
        for request in longs:
            compute(request)
        if longs:
            self.admission.admit(draft, compute, shorts_only=False)

    def _num_left(self, request: Request) -> int:
        """Tokens to compute before the request is level with its group: beams sample together or not at all."""
        left = request.num_tokens - request.num_computed_tokens
        return left - 1 if request.is_beam and len(self.roster.group_of[request].requests) > 1 else left

    def _prefill(self, request: Request, draft: Draft) -> None:
        if request.slot < 0:  # preempted for one before it
            return
        count = min(self._num_left(request), draft.budget)
        if count > 0 and self.preemption.make_room(request, request.num_computed_tokens + count, draft):
            self._take(request, count, draft)

    def _take(self, request: Request, count: int, draft: Draft) -> None:
        """Puts the request's next ``count`` tokens into the step; there is room for them."""
        start, num_tokens = request.num_computed_tokens, request.num_tokens
        request.num_computed_tokens = start + count
        samples = start + count == num_tokens
        if samples:
            request.num_pending_tokens += 1
            request.sampled_in = draft.call
        self.kv.name_blocks(request, being_written=True)
        item = ScheduledRequest(request, start, count, samples, num_tokens - request.num_prompt_tokens)
        draft.items.append(item)
        draft.budget -= count
        draft.num_prefill_tokens += max(0, min(start + count, request.num_prefill_tokens) - start)
        self.roster.stats.num_recomputed_tokens += max(0, min(start + count, request.num_lost_tokens) - start)
        if samples and num_tokens == request.num_prompt_tokens:
            self.kv.name_tail(request, being_written=True)
            self._fork_samples(item, draft)

    def _fork_samples(self, parent: ScheduledRequest, draft: Draft) -> None:
        """The prompt is computed: its other samples begin with the same blocks and the same logits."""
        roster, num_prompt_tokens = self.roster, parent.request.num_prompt_tokens
        group = roster.group_of[parent.request]
        roster.defer(group, 0)  # from here on they wait for room
        for request in [each for each in group.waiting if each.num_tokens == num_prompt_tokens]:
            # Each of them will want a block of its own in the next step.
            if not roster.free_slots or self.kv.pool.num_free <= len(draft.forks) + 1:
                return
            self.kv.fork(parent.request, request, num_prompt_tokens)
            roster.start(request, group, num_prompt_tokens, max(0, parent.request.num_cached_tokens))
            request.num_pending_tokens += 1
            request.sampled_in = draft.call
            draft.forks.append(ScheduledRequest(request, num_prompt_tokens, 0, True, 0, parent))
