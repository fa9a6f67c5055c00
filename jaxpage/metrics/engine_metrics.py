"""The numbers of one engine: written by its thread, copied as a whole by whoever shows them.

Knows neither schedulers nor Prometheus: what the numbers mean is in ``engine/meter.py``, their names in ``prometheus``.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import NamedTuple

from jaxpage.metrics.histogram import (
    FIRST_TOKEN_BOUNDS_S,
    LATENCY_BOUNDS_S,
    NUM_SAMPLES_BOUNDS,
    PREEMPTION_BOUNDS,
    STEP_TOKENS_BOUNDS,
    TOKEN_BOUNDS_S,
    Histogram,
    token_count_bounds,
)
from jaxpage.request import FinishReason


@dataclasses.dataclass(frozen=True, slots=True)
class CacheInfo:
    """What does not change about a KV cache.

    Attributes:
        num_blocks: the scratch block included. num_usable_blocks: those that requests can hold.
        cache_dtype: as in ``EngineConfig.kv_cache_dtype``.
    """

    block_size: int = 0
    num_blocks: int = 0
    num_usable_blocks: int = 0
    cache_dtype: str = ""
    enable_prefix_caching: bool = False
    max_model_len: int = 1


class EngineCounts(NamedTuple):
    """What scheduler and cache say after a step. All from the same moment; a beam search counts as one sample.

    Attributes:
        num_running, num_waiting: samples with and without blocks.
        num_deferred: waiting samples whose prompt another sample is just computing; num_swapped: those with blocks on
            the host.
        kv_usage, host_usage: shares of the blocks that are in use, 0 to 1.
        num_prompt_tokens: of admitted prompts, once each; num_cached_tokens: those of them that the prefix cache had;
            num_queried_tokens: those that it was asked for.
        num_swap_tokens, num_recompute_tokens: given up by preemptions; num_recomputed_tokens: computed again.
        num_corrupted: samples that ended because their logits were no numbers.
        num_faults: steps that failed.
        num_warmup_compilations, num_serving_compilations: before and since the engine was ready.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    num_swapped: int = 0
    kv_usage: float = 0.0
    host_usage: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_queried_tokens: int = 0
    num_preemptions: int = 0
    num_swap_tokens: int = 0
    num_recompute_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_corrupted: int = 0
    num_faults: int = 0
    num_warmup_compilations: int = 0
    num_serving_compilations: int = 0


NOTHING_YET = EngineCounts()


@dataclasses.dataclass(slots=True)
class Histograms:
    """What is observed, named as Prometheus shows it.

    Times run from an arrival to the first admission (queue), on to the first token (prefill) and to the last one
    (decode); inference is prefill and decode. Those of whole prompts are observed when all samples have ended by stop
    or length. For a prompt that generates nothing its end stands for both tokens; it has no time to first token.
    """

    time_to_first_token_seconds: Histogram
    inter_token_latency_seconds: Histogram
    request_time_per_output_token_seconds: Histogram
    e2e_request_latency_seconds: Histogram
    request_queue_time_seconds: Histogram
    request_prefill_time_seconds: Histogram
    request_decode_time_seconds: Histogram
    request_inference_time_seconds: Histogram
    request_prompt_tokens: Histogram
    request_prefill_kv_computed_tokens: Histogram
    request_num_preemptions: Histogram
    request_params_n: Histogram
    request_params_max_tokens: Histogram
    request_max_num_generation_tokens: Histogram
    request_generation_tokens: Histogram
    iteration_tokens_total: Histogram

    @classmethod
    def empty(cls, max_model_len: int) -> Histograms:
        """Without observations; token counts have buckets up to ``max_model_len``."""
        bounds: dict[str, tuple[float, ...]] = {field.name: LATENCY_BOUNDS_S for field in dataclasses.fields(cls)}
        bounds["time_to_first_token_seconds"] = FIRST_TOKEN_BOUNDS_S
        bounds["inter_token_latency_seconds"] = TOKEN_BOUNDS_S
        bounds["request_time_per_output_token_seconds"] = TOKEN_BOUNDS_S
        bounds["request_num_preemptions"] = PREEMPTION_BOUNDS
        bounds["request_params_n"] = NUM_SAMPLES_BOUNDS
        bounds["iteration_tokens_total"] = STEP_TOKENS_BOUNDS
        for name in (
            "request_prompt_tokens",
            "request_prefill_kv_computed_tokens",
            "request_params_max_tokens",
            "request_max_num_generation_tokens",
            "request_generation_tokens",
        ):
            bounds[name] = token_count_bounds(max_model_len)
        return cls(**{name: Histogram(each) for name, each in bounds.items()})

    def copy(self) -> Histograms:
        """The same numbers, which no longer change."""
        return Histograms(*(getattr(self, field.name).copy() for field in dataclasses.fields(self)))


@dataclasses.dataclass(slots=True)
class Numbers:
    """Everything that is counted.

    Attributes:
        num_accepted: samples that came in, ever; num_ended: by reason. The difference is running or waiting.
        num_generation_tokens: tokens accepted into outputs.
    """

    histograms: Histograms
    counts: EngineCounts = NOTHING_YET
    num_accepted: int = 0
    num_ended: dict[str, int] = dataclasses.field(default_factory=lambda: {reason.value: 0 for reason in FinishReason})
    num_generation_tokens: int = 0


def summed(numbers: Sequence[Numbers]) -> Numbers:
    """The numbers of several engines, or of several lives of one, together; shares are summed up, too."""
    histograms = Histograms(
        *(Histogram.summed([getattr(each.histograms, field.name) for each in numbers])
          for field in dataclasses.fields(Histograms))
    )  # fmt: skip
    return Numbers(
        histograms,
        EngineCounts(*map(sum, zip(*(each.counts for each in numbers), strict=True))),
        sum(each.num_accepted for each in numbers),
        {reason.value: sum(each.num_ended[reason.value] for each in numbers) for reason in FinishReason},
        sum(each.num_generation_tokens for each in numbers),
    )


def last_of(numbers: Numbers) -> Numbers:
    """What is left to say of an engine that has died: nothing runs, and what ran has ended by an error."""
    counts = numbers.counts._replace(
        num_running=0, num_waiting=0, num_deferred=0, num_swapped=0, kv_usage=0.0, host_usage=0.0
    )
    num_lost = numbers.num_accepted - sum(numbers.num_ended.values())
    error = FinishReason.ERROR.value
    ended = numbers.num_ended | {error: numbers.num_ended[error] + num_lost}
    return dataclasses.replace(numbers, counts=counts, num_ended=ended)


class EngineMetrics:
    """Numbers behind a lock, which the engine's thread takes once a step and holds for microseconds."""

    def __init__(self, cache: CacheInfo = CacheInfo()) -> None:
        self.cache = cache
        self.lock = threading.Lock()
        self.numbers = Numbers(Histograms.empty(cache.max_model_len))
        """Only to be touched with the lock held."""

    def read(self) -> Numbers:
        """A copy from between two steps. Callable from any thread."""
        with self.lock:
            now = self.numbers
            return dataclasses.replace(now, histograms=now.histograms.copy(), num_ended=dict(now.num_ended))

    def replace(self, numbers: Numbers) -> None:
        """Takes over the numbers of an engine that counts elsewhere."""
        with self.lock:
            self.numbers = numbers


class SummedMetrics:
    """What several engines count together, as their status line shows it: shares are means."""

    def __init__(self, engines: Sequence[EngineMetrics]) -> None:
        self._engines = engines

    def read(self) -> Numbers:
        """A copy; the engines' numbers are not all from the same moment. Callable from any thread."""
        numbers = summed([each.read() for each in self._engines])
        counts, num_engines = numbers.counts, len(self._engines)
        numbers.counts = counts._replace(
            kv_usage=counts.kv_usage / num_engines, host_usage=counts.host_usage / num_engines
        )
        return numbers
