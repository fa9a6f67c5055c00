"""Says what the engine's numbers mean: follows prompts from arrival to end and writes ``EngineMetrics``.

Runs in the engine's thread, a call a step. It reads the core and changes nothing in it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from typing import Protocol

from jaxpage.config import EngineConfig
from jaxpage.engine.core import EngineCore
from jaxpage.metrics import CacheInfo, EngineCounts, EngineMetrics
from jaxpage.request import FinishReason, Request, RequestMetrics
from jaxpage.scheduler.group import RequestGroup

_GOOD_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclasses.dataclass(slots=True, eq=False)
class SampleLife:
    """One sample, or a whole beam search; times are monotonic, 0 means not yet."""

    first_token_s: float = 0.0
    last_token_s: float = 0.0
    num_tokens: int = 0
    is_open: bool = True


@dataclasses.dataclass(slots=True, eq=False)
class PromptLife:
    """One prompt of a call.

    Attributes:
        group: its samples in the scheduler; first: the request that stands for the prompt there.
        arrival_s, first_token_s, last_token_s: monotonic, 0 means not yet.
        num_open: samples that have not ended. is_whole: none of the others was aborted or failed.
        num_most_tokens: of the longest sample that has ended.
        metrics: what the user gets to see.
    """

    group: RequestGroup
    first: Request
    num_samples: int
    max_tokens: int
    arrival_s: float
    num_open: int
    metrics: RequestMetrics
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    is_whole: bool = True
    num_most_tokens: int = 0

    @property
    def admitted_s(self) -> float:
        """When it was first let in, monotonic; it must have been."""
        assert self.group.admitted_s is not None, "a prompt without admission has no tokens and no good end"
        return self.group.admitted_s

    def wall_time(self, moment_s: float) -> float:
        """A monotonic time of this life as seconds since the epoch."""
        return self.metrics.arrival_time + moment_s - self.arrival_s


class MeteredSample(Protocol):
    """What is looked at of a sample."""

    @property
    def request(self) -> Request: ...
    @property
    def life(self) -> SampleLife: ...
    @property
    def finish_reason(self) -> str | None: ...


Changed = Iterable[tuple[PromptLife, Iterable[MeteredSample]]]


class Meter:
    """Writes one engine's metrics. What changes together is written together, so that readers see it whole."""

    def __init__(self, core: EngineCore, config: EngineConfig) -> None:
        kv = core.scheduler.kv
        self.metrics = EngineMetrics(
            CacheInfo(
                block_size=kv.block_size,
                num_blocks=kv.pool.num_blocks,
                num_usable_blocks=kv.pool.num_usable,
                cache_dtype=config.kv_cache_dtype,
                enable_prefix_caching=kv.enable_prefix_caching,
                max_model_len=config.max_model_len,
            )
        )
        self._core = core
        self._numbers = self.metrics.numbers
        self._searches: dict[PromptLife, SampleLife] = {}
        self._over: list[tuple[PromptLife, list[int], FinishReason]] = []
        self._publish()

    def arrived(
        self, group: RequestGroup, num_samples: int, max_tokens: int, arrival_s: float | None = None
    ) -> PromptLife:
        """A prompt was queued. ``arrival_s``: when its call came, on the monotonic clock; None: now."""
        now_s = time.monotonic()
        arrival_s = now_s if arrival_s is None else arrival_s
        metrics = RequestMetrics(time.time() - (now_s - arrival_s))
        num_open = 1 if group.search is not None else num_samples
        life = PromptLife(group, group.requests[0], num_samples, max_tokens, arrival_s, num_open, metrics)
        if group.search is not None:
            self._searches[life] = SampleLife()
        with self.metrics.lock:
            self._numbers.num_accepted += num_open
            self._publish()
        return life

    def over(self, life: PromptLife, num_tokens: list[int], reason: FinishReason) -> None:
        """A search has ended with beams of these lengths, or a pooled prompt. ``stepped`` or ``aborted`` follows."""
        self._over.append((life, num_tokens, reason))

    def stepped(self, changed: Changed) -> None:
        """The core made a step; ``changed`` are the samples that got tokens or ended."""
        self._record(changed, self._core.num_step_tokens)

    def aborted(self, changed: Changed) -> None:
        """The samples in ``changed`` were ended between two steps."""
        self._record(changed, 0)

    def _record(self, changed: Changed, num_step_tokens: int) -> None:
        now_s = time.monotonic()
        numbers, gaps = self._numbers, self._numbers.histograms.inter_token_latency_seconds
        # Most samples of a step had their last output at the same time: one observation for all of them.
        same_s, count = 0.0, 0
        with self.metrics.lock:
            for prompt, samples in changed:
                for sample in samples:
                    life, request = sample.life, sample.request
                    num_new = len(request.token_ids) - request.num_prompt_tokens - life.num_tokens
                    if num_new:
                        numbers.num_generation_tokens += num_new
                        life.num_tokens += num_new
                        last_s, life.last_token_s = life.last_token_s, now_s
                        if not last_s:
                            self._first_token(prompt, life, now_s)
                        elif last_s == same_s:
                            count += 1
                        else:
                            gaps.observe(now_s - same_s, count)
                            same_s, count = last_s, 1
                    if sample.finish_reason is not None and life.is_open:
                        self._sample_ended(prompt, life, FinishReason(sample.finish_reason), now_s)
            gaps.observe(now_s - same_s, count)
            if num_step_tokens:
                numbers.histograms.iteration_tokens_total.observe(num_step_tokens)
            self._follow_searches(now_s)
            self._publish()

    def _follow_searches(self, now_s: float) -> None:
        for prompt, life in self._searches.items():
            if not life.last_token_s and any(beam.num_known_output_tokens for beam in prompt.group.requests):
                self._first_token(prompt, life, now_s)
                life.last_token_s = now_s
        for prompt, num_tokens, reason in self._over:
            life = self._searches.pop(prompt, SampleLife())
            life.num_tokens = sum(num_tokens)
            self._numbers.num_generation_tokens += life.num_tokens
            if life.num_tokens:
                if not life.last_token_s:
                    self._first_token(prompt, life, now_s)
                life.last_token_s = now_s
            self._sample_ended(prompt, life, reason, now_s, max(num_tokens, default=0))
        self._over.clear()

    def _first_token(self, prompt: PromptLife, sample: SampleLife, now_s: float) -> None:
        sample.first_token_s = now_s
        if not prompt.first_token_s:
            prompt.first_token_s = now_s
            prompt.metrics.first_scheduled_time = prompt.wall_time(prompt.admitted_s)
            prompt.metrics.first_token_time = prompt.wall_time(now_s)
            self._numbers.histograms.time_to_first_token_seconds.observe(now_s - prompt.arrival_s)

    def _sample_ended(
        self, prompt: PromptLife, sample: SampleLife, reason: FinishReason, now_s: float, length: int | None = None
    ) -> None:
        """``length``: tokens in a row, where that is not all that the sample has."""
        length = sample.num_tokens if length is None else length
        histograms = self._numbers.histograms
        self._numbers.num_ended[reason.value] += 1
        sample.is_open = False
        prompt.num_open -= 1
        prompt.num_most_tokens = max(prompt.num_most_tokens, length)
        prompt.last_token_s = max(prompt.last_token_s, sample.last_token_s)
        if reason in _GOOD_ENDS:
            seconds = (sample.last_token_s - sample.first_token_s) / (length - 1) if length > 1 else 0.0
            histograms.request_time_per_output_token_seconds.observe(seconds)
            histograms.request_generation_tokens.observe(sample.num_tokens)
        else:
            prompt.is_whole = False
        if prompt.num_open == 0:
            self._prompt_ended(prompt, now_s)

    def _prompt_ended(self, prompt: PromptLife, now_s: float) -> None:
        metrics = prompt.metrics
        if prompt.last_token_s:
            metrics.last_token_time = prompt.wall_time(prompt.last_token_s)
        metrics.finished_time = prompt.wall_time(now_s)
        if prompt.group.admitted_s is not None:
            metrics.first_scheduled_time = prompt.wall_time(prompt.admitted_s)
        if not prompt.is_whole:
            return
        histograms, num_prompt_tokens = self._numbers.histograms, prompt.first.num_prompt_tokens
        first_s, last_s = prompt.first_token_s or now_s, prompt.last_token_s or now_s
        histograms.e2e_request_latency_seconds.observe(now_s - prompt.arrival_s)
        histograms.request_queue_time_seconds.observe(prompt.admitted_s - prompt.arrival_s)
        histograms.request_prefill_time_seconds.observe(first_s - prompt.admitted_s)
        histograms.request_decode_time_seconds.observe(last_s - first_s)
        histograms.request_inference_time_seconds.observe(last_s - prompt.admitted_s)
        histograms.request_prompt_tokens.observe(num_prompt_tokens)
        num_computed = num_prompt_tokens - max(0, prompt.first.num_cached_tokens)
        histograms.request_prefill_kv_computed_tokens.observe(num_computed)
        histograms.request_num_preemptions.observe(prompt.group.num_preemptions)
        histograms.request_params_n.observe(prompt.num_samples)
        histograms.request_params_max_tokens.observe(prompt.max_tokens)
        histograms.request_max_num_generation_tokens.observe(prompt.num_most_tokens)

    def _publish(self) -> None:
        """Copies what scheduler and cache count; the lock is held."""
        scheduler, compilations = self._core.scheduler, self._core.runner.compilations
        kv, stats = scheduler.kv, scheduler.stats
        num_running, num_waiting, num_swapped = len(scheduler.running), scheduler.num_waiting, kv.num_swapped_requests
        for life in self._searches:  # the scheduler counts beams
            num_beams, num_with_blocks = len(life.group.requests), len(life.group.running)
            num_running -= num_with_blocks - (num_with_blocks > 0)
            num_waiting -= num_beams - num_with_blocks - (num_beams > 0 == num_with_blocks)
            if life.group.swapped is not None:
                num_swapped -= len(life.group.swapped.tables) - 1
        self._numbers.counts = EngineCounts(
            num_running=num_running,
            num_waiting=num_waiting,
            num_deferred=scheduler.roster.num_deferred,
            num_swapped=num_swapped,
            kv_usage=kv.pool.num_used / kv.pool.num_usable,
            host_usage=1 - kv.num_free_host_blocks / kv.num_host_blocks if kv.num_host_blocks else 0.0,
            num_prompt_tokens=stats.num_prompt_tokens,
            num_cached_tokens=stats.num_cached_prompt_tokens,
            num_queried_tokens=stats.num_queried_prompt_tokens,
            num_preemptions=stats.num_preempted_samples,
            num_swap_tokens=stats.num_swap_preempted_tokens,
            num_recompute_tokens=stats.num_recompute_preempted_tokens,
            num_recomputed_tokens=stats.num_recomputed_tokens,
            num_swapped_out_blocks=kv.counters.num_swapped_out_blocks,
            num_swapped_in_blocks=kv.counters.num_swapped_in_blocks,
            num_corrupted=stats.num_corrupted,
            num_faults=self._core.num_faults,
            num_warmup_compilations=compilations.num_warmup,
            num_serving_compilations=compilations.num_serving,
        )
