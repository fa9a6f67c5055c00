"""``python -m jaxpage.benchmarks.pipeline``: how much of the time the stages of a pipeline stand idle.

Drives the real core and scheduler over stages that only take time, on a virtual clock, or reads the timeline of a real
engine: a JSON list of objects with ``call`` (``Schedule.call``), ``stage``, ``start_s`` and ``end_s``. Examples:
    python -m jaxpage.benchmarks.pipeline --stages 2 4 8 --requests 1 8 9 64
    python -m jaxpage.benchmarks.pipeline --timeline FILE
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from jaxpage.benchmarks import report
from jaxpage.engine.core import EngineCore
from jaxpage.kv.manager import KVCacheManager
from jaxpage.params import SamplingParams
from jaxpage.request import Request
from jaxpage.runner.runner import Runner, StepInFlight, StepResult
from jaxpage.scheduler.schedule import Schedule
from jaxpage.scheduler.scheduler import Scheduler

PROMPT_TOKENS = 100
MEAN_OUTPUT_TOKENS = 60
"""Of requests that come and go: others take their places when they end."""
MAX_MODEL_LEN = 1_000_000
"""Also the block size: a request has one block, and memory plays no part."""
TOKEN_ID = 7


@dataclasses.dataclass(frozen=True, slots=True)
class StageRun:
    """One stage's part of one step."""

    call: int
    stage: int
    start_s: float
    end_s: float


def idle_share(runs: Iterable[StageRun]) -> float:
    """The share of time without work, over all stages, each from its first start to its last end.

    So the time in which a pipeline fills and drains does not count.
    """
    idle_s = total_s = 0.0
    for _, group in itertools.groupby(sorted(runs, key=lambda run: (run.stage, run.start_s)), lambda run: run.stage):
        own = list(group)
        span_s = max(run.end_s for run in own) - own[0].start_s
        total_s += span_s
        idle_s += span_s - sum(run.end_s - run.start_s for run in own)
    return idle_s / total_s if total_s else 0.0


def read_timeline(path: str) -> list[StageRun]:
    """The runs in a file.

    Raises:
        ValueError: it is not such a list, or the runs of a stage overlap.
    """
    try:
        entries = json.loads(Path(path).read_text())
        runs = [
            StageRun(int(each["call"]), int(each["stage"]), float(each["start_s"]), float(each["end_s"]))
            for each in entries
        ]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no list of call, stage, start_s, end_s: {error!r}") from error
    if not runs:
        raise ValueError(f"{path} has no runs")
    runs.sort(key=lambda run: (run.stage, run.start_s))
    for before, after in itertools.pairwise(runs):
        if before.stage == after.stage and after.start_s < before.end_s:
            raise ValueError(f"{path}: stage {after.stage} begins call {after.call} before it ends call {before.call}")
    return runs


class TimedStages:
    """In the place of a runner: every stage takes its time for each step, in order, and gives no thought to tokens.

    A stage begins when it is free, the stage before has ended, and, for the first, when the tokens of the step as many
    calls before as there are stages are there.

    Attributes:
        now_s: the host's clock.
    """

    num_mask_words = 1

    def __init__(self, stage_s: Sequence[float], host_s: float = 0.0) -> None:
        """``host_s``: what a step takes of the host's time before the first stage can begin."""
        self.stage_s, self.host_s = stage_s, host_s
        self.now_s = 0.0
        self.runs: list[StageRun] = []
        self.schedules: list[Schedule] = []
        self._free_s = [0.0] * len(stage_s)
        self._ends_s: list[tuple[int, float]] = []

    def dispatch(self, schedule: Schedule, masks: object = None) -> StepInFlight | None:
        """Enters the step in the timeline."""
        if not schedule.requests:
            return None
        self.schedules.append(schedule)
        self.now_s += self.host_s
        tokens_s = next((end for call, end in reversed(self._ends_s) if call <= schedule.call - len(self.stage_s)), 0.0)
        ready_s = max(self.now_s, tokens_s)
        for stage, duration_s in enumerate(self.stage_s):
            start_s = max(ready_s, self._free_s[stage])
            ready_s = self._free_s[stage] = start_s + duration_s
            self.runs.append(StageRun(schedule.call, stage, start_s, ready_s))
        self._ends_s = [*self._ends_s[-len(self.stage_s) :], (schedule.call, ready_s)]
        return cast(StepInFlight, _TimedStep(self, schedule, ready_s))


@dataclasses.dataclass(slots=True)
class _TimedStep:
    stages: TimedStages
    schedule: Schedule
    end_s: float

    def collect(self) -> StepResult:
        self.stages.now_s = max(self.stages.now_s, self.end_s)
        return StepResult([TOKEN_ID] * len(self.schedule.requests), None, None, None)


class Simulation:
    """Some requests on such stages; ``comes_and_goes``: each ends at some time, and another takes its place."""

    def __init__(
        self, num_requests: int, stage_s: Sequence[float], host_s: float = 0.0, comes_and_goes: bool = False
    ) -> None:
        self.stages = TimedStages(stage_s, host_s)
        self.num_requests = num_requests
        self._random = random.Random(0) if comes_and_goes else None
        scheduler = Scheduler(
            KVCacheManager(2 * num_requests + 1, MAX_MODEL_LEN, False),
            max_num_seqs=num_requests,
            max_num_batched_tokens=max(2048, num_requests),
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=True,
            num_stages=len(stage_s),
        )
        self.core = EngineCore(scheduler, cast(Runner, self.stages))
        self._names = itertools.count()

    def step(self) -> None:
        """One call of the core."""
        scheduler = self.core.scheduler
        while len(scheduler.running) + scheduler.num_waiting < self.num_requests:
            name, max_tokens = next(self._names), MAX_MODEL_LEN
            if self._random is not None:
                max_tokens = 1 + int(self._random.expovariate(1 / MEAN_OUTPUT_TOKENS))
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            self.core.add(Request(str(name), [TOKEN_ID] * PROMPT_TOKENS, params, max_tokens))
        self.core.step()

    def run(self, num_calls: int) -> tuple[list[StageRun], list[Schedule]]:
        """The runs and schedules of ``num_calls`` calls in steady decode, that is, with all prompts dealt out."""
        scheduler = self.core.scheduler
        self.step()
        while scheduler.num_waiting:
            self.step()
        for _ in range(4 * len(self.stages.stage_s)):
            self.step()
        first = scheduler.num_calls
        for _ in range(num_calls):
            self.step()
        runs = [run for run in self.stages.runs if run.call >= first]
        return runs, [schedule for schedule in self.stages.schedules if schedule.call >= first]


def measure(num_stages: int, num_requests: int, num_calls: int, host: float, comes_and_goes: bool) -> dict[str, Any]:
    """A row of the table. Times are in the time of one stage."""
    runs, schedules = Simulation(num_requests, [1.0] * num_stages, host, comes_and_goes).run(num_calls)
    sizes = [len(schedule.requests) for schedule in schedules]
    span = max(run.end_s for run in runs) - min(run.start_s for run in runs) - (num_stages - 1)
    return {
        "stages": num_stages,
        "requests": num_requests,
        "come and go": "yes" if comes_and_goes else "no",
        "requests a step": f"{min(sizes)}-{max(sizes)}",
        "tokens a stage time": sum(sizes) / span,
        "idle %": 100 * idle_share(runs),
        "unavoidable idle %": 100 * max(0.0, 1 - num_requests / num_stages),
    }


def main(argv: list[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N", help="stages of equal time")
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[1, 8, 9, 64], metavar="N", help="requests at a time"
    )
    parser.add_argument("--calls", type=int, default=400, metavar="N", help="calls of the scheduler that are measured")
    parser.add_argument("--host", type=float, default=0.1, metavar="X", help="the host's time a step, in stage times")
    parser.add_argument("--timeline", metavar="FILE", help="read what a real engine did instead")
    parser.add_argument("--json", metavar="FILE", help="file for the result")
    options = parser.parse_args(argv)
    settings: dict[str, Any] = {}
    if options.timeline:
        try:
            runs = read_timeline(options.timeline)
        except ValueError as error:
            parser.error(f"--timeline: {error}")
        stages, calls = {run.stage for run in runs}, {run.call for run in runs}
        rows = [{"stages": len(stages), "steps": len(calls), "idle %": 100 * idle_share(runs)}]
    else:
        if min(*options.stages, *options.requests, options.calls - 1) < 1 or options.host < 0:
            parser.error("--stages, --requests: must be at least 1, --calls at least 2, --host at least 0")
        settings = {"calls": options.calls, "host": options.host}
        cases = itertools.product(options.stages, options.requests, (False, True))
        rows = [measure(stages, requests, options.calls, options.host, goes) for stages, requests, goes in cases]
    print(report.table(rows))
    report.write(options.json, "pipeline", rows, **settings)


if __name__ == "__main__":
    main()
