"""The host half of a step: turns schedules into commands for the worker, and reads what came of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jaxpage.batch import ScoredTokens
from jaxpage.config import EngineConfig
from jaxpage.models.config import ModelConfig
from jaxpage.request import Request
from jaxpage.runner.batch_builder import pack_schedule
from jaxpage.runner.buckets import bucket_for
from jaxpage.runner.commands import NO_BATCH, Command, StateFill
from jaxpage.runner.compilations import CompilationCounter
from jaxpage.runner.memory import KVCachePlan
from jaxpage.runner.pipeline import Results
from jaxpage.runner.slots import SlotTable
from jaxpage.runner.worker import Worker
from jaxpage.scheduler.schedule import Schedule


@dataclasses.dataclass(slots=True)
class StepResult:
    """What a finished step gave, on the host, in the order of the schedule.

    Attributes:
        sampled, prompt: scores with numpy leaves, None unless some request of the step asked.
        pooled: hidden states by row, None unless some request of the step is pooled.
    """

    token_ids: list[int]
    sampled: ScoredTokens | None
    prompt: ScoredTokens | None
    pooled: np.ndarray | None


@dataclasses.dataclass(slots=True)
class StepInFlight:
    """A dispatched step. The device may still be computing it."""

    schedule: Schedule
    results: Results
    flags: dict[str, bool]
    worker: Worker

    def collect(self) -> StepResult:
        """Waits for the step and copies what was asked for to the host."""
        self.worker.bring_back(self.schedule.call)
        output = self.results.result()
        tokens = np.asarray(output.token_ids)[: len(self.schedule.requests)].tolist()
        self.worker.confirm(self.schedule.call, output)
        sampled = jax.tree.map(np.asarray, output.sampled) if self.flags["has_logprobs"] else None
        prompt = jax.tree.map(np.asarray, output.prompt) if self.flags["has_prompt_logprobs"] else None
        pooled = np.asarray(output.pooled) if self.flags["has_pooling"] else None
        return StepResult(tokens, sampled, prompt, pooled)


class Runner:
    """The host half: knows schedules, keeps what belongs to slots, and tells the worker what to do."""

    def __init__(self, worker: Worker, model: ModelConfig, config: EngineConfig) -> None:
        self.worker, self.model, self.config = worker, model, config
        self._programs = worker.stages[-1].programs
        self._packings = {size: self._programs.packing(size) for size in worker.buckets}
        self._slots = SlotTable(config.max_num_seqs, config.max_blocks_per_request, config.block_size)

    @property
    def num_mask_words(self) -> int:
        """Words of a mask that has a bit for every token."""
        return self._programs.num_mask_words

    @property
    def num_host_blocks(self) -> int:
        """Blocks that can be swapped out to the host's memory."""
        return self.worker.num_host_blocks

    @property
    def plan(self) -> KVCachePlan:
        """Size of the cache."""
        return self.worker.plan

    @property
    def compilations(self) -> CompilationCounter:
        """What was compiled before serving and while serving."""
        return self.worker.compilations

    def dispatch(self, schedule: Schedule, masks: Mapping[int, np.ndarray] | None = None) -> StepInFlight | None:
        """Starts a step and returns at once; None if only blocks move. Steps run in the order of dispatch.

        Args:
            masks: by slot, the tokens that its request may sample now (see ``SamplingState.token_mask``).
        """
        fills = []
        for request in schedule.admitted:
            self._slots.admit(request)
            if _needs_state(request):
                fills.append(self._fill_of(request))
        if not schedule.requests:
            self.worker.obey(Command(schedule.call, schedule.block_ops, fills, {}, 0, NO_BATCH))
            return None
        for item in schedule.requests:
            self._slots.refresh_blocks(item.request, item.start)
        needed = max(schedule.num_tokens, len(schedule.requests))
        packing = self._packings[bucket_for(self.worker.buckets, needed)]
        packed, flags = pack_schedule(schedule, packing, self._slots)
        results = self.worker.obey(
            Command(schedule.call, schedule.block_ops, fills, dict(masks or {}), packing.num_tokens, packed)
        )
        assert results is not None, "the leading process has the first stage"
        return StepInFlight(schedule, results, flags, self.worker)

    def start_over(self) -> None:
        """Forgets what the device holds, after a step that failed. Nobody may have blocks or a slot.

        Raises:
            Exception: the device is broken, or not this process's alone.
        """
        self.worker.start_over()

    def wait(self) -> None:
        """Blocks until the device has done everything that was dispatched."""
        self.worker.wait()

    def _fill_of(self, request: Request) -> StateFill:
        """Token counts, bias and masked ids of a request."""
        params, vocab_size = request.params, self.model.vocab_size
        tokens = np.full(self.config.max_model_len, vocab_size, np.int32)
        tokens[: len(request.token_ids)] = request.token_ids
        bias = np.zeros(vocab_size, np.float32)
        if params.allowed_token_ids is not None:
            bias[:] = -np.inf
            bias[list(params.allowed_token_ids)] = 0.0
        for token_id, value in (params.logit_bias or {}).items():
            bias[token_id] += value
        stop_ids = np.full(self._programs.num_stop_ids, vocab_size, np.int32)
        masked = sorted({*self.model.end_token_ids, *(params.stop_token_ids or ())})
        stop_ids[: len(masked)] = masked
        return StateFill(request.slot, tokens, request.num_prompt_tokens, bias, stop_ids)


def _needs_state(request: Request) -> bool:
    params = request.params
    has_bias = bool(params.logit_bias) or params.allowed_token_ids is not None
    return params.has_penalties or has_bias or params.min_tokens > 0


def logprob_rows(scores: ScoredTokens, row: int, count: int) -> Sequence[tuple[int, float]]:
    """The ``count`` most likely (id, logprob) of a row of scores."""
    return list(zip(scores.top_ids[row, :count].tolist(), scores.top_logprobs[row, :count].tolist(), strict=True))
