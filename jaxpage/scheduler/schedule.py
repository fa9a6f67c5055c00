"""What the scheduler decided for one step, as plain data."""

from __future__ import annotations

import dataclasses

from jaxpage.request import Request


@dataclasses.dataclass(slots=True)
class ScheduledRequest:
    """One request's share of a step: ``num_tokens`` tokens from position ``start`` on.

    Attributes:
        samples: the step reaches the request's last token, so it produces a new one.
        is_admitted: the request got its slot in this step; per-request device state must be filled.
        output_index: tokens the request had generated before this step.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    is_admitted: bool
    output_index: int


@dataclasses.dataclass(slots=True)
class Schedule:
    """All that one step computes. Decode rows come first."""

    requests: list[ScheduledRequest]
    num_tokens: int
    num_preempted: int
