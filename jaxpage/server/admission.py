"""Owns the limits on work that waits: which calls are let in, and what they hold until their answer ends.

It must not know what the calls ask for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxpage.server.errors import unavailable


@dataclasses.dataclass(slots=True, eq=False)
class Ticket:
    """What one call counts for.

    Attributes:
        num_waiting_tokens: tokens of its prompts that no output came from yet.
    """

    num_samples: int
    num_waiting_tokens: int


class Admission:
    """Lets calls in until what is inside has reached a limit; so one call may go beyond it, by no more than itself.

    Args:
        max_num_samples: running and waiting samples from which on calls are refused; None for no limit.
        max_num_waiting_tokens: the same for prompt tokens that wait for their first output.
        count_refusal: is told the name of the option that refused a call.
    """

    def __init__(
        self,
        max_num_samples: int | None,
        max_num_waiting_tokens: int | None,
        count_refusal: Callable[[str], None],
    ) -> None:
        self._max_num_samples = max_num_samples
        self._max_num_waiting_tokens = max_num_waiting_tokens
        self._count_refusal = count_refusal
        self._inside: set[Ticket] = set()

    def enter(self, num_samples: int, num_tokens: int) -> Ticket:
        """Takes in a call with ``num_tokens`` prompt tokens.

        Raises:
            ApiError: 503 if a limit is reached.
        """
        self._check("max_num_queued_reqs", self._max_num_samples, lambda ticket: ticket.num_samples)
        self._check("max_num_queued_tokens", self._max_num_waiting_tokens, lambda ticket: ticket.num_waiting_tokens)
        ticket = Ticket(num_samples, num_tokens)
        self._inside.add(ticket)
        return ticket

    def release(self, ticket: Ticket | None) -> None:
        """The call has ended; None stands for one that was never let in."""
        if ticket is not None:
            self._inside.discard(ticket)

    def _check(self, option: str, limit: int | None, amount: Callable[[Ticket], int]) -> None:
        if limit is not None and sum(map(amount, self._inside)) >= limit:
            self._count_refusal(option)
            raise unavailable(f"the server is busy: {option} {limit} is reached")
