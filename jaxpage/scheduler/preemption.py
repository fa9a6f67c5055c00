"""Giving way: who loses its blocks when the pool is short, and whether they go to the host or are computed again."""

from __future__ import annotations

import dataclasses
from collections import Counter

from jaxpage.request import Request
from jaxpage.scheduler.group import RequestGroup
from jaxpage.scheduler.roster import Roster
from jaxpage.scheduler.schedule import Draft


@dataclasses.dataclass(frozen=True)
class PreemptionPolicy:
    """Compares the time of the two ways.

    Attributes:
        mode: "swap" and "recompute" force one way; where the host pool is full, "swap" computes again, too.
        seconds_per_token: to compute a token of a prompt again.
        seconds_per_block: to move a block one way between device and host.
    """

    mode: str = "auto"
    seconds_per_token: float = 0.0
    seconds_per_block: float = 0.0

    def prefers_swap(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether blocks that hold ``num_tokens`` tokens are better moved out and in again than computed again."""
        if self.mode != "auto":
            return self.mode == "swap"
        return 2 * num_blocks * self.seconds_per_block < num_tokens * self.seconds_per_token


class Preemption:
    """Takes blocks from those who come last in order and gives them to those who come first.

    The first in order always gets what it needs, so it goes on and ends, and everybody's turn comes: no deadlock, and
    no two requests that keep taking each other's blocks.
    """

    def __init__(self, roster: Roster, policy: PreemptionPolicy) -> None:
        self.roster = roster
        self.kv = roster.kv
        self.policy = policy

    def make_room(self, request: Request, num_tokens: int, draft: Draft) -> bool:
        """Grows the request's blocks at the expense of what comes after it; False if it has to pause or has ended."""
        while not self.kv.append_slots(request, num_tokens):
            draft.is_short_of_blocks = True
            if not self._preempt_behind(request, draft):
                return False
        return True

    def preempt(self, group: RequestGroup, members: list[Request], *, may_swap: bool = True) -> None:
        """Takes the blocks of some running members.

        Only a whole group can be swapped: a part of one shares blocks with what stays, and finds them there again.
        """
        stats = self.roster.stats
        num_tokens = sum(request.num_computed_tokens for request in members)
        num_samples = 1 if group.search is not None else len(members)
        group.num_preemptions += num_samples
        stats.num_preempted_samples += num_samples
        num_blocks = len({block for request in members for block in request.block_ids})
        is_whole = len(members) == len(group.running)
        if may_swap and is_whole and self.policy.prefers_swap(num_blocks * self.kv.block_size, num_blocks):
            group.swapped = self.kv.swap_out(members)
        if group.swapped is not None:
            stats.num_swap_preemptions += len(members)
            stats.num_swap_preempted_tokens += num_tokens
        else:
            stats.num_recompute_preemptions += len(members)
            stats.num_recompute_preempted_tokens += num_tokens
            for request in reversed(members):
                self.kv.free(request)
                _lose(request)
        self.roster.stop(group, members)

    def lose(self, group: RequestGroup) -> None:
        """What the device and the host hold of a group is worth nothing: it has to be computed again."""
        if group.swapped is not None:
            for request in list(group.swapped.tables):
                self.kv.drop_swapped(group.swapped, request)
                _lose(request)
            group.swapped = None
        if group.running:
            self.preempt(group, group.running, may_swap=False)

    def make_room_by_priority(self) -> None:
        """Makes room for the head of the queue where running groups of lower priority can give enough."""
        roster, pool = self.roster, self.kv.pool
        head = next(iter(roster.waiting), None)
        if head is None:
            return
        groups = dict.fromkeys(roster.group_of[request] for request in reversed(roster.running))
        behind = [group for group in groups if group.priority > head.priority and group.can_be_preempted]
        num_slots = 0 if head.slots else head.num_slots
        num_blocks = self.kv.blocks_for(len(head.waiting[0].token_ids))
        if len(behind) < len(groups):  # it will run beside others
            num_blocks += roster.num_spare_blocks(head.waiting[0])
        holders = Counter(block for group in behind for request in group.running for block in request.block_ids)
        blocks_to_give = sum(count == pool.ref_counts[block] for block, count in holders.items())
        slots_to_give = sum(len(group.running) + len(group.slots) for group in behind)
        if pool.num_free + blocks_to_give < num_blocks or len(roster.free_slots) + slots_to_give < num_slots:
            return
        for group in behind:
            if pool.num_free >= num_blocks and len(roster.free_slots) >= num_slots:
                return
            self.preempt(group, group.running)

    def break_stall(self, alone: RequestGroup | None) -> None:
        """Nothing could be scheduled and nothing is under way: the last group gives way to those before it.

        ``alone``: who alone may go on.
        """
        roster = self.roster
        last = roster.group_of[roster.running[-1]]
        is_alone = last is roster.group_of[roster.running[0]]
        # Beams that came back without their siblings keep the room that the head of the queue waits for.
        is_paused = alone is not None and alone is not last
        if not is_alone or is_paused or (last.waiting and next(iter(roster.waiting)) is not last):
            self.preempt(last, last.running)
        elif last.search is None and len(roster.running) > 1:
            self.preempt(last, [roster.running[-1]])
        else:
            roster.end_for_lack_of_room(roster.running[-1])

    def _preempt_behind(self, request: Request, draft: Draft) -> bool:
        roster, taken = self.roster, draft.taken()
        own = roster.group_of[request]
        for other in reversed(roster.running):
            group = roster.group_of[other]
            if group is own:
                break
            if group.can_be_preempted and taken.isdisjoint(group.requests):
                self.preempt(group, group.running)
                return True
        if own.search is None:
            for sibling in reversed(own.running):
                if sibling is request:
                    break
                if sibling not in taken:
                    self.preempt(own, [sibling])
                    return True
        members = own.running if own.search is not None else [request]
        if len(members) == len(roster.running) and not own.has_pending_tokens:
            roster.end_for_lack_of_room(request)  # alone, and the pool holds no more
        return False


def _lose(request: Request) -> None:
    """Notes what is to be computed again: what was computed, and the token sampled last along with the rest."""
    is_prefilled = request.num_computed_tokens >= request.num_prompt_tokens
    num_lost = request.num_tokens if is_prefilled else request.num_computed_tokens
    request.num_lost_tokens = max(request.num_lost_tokens, num_lost)
    request.num_prefill_tokens = max(request.num_prefill_tokens, request.num_lost_tokens)
    request.num_computed_tokens = 0
