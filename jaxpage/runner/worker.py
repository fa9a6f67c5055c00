"""The device half of a runner: owns parameters, KV cache, sampling state and the compiled steps, and obeys commands.

Knows slots, blocks and packed numbers; schedules and requests are the host half's.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.batch import SamplingState, StepOutput
from jaxpage.config import EngineArgs, EngineConfig
from jaxpage.errors import StartupError
from jaxpage.layers.kv_cache import KVCache
from jaxpage.models.decoder import Params
from jaxpage.parallel.hosts import least_of_all
from jaxpage.runner.block_ops import BlockMover
from jaxpage.runner.buckets import token_buckets
from jaxpage.runner.commands import Command, StateFill
from jaxpage.runner.compilations import CompilationCounter
from jaxpage.runner.hand_over import HandOver
from jaxpage.runner.memory import KVCachePlan, gib, num_host_blocks, plan_kv_cache
from jaxpage.runner.programs import StagePrograms, fill_slot, set_masks

logger = logging.getLogger("jaxpage")

COMPILE_THREADS = 2
MASK_ROWS = 8
"""Masks sent to the device at a time."""
Progress = Callable[[str, int, int], None]
"""Called with a stage's name, steps done and steps in all."""


class StageWorker:
    """One stage on its devices. The whole model, where it has no others.

    Of a stage on devices of other processes, ``programs`` is all that is here.
    """

    def __init__(self, programs: StagePrograms, params: Params) -> None:
        self.programs, self.params = programs, params
        self.kv_cache: KVCache = []
        self.state: SamplingState | None = None
        self._cache_shapes: KVCache = []
        self._state_shapes: SamplingState | None = None
        self.steps: dict[int, Any] = {}
        self._mover: BlockMover | None = None

    @property
    def is_here(self) -> bool:
        """This process has one of its devices."""
        return self.programs.placement.is_here

    def compile(self, num_tokens: int, num_blocks: int) -> Any:
        """The stage's part of a step of ``num_tokens`` tokens."""
        with jax.default_device(self.programs.placement.first_device):
            return self.programs.lower(num_tokens, self.params, num_blocks).compile()

    def allocate(self, num_blocks: int, num_host: int) -> None:
        """Makes cache, host blocks and, in the last stage, the sampling state."""
        self._cache_shapes = self.programs.cache_shapes(num_blocks)
        self._mover = BlockMover(self._cache_shapes, num_host, self.programs.placement.first_device)
        if self.programs.is_last:
            self._state_shapes = self.programs.state_shapes()
            kept = jax.tree.map(lambda shape: shape.sharding, self._state_shapes)
            self._fill = jax.jit(fill_slot, donate_argnums=0, out_shardings=kept)
            self._set_masks = jax.jit(set_masks, donate_argnums=0, out_shardings=kept)
        self.clear()

    def clear(self) -> None:
        """Cache, host blocks and sampling state are as at the start."""
        assert self._mover is not None, "the cache is not allocated"
        self.kv_cache, self.state = [], None  # there is not room for two
        self._mover.forget()
        self.kv_cache = zeros(self._cache_shapes)
        if self._state_shapes is not None:
            self.state = zeros(self._state_shapes)

    def move(self, command: Command) -> None:
        """Copies and swaps blocks."""
        assert self._mover is not None, "the cache is not allocated"
        self.kv_cache = self._mover.run(self.kv_cache, command.block_ops)

    def warm_up_mover(self) -> None:
        """Raises StartupError if blocks cannot be swapped. The cache may then be gone: ``allocate`` makes it anew."""
        assert self._mover is not None, "the cache is not allocated"
        self.kv_cache = self._mover.warm_up(self.kv_cache)

    def fill(self, fill: StateFill) -> None:
        """Fills the row of a slot."""
        self.state = self._fill(
            self.state, np.int32(fill.slot), fill.token_ids, np.int32(fill.num_prompt_tokens), fill.bias, fill.stop_ids
        )

    def set_masks(self, masks: dict[int, np.ndarray]) -> None:
        """Writes masks a few rows at a time, so that one program does for any number of them."""
        items = list(masks.items())
        for start in range(0, len(items), MASK_ROWS):
            slots = np.full(MASK_ROWS, self.programs.config.max_num_seqs, np.int32)
            words = np.zeros((MASK_ROWS, self.programs.num_mask_words), np.int32)
            for row, (slot, mask) in enumerate(items[start : start + MASK_ROWS]):
                slots[row], words[row] = slot, mask
            self.state = self._set_masks(self.state, slots, words)

    def run(self, num_tokens: int, packed: np.ndarray, arrived: jax.Array | None) -> Any:
        """Starts the stage's part of a step; gives what the next stage takes, or the step's output."""
        state = (self.state,) if self.programs.is_last else ()
        takes = () if arrived is None else (arrived,)
        self.kv_cache, *new_state, output = self.steps[num_tokens](self.params, self.kv_cache, *state, *takes, packed)
        if new_state:
            (self.state,) = new_state
        return output


class Worker:
    """Obeys commands on all stages. Everything is allocated and compiled at construction; serving compiles nothing.

    Stages run at the same time: the first one is given the next step while the last one still computes those before.
    So with S stages a step reads the tokens that were sampled S calls of the scheduler before.

    Stages in different processes are worse off: what they hand over is a collective, whose small programs are compiled
    when first used, and where a device does everything in order the tokens' way back holds up its next step.

    Attributes:
        plan: size of the cache. Its bytes are those of the devices that have most.
    """

    def __init__(
        self,
        args: EngineArgs,
        config: EngineConfig,
        stages: Sequence[StageWorker],
        progress: Progress = lambda stage, done, total: None,
    ) -> None:
        """Compiles every bucket, sizes the cache and allocates it.

        Raises:
            StartupError: if the cache does not fit, or the swapped blocks not in the host's memory.
        """
        self.compilations = CompilationCounter()
        self.config, self.stages = config, stages
        self.buckets = token_buckets(config.max_num_batched_tokens)
        self._args, self._lazy = args, args.enforce_eager
        self._num_plans = 0
        self._here = [stage for stage in stages if stage.is_here]
        # Before the long work: what cannot be had should be said at once.
        bytes_per_block = sum(stage.programs.kv_bytes_per_token for stage in stages) * config.block_size
        most_blocks = config.max_num_seqs * config.max_blocks_per_request
        self.num_host_blocks = num_host_blocks(config.swap_space_bytes, bytes_per_block, most_blocks)
        self.plan = self._plan_and_compile(progress)
        logger.info(self.plan.describe())
        if self.plan.num_tokens < config.max_model_len:
            logger.warning(
                "The KV cache holds %d tokens, less than max_model_len %d: longer requests are refused or end with "
                "finish_reason length; raise kv_cache_memory_bytes or lower max_model_len",
                self.plan.num_tokens, config.max_model_len,
            )  # fmt: skip
        for stage in self._here:
            stage.allocate(self.plan.num_blocks, self.num_host_blocks)
        self._forward = [_between(one, next_one) for one, next_one in itertools.pairwise(stages)]
        self._back = _between(stages[-1], stages[0]) if len(stages) > 1 else None
        self._sampled: deque[tuple[int, jax.Array | None]] = deque()
        """Call and its tokens by slot, where the first stage wants them; only with several stages."""
        if not self._lazy:
            self._warm_up()
        self.compilations.is_ready()

    def obey(self, command: Command) -> StepOutput | None:
        """Starts what the command says and returns at once.

        None if it has no step, or if neither the first nor the last stage is here.
        """
        for stage in self._here:
            stage.move(command)
        if self.stages[-1].is_here:
            for fill in command.fills:
                self.stages[-1].fill(fill)
            self.stages[-1].set_masks(command.masks)
        return self._run(command) if command.num_tokens else None

    def confirm(self, call: int, output: StepOutput) -> None:
        """Called with what a step has sampled, before anybody acts on it. Alone there is nobody to ask."""

    def notify_of_loss(self, callback: Callable[[str], None]) -> None:
        """``callback`` is to be called when the job is over because of another host. Alone there is none."""

    def start_over(self) -> None:
        """After a step that failed: makes cache and state anew, and runs a step of padding to see whether that works.

        Raises:
            Exception: the device is broken, or not this process's alone.
        """
        self._sampled.clear()
        for stage in self._here:
            stage.clear()
        self._run_padding()

    def wait(self) -> None:
        """Blocks until the devices have done everything that was started."""
        jax.block_until_ready([(stage.kv_cache, stage.state) for stage in self._here])

    def _run(self, command: Command) -> StepOutput | None:
        if command.num_tokens not in self._here[0].steps:
            self._compile_all(command.num_tokens)
        arrived: Any = self._tokens_before(command.call) if len(self.stages) > 1 else None
        for index, stage in enumerate(self.stages):
            if not stage.programs.is_first:
                arrived = self._forward[index - 1](arrived, stage.programs.boundary_shape(command.num_tokens))
            arrived = stage.run(command.num_tokens, command.packed, arrived) if stage.is_here else None
        return arrived if len(self.stages) == 1 else self._give_back(command, arrived)

    def _tokens_before(self, call: int) -> jax.Array | None:
        """By slot, what was sampled up to the call that is as many calls back as there are stages.

        Later ones would make the first stage wait for the last. Without any, nobody in the step has sampled yet.
        """
        latest = call - len(self.stages)
        while len(self._sampled) > 1 and self._sampled[1][0] <= latest:
            self._sampled.popleft()
        if self._sampled and self._sampled[0][0] <= latest:
            return self._sampled[0][1]
        first = self.stages[0]
        return zeros(first.programs.first_stage_tokens) if first.is_here else None

    def _give_back(self, command: Command, output: StepOutput | None) -> StepOutput | None:
        """Hands the tokens to the first stage; and to the leading process, which has that one, what it will read."""
        last = self.stages[-1]
        assert self._back is not None, "one stage has nobody to give to"
        tokens = last.state.last_token if last.state is not None else None
        self._sampled.append((command.call, self._back(tokens, self.stages[0].programs.first_stage_tokens)))
        if self._back.is_local:
            return output
        shapes = last.programs.output_shapes(command.num_tokens)
        flags = last.programs.packing(command.num_tokens).flags(command.packed)
        read = {"token_ids": True, "sampled": flags["has_logprobs"], "prompt": flags["has_prompt_logprobs"]}
        read["pooled"] = flags["has_pooling"]
        given: dict[str, Any] = {}
        for name in read:
            own, shape = getattr(output, name, None), getattr(shapes, name)
            leaves = [None] * len(jax.tree.leaves(shape)) if own is None else jax.tree.leaves(own)
            if read[name]:
                leaves = [self._back(leaf, each) for leaf, each in zip(leaves, jax.tree.leaves(shape), strict=True)]
            given[name] = jax.tree.unflatten(jax.tree.structure(shape), leaves)
        if output is not None or not self.stages[0].is_here:
            return output
        return StepOutput(**given)

    def _warm_up(self) -> None:
        """Runs what has not run yet, with nothing but padding: block moves, smallest step, fill of the spare slot."""
        least_of_all(0, "the first step")  # collectives of a CPU wait half a minute for each other, not longer
        self._warm_up_movers()
        for _ in range(2):  # what the first run of a program gives may differ from what it took in how it is bound
            self._run_padding()

    def _run_padding(self) -> None:
        """The smallest step and a fill of the spare slot: nobody's tokens."""
        spare, vocab_size = self.config.max_num_seqs, self.stages[-1].programs.model.vocab_size
        packing = self.stages[0].programs.packing(self.buckets[0])
        packed, fields = packing.allocate()
        fields["slots"][:] = spare
        masks = {spare: np.zeros(self.stages[-1].programs.num_mask_words, np.int32)}
        fill = StateFill(
            spare,
            np.full(self.config.max_model_len, vocab_size, np.int32),
            0,
            np.zeros(vocab_size, np.float32),
            np.full(self.stages[-1].programs.num_stop_ids, vocab_size, np.int32),
        )
        # Every process does so by itself: nobody is told to.
        Worker.obey(self, Command(0, [], [fill], masks, packing.num_tokens, packed))
        self._sampled.clear()
        self.wait()

    def _warm_up_movers(self) -> None:
        wanted = self.num_host_blocks
        try:
            for stage in self._here:
                stage.warm_up_mover()
        except StartupError as error:
            if self.config.preemption_mode == "swap":
                raise
            logger.warning("%s; preempted requests will be computed again", error)
            self.num_host_blocks = 0
        self.num_host_blocks = least_of_all(self.num_host_blocks, "swapping")
        if self.num_host_blocks == wanted:
            return
        # Nobody insisted on swapping, so its failure is no reason not to start. It may have taken the cache along.
        for stage in self._here:
            stage.kv_cache, stage.state = [], None
            stage.allocate(self.plan.num_blocks, 0)
            stage.warm_up_mover()

    def _plan_and_compile(self, progress: Progress) -> KVCachePlan:
        largest = self.buckets[-1]
        # A first guess; the compiler then tells the truth, and only if that is more is the plan made again.
        needs = [stage.programs.guessed_step_bytes(largest) for stage in self._here]
        plan = self._plan(needs)
        if self._lazy:
            return plan
        started = time.monotonic()
        logger.info("Compiling %d step shapes (the first start only: they are kept on disk)", len(self.buckets))
        progress("compiling", 0, len(self.buckets))
        self._compile_all(largest, plan)
        told = [stage.programs.step_bytes(largest, stage.steps[largest]) for stage in self._here]
        measured = [number for number in told if number is not None]
        if measured:
            logger.info("Largest step (%d tokens) needs %s beside weights and cache", largest, gib(max(measured)))
        greater = [max(need, number or 0) for need, number in zip(needs, told, strict=True)]
        if greater != needs or jax.process_count() > 1:  # one process alone cannot plan again
            new_plan = self._plan(greater)
            if new_plan != plan:
                plan = new_plan
                self._compile_all(largest, plan)
        progress("compiling", 1, len(self.buckets))
        with ThreadPoolExecutor(COMPILE_THREADS) as pool:
            rest = self.buckets[-2::-1]
            for done, _ in enumerate(pool.map(lambda size: self._compile_all(size, plan), rest), start=2):
                progress("compiling", done, len(self.buckets))
        logger.info("Compiled %d step shapes in %.1f s", len(self.buckets), time.monotonic() - started)
        return plan

    def _compile_all(self, num_tokens: int, plan: KVCachePlan | None = None) -> None:
        for stage in self._here:
            stage.steps[num_tokens] = stage.compile(num_tokens, (plan or self.plan).num_blocks)

    def _plan(self, step_bytes: Sequence[int]) -> KVCachePlan:
        """The size that fits on every stage: a block is one on all of them."""
        plans = []
        for stage, needed in zip(self._here, step_bytes, strict=True):
            programs = stage.programs
            plans.append(
                plan_kv_cache(
                    self._args, self.config, programs.device_bytes_per_block, programs.placement.first_device, needed
                )
            )
        self._num_plans += 1
        num_blocks = least_of_all(min(plan.num_blocks for plan in plans), f"plan {self._num_plans}")
        widest = max(plans, key=lambda plan: plan.bytes_per_block)
        return KVCachePlan(num_blocks, widest.block_size, widest.bytes_per_block, widest.max_model_len)


def _between(one: StageWorker, other: StageWorker) -> HandOver:
    source, target = (stage.programs.first_stage_tokens.sharding for stage in (one, other))
    return HandOver(source, target)


def zeros(shapes: Any) -> Any:
    """Arrays full of zeros, each where its shape says."""
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype, device=shape.sharding), shapes)
