"""Owns what several engines show together: their pictures and the state of their caches as those of one.

It must not know where engines run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxpage.kv.manager import KVCacheStats
from jaxpage.scheduler.snapshot import EngineSnapshot, RequestSnapshot

_NOT_SUMMED = ("time_s", "cost_s", "block_size", "block_states", "running", "waiting")


def summed_snapshots(snapshots: Sequence[EngineSnapshot]) -> EngineSnapshot:
    """One picture of several engines: their pools lie one behind the other, each with its scratch block."""
    if len(snapshots) == 1:
        return snapshots[0]
    running: list[RequestSnapshot] = []
    waiting: list[RequestSnapshot] = []
    num_blocks = 0
    for each in snapshots:
        running += [_moved(request, num_blocks) for request in each.running]
        waiting += each.waiting
        num_blocks += len(each.block_states)
    sums = {
        field.name: sum(getattr(each, field.name) for each in snapshots)
        for field in dataclasses.fields(EngineSnapshot)
        if field.name not in _NOT_SUMMED
    }
    return dataclasses.replace(
        snapshots[0],
        time_s=max(each.time_s for each in snapshots),
        cost_s=max(each.cost_s for each in snapshots),
        block_states=b"".join(each.block_states for each in snapshots),
        running=running,
        waiting=waiting,
        **sums,
    )


def summed_cache_stats(stats: Sequence[KVCacheStats]) -> KVCacheStats:
    """The caches of several engines as one."""
    counters = _summed([each.counters for each in stats])
    return _summed(stats, counters=counters)


def _moved(request: RequestSnapshot, distance: int) -> RequestSnapshot:
    return dataclasses.replace(request, block_ids=tuple(block + distance for block in request.block_ids))


def _summed(values: Sequence[Any], **others: Any) -> Any:
    names = [field.name for field in dataclasses.fields(values[0]) if field.name not in others]
    return type(values[0])(**{name: sum(getattr(each, name) for each in values) for name in names}, **others)
