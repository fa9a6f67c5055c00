"""What each device holds, and how much KV cache fits beside that. The arithmetic is the engine's own.

It must not know times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jaxpage.errors import StartupError
from jaxpage.plan.scenario import Scenario, StagePart
from jaxpage.runner.gpu_pool import usable_share, wanted_share
from jaxpage.runner.memory import KVCachePlan, plan_kv_cache
from jaxpage.runner.step import PROMPT_SCORE_ROWS

UNLIMITED_REQUESTS = 2**40
"""max_num_seqs when only memory is to limit the cache."""


@dataclasses.dataclass(frozen=True)
class StageMemory:
    """Bytes on each device of a stage.

    Attributes:
        usable_bytes: what the engine may use of the device; None if nobody knows, as on a CPU.
        temp_bytes: what is set aside for steps, for temporaries of one and outputs of all in flight: what the largest
            ones need and, as the engine does, no less than its first guess.
        is_estimate: temp_bytes is not from the compiler.
        kv_bytes: the cache that the engine would make; 0 if none fits.
    """

    name: str
    num_layers: int
    usable_bytes: int | None
    weight_bytes: int
    state_bytes: int
    temp_bytes: int
    is_estimate: bool
    bytes_per_block: int
    kv_bytes: int = 0

    @property
    def free_bytes(self) -> int | None:
        """Negative: what is missing even without a cache."""
        if self.usable_bytes is None:
            return None
        return self.usable_bytes - self.weight_bytes - self.state_bytes - self.temp_bytes - self.kv_bytes


@dataclasses.dataclass(frozen=True)
class Memory:
    """What fits on the devices of one engine.

    Attributes:
        cache: as the engine would make it; None if it would not start.
        most: the cache that would fill the memory, were there no limit of requests.
        problem: why the engine would not start.
    """

    stages: tuple[StageMemory, ...]
    cache: KVCachePlan | None
    most: KVCachePlan | None
    problem: str | None = None

    @property
    def fits(self) -> bool:
        """The engine starts, and a request of full length fits."""
        return self.most is not None and self.full_requests >= 1

    @property
    def num_tokens(self) -> int:
        """Tokens of KV cache that fit, in one engine."""
        return 0 if self.most is None else self.most.num_tokens

    @property
    def full_requests(self) -> float:
        """Requests of max_model_len tokens that fit at once, in one engine."""
        if self.most is None:
            return 0.0
        return (self.most.num_blocks - 1) / -(-self.most.max_model_len // self.most.block_size)


class TempFit(NamedTuple):
    """What temporaries of the largest step are made of, fitted to what the compilers say.

    Attributes:
        logits_copies: arrays of the logits of all rows that are alive at once, where the sampler filters them.
        hidden_copies: the same of the hidden states of all tokens.
        is_split: each device sorts its part of the vocabulary only.
    """

    logits_copies: float
    hidden_copies: float
    is_split: bool


TEMP_FITS = {"tpu": TempFit(5.6, 8.0, True), "gpu": TempFit(7.5, 2.0, False), "cpu": TempFit(8.0, 2.0, False)}
"""By platform. Against the largest steps of six models that were compiled, those of GPUs and of a CPU come out at most
a twentieth too small and a fifth too large, those of TPUs up to three times too large."""
PROMPT_LOGITS_COPIES = 4.0
"""Where prompt tokens are scored."""


def estimate_step_bytes(part: StagePart) -> int:
    """Temporaries of the largest step without a compiler, and outputs of all that are in flight."""
    num_tokens = part.programs.config.max_num_batched_tokens
    return _temp_bytes(part, num_tokens) + part.programs.in_flight_bytes(num_tokens)


def _temp_bytes(part: StagePart, num_tokens: int) -> int:
    programs, platform = part.programs, part.platform
    fit, ways, model = TEMP_FITS[platform], programs.placement.ways, programs.model
    packing = programs.packing(num_tokens)
    hidden = fit.hidden_copies * num_tokens * model.hidden_size * part.itemsize
    if not programs.is_last:
        return int(hidden)
    vocab_bytes = 4 * model.vocab_size / (ways("vocab") if fit.is_split else 1)
    scored = PROMPT_LOGITS_COPIES * min(PROMPT_SCORE_ROWS, num_tokens)
    return int(max(hidden, vocab_bytes * max(fit.logits_copies * packing.num_rows, scored)))


def find_memory(scenario: Scenario, compiled: Sequence[int] | None = None, factor: float = 1.0) -> Memory:
    """What fits.

    Args:
        compiled: for each stage, ``StepReport.step_bytes`` of the largest step; None: they are estimated.
        factor: on estimates, where the compilers' answer to something alike is known.
    """
    stages, plans, problem = [], [], None
    for index, part in enumerate(scenario.parts):
        needed = int(estimate_step_bytes(part) * factor) if compiled is None else compiled[index]
        stage = _stage_memory(scenario, part, needed, is_estimate=compiled is None)
        stages.append(stage)
        try:
            plans.append(tuple(_plan(scenario, stage, limit) for limit in (None, UNLIMITED_REQUESTS)))
        except StartupError as error:
            problem = problem or (f"{stage.name}: {error}" if len(scenario.parts) > 1 else str(error))
    if problem is not None:
        return Memory(tuple(stages), None, None, problem)
    cache, most = (min(choices, key=lambda plan: plan.num_blocks) for choices in zip(*plans, strict=True))
    held = [dataclasses.replace(stage, kv_bytes=cache.num_blocks * stage.bytes_per_block) for stage in stages]
    return Memory(tuple(held), cache, most)


def _stage_memory(scenario: Scenario, part: StagePart, temp_bytes: int, is_estimate: bool) -> StageMemory:
    programs, chip = part.programs, scenario.where.chip
    guess = programs.guessed_step_bytes(scenario.config.max_num_batched_tokens) - programs.state_bytes
    return StageMemory(
        name="model" if len(scenario.parts) == 1 else f"stage {part.stage.index}",
        num_layers=programs.model.num_layers,
        usable_bytes=None if chip is None else int(chip.memory_bytes * _usable_share(scenario)),
        weight_bytes=part.weight_bytes,
        state_bytes=programs.state_bytes,
        temp_bytes=max(temp_bytes, guess),
        is_estimate=is_estimate,
        bytes_per_block=programs.device_bytes_per_block,
    )


def _usable_share(scenario: Scenario) -> float:
    utilization, pool = scenario.args.gpu_memory_utilization, share_of_gpu(scenario)
    return utilization if pool is None else pool * usable_share(utilization, pool)


def share_of_gpu(scenario: Scenario) -> float | None:
    """What jax will have of a GPU's memory, as the engine asks it to; None where there is no GPU."""
    is_gpu = scenario.where.target.platform == "gpu"
    return wanted_share(scenario.args.gpu_memory_utilization) if is_gpu else None


def _plan(scenario: Scenario, stage: StageMemory, max_num_seqs: int | None) -> KVCachePlan:
    """The engine's choice on a device that holds the stage's weights already."""
    config, pool = scenario.config, share_of_gpu(scenario)
    if max_num_seqs is not None:
        config = dataclasses.replace(config, max_num_seqs=max_num_seqs)
    (device,) = scenario.where.stand_ins(1, stage.weight_bytes, 1.0 if pool is None else pool)
    needed = stage.state_bytes + stage.temp_bytes
    return plan_kv_cache(scenario.args, config, stage.bytes_per_block, device, needed, pool)
