"""The device half of a runner: owns the stages with their arrays and compiled steps, and obeys commands.

Knows slots, blocks and packed numbers; schedules and requests are the host half's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from jaxpage.batch import StepOutput
from jaxpage.config import EngineArgs, EngineConfig
from jaxpage.errors import StartupError
from jaxpage.parallel.hosts import least_of_all
from jaxpage.runner.buckets import token_buckets
from jaxpage.runner.commands import Command, StateFill
from jaxpage.runner.compilations import CompilationCounter
from jaxpage.runner.memory import KVCachePlan, gib, num_host_blocks, plan_kv_cache
from jaxpage.runner.pipeline import Results, StagePipeline
from jaxpage.runner.stage import StageWorker

logger = logging.getLogger("jaxpage")

COMPILE_THREADS = 2
Progress = Callable[[str, int, int], None]
"""Called with a stage's name, steps done and steps in all."""


class Worker:
    """Obeys commands on all stages. Everything is allocated and compiled at construction; serving compiles nothing.

    The exception: what stages in different processes hand over goes through small programs of each shape, which are
    compiled when first used.

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
        self.pipeline = StagePipeline(stages)
        if not self._lazy:
            self._warm_up()
        self.compilations.is_ready()

    def obey(self, command: Command) -> Results | None:
        """Starts what the command says and returns at once.

        None if it has no step, or if neither the first nor the last stage is here. A command without a step asks for
        all results that are still in another process.
        """
        for stage in self._here:
            stage.move(command)
        if self.stages[-1].is_here:
            for fill in command.fills:
                self.stages[-1].fill(fill)
            self.stages[-1].set_masks(command.masks)
        if not command.num_tokens:
            self.pipeline.bring_back(command.call)
            return None
        if command.num_tokens not in self._here[0].steps:
            self._compile_all(command.num_tokens)
        return self.pipeline.run(command)

    def bring_back(self, call: int) -> None:
        """Asks for the results of this call, if they are not on their way. Alone they always are."""

    def confirm(self, call: int, output: StepOutput) -> None:
        """Called with what a step has sampled, before anybody acts on it. Alone there is nobody to ask."""

    def notify_of_loss(self, callback: Callable[[str], None]) -> None:
        """``callback`` is to be called when the job is over because of another host. Alone there is none."""

    def start_over(self) -> None:
        """After a step that failed: makes cache and state anew, and runs a step of padding to see whether that works.

        Raises:
            Exception: the device is broken, or not this process's alone.
        """
        self.pipeline.forget()
        for stage in self._here:
            stage.clear()
        self._run_padding()

    def wait(self) -> None:
        """Blocks until the devices have done everything that was started."""
        jax.block_until_ready([(stage.kv_cache, stage.state) for stage in self._here])

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
        self.pipeline.bring_back(0)
        self.pipeline.forget()
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
