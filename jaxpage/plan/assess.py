"""A scenario with all that is known of it: memory, compiled steps, and the rates that its chips allow at best.

It must not know how any of it is shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxpage.plan.compiled import StepReport
from jaxpage.plan.hlo import total_wire_bytes
from jaxpage.plan.memory import Memory, estimate_step_bytes, find_memory
from jaxpage.plan.scenario import Scenario
from jaxpage.plan.work import StageWork, Work
from jaxpage.runner.memory import KVCachePlan
from pallas_kernels.targets.chips import Chip

MOST_REQUESTS = 2**20


@dataclasses.dataclass(frozen=True)
class Rate:
    """The most that steps of one kind can do.

    Attributes:
        size: requests (decode) or tokens (prefill) at once, in all engines together.
        context: tokens of each request in the cache, or of each prompt.
        work: of one device in a step, where stages differ of the one that takes longest.
        times: seconds by resource that a device is busy for one step.
        seconds: from one token of a request to the next, at least; for prefill, of the step.
        tokens_per_s: of all engines together, at most.
        fits: the cache holds such requests.
    """

    size: int
    context: int
    work: Work
    times: dict[str, float]
    seconds: float
    tokens_per_s: float
    fits: bool

    @property
    def bound(self) -> str:
        """The resource that is busy longest."""
        return max(self.times, key=self.times.__getitem__)


@dataclasses.dataclass(frozen=True)
class Assessment:
    """See the module.

    Attributes:
        steps: what the compiler says; None if it was not asked.
        chip: limits of a device; None if not known, and then there are no rates.
    """

    scenario: Scenario
    memory: Memory
    steps: Sequence[StepReport] | None
    chip: Chip | None
    context: int

    @property
    def problems(self) -> list[str]:
        """Why this would not work; nothing if it would."""
        found = [f"the {step.name} step does not compile: {step.problem}" for step in self.steps or () if step.problem]
        if self.memory.problem:
            found.append(self.memory.problem)
        elif self.memory.most is not None and self.memory.full_requests < 1:
            found.append(
                f"a request of max_model_len {self.scenario.config.max_model_len:,} tokens does not fit: there is room "
                f"for {self.memory.num_tokens:,} tokens"
            )
        return found

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def num_served(self) -> int:
        """Requests of ``context`` tokens that all engines can run at once."""
        most = self.memory.most
        if most is None:
            return 0
        blocks = -(-self.context // most.block_size)
        room = (most.num_blocks - 1) // blocks
        return self.scenario.num_replicas * min(room, self.scenario.config.max_num_seqs)

    @property
    def temp_factor(self) -> float:
        """How the compiler's temporaries compare to the estimate, to correct estimates of what is alike."""
        if self.steps is None:
            return 1.0
        guessed = max(estimate_step_bytes(part) for part in self.scenario.parts)
        return max((step.step_bytes for step in self.steps), default=guessed) / guessed

    def decode(self, num_requests: int, context: int | None = None) -> Rate:
        """A token for each of ``num_requests``, which engines and the stages of their pipelines share evenly."""
        context = context or self.context
        scenario, num_stages = self.scenario, len(self.scenario.parts)
        in_step = num_requests / scenario.num_replicas / num_stages
        works = [StageWork(part).decode(in_step, context) for part in scenario.parts]
        works = [self._with_compiled_wire(work, index, "decode", in_step) for index, work in enumerate(works)]
        work, times = self._slowest(works)
        seconds = max(times.values()) * num_stages
        fits = self.memory.most is not None and _room(self.memory.most, context) >= num_requests / scenario.num_replicas
        return Rate(num_requests, context, work, times, seconds, num_requests / seconds, fits)

    def prefill(self, context: int | None = None) -> Rate:
        """The largest step, full of prompts of ``context`` tokens."""
        context = context or self.context
        scenario, num_tokens = self.scenario, self.scenario.config.max_num_batched_tokens
        works = [StageWork(part).prefill(num_tokens, context) for part in scenario.parts]
        works = [self._with_compiled_wire(work, index, "prefill", num_tokens) for index, work in enumerate(works)]
        work, times = self._slowest(works)
        seconds = max(times.values())
        total = num_tokens * scenario.num_replicas
        fits = self.memory.most is not None and _room(self.memory.most, context) >= 1
        return Rate(total, context, work, times, seconds, total / seconds, fits)

    def compute_bound_from(self, context: int | None = None) -> int | None:
        """The least number of requests at which a decode step computes no shorter than it reads memory.

        None: reading keys and values takes longer for any number.
        """

        def is_compute_bound(num_requests: int) -> bool:
            times = self.decode(num_requests, context).times
            return times["compute"] >= times["memory"]

        if not is_compute_bound(MOST_REQUESTS):
            return None
        low, high = 0, MOST_REQUESTS
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if is_compute_bound(middle) else (middle, high)
        return high

    def _slowest(self, works: Sequence[Work]) -> tuple[Work, dict[str, float]]:
        assert self.chip is not None, "rates need the limits of a chip"
        dtype = self.scenario.config.dtype
        pairs = [(work, work.times(self.chip, dtype)) for work in works]
        return max(pairs, key=lambda pair: max(pair[1].values()))

    def _with_compiled_wire(self, work: Work, stage: int, name: str, num_tokens: float) -> Work:
        """What is sent grows with the tokens; the compiler says how much it is for one size."""
        for step in self.steps or ():
            if (step.stage, step.name) == (stage, name) and not step.problem:
                sent = total_wire_bytes(step.collectives) * num_tokens / step.num_tokens
                return dataclasses.replace(work, wire_bytes=sent)
        return work


def _room(cache: KVCachePlan, context: int) -> int:
    """Requests of ``context`` tokens that a cache holds."""
    return (cache.num_blocks - 1) // -(-context // cache.block_size)


def assess(
    scenario: Scenario,
    context: int,
    steps: Sequence[StepReport] | None = None,
    chip: Chip | None = None,
    temp_factor: float = 1.0,
) -> Assessment:
    """Puts together what is known.

    Args:
        context: tokens of a request, where rates depend on it.
        steps: of the compiler; the most that any of a stage's needs is set aside.
        chip: limits of a device, if the slice does not tell.
        temp_factor: on estimates of temporaries, see ``Assessment.temp_factor``.
    """
    compiled = None
    if steps is not None and not any(step.problem for step in steps):
        compiled = [max(step.step_bytes for step in steps if step.stage == part.stage.index) for part in scenario.parts]
    memory = find_memory(scenario, compiled, temp_factor)
    return Assessment(scenario, memory, steps, chip or scenario.where.chip, context)
