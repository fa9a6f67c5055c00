"""Finding the request that makes steps fail, so that it ends and the others do not."""

from __future__ import annotations

from collections.abc import Iterable

from jaxpage.request import Request
from jaxpage.scheduler.group import RequestGroup
from jaxpage.scheduler.schedule import ScheduledRequest


class Quarantine:
    """The groups of a step that failed. Each in turn is computed again with nobody else in its steps.

    A group is cleared once its requests have the tokens that the failed step was to give them, or have ended. A step
    that fails with one group alone is that group's fault. So the cost of a fault is one group at a time for a few
    steps; nothing but the group at fault is lost.
    """

    def __init__(self) -> None:
        self._goals: dict[RequestGroup, dict[Request, int]] = {}

    def admit(self, groups: Iterable[RequestGroup], items: Iterable[ScheduledRequest]) -> None:
        """Suspects ``groups``, tried in this order, before those already here; ``items`` are the failed step's.

        To be called while the tokens of the steps in flight still count as pending.
        """
        goals: dict[RequestGroup, dict[Request, int]] = {group: {} for group in groups}
        in_step = {item.request for item in items}
        for group, of_group in goals.items():
            for request in group.requests:
                if request in in_step:
                    of_group[request] = len(request.token_ids) + 1
        self._goals = goals | {group: old for group, old in self._goals.items() if group not in goals}

    def current(self) -> RequestGroup | None:
        """Who alone may be in the next step; None: everybody may."""
        while self._goals:
            group, goals = next(iter(self._goals.items()))
            if any(not each.is_finished and len(each.token_ids) < goal for each, goal in goals.items()):
                return group
            del self._goals[group]
        return None
