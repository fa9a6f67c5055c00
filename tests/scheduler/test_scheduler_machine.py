"""Whatever comes in whatever order, in however small a pool: everything ends, with the tokens it has alone."""

from __future__ import annotations

from typing import Any

import pytest
from engine_loop import Loop
from fake_model import END_ID, make_request, make_samples, make_scheduler, make_search
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxpage.request import Request
from jaxpage.scheduler.group import RequestGroup

pytestmark = pytest.mark.timeout(0)  # the nightly profile runs long
MAX_MODEL_LEN = 24
MAX_STEPS = 3000
PIECES = [(0, 1, 2, 3), (0, 1, 2, 4, 5), (6, 7, 8), (9,), (0, 1)]
"""Prompts are made of these, so they often begin alike, and part inside a block."""
MODES = ["swap", "recompute"]


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, steps, aborts, preemptions and resets in any order; ``Loop`` checks every step."""

    def __init__(self) -> None:
        super().__init__()
        self.num_added = 0

    @initialize(
        num_usable=st.sampled_from([6, 8, 5, 4, 10, 3, 2, 1, 20]),
        block_size=st.sampled_from([4, 2, 1, 8]),
        max_num_seqs=st.sampled_from([4, 3, 6, 2, 1]),
        extra_budget=st.integers(0, 12),
        chunked=st.sampled_from([True, True, False]),
        caching=st.booleans(),
        num_host_blocks=st.sampled_from([0, 4, 30, 2]),
        mode=st.sampled_from(MODES),
        policy=st.sampled_from(["fcfs", "priority"]),
        threshold=st.sampled_from([0, 3, 8]),
        num_stages=st.sampled_from([1, 2, 4]),
    )
    def start(self, extra_budget: int, **engine: Any) -> None:
        smallest = engine["max_num_seqs"] if engine["chunked"] else MAX_MODEL_LEN
        engine |= {"budget": smallest + extra_budget, "max_model_len": MAX_MODEL_LEN}
        self.loop = Loop(make_scheduler(**engine))

    def prompt(self, pieces: list[tuple[int, ...]]) -> list[int]:
        pool = self.loop.scheduler.kv
        tokens = [token for piece in pieces for token in piece]
        return tokens[: min(MAX_MODEL_LEN - 1, pool.pool.num_usable * pool.block_size)]

    def priority(self, value: int) -> int:
        return value if self.loop.scheduler.policy == "priority" else 0

    @rule(
        pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=6),
        n=st.sampled_from([1, 1, 2, 3, 5]),
        max_tokens=st.sampled_from([8, 3, 1, 14, 0]),
        end_ids=st.sampled_from([(), (END_ID,), (END_ID, 3)]),
        min_tokens=st.integers(0, 3),
        salt=st.sampled_from([None, None, None, "a"]),
        scored=st.sampled_from([None, None, None, 1]),
        priority=st.integers(-1, 1),
        poison=st.sampled_from([None, None, None, None, 0, 2, 5, 9]),
    )
    def add(self, pieces, n, max_tokens, end_ids, min_tokens, salt, scored, priority, poison) -> None:
        requests = make_samples(
            f"{self.num_added}.",
            self.prompt(pieces),
            n,
            max_tokens,
            end_ids=end_ids,
            min_tokens=min(min_tokens, max_tokens),
            salt=salt,
            prompt_logprobs=scored,
        )
        self.loop.add(*requests, priority=self.priority(priority))
        if poison is not None:
            self.loop.poison[requests[-1]] = poison
        self.num_added += 1

    @rule(
        pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=4),
        width=st.sampled_from([2, 3, 1, 4]),
        max_tokens=st.sampled_from([6, 2, 10, 1]),
        end_ids=st.sampled_from([(), (END_ID,), (END_ID, 3)]),
        early_stopping=st.sampled_from([False, True, "never"]),
        priority=st.integers(-1, 1),
    )
    def add_search(self, pieces, width, max_tokens, end_ids, early_stopping, priority) -> None:
        prompt = self.prompt(pieces)
        max_tokens = min(max_tokens, MAX_MODEL_LEN - len(prompt))
        width = min(width, self.loop.scheduler.roster.max_num_seqs)
        search = make_search(max_tokens, width, end_ids=end_ids, early_stopping=early_stopping)
        request = make_request(f"{self.num_added}b", prompt, max_tokens, end_ids=end_ids)
        self.loop.add_search(request, search, self.priority(priority))
        self.num_added += 1

    @precondition(lambda self: not self.loop.is_done)
    @rule(lags=st.lists(st.integers(0, 4), min_size=1, max_size=6))
    def step(self, lags: list[int]) -> None:
        for lag in lags:
            self.loop.step(min(lag, self.loop.scheduler.num_stages))

    @precondition(lambda self: self.loop.scheduler.has_requests)
    @rule(data=st.data(), alone=st.booleans())
    def abort(self, data: st.DataObject, alone: bool) -> None:
        group = self.draw_group(data, self.loop.checks.groups())
        self.loop.abort(group, group.requests[-1:] if alone and group.search is None else group.requests)

    @precondition(lambda self: self.preemptible())
    @rule(data=st.data(), mode=st.sampled_from(MODES), alone=st.booleans())
    def preempt(self, data: st.DataObject, mode: str, alone: bool) -> None:
        group = self.draw_group(data, self.preemptible())
        members: list[Request] = group.running
        if alone and group.search is None:
            members = [members[data.draw(st.integers(0, len(members) - 1), "member")]]
        self.loop.preempt(*members, mode=mode)

    @rule()
    def fail(self) -> None:
        self.loop.fails_next = True

    @rule()
    def reset_prefix_cache(self) -> None:
        self.loop.scheduler.kv.reset_prefix_cache()

    @invariant()
    def books_are_true(self) -> None:
        if hasattr(self, "loop"):
            self.loop.checks.books()

    def draw_group(self, data: st.DataObject, groups: list[RequestGroup]) -> RequestGroup:
        return groups[data.draw(st.integers(0, len(groups) - 1), "group")]

    def preemptible(self) -> list[RequestGroup]:
        return [group for group in self.loop.checks.groups() if group.running and group.can_be_preempted]

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.loop.run_all(lag=self.num_added % (self.loop.scheduler.num_stages + 1), max_steps=MAX_STEPS)
        self.loop.verify()
        stats = self.loop.scheduler.stats
        event(f"preemptions: {min(stats.num_preemptions, 5)}")


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=max(150, settings().max_examples),
    stateful_step_count=25,
)
