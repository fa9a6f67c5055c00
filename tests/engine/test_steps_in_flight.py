"""The core keeps as many steps in flight as there are stages, reads the oldest, and lets only those wait who must."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxpage.benchmarks.pipeline import Simulation, TimedStages, idle_share
from jaxpage.request import FinishReason, Request


class Anything:
    """A constraint that notes how many tokens it knew each time it was asked."""

    def __init__(self) -> None:
        self.num_known = 0
        self.asked: list[int] = []

    def mask(self, allowed: np.ndarray) -> None:
        assert allowed.shape == (TimedStages.num_mask_words,)
        self.asked.append(self.num_known)

    def accept(self, token_id: int) -> None:
        self.num_known += 1

    def fork(self) -> Anything:
        return self


def calls_of(simulation: Simulation, request: Request, first: int) -> list[int]:
    return [
        schedule.call
        for schedule in simulation.stages.schedules
        if schedule.call >= first and any(item.request is request for item in schedule.requests)
    ]


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_a_step_is_dispatched_before_the_one_that_makes_room_is_read(num_stages: int) -> None:
    simulation = Simulation(8, [1.0] * num_stages, host_s=0.9)
    runs, schedules = simulation.run(40)
    assert [schedule.call for schedule in schedules] == list(range(schedules[0].call, schedules[0].call + 40))
    assert idle_share(runs) == pytest.approx(0, abs=1e-9), "the host's time is hidden behind the stages'"
    assert len(simulation.core._in_flight) == num_stages


def test_with_one_stage_the_step_before_is_read_even_if_there_is_nothing_to_run() -> None:
    simulation = Simulation(1, [1.0])
    simulation.step()
    [request] = simulation.core.scheduler.running
    assert (len(simulation.core._in_flight), request.num_known_output_tokens) == (1, 0)
    simulation.core.finish(request, FinishReason.ABORT)
    simulation.core.step()
    assert not simulation.core.has_work and simulation.stages.now_s == 1.0


def test_what_is_in_flight_is_read_step_by_step_when_all_have_ended() -> None:
    simulation = Simulation(8, [1.0] * 4)
    simulation.run(12)
    core = simulation.core
    for request in list(core.scheduler.running):
        core.finish(request, FinishReason.ABORT)
    waits = []
    while core.has_work:
        before = simulation.stages.now_s
        assert core.step() == []
        waits.append(simulation.stages.now_s - before)
    assert waits == pytest.approx([1.0] * 4)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_a_masked_request_has_its_turn_every_time_and_holds_up_nobody_else(num_stages: int) -> None:
    simulation = Simulation(8, [1.0] * num_stages, host_s=0.2)
    simulation.run(4)
    masked = simulation.core.scheduler.running[3]
    masked.constraint = constraint = Anything()
    first = simulation.core.scheduler.num_calls + 2 * num_stages
    runs, _ = simulation.run(80)
    calls = calls_of(simulation, masked, first)
    assert {after - before for before, after in itertools.pairwise(calls)} == {num_stages}
    assert constraint.asked[-10:] == list(range(constraint.asked[-10], constraint.asked[-10] + 10))
    # One step in so many waits for the host; without a pipeline that is every step.
    assert 0.9 * 0.2 / num_stages < 1 / (1 - idle_share(runs)) - 1 < 1.1 * 0.2 / num_stages
