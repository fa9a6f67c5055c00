"""Letting in: which waiting groups get blocks and slots, and in what order."""

from __future__ import annotations

import enum
from collections.abc import Callable

from jaxpage.request import Request
from jaxpage.scheduler.group import RequestGroup
from jaxpage.scheduler.roster import Roster
from jaxpage.scheduler.schedule import Draft

LOOKAHEAD = 16
"""Groups of the queue a step looks at: the head may not fit while a smaller one does."""
MAX_OVERTAKES = 32
"""Groups that may be admitted before an older one that does not fit; then nobody passes it any more."""


class _Outcome(enum.Enum):
    ADMITTED = enum.auto()
    NOT_YET = enum.auto()  # waits for something of its own; others are welcome
    NO_ROOM = enum.auto()


class Admission:
    """Looks at the head of the queue, step by step.

    A group that does not fit lets smaller ones pass, at most MAX_OVERTAKES of them. Preempted groups come first and are
    never passed.
    """

    def __init__(self, roster: Roster, *, enable_chunked_prefill: bool, long_prefill_token_threshold: int) -> None:
        self.roster = roster
        self.kv = roster.kv
        self.enable_chunked_prefill = enable_chunked_prefill
        self.long_prefill_token_threshold = long_prefill_token_threshold

    def num_waiting_short_tokens(self) -> int:
        """Tokens of the short prompts near the head of the queue, as far as there are slots for them."""
        if not self.roster.free_slots:
            return 0
        lengths = [len(group.waiting[0].token_ids) for group in self.roster.waiting.first(LOOKAHEAD)]
        return sum(length for length in lengths if length <= self.long_prefill_token_threshold)

    def admit(self, draft: Draft, compute: Callable[[Request], None], *, shorts_only: bool) -> None:
        """Starts what fits; ``compute`` puts the tokens of a request that was started into the draft.

        ``shorts_only``: no prompts with more than ``long_prefill_token_threshold`` tokens to compute.
        """
        passed: list[RequestGroup] = []
        waiting = self.roster.waiting.first(LOOKAHEAD)
        if draft.alone is not None:
            waiting = [draft.alone] if draft.alone.is_queued else []
        for group in waiting:
            if draft.is_short_of_blocks or draft.budget <= 0:
                return
            if not self.roster.free_slots and not group.slots:
                continue
            outcome = self._admit_group(group, draft, compute, shorts_only)
            if outcome is _Outcome.NO_ROOM:
                if group.was_preempted or group.num_overtakes >= MAX_OVERTAKES:
                    return
                passed.append(group)
            elif outcome is _Outcome.ADMITTED:
                for each in passed:
                    each.num_overtakes += 1

    def _admit_group(
        self, group: RequestGroup, draft: Draft, compute: Callable[[Request], None], shorts_only: bool
    ) -> _Outcome:
        """Admits as many members as there is room for."""
        if any(request.num_pending_tokens for request in group.waiting):
            return _Outcome.NO_ROOM  # preempted while a step was in flight: its tokens come first
        if not group.slots and len(self.roster.free_slots) < group.num_slots:
            return _Outcome.NO_ROOM
        if group.swapped is not None:
            return self._resume(group, compute)
        outcome = _Outcome.NOT_YET
        while group.waiting and draft.budget > 0 and (self.roster.free_slots or group.slots):
            request = group.waiting[0]
            result = self._admit_request(request, group, draft, shorts_only)
            if result is not _Outcome.ADMITTED:
                return result if outcome is _Outcome.NOT_YET else outcome
            outcome = result
            compute(request)
        return outcome

    def _admit_request(self, request: Request, group: RequestGroup, draft: Draft, shorts_only: bool) -> _Outcome:
        kv, num_spare_blocks = self.kv, self.roster.num_spare_blocks(request)
        prefix = kv.find_prefix(request)
        parent, num_shared = _closest(request, group.running)
        if parent is not None and num_shared > prefix.num_tokens:
            if num_shared > draft.start_of(parent):
                return _Outcome.NOT_YET  # blocks are copied before a step writes, so only older tokens can be shared
            needed = kv.blocks_for(len(request.token_ids)) - num_shared // kv.block_size
            if needed + num_spare_blocks > kv.pool.num_free:
                return _Outcome.NO_ROOM
            kv.fork(parent, request, num_shared)
            self.roster.start(request, group, num_shared, num_shared)
            return _Outcome.ADMITTED
        left = request.num_tokens - prefix.num_tokens
        if shorts_only and left > self.long_prefill_token_threshold:
            return _Outcome.NOT_YET
        if left > draft.budget and not self.enable_chunked_prefill:
            return _Outcome.NO_ROOM
        if not kv.allocate(request, prefix, prefix.num_tokens, num_spare_blocks):
            if not self.roster.running:  # all blocks are free: it had grown as long as the pool, and can go no further
                self.roster.end_for_lack_of_room(request)
            return _Outcome.NO_ROOM
        self.roster.start(request, group, prefix.num_tokens, prefix.num_tokens)
        return _Outcome.ADMITTED

    def _resume(self, group: RequestGroup, compute: Callable[[Request], None]) -> _Outcome:
        """Brings a swapped group back, as a whole."""
        assert group.swapped is not None
        members = list(group.swapped.tables)
        num_spare_blocks = 0
        if self.roster.running:
            num_spare_blocks = max(map(self.roster.num_spare_blocks, members)) + len(members)
        if not self.kv.swap_in(group.swapped, num_spare_blocks):
            return _Outcome.NO_ROOM
        group.swapped = None
        for request in members:
            self.roster.start(request, group, request.num_computed_tokens, 0)
        for request in members:
            compute(request)
        return _Outcome.ADMITTED


def _closest(request: Request, siblings: list[Request]) -> tuple[Request | None, int]:
    """The running member that shares most leading tokens, and how many; one token is left to compute."""
    best, most = None, 0
    for sibling in siblings:
        limit = min(len(request.token_ids) - 1, len(sibling.token_ids))
        shared = min(request.num_prompt_tokens, limit)
        while shared < limit and request.token_ids[shared] == sibling.token_ids[shared]:
            shared += 1
        if shared > most:
            best, most = sibling, shared
    return best, most
