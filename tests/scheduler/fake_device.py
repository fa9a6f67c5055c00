"""A device for scheduler tests: a paged cache in plain lists, written and read through block tables like a real one.

Knows schedules only; whether they are any good is judged by ``schedule_checks``.
"""

from __future__ import annotations

from collections.abc import Sequence

from fake_model import candidates, extended, sampled

from jaxpage.kv.block_ops import BlockOp, BlockOpKind
from jaxpage.request import Request
from jaxpage.scheduler.schedule import Schedule, ScheduledRequest
from jaxpage.scheduler.search import Candidates

EMPTY = -1
"""What a position holds that nobody wrote."""


class FakeDevice:
    """Does what a schedule says at once: block operations, then writes, then reads.

    Attributes:
        blocks: what each block holds; -1: nothing.
        host: the same of host blocks.
        owner: who was admitted to a slot last.
        last_token: by slot, the call whose step sampled last, and the token.
    """

    def __init__(self, num_blocks: int, block_size: int, num_stages: int = 1) -> None:
        self.block_size = block_size
        self.num_stages = num_stages
        self.blocks = [[EMPTY] * block_size for _ in range(num_blocks)]
        self.host: dict[int, list[int]] = {}
        self.owner: dict[int, Request] = {}
        self.last_token: dict[int, tuple[int, int]] = {}

    def forget(self) -> None:
        """As after a fault: nothing is there any more."""
        self.blocks = [[EMPTY] * self.block_size for _ in self.blocks]
        self.host.clear()
        self.owner.clear()
        self.last_token.clear()

    def run(self, schedule: Schedule) -> tuple[list[int], dict[int, Candidates]]:
        """The sampled tokens, and the candidates of the rows that are beams."""
        self.move(schedule.block_ops)
        for request in schedule.admitted:
            self.owner[request.slot] = request
        for item in schedule.requests:
            assert self.owner.get(item.request.slot) is item.request, "a request runs in a slot it was not admitted to"
            for position in range(item.start, item.start + item.num_tokens):
                before = self.read(item.request, position - 1) if position else 0
                self.write(item.request, position, extended(before, self.token(item, position, schedule.call)))
        tokens = [self.sample(item) for item in schedule.requests]
        for item, token_id in zip(schedule.requests, tokens, strict=True):
            if item.samples:
                self.last_token[item.request.slot] = schedule.call, token_id
        beams: dict[int, Candidates] = {
            row: candidates(self.states(item), 100)
            for row, item in enumerate(schedule.requests)
            if item.samples and item.request.is_beam
        }
        return tokens, beams

    def move(self, block_ops: Sequence[BlockOp]) -> None:
        """Operations take effect one after the other."""
        for kind, source, destination in block_ops:
            if kind is BlockOpKind.COPY:
                self.blocks[destination] = list(self.blocks[source])
            elif kind is BlockOpKind.SWAP_OUT:
                self.host[destination] = list(self.blocks[source])
            else:
                self.blocks[destination] = list(self.host[source])

    def read(self, request: Request, position: int) -> int:
        return self.blocks[request.block_ids[position // self.block_size]][position % self.block_size]

    def write(self, request: Request, position: int, state: int) -> None:
        self.blocks[request.block_ids[position // self.block_size]][position % self.block_size] = state

    def token(self, item: ScheduledRequest, position: int, call: int) -> int:
        """A token that the host does not know yet can only be the one its slot sampled last, in the step that is just
        over when this one starts."""
        known = item.request.token_ids
        if position < len(known):
            return known[position]
        assert position == len(known) == item.start + item.num_tokens - 1
        sampled_in, token_id = self.last_token[item.request.slot]
        assert sampled_in == call - self.num_stages, "a token is read before, or long after, it was sampled"
        return token_id

    def states(self, item: ScheduledRequest) -> list[int]:
        """What an item's logits depend on; a fork samples from the logits of its parent."""
        source = item if item.parent is None else item.parent
        return [self.read(source.request, position) for position in range(source.start + source.num_tokens)]

    def sample(self, item: ScheduledRequest) -> int:
        return sampled(self.states(item), item.request, item.output_index) if item.samples else -1
