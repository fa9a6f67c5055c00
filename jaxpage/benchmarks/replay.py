"""Replays requests through the real scheduler and KV cache manager, with a fake model step on a virtual clock.

Knows no device, no array and no file format; it measures and leaves tables to others.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterable, Sequence

from jaxpage.benchmarks.fake_model import FakeModel, StepTime
from jaxpage.benchmarks.traces import TraceRow
from jaxpage.kv.block_ops import BlockOpKind
from jaxpage.kv.manager import KVCacheManager, KVCounters
from jaxpage.params import BeamSearchParams, SamplingParams
from jaxpage.request import Request
from jaxpage.scheduler.beam import BeamSearch
from jaxpage.scheduler.group import RequestGroup
from jaxpage.scheduler.preemption import PreemptionPolicy
from jaxpage.scheduler.roster import SchedulerStats
from jaxpage.scheduler.schedule import Schedule
from jaxpage.scheduler.scheduler import Scheduler


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes of the simulated engine.

    Attributes:
        num_blocks: blocks that requests can hold.
        num_host_blocks: blocks of the swap pool.
        n: samples of each prompt.
        beam_width: 0 samples; above, every row is a beam search over its output length.
        one_at_a_time: each row waits until the one before it has ended, whenever it arrived.
    """

    block_size: int = 16
    num_blocks: int
    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    num_host_blocks: int = 0
    preemption_mode: str = "auto"
    policy: str = "fcfs"
    n: int = 1
    beam_width: int = 0
    one_at_a_time: bool = False
    step_time: StepTime = dataclasses.field(default_factory=StepTime)


@dataclasses.dataclass
class Shares:
    """Means over steps, weighted by the virtual time a step takes, of shares in [0, 1].

    Attributes:
        waste: of the slots allocated, those that hold no token.
        waste_max, waste_pow2, waste_exact: the same where each running sequence reserves a contiguous range of
            max_model_len tokens, of its prompt and the next power of two of its output, or of exactly its final length.
        saved: of the blocks in all block tables, those that need no memory because they are there more than once.
        used: of all blocks, those that somebody holds.
    """

    waste: float = 0.0
    waste_max: float = 0.0
    waste_pow2: float = 0.0
    waste_exact: float = 0.0
    saved: float = 0.0
    used: float = 0.0


@dataclasses.dataclass
class Result:
    """What a replay measured.

    Attributes:
        num_refused: rows that never fit the pool or max_model_len, and were left out.
        num_cut: requests that ended before their length for lack of room.
        duration_s: virtual seconds from the first arrival to the last end.
        delays_s, delays_steps: from a row's arrival to the start of the first step that computes any of it.
        first_token_s: from a row's arrival to the end of the step that gives its first token.
        table_max, table_mean: blocks in a block table.
        num_scheduled: items of all schedules; host_s: seconds spent in ``schedule`` and ``update``.
    """

    counters: KVCounters
    stats: SchedulerStats
    num_refused: int = 0
    num_cut: int = 0
    num_steps: int = 0
    duration_s: float = 0.0
    peak_running: int = 0
    shares: Shares = dataclasses.field(default_factory=Shares)
    delays_s: list[float] = dataclasses.field(default_factory=list)
    delays_steps: list[int] = dataclasses.field(default_factory=list)
    first_token_s: list[float] = dataclasses.field(default_factory=list)
    table_max: int = 0
    table_mean: float = 0.0
    num_scheduled: int = 0
    host_s: float = 0.0


@dataclasses.dataclass(slots=True)
class _Arrival:
    time_s: float
    step: int
    reserved_pow2: int
    reserved_exact: int
    has_started: bool = False
    has_token: bool = False


@dataclasses.dataclass(slots=True)
class _InFlight:
    schedule: Schedule
    duration_s: float
    groups: set[RequestGroup] = dataclasses.field(default_factory=set)
    candidates: dict[int, Sequence[tuple[int, float]]] = dataclasses.field(default_factory=dict)


class Replay:
    """One run over a trace. Like the engine, it schedules a step before it takes in the results of the one before."""

    def __init__(self, settings: Settings) -> None:
        step_time, size = settings.step_time, settings.block_size
        self.settings = settings
        self.kv = KVCacheManager(
            settings.num_blocks + 1, size, settings.enable_prefix_caching, num_host_blocks=settings.num_host_blocks
        )
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=settings.max_model_len,
            enable_chunked_prefill=True,
            policy=settings.policy,
            preemption=PreemptionPolicy(
                settings.preemption_mode if settings.num_host_blocks else "recompute",
                seconds_per_token=step_time.s_per_token,
                seconds_per_block=step_time.swap_s_per_token * size,
            ),
        )
        self.result = Result(self.kv.counters, self.scheduler.stats)
        self._model = FakeModel()
        self._clock_s = 0.0
        self._in_flight: _InFlight | None = None
        self._arrivals: dict[RequestGroup, _Arrival] = {}
        self._weight_s = 0.0
        self._table_blocks = self._table_count = 0

    def run(self, rows: Iterable[TraceRow]) -> Result:
        """Serves all rows to their end, and checks that nothing is left behind.

        Raises:
            ValueError: a setting the scheduler refuses.
            RuntimeError: the scheduler stands still, or the end leaves blocks held.
        """
        to_come = deque(enumerate(rows))
        num_idle = 0
        while to_come or self.scheduler.has_requests or self._in_flight is not None:
            self._add_arrived(to_come)
            schedule, before = self._schedule(), self._in_flight
            self._in_flight = None if schedule.is_empty else self._begin(schedule)
            if before is not None:
                self._end(before)
            elif schedule.is_empty and not self.scheduler.has_requests and to_come:
                self._clock_s = max(self._clock_s, to_come[0][1].arrival_s)
            is_idle = before is None and schedule.is_empty and self.scheduler.has_requests
            num_idle = num_idle + 1 if is_idle else 0
            if num_idle > 2:
                raise RuntimeError(f"nothing is scheduled while {self.scheduler.num_waiting} requests wait")
        try:
            self.scheduler.check_integrity()
        except AssertionError as error:
            raise RuntimeError(f"the replay left something behind: {error}") from error
        self._average()
        return self.result

    def _add_arrived(self, to_come: deque[tuple[int, TraceRow]]) -> None:
        settings = self.settings
        while to_come and to_come[0][1].arrival_s <= self._clock_s:
            if settings.one_at_a_time and (self.scheduler.has_requests or self._in_flight is not None):
                return
            index, row = to_come.popleft()
            if row.num_prompt_tokens >= settings.max_model_len or not self.scheduler.fits(row.num_prompt_tokens):
                self.result.num_refused += 1
            else:
                self._add(index, row)

    def _add(self, index: int, row: TraceRow) -> None:
        settings, max_tokens = self.settings, row.num_output_tokens
        prompt = row.prompt_token_ids(index)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        if settings.beam_width:
            search = BeamSearch(BeamSearchParams(beam_width=settings.beam_width), max_tokens, frozenset())
            group = self.scheduler.add(Request(str(index), prompt, params, max_tokens), search=search)
        else:
            samples = [
                Request(f"{index}.{sample}", prompt, params, max_tokens, sample_index=sample)
                for sample in range(settings.n)
            ]
            group = self.scheduler.add(*samples)
        exact = min(row.num_prompt_tokens + max_tokens, settings.max_model_len)
        pow2 = min(row.num_prompt_tokens + (1 << (max_tokens - 1).bit_length()), settings.max_model_len)
        arrived_s = self._clock_s if settings.one_at_a_time else row.arrival_s
        self._arrivals[group] = _Arrival(arrived_s, self.result.num_steps, pow2, exact)

    def _schedule(self) -> Schedule:
        started = time.perf_counter()
        schedule = self.scheduler.schedule()
        self.result.host_s += time.perf_counter() - started
        self.result.num_scheduled += len(schedule.requests)
        self.result.num_cut += len(self.scheduler.take_ended())
        return schedule

    def _begin(self, schedule: Schedule) -> _InFlight:
        """Starts the step on the device, which is busy with the one before until then."""
        start_s = self._clock_s + (0.0 if self._in_flight is None else self._in_flight.duration_s)
        num_swapped = sum(op.kind is not BlockOpKind.COPY for op in schedule.block_ops)
        duration_s = self.settings.step_time.of(schedule, num_swapped, self.settings.block_size)
        step = _InFlight(schedule, duration_s)
        for place, item in enumerate(schedule.requests):
            group = self.scheduler.group_of(item.request)
            if group is None:  # it ended for lack of room while the step was made
                continue
            step.groups.add(group)
            arrival = self._arrivals[group]
            if not arrival.has_started:
                arrival.has_started = True
                self.result.delays_s.append(start_s - arrival.time_s)
                self.result.delays_steps.append(self.result.num_steps - arrival.step)
            if item.samples and not arrival.has_token:
                arrival.has_token = True
                self.result.first_token_s.append(start_s + duration_s - arrival.time_s)
            if item.samples and group.search is not None:
                step.candidates[place] = self._model.candidates(group.search.num_candidates)
        self.result.num_steps += 1
        self._measure(duration_s)
        return step

    def _end(self, step: _InFlight) -> None:
        self._clock_s += step.duration_s
        self.result.duration_s = self._clock_s
        token_ids = [self._model.token_id(item) for item in step.schedule.requests]
        started = time.perf_counter()
        self.scheduler.update(step.schedule, token_ids, step.candidates)
        self.result.host_s += time.perf_counter() - started
        self.scheduler.take_ended_searches()
        for group in step.groups:
            if not group.requests:
                self._arrivals.pop(group, None)

    def _measure(self, duration_s: float) -> None:
        """Adds the step's shares; slots count as filled by the step that writes them."""
        running, shares, size = self.scheduler.running, self.result.shares, self.settings.block_size
        used, num_tables, tokens, pow2, exact = self.kv.pool.num_used, 0, 0, 0, 0
        for request in running:
            group = self.scheduler.group_of(request)
            assert group is not None, f"request {request.request_id} runs without a group"
            arrival = self._arrivals[group]
            num_blocks = len(request.block_ids)
            self.result.table_max = max(self.result.table_max, num_blocks)
            num_tables += num_blocks
            tokens += request.num_computed_tokens
            pow2 += arrival.reserved_pow2
            exact += arrival.reserved_exact
        self.result.peak_running = max(self.result.peak_running, len(running))
        if not used:
            return
        self._weight_s += duration_s
        self._table_blocks += num_tables
        self._table_count += len(running)
        shares.waste += duration_s * self.kv.num_wasted_slots(running) / (used * size)
        shares.waste_max += duration_s * (1 - tokens / (len(running) * self.settings.max_model_len))
        shares.waste_pow2 += duration_s * (1 - tokens / pow2)
        shares.waste_exact += duration_s * (1 - tokens / exact)
        shares.saved += duration_s * (1 - used / num_tables)
        shares.used += duration_s * used / self.settings.num_blocks

    def _average(self) -> None:
        for field in dataclasses.fields(Shares):
            total = getattr(self.result.shares, field.name)
            setattr(self.result.shares, field.name, total / self._weight_s if self._weight_s else 0.0)
        self.result.table_mean = self._table_blocks / max(1, self._table_count)
