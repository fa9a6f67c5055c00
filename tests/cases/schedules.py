"""Keeps what an engine schedules, as it was when a step went out. It must not know what is asserted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from unittest import mock

from jaxpage import LLM
from jaxpage.engine.front import Engine
from jaxpage.request import Request
from jaxpage.scheduler.schedule import Schedule
from jaxpage.scheduler.scheduler import Scheduler


class Row(NamedTuple):
    """What a step does for a request: ``num_tokens`` from position ``start`` on, in these blocks."""

    request: Request
    start: int
    num_tokens: int
    samples: bool
    block_ids: tuple[int, ...]


@contextlib.contextmanager
def recorded(llm: LLM) -> Iterator[list[list[Row]]]:
    """Gives the list to which the rows of every step are added; steps without rows are left out."""
    scheduler = llm.engine.core.scheduler
    schedule, steps = type(scheduler).schedule, []

    def recording(self: Scheduler) -> Schedule:
        result = schedule(self)
        rows = [
            Row(item.request, item.start, item.num_tokens, item.samples, tuple(item.request.block_ids))
            for item in result.requests
        ]
        if rows and self is scheduler:
            steps.append(rows)
        return result

    # Of the class, for hooks that preempt put themselves before the object's own method.
    with mock.patch.object(Scheduler, "schedule", recording):
        yield steps


class PreemptMembers:
    """A hook for ``driving.run``: preempts samples of the oldest request whenever it has computed so many tokens.

    Args:
        at: how many tokens its first sample must have computed.
        members: indices of the samples.
        keep_cache: the prefix cache may spare them the recomputation; else it is emptied.

    Attributes:
        left: what of ``at`` has not happened yet.
    """

    def __init__(self, at: Sequence[int], members: Sequence[int], keep_cache: bool = False) -> None:
        self.left = sorted(at)
        self._members = members
        self._keep_cache = keep_cache

    def __call__(self, engine: Engine) -> None:
        scheduler = engine.core.scheduler
        if not self.left or not scheduler.running:
            return
        group = scheduler.group_of(scheduler.running[0])
        assert group is not None
        chosen = [request for request in group.running if request.sample_index in self._members]
        is_due = group.requests[0].num_computed_tokens >= self.left[0]
        if is_due and len(chosen) == len(self._members) and group.can_be_preempted:
            self.left.pop(0)
            scheduler.preemption.preempt(group, chosen)
            if not self._keep_cache:
                scheduler.kv.reset_prefix_cache()
