"""The groups that wait, in the order in which they are to be served."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from jaxpage.scheduler.group import RequestGroup


class WaitingQueue:
    """Sorted by priority (all equal under first come, first served), preempted ones first, then by arrival."""

    def __init__(self) -> None:
        self._groups: list[RequestGroup] = []

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[RequestGroup]:
        return iter(self._groups)

    def add(self, group: RequestGroup) -> None:
        """Puts a group in its place; it must not be here yet, and its keys must not change while it is."""
        bisect.insort(self._groups, group, key=_order)
        group.is_queued = True

    def remove(self, group: RequestGroup) -> None:
        """Takes a group out."""
        self._groups.remove(group)
        group.is_queued = False

    def first(self, count: int) -> list[RequestGroup]:
        """Up to ``count`` groups from the head."""
        return self._groups[:count]


def _order(group: RequestGroup) -> tuple[int, bool, int]:
    return group.priority, not group.was_preempted, group.arrival
