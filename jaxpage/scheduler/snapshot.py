"""A picture of the engine between two steps, for people who watch: who is there, what they hold, and every block.

Plain data: counts and block ids, never tokens or text. Reads the scheduler and changes nothing.
"""

from __future__ import annotations

import dataclasses
import time
from itertools import islice

from jaxpage.kv.block_map import block_states
from jaxpage.request import Request
from jaxpage.scheduler.group import RequestGroup
from jaxpage.scheduler.scheduler import Scheduler

MAX_LISTED = 100
"""Running, and waiting, requests that a picture names one by one; the others are counted only."""
FORKED = "'"


@dataclasses.dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """One sample or beam.

    Attributes:
        request_id: ends in "/" and the number of the sample, or the present rank of the beam.
        state: "prefill" (its prompt is being computed), "decode", "waiting", "swapped" (its blocks are on the host) or
            "preempted" (its blocks are gone and are computed again).
        num_cached_tokens: prompt tokens it found in the prefix cache; None before it was first let in.
        block_ids: its block table; empty while it holds no blocks.
        age_s: since it arrived.
    """

    request_id: str
    state: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int | None
    num_preemptions: int
    block_ids: tuple[int, ...]
    age_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine at a moment; counters run since its start.

    Attributes:
        time_s: monotonic. cost_s: what taking the picture took of the engine's time.
        block_states: one ``kv.block_map.BlockState`` a block, the scratch block (0) included.
        running, waiting: at most ``MAX_LISTED`` each, in the order in which they are served.
        num_queried_tokens: tokens of prompts that asked the prefix cache; num_hit_tokens: those it had.
    """

    time_s: float
    cost_s: float
    block_size: int
    block_states: bytes
    num_host_blocks: int
    num_used_host_blocks: int
    max_num_seqs: int
    num_running: int
    num_waiting: int
    running: list[RequestSnapshot]
    waiting: list[RequestSnapshot]
    num_finished: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_copied_blocks: int
    num_swap_preemptions: int
    num_recompute_preemptions: int


def take_snapshot(scheduler: Scheduler) -> EngineSnapshot:
    """The scheduler and its cache now; only for the thread that owns them. About 0.2 ms with 4,096 blocks."""
    started_s = time.monotonic()
    kv, stats = scheduler.kv, scheduler.stats
    states = block_states(kv.pool)
    waiting = ((request, group) for group in scheduler.waiting for request in group.waiting)
    listed_waiting = [_request(*each, started_s) for each in islice(waiting, MAX_LISTED)]
    running = [_request(each, None, started_s) for each in scheduler.running[:MAX_LISTED]]
    return EngineSnapshot(
        time_s=started_s,
        cost_s=time.monotonic() - started_s,
        block_size=kv.block_size,
        block_states=states,
        num_host_blocks=kv.num_host_blocks,
        num_used_host_blocks=kv.num_host_blocks - kv.num_free_host_blocks,
        max_num_seqs=scheduler.roster.max_num_seqs,
        num_running=len(scheduler.running),
        num_waiting=scheduler.num_waiting,
        running=running,
        waiting=listed_waiting,
        num_finished=stats.num_finished,
        num_prompt_tokens=stats.num_prompt_tokens,
        num_generated_tokens=stats.num_generated_tokens,
        num_queried_tokens=kv.counters.num_queried_tokens,
        num_hit_tokens=kv.counters.num_hit_tokens,
        num_copied_blocks=kv.counters.num_copied_blocks,
        num_swap_preemptions=stats.num_swap_preemptions,
        num_recompute_preemptions=stats.num_recompute_preemptions,
    )


def _request(request: Request, waits_in: RequestGroup | None, now_s: float) -> RequestSnapshot:
    """``waits_in``: the group in whose queue it waits, None if it runs."""
    # Beams are named after their parents, with a stroke for each fork.
    beam_id = f"{request.request_id.rstrip(FORKED)}/{request.order[2]}"
    return RequestSnapshot(
        request_id=beam_id if request.is_beam else request.request_id,
        state=_state(request, waits_in),
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_known_output_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_cached_tokens=request.num_cached_tokens if request.num_cached_tokens >= 0 else None,
        num_preemptions=request.num_preemptions,
        block_ids=tuple(request.block_ids),
        age_s=now_s - request.arrival_time_s,
    )


def _state(request: Request, waits_in: RequestGroup | None) -> str:
    if waits_in is None:
        return "decode" if request.num_computed_tokens >= request.num_prompt_tokens else "prefill"
    if waits_in.swapped is not None and request in waits_in.swapped.tables:
        return "swapped"
    return "preempted" if request.num_preemptions else "waiting"
