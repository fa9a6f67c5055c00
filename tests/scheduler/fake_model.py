"""A model and a device for scheduler tests: tokens are hashes of what is read back from a paged cache.

The cache is written and read through block tables like a real one, so a wrong or overwritten block changes the tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from jaxpage.kv.manager import KVCacheManager
from jaxpage.request import FinishReason, Request, SamplingParams
from jaxpage.scheduler.schedule import Schedule, ScheduledRequest
from jaxpage.scheduler.scheduler import Scheduler

VOCAB_SIZE = 12
END_ID = 11
PRIME = 1_000_003


def make_request(
    name: str, prompt: Iterable[int], max_tokens: int = 4, *, end_ids: Iterable[int] = (), **params: object
) -> Request:
    settings = SamplingParams(max_tokens=max_tokens, **params)
    end_token_ids = frozenset(end_ids) | frozenset(settings.stop_token_ids)
    return Request(name, list(prompt), settings, max_tokens, end_token_ids=end_token_ids)


def make_scheduler(
    num_usable: int = 64,
    block_size: int = 4,
    *,
    max_num_seqs: int = 8,
    budget: int = 64,
    max_model_len: int = 128,
    chunked: bool = True,
    caching: bool = False,
) -> Scheduler:
    return Scheduler(
        KVCacheManager(num_usable + 1, block_size, caching),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        enable_chunked_prefill=chunked,
    )


def extended(state: int, token_id: int) -> int:
    """What the cache holds at a position: a hash of this token and of what is read at the position before."""
    return (state * PRIME + token_id + 1) % (2**61 - 1)


def sampled(states: Sequence[int], output_index: int, min_tokens: int, end_token_ids: frozenset[int]) -> int:
    """The next token after a history whose cache content is ``states``; end ids are masked until ``min_tokens``."""
    mixed = 0
    for state in states:
        mixed = extended(mixed, state)
    token_id = (mixed >> 7) % VOCAB_SIZE
    while output_index < min_tokens and token_id in end_token_ids:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def undisturbed(request: Request, max_model_len: int, num_slots: int) -> tuple[list[int], FinishReason]:
    """The output of a request that has the engine to itself, with ``num_slots`` tokens of cache."""
    known, states = list(request.prompt_token_ids), []
    while True:
        for token_id in known[len(states) :]:
            states.append(extended(states[-1] if states else 0, token_id))
        if len(states) > num_slots:
            return known[request.num_prompt_tokens :], FinishReason.LENGTH
        index = len(known) - request.num_prompt_tokens
        known.append(sampled(states, index, request.params.min_tokens, request.end_token_ids))
        if known[-1] in request.end_token_ids and index >= request.params.min_tokens:
            return known[request.num_prompt_tokens :], FinishReason.STOP
        if index + 1 == request.max_tokens or len(known) == max_model_len:
            return known[request.num_prompt_tokens :], FinishReason.LENGTH


class Loop:
    """The engine's loop over a fake device: a step runs when it is scheduled, its tokens may be taken in later."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.block_size = scheduler.kv.block_size
        self.cache: dict[int, int] = {}
        self.last_token: dict[int, int] = {}
        self.in_flight: deque[tuple[Schedule, list[int]]] = deque()
        self.history: list[list[tuple[str, int, bool]]] = []
        self.ended: list[Request] = []

    def step(self, lag: int = 0) -> Schedule:
        """Schedules and runs a step, then takes in the results of all but the newest ``lag`` steps."""
        schedule = self.scheduler.schedule()
        self.check(schedule)
        self.ended += self.scheduler.ended_while_scheduling
        self.scheduler.ended_while_scheduling.clear()
        if schedule.requests:
            self.in_flight.append((schedule, self.run(schedule)))
            self.history.append(
                [(item.request.request_id, item.num_tokens, item.samples) for item in schedule.requests]
            )
        else:
            lag = 0
        while len(self.in_flight) > lag:
            accepted = self.scheduler.update(*self.in_flight.popleft())
            self.ended += [request for request in accepted if request.is_finished]
        self.scheduler.check_integrity()
        return schedule

    def run_all(self, lag: int = 0, max_steps: int = 500) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_requests and not self.in_flight:
                return
            self.step(lag)
        raise AssertionError(f"not done after {max_steps} steps: {self.history[-5:]}")

    def run(self, schedule: Schedule) -> list[int]:
        """All keys and values are written before any are read, as on a device."""
        for item in schedule.requests:
            for position in range(item.start, item.start + item.num_tokens):
                before = self.cache[self.slot(item.request, position - 1)] if position else 0
                self.cache[self.slot(item.request, position)] = extended(before, self.token(item, position))
        tokens = [self.sample(item) for item in schedule.requests]
        for item, token_id in zip(schedule.requests, tokens, strict=True):
            if item.samples:
                self.last_token[item.request.slot] = token_id
        return tokens

    def slot(self, request: Request, position: int) -> int:
        return request.block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def token(self, item: ScheduledRequest, position: int) -> int:
        """A token that the host does not know yet can only be the one its slot sampled last."""
        known = item.request.token_ids
        if position < len(known):
            return known[position]
        assert position == len(known) == item.start + item.num_tokens - 1
        return self.last_token[item.request.slot]

    def sample(self, item: ScheduledRequest) -> int:
        if not item.samples:
            return -1
        request = item.request
        states = [self.cache[self.slot(request, position)] for position in range(item.start + item.num_tokens)]
        return sampled(states, item.output_index, request.params.min_tokens, request.end_token_ids)

    def check(self, schedule: Schedule) -> None:
        """What holds for every schedule."""
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        assert schedule.num_tokens == sum(item.num_tokens for item in schedule.requests)
        assert schedule.num_tokens <= scheduler.max_num_batched_tokens
        assert all(item.num_tokens >= 1 for item in schedule.requests)
        requests = [item.request for item in schedule.requests]
        assert len(set(requests)) == len(requests)
        assert set(requests) <= set(scheduler.running)
        slots = [request.slot for request in scheduler.running]
        assert len(set(slots)) == len(slots) and min(slots, default=0) >= 0
        for block in range(pool.num_blocks):
            owners = sum(request.block_ids.count(block) for request in scheduler.running)
            assert pool.ref_count(block) == owners, f"block {block}"
        assert not any(request.block_ids for request in scheduler.waiting)
        written = [
            self.slot(item.request, position)
            for item in schedule.requests
            for position in range(item.start, item.start + item.num_tokens)
        ]
        assert len(set(written)) == len(written), "two tokens in one slot"
        held_before = {block for request in scheduler.running if request not in requests for block in request.block_ids}
        assert not held_before & {slot // self.block_size for slot in written}, "a block of another request is written"
