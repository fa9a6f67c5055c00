"""The engine's loop over the fake device: a step runs when it is scheduled, its tokens may be taken in later."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from fake_device import FakeDevice
from fake_model import undisturbed, undisturbed_search
from schedule_checks import Checks

from jaxpage.request import FinishReason, Request
from jaxpage.scheduler.beam import BeamSearch
from jaxpage.scheduler.group import RequestGroup
from jaxpage.scheduler.preemption import PreemptionPolicy
from jaxpage.scheduler.schedule import Schedule, ScheduledRequest
from jaxpage.scheduler.scheduler import Scheduler
from jaxpage.scheduler.search import Candidates


class Loop:
    """Drives a scheduler and checks every step.

    Attributes:
        books_every: steps from one check of the books to the next; it looks at every request there is.
        history: (request id, tokens, samples) of each row of each step that computed something.
        ended: requests in the order of their ends, aborted ones left out.
        poison: by request, a position at which every step fails that computes it.
        fails_next: the next step fails, whoever is in it.
        num_faults: by group, the failed steps that it was in.
    """

    def __init__(self, scheduler: Scheduler, books_every: int = 1) -> None:
        self.scheduler = scheduler
        self.books_every = books_every
        self.num_steps = 0
        self.block_size = scheduler.kv.block_size
        self.device = FakeDevice(scheduler.kv.pool.num_blocks, scheduler.kv.block_size, scheduler.num_stages)
        self.checks = Checks(scheduler, self.device)
        self.in_flight: deque[tuple[Schedule, list[int], dict[int, Candidates]]] = deque()
        self.poison: dict[Request, int] = {}
        self.fails_next = False
        self.num_faults: Counter[RequestGroup] = Counter()
        self._failed: list[Schedule] = []
        self.history: list[list[tuple[str, int, bool]]] = []
        self.ended: list[Request] = []
        self.samples: list[Request] = []
        self.groups: dict[Request, RequestGroup] = {}
        self.searches: list[tuple[Request, RequestGroup]] = []
        self.aborted: list[RequestGroup] = []

    @property
    def is_done(self) -> bool:
        return not self.scheduler.has_requests and not self.in_flight

    def add(self, *requests: Request, priority: int = 0) -> RequestGroup:
        self.samples += requests
        group = self.scheduler.add(*requests, priority=priority)
        self.groups |= dict.fromkeys(requests, group)
        return group

    def add_search(self, request: Request, search: BeamSearch, priority: int = 0) -> RequestGroup:
        group = self.scheduler.add(request, priority=priority, search=search)
        self.searches.append((request, group))
        return group

    def step(self, lag: int = 0) -> Schedule:
        """Schedules and runs a step, then takes in the results of all but the newest ``lag`` steps.

        However large ``lag``, a step is taken in with the call that can read its tokens on the device. The engine
        always waits that long; knowing tokens before must do no harm.
        """
        scheduler = self.scheduler
        self.checks.before_schedule()
        schedule = scheduler.schedule()
        self.checks.schedule(schedule)
        has_ended = bool(scheduler.roster.ended or scheduler.roster.ended_searches)
        self.ended += scheduler.roster.ended
        scheduler.roster.ended.clear()
        results = self.device.run(schedule)
        has_moved = schedule.requests or schedule.admitted or schedule.num_preempted or has_ended
        assert has_moved or self.in_flight or not scheduler.has_requests, "nothing happens though requests wait"
        if schedule.requests:
            self.in_flight.append((schedule, *results))
            if self.fails_next or any(self._is_poisoned(item) for item in schedule.requests):
                self.fails_next = False
                self._failed.append(schedule)
            self.history.append(
                [(item.request.request_id, item.num_tokens, item.samples) for item in schedule.requests]
            )
        while len(self.in_flight) > lag or self._is_due(schedule.call):
            self._take_in_oldest()
        self.ended += [request for request, group in self.searches if group in scheduler.roster.ended_searches]
        scheduler.roster.ended_searches.clear()
        self.num_steps += 1
        if self.num_steps % self.books_every == 0:
            self.checks.books()
        self.checks.content()
        return schedule

    def _take_in_oldest(self) -> None:
        schedule, tokens, candidates = self.in_flight.popleft()
        if schedule not in self._failed:
            accepted = self.scheduler.update(schedule, tokens, candidates)
            self.ended += [request for request in accepted if request.is_finished]
            return
        groups = {self.scheduler.group_of(item.request) for item in schedule.requests}
        self.num_faults.update(group for group in groups if group is not None)
        self.in_flight.clear()
        self._failed.clear()
        self.scheduler.start_over(schedule)
        self.device.forget()
        self.ended += self.scheduler.take_ended()
        assert not self.scheduler.running and self.scheduler.kv.pool.num_used == 0

    def _is_poisoned(self, item: ScheduledRequest) -> bool:
        return item.start <= self.poison.get(item.request, -1) < item.start + item.num_tokens

    def _has_failed(self, group: RequestGroup) -> bool:
        """A search that ended with an error, and had two faults."""
        assert group.search is not None
        reasons = {beam.finish_reason for beam in group.search.ended}
        return reasons == {FinishReason.ERROR} and self.num_faults[group] >= 2

    def _is_due(self, call: int) -> bool:
        return bool(self.in_flight) and self.in_flight[0][0].call <= call - self.scheduler.num_stages

    def run_all(self, lag: int = 0, max_steps: int = 500) -> None:
        for _ in range(max_steps):
            if self.is_done:
                return
            self.step(lag)
        raise AssertionError(f"not done after {max_steps} steps: {self.history[-5:]}")

    def abort(self, group: RequestGroup, requests: Iterable[Request] | None = None) -> None:
        """Ends some members of a group, or all."""
        self.aborted.append(group)
        for request in list(group.requests if requests is None else requests):
            self.scheduler.finish(request, FinishReason.ABORT)

    def preempt(self, *requests: Request, mode: str = "recompute") -> None:
        """As if the pool were short: nothing else takes blocks from a lone request."""
        group = self.scheduler.group_of(requests[0])
        assert group is not None
        preemption = self.scheduler.preemption
        before, preemption.policy = preemption.policy, PreemptionPolicy(mode)
        preemption.preempt(group, list(requests))
        preemption.policy = before
        self.checks.books()

    def verify(self) -> None:
        """Everything that ended has what it has alone; nothing is held any more."""
        kv = self.scheduler.kv
        num_slots = kv.pool.num_usable * kv.block_size
        for request in self.samples:
            tokens, reason = undisturbed(request, self.scheduler.roster.max_model_len, num_slots)
            output = request.token_ids[request.num_prompt_tokens :]
            if request.finish_reason is FinishReason.ERROR:
                assert self.num_faults[self.groups[request]] >= 2, f"{request.request_id}: an error without two faults"
            if request.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert output == tokens[: len(output)], request.request_id
            else:
                assert (output, request.finish_reason) == (tokens, reason), request.request_id
        for request, group in self.searches:
            if group not in self.aborted and not self._has_failed(group):
                self._verify_search(request, group)
        assert kv.pool.num_free == kv.pool.num_usable
        assert kv.num_free_host_blocks == kv.num_host_blocks
        self.checks.books()
        assert self.is_done and self.scheduler.num_waiting == 0

    def _verify_search(self, request: Request, group: RequestGroup) -> None:
        assert group.search is not None and group.search.is_over
        found = [(beam.token_ids, beam.finish_reason) for beam in group.search.ended]
        expected = undisturbed_search(request.prompt_token_ids, group.search)
        if found == [(beam.token_ids, beam.finish_reason) for beam in expected.ended]:
            return
        # Cut for lack of room: only if all beams with no block shared do not fit.
        num_tokens = group.search._num_tokens
        kv = self.scheduler.kv
        most = group.search.params.beam_width * kv.blocks_for(request.num_prompt_tokens + num_tokens + 1)
        assert most > kv.pool.num_usable, f"{request.request_id} differs: {found}"
        cut = undisturbed_search(request.prompt_token_ids, group.search, num_tokens)
        assert found == [(beam.token_ids, beam.finish_reason) for beam in cut.ended]
