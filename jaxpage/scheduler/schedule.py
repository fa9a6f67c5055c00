"""What the scheduler decided for one step, as plain data."""

from __future__ import annotations

import dataclasses

from jaxpage.kv.block_ops import BlockOp
from jaxpage.request import Request
from jaxpage.scheduler.group import RequestGroup


@dataclasses.dataclass(slots=True)
class ScheduledRequest:
    """One request's share of a step: ``num_tokens`` tokens from position ``start`` on.

    Attributes:
        samples: the step reaches the request's last token, so it produces a new one.
        output_index: tokens the request had generated before this step.
        parent: set for a request forked in this step: it computes nothing and samples from the logits of the parent's
            last token. Such items come after all others.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    output_index: int
    parent: ScheduledRequest | None = None


@dataclasses.dataclass(slots=True)
class Schedule:
    """All that one step computes. Decode rows come first.

    Attributes:
        num_prefill_tokens: tokens of prompts, and tokens computed again after a preemption.
        admitted: requests that got a slot since the step before: per-request device state must be filled.
        block_ops: blocks to move before the step's writes, in this order.
        call: number of the call of ``Scheduler.schedule`` that made it, from 0 on; empty schedules count. A token that
            the host does not know is that of the step with ``call - num_stages``.
    """

    requests: list[ScheduledRequest]
    num_tokens: int
    num_preempted: int = 0
    admitted: list[Request] = dataclasses.field(default_factory=list)
    block_ops: list[BlockOp] = dataclasses.field(default_factory=list)
    num_prefill_tokens: int = 0
    call: int = 0

    @property
    def decides_the_next(self) -> bool:
        """Requests of it need its tokens on the host for their next step: they move beams, or masks of tokens."""
        return any(item.samples and (item.request.is_beam or item.request.constraint) for item in self.requests)

    @property
    def is_empty(self) -> bool:
        """Nothing to do for the device."""
        return not (self.requests or self.block_ops or self.admitted)


@dataclasses.dataclass(slots=True)
class Draft:
    """A schedule in the making.

    Attributes:
        budget: tokens that may still be added.
        call: as in ``Schedule``.
        alone: who alone may be in it; None: everybody may.
        num_prefill_tokens: as in ``Schedule``.
        is_short_of_blocks: somebody had to give way or to pause, so nobody is let in.
    """

    budget: int
    call: int
    alone: RequestGroup | None = None
    items: list[ScheduledRequest] = dataclasses.field(default_factory=list)
    forks: list[ScheduledRequest] = dataclasses.field(default_factory=list)
    is_short_of_blocks: bool = False
    num_prefill_tokens: int = 0

    def taken(self) -> set[Request]:
        """Requests whose tokens are in the draft already: they can no longer give their blocks away."""
        return {item.request for item in (*self.items, *self.forks)}

    def start_of(self, request: Request) -> int:
        """Tokens of the request that earlier steps have computed."""
        return next((item.start for item in self.items if item.request is request), request.num_computed_tokens)
