"""Owns the device: parameters, KV cache, sampling state and the compiled steps. Knows schedules, not queues or text."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.batch import Device, SamplingState, ScoredTokens, StepOutput
from jaxpage.config import EngineArgs, EngineConfig
from jaxpage.errors import StartupError
from jaxpage.layers.kv_cache import KVCache
from jaxpage.models.config import ModelConfig
from jaxpage.models.decoder import Params
from jaxpage.request import Request
from jaxpage.runner.batch_builder import pack_schedule
from jaxpage.runner.block_ops import BlockMover
from jaxpage.runner.buckets import bucket_for, token_buckets
from jaxpage.runner.compilations import CompilationCounter
from jaxpage.runner.memory import KVCachePlan, gib, num_host_blocks, plan_kv_cache
from jaxpage.runner.packing import Packing
from jaxpage.runner.programs import StepPrograms
from jaxpage.runner.slots import SlotTable
from jaxpage.sampling.logits import PROMPT_FLAG
from jaxpage.scheduler.schedule import Schedule

logger = logging.getLogger("jaxpage")

COMPILE_THREADS = 2
MASK_ROWS = 8
"""Masks sent to the device at a time."""
Progress = Callable[[str, int, int], None]
"""Called with a stage's name, steps done and steps in all."""


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
    output: StepOutput
    flags: dict[str, bool]

    def collect(self) -> StepResult:
        """Waits for the step and copies what was asked for to the host."""
        tokens = np.asarray(self.output.token_ids)[: len(self.schedule.requests)].tolist()
        sampled = jax.tree.map(np.asarray, self.output.sampled) if self.flags["has_logprobs"] else None
        prompt = jax.tree.map(np.asarray, self.output.prompt) if self.flags["has_prompt_logprobs"] else None
        pooled = np.asarray(self.output.pooled) if self.flags["has_pooling"] else None
        return StepResult(tokens, sampled, prompt, pooled)


class Runner:
    """Runs schedules. Everything is allocated and compiled at construction; serving compiles nothing."""

    def __init__(
        self,
        args: EngineArgs,
        model: ModelConfig,
        config: EngineConfig,
        params: Params,
        device: Device,
        progress: Progress = lambda stage, done, total: None,
    ) -> None:
        """Compiles every bucket, sizes the cache and allocates it.

        Raises:
            StartupError: if the cache does not fit, or the swapped blocks not in the host's memory.
        """
        self.compilations = CompilationCounter()
        self.model, self.config, self.params, self.device = model, config, params, device
        self.buckets = token_buckets(config.max_num_batched_tokens)
        self._programs = StepPrograms(model, config)
        self._packings = {size: self._programs.packing(size) for size in self.buckets}
        self._slots = SlotTable(config.max_num_seqs, config.max_blocks_per_request, config.block_size)
        self._lazy = args.enforce_eager
        # Before the long work: what cannot be had should be said at once.
        bytes_per_block = self._programs.kv_bytes_per_token * config.block_size
        most_blocks = config.max_num_seqs * config.max_blocks_per_request
        host_blocks = num_host_blocks(config.swap_space_bytes, bytes_per_block, most_blocks)
        self.plan, self._steps = self._plan_and_compile(args, progress)
        logger.info(self.plan.describe())
        if self.plan.num_tokens < config.max_model_len:
            logger.warning(
                "The KV cache holds %d tokens, less than max_model_len %d: longer requests are refused or end with "
                "finish_reason length; raise kv_cache_memory_bytes or lower max_model_len",
                self.plan.num_tokens, config.max_model_len,
            )  # fmt: skip
        self._mover = BlockMover(self._programs.cache_shapes(self.plan.num_blocks), host_blocks, device)
        self._kv_cache = self._empty_cache()
        with jax.default_device(device):
            self._state = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), self._programs.state_shapes())
        self._admit = jax.jit(_admit_slot, donate_argnums=0)
        self._set_masks = jax.jit(_set_masks, donate_argnums=0)
        if not self._lazy:
            self._warm_up()
        self.compilations.is_ready()

    @property
    def num_mask_words(self) -> int:
        """Words of a mask that has a bit for every token."""
        return self._programs.num_mask_words

    @property
    def num_host_blocks(self) -> int:
        """Blocks that can be swapped out to the host's memory."""
        return self._mover.num_host_blocks

    def dispatch(self, schedule: Schedule, masks: Mapping[int, np.ndarray] | None = None) -> StepInFlight | None:
        """Starts a step and returns at once; None if only blocks move. Steps run in the order of dispatch.

        Args:
            masks: by slot, the tokens that its request may sample now (see ``SamplingState.token_mask``).
        """
        self._kv_cache = self._mover.run(self._kv_cache, schedule.block_ops)
        for request in schedule.admitted:
            self._slots.admit(request)
            if _needs_state(request):
                self._fill_state(request)
        if not schedule.requests:
            return None
        if masks:
            self._send_masks(masks)
        for item in schedule.requests:
            self._slots.refresh_blocks(item.request, item.start)
        packing = self._packings[bucket_for(self.buckets, max(schedule.num_tokens, len(schedule.requests)))]
        packed, flags = pack_schedule(schedule, packing, self._slots)
        output = self._run(packing, packed)
        output.token_ids.copy_to_host_async()
        return StepInFlight(schedule, output, flags)

    def wait(self) -> None:
        """Blocks until the device has done everything that was dispatched."""
        jax.block_until_ready((self._kv_cache, self._state))

    def _run(self, packing: Packing, packed: np.ndarray) -> StepOutput:
        compiled = self._steps.get(packing.num_tokens)
        if compiled is None:
            compiled = self._steps[packing.num_tokens] = self._compile(packing.num_tokens, self.plan)
        self._kv_cache, self._state, output = compiled(self.params, self._kv_cache, self._state, packed)
        return output

    def _send_masks(self, masks: Mapping[int, np.ndarray]) -> None:
        """Writes masks a few rows at a time, so that one program does for any number of them."""
        items = list(masks.items())
        for start in range(0, len(items), MASK_ROWS):
            slots = np.full(MASK_ROWS, self.config.max_num_seqs, np.int32)
            words = np.zeros((MASK_ROWS, self._programs.num_mask_words), np.int32)
            for row, (slot, mask) in enumerate(items[start : start + MASK_ROWS]):
                slots[row], words[row] = slot, mask
            self._state = self._set_masks(self._state, slots, words)

    def _fill_state(self, request: Request) -> None:
        """Writes token counts, bias and masked ids of a request into its slot."""
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
        self._state = self._admit(
            self._state, np.int32(request.slot), tokens, np.int32(request.num_prompt_tokens), bias, stop_ids
        )

    def _warm_up(self) -> None:
        """Runs what has not run yet, with nothing but padding: block moves, smallest step, fill of the spare slot."""
        self._warm_up_mover()
        packing = self._packings[self.buckets[0]]
        packed, _ = pack_schedule(Schedule([], 0), packing, self._slots)
        self._run(packing, packed)
        # After the step: its output is bound to the device, unlike the zeros before, and jit tells the two apart.
        vocab_size = self.model.vocab_size
        self._state = self._admit(
            self._state,
            np.int32(self.config.max_num_seqs),
            np.full(self.config.max_model_len, vocab_size, np.int32),
            np.int32(0),
            np.zeros(vocab_size, np.float32),
            np.full(self._programs.num_stop_ids, vocab_size, np.int32),
        )
        self._send_masks({self.config.max_num_seqs: np.zeros(self._programs.num_mask_words, np.int32)})
        jax.block_until_ready(self._state)

    def _warm_up_mover(self) -> None:
        try:
            self._kv_cache = self._mover.warm_up(self._kv_cache)
            return
        except StartupError as error:
            if self.config.preemption_mode == "swap":
                raise
            logger.warning("%s; preempted requests will be computed again", error)
        # Nobody insisted on swapping, so its failure is no reason not to start. It may have taken the cache along.
        self._kv_cache = []
        self._mover = BlockMover(self._programs.cache_shapes(self.plan.num_blocks), 0, self.device)
        self._kv_cache = self._mover.warm_up(self._empty_cache())

    def _empty_cache(self) -> KVCache:
        with jax.default_device(self.device):
            return jax.tree.map(
                lambda shape: jnp.zeros(shape.shape, shape.dtype), self._programs.cache_shapes(self.plan.num_blocks)
            )

    def _plan_and_compile(self, args: EngineArgs, progress: Progress) -> tuple[KVCachePlan, dict[int, Any]]:
        largest = self.buckets[-1]
        bytes_per_token = self._programs.kv_bytes_per_token
        state_bytes = sum(shape.size * shape.dtype.itemsize for shape in jax.tree.leaves(self._programs.state_shapes()))
        # A first guess; the compiler then tells the truth, and only if that is more is the plan made again.
        step_bytes = state_bytes + largest * 4 * (self.model.hidden_size * 8 + self.model.intermediate_size * 4)
        plan = plan_kv_cache(args, self.config, bytes_per_token, self.device, step_bytes)
        if self._lazy:
            return plan, {}
        started = time.monotonic()
        logger.info("Compiling %d step shapes (the first start only: they are kept on disk)", len(self.buckets))
        progress("compiling", 0, len(self.buckets))
        compiled = self._compile(largest, plan)
        analysis = compiled.memory_analysis()
        if analysis is not None:
            needed = state_bytes + analysis.temp_size_in_bytes
            needed += max(0, analysis.output_size_in_bytes - analysis.alias_size_in_bytes)
            logger.info("Largest step (%d tokens) needs %s beside weights and cache", largest, gib(needed))
            if needed > step_bytes:
                new_plan = plan_kv_cache(args, self.config, bytes_per_token, self.device, needed)
                if new_plan != plan:
                    plan, compiled = new_plan, self._compile(largest, new_plan)
        steps = {largest: compiled}
        progress("compiling", 1, len(self.buckets))
        with ThreadPoolExecutor(COMPILE_THREADS) as pool:
            rest = self.buckets[-2::-1]
            for size, step_ in zip(rest, pool.map(lambda size: self._compile(size, plan), rest), strict=True):
                steps[size] = step_
                progress("compiling", len(steps), len(self.buckets))
        logger.info("Compiled %d step shapes in %.1f s", len(steps), time.monotonic() - started)
        return plan, steps

    def _compile(self, num_tokens: int, plan: KVCachePlan) -> Any:
        with jax.default_device(self.device):
            return self._programs.lower(num_tokens, self.params, plan.num_blocks).compile()


def _needs_state(request: Request) -> bool:
    params = request.params
    has_bias = bool(params.logit_bias) or params.allowed_token_ids is not None
    return params.has_penalties or has_bias or params.min_tokens > 0


def _admit_slot(state: SamplingState, slot, token_ids, num_prompt_tokens, bias, stop_ids) -> SamplingState:
    """``state`` with the slot's row filled; ``token_ids`` is padded with the vocabulary size."""
    is_prompt = jnp.arange(len(token_ids)) < num_prompt_tokens
    vocab_size = state.token_counts.shape[1]
    counts = jnp.zeros(vocab_size, jnp.int32).at[token_ids].add(jnp.where(is_prompt, 0, 1), mode="drop")
    in_prompt = jnp.zeros(vocab_size, bool).at[jnp.where(is_prompt, token_ids, vocab_size)].set(True, mode="drop")
    return state._replace(
        token_counts=state.token_counts.at[slot].set(counts + jnp.where(in_prompt, PROMPT_FLAG, 0)),
        logit_bias=state.logit_bias.at[slot].set(bias),
        stop_ids=state.stop_ids.at[slot].set(stop_ids),
    )


def _set_masks(state: SamplingState, slots, words) -> SamplingState:
    """``state`` with the masks of some slots replaced."""
    return state._replace(token_mask=state.token_mask.at[slots].set(words))


def logprob_rows(scores: ScoredTokens, row: int, count: int) -> Sequence[tuple[int, float]]:
    """The ``count`` most likely (id, logprob) of a row of scores."""
    return list(zip(scores.top_ids[row, :count].tolist(), scores.top_logprobs[row, :count].tolist(), strict=True))
