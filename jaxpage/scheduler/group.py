"""One prompt and all that goes on from it: n samples, or the beams of a search."""

from __future__ import annotations

import dataclasses

from jaxpage.kv.manager import SwappedBlocks
from jaxpage.request import Request
from jaxpage.scheduler.beam import BeamSearch


@dataclasses.dataclass(eq=False, slots=True)
class RequestGroup:
    """Requests that are served, preempted and resumed together, so that they go on sharing their blocks.

    Attributes:
        requests: those that have not ended, in the order in which they are served; for a search the running beams,
            best first.
        waiting: those of ``requests`` that hold no blocks.
        priority, arrival: the smaller, the sooner served; priority counts first.
        search: set for beams.
        slots: kept for the beams to come; samples take theirs one by one.
        swapped: where the blocks of ``waiting`` are, if on the host.
        was_preempted: some of ``waiting`` had blocks before.
        is_queued: it is in the waiting queue.
        is_counted: its prompt is in the statistics.
        num_overtakes: groups that arrived later and were admitted since this one first did not fit.
        admitted_s: when it was first let in, on the monotonic clock.
        num_deferred: those of ``waiting`` that wait for another member to compute the prompt.
        num_preemptions: of samples; a search counts as one.
    """

    requests: list[Request]
    waiting: list[Request]
    priority: int
    arrival: int
    search: BeamSearch | None = None
    slots: list[int] = dataclasses.field(default_factory=list)
    swapped: SwappedBlocks | None = None
    was_preempted: bool = False
    num_overtakes: int = 0
    is_queued: bool = False
    is_counted: bool = False
    admitted_s: float | None = None
    num_deferred: int = 0
    num_preemptions: int = 0

    @property
    def rank(self) -> tuple[int, int]:
        """The smaller, the sooner served."""
        return self.priority, self.arrival

    @property
    def running(self) -> list[Request]:
        """Members that hold blocks."""
        return [request for request in self.requests if request.slot >= 0]

    @property
    def num_slots(self) -> int:
        """Slots it needs to go on: a search keeps one for each beam to come, swapped samples come back together."""
        if self.search is not None:
            return self.search.params.beam_width
        return 1 if self.swapped is None else len(self.swapped.tables)

    @property
    def has_pending_tokens(self) -> bool:
        """Some member's last token is not known yet."""
        return any(request.num_pending_tokens for request in self.requests)

    @property
    def can_be_preempted(self) -> bool:
        """Beams must not lose their blocks while a step is in flight that decides which of them live on."""
        return self.search is None or not self.has_pending_tokens
