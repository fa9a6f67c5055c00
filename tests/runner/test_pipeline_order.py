"""Stages in several processes, on devices that run what they are given in order: none waits for ever, none in vain.

The real pipeline gives work to devices that are simulated: a computation takes 1 s; a transfer takes no time, and both
its ends are in it together.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxpage.batch import StepOutput
from jaxpage.runner.commands import Command
from jaxpage.runner.pipeline import StagePipeline

NUM_STEPS = 40


@dataclasses.dataclass(eq=False)
class Work:
    """Something that one device, or two together, do, after ``needs``, which ends at ``end_s``."""

    name: tuple[Any, ...]
    seconds: float
    num_devices: int = 1
    needs: Work | None = None
    end_s: float | None = None

    def copy_to_host_async(self) -> None:
        """The host does not count here."""


class Devices:
    """One device a stage, with the work it was given."""

    def __init__(self, num_stages: int) -> None:
        self.queues: list[deque[Work]] = [deque() for _ in range(num_stages)]
        self.transfers: dict[tuple[Any, ...], Work] = {}
        self.starts_s: list[list[float]] = [[] for _ in range(num_stages)]

    def run(self) -> None:
        """Until all is done; raises TimeoutError if all devices wait for each other."""
        free_s = [0.0] * len(self.queues)
        while any(self.queues):
            heads = Counter(queue[0] for queue in self.queues if queue)
            ready = [
                work
                for work, count in heads.items()
                if count == work.num_devices and (work.needs is None or work.needs.end_s is not None)
            ]
            if not ready:
                raise TimeoutError(f"everybody waits: {[queue[0].name for queue in self.queues if queue]}")
            for work in ready:
                where = [stage for stage, queue in enumerate(self.queues) if queue and queue[0] is work]
                needed_s = 0.0 if work.needs is None else work.needs.end_s or 0.0
                start_s = max(needed_s, *(free_s[stage] for stage in where))
                work.end_s = start_s + work.seconds
                for stage in where:
                    self.queues[stage].popleft()
                    free_s[stage] = work.end_s
                    if work.seconds:
                        self.starts_s[stage].append(start_s)


class Stage:
    """A stage as one process sees it."""

    def __init__(self, devices: Devices, index: int, num_stages: int, is_here: bool) -> None:
        self.devices, self.index, self.is_here = devices, index, is_here
        self.is_last = index == num_stages - 1
        shape = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=SingleDeviceSharding(jax.devices()[0]))
        self.programs = SimpleNamespace(
            first_stage_tokens=shape,
            boundary_shape=lambda num_tokens: shape,
            output_shapes=lambda num_tokens: StepOutput(shape, (), (), ()),  # type: ignore[arg-type]
            packing=lambda num_tokens: SimpleNamespace(
                flags=lambda packed: dict.fromkeys(("has_logprobs", "has_prompt_logprobs", "has_pooling"), False)
            ),
        )
        self.state: Any = None
        self.num_steps = 0

    def run(self, num_tokens: int, packed: np.ndarray, arrived: Any) -> Any:
        needs = arrived if isinstance(arrived, Work) else None
        work = Work(("step", self.num_steps, "stage", self.index), 1.0, needs=needs)
        self.num_steps += 1
        self.devices.queues[self.index].append(work)
        if not self.is_last:
            return work
        self.state = SimpleNamespace(last_token=work)
        return StepOutput(work, (), (), ())  # type: ignore[arg-type]


class Way:
    """Between two stages, as one process sees it. Within a process copies go beside what devices do."""

    def __init__(self, one: Stage, other: Stage) -> None:
        self.one, self.other = one, other
        self.is_local = one.is_here and other.is_here
        self.count = 0

    def __call__(self, x: Work | None, shape: Any) -> Work | None:
        if self.is_local:
            return x
        if not (self.one.is_here or self.other.is_here):
            return None
        name = ("from", self.one.index, "to", self.other.index, self.count)
        self.count += 1
        work = self.one.devices.transfers.setdefault(name, Work(name, 0.0, num_devices=2))
        if self.one.is_here:
            work.needs = x
            self.one.devices.queues[self.one.index].append(work)
            return None
        self.other.devices.queues[self.other.index].append(work)
        return work


def simulate(process_of: list[int], after_run: Callable[[StagePipeline, int], None] | None = None) -> Devices:
    """Steps through stages that belong to these processes, and then what is left of them."""
    num_stages = len(process_of)
    devices = Devices(num_stages)
    for process in range(max(process_of) + 1):
        stages: Any = [Stage(devices, each, num_stages, process_of[each] == process) for each in range(num_stages)]
        pipeline = StagePipeline(stages, Way)  # type: ignore[arg-type]
        results = []
        for call in range(NUM_STEPS):
            results.append(pipeline.run(Command(call, [], [], {}, 8, np.zeros(0, np.int32))))
            if after_run is not None:
                after_run(pipeline, call)
            due = results[call - num_stages] if call >= num_stages else None
            assert due is None or due.done(), "the host could not read the step that is due"
        pipeline.bring_back(NUM_STEPS)
        is_informed = process_of[0] == process or process_of[-1] == process
        assert all((each is not None and each.done()) == is_informed for each in results)
    devices.run()
    return devices


def idle_s(devices: Devices) -> float:
    """Seconds that stages stand idle between their first and their last step."""
    return sum(starts[-1] - starts[0] - (len(starts) - 1) for starts in devices.starts_s)


PROCESSES = [
    [0, 1],
    [0, 1, 2],
    [0, 0, 1],
    [0, 1, 1],
    [0, 1, 2, 3],
    [0, 0, 1, 1],
    [0, 1, 1, 1],
    [0, 0, 1, 2],
    [*range(8)],
]


@pytest.mark.parametrize("process_of", [[0], [0, 0], [0, 0, 0], *PROCESSES], ids=str)
def test_no_stage_stands_idle(process_of: list[int]) -> None:
    devices = simulate(process_of)
    assert [len(starts) for starts in devices.starts_s] == [NUM_STEPS] * len(process_of)
    assert idle_s(devices) == 0.0


@pytest.mark.parametrize("process_of", PROCESSES, ids=str)
def test_a_way_back_given_at_once_would_hold_up_the_first_stage(process_of: list[int]) -> None:
    """That the simulation can tell the difference."""
    devices = simulate(process_of, after_run=lambda pipeline, call: pipeline.bring_back(call))
    assert idle_s(devices) >= NUM_STEPS - len(process_of)


@pytest.mark.parametrize("process_of", [[0, 1], [0, 1, 2], [0, 1, 2, 3]], ids=str)
def test_a_way_back_given_after_the_next_hand_over_would_stop_everybody(
    process_of: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    bring_back = StagePipeline.bring_back
    count = itertools.count()

    def late(pipeline: StagePipeline, call: int) -> None:
        if next(count) % 2 == 0 or call == NUM_STEPS:  # the second time in a step is before the hand-over
            bring_back(pipeline, call)

    monkeypatch.setattr(StagePipeline, "bring_back", late)
    with pytest.raises(TimeoutError, match="everybody waits"):
        simulate(process_of)


@pytest.mark.parametrize("gap", [1, 2, 5])
@pytest.mark.parametrize("process_of", PROCESSES, ids=str)
def test_calls_without_a_step(process_of: list[int], gap: int) -> None:
    """All that is in flight is asked for, as the host does when nothing new can be scheduled."""

    def ask(pipeline: StagePipeline, call: int) -> None:
        if call % gap == 0:
            pipeline.bring_back(call - call % 2)

    simulate(process_of, after_run=ask)
