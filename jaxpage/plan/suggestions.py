"""What to turn to serve more or at all: each change is planned like any scenario, and told with what it gives.

It must not know how suggestions are shown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from jaxpage.errors import ParameterError, StartupError
from jaxpage.layers.kv_cache import QUANTIZED_DTYPES
from jaxpage.parallel.table import presets
from jaxpage.plan.assess import Assessment, assess
from jaxpage.plan.slices import Slice, larger_slices
from jaxpage.plan.splits import choose_scenario

SPLIT = ("tensor_parallel_size", "data_parallel_size")
LEAST_GAIN = 1.02
"""Gains below are not worth a line."""


@dataclasses.dataclass(frozen=True)
class Change:
    """A candidate: options, or other chips, and what has to be paid for it."""

    options: dict[str, Any]
    price: str
    where: Slice | None = None

    @property
    def flags(self) -> str:
        """As they are typed."""
        words = [f"--target {self.where.name}"] if self.where is not None else []
        for name, value in self.options.items():
            flag = "--" + name.replace("_", "-")
            words += [flag] if value is True else [] if value is None or value is False else [f"{flag} {value}"]
        return " ".join(words)


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """A change and what it would give; numbers are of all engines together.

    Attributes:
        makes_it_fit: without it nothing can be served.
        full_requests: of max_model_len tokens that fit.
        num_served: requests at once, as memory and max_num_seqs allow.
        tokens_per_s: the bound for them; None if the chip's limits are not known.
        gain: of that rate or, where there is none, of requests; infinite for what makes it fit.
    """

    flags: str
    price: str
    makes_it_fit: bool
    full_requests: float
    num_served: int
    tokens_per_s: float | None
    gain: float

    def told(self, before: Assessment) -> str:
        """In words, against what there is now."""
        gains = [f"{_shown(self.full_requests)} full-length requests fit"]
        if not self.makes_it_fit:
            gains[0] += f" instead of {_shown(before.memory.full_requests * before.scenario.num_replicas)}"
        if self.tokens_per_s is not None:
            gains.append(f"at most {self.tokens_per_s:,.0f} tok/s with {self.num_served} at once")
        return ", ".join(gains)


def find_suggestions(base: Assessment) -> list[Suggestion]:
    """Changes that help, the most helpful first."""
    found = []
    for change in _candidates(base):
        try:
            scenario = base.scenario.changed(change.where, **change.options)
        except (ParameterError, StartupError):
            continue
        after = assess(scenario, min(base.context, scenario.config.max_model_len), None, base.chip, base.temp_factor)
        suggestion = _judged(base, after, change)
        if suggestion is not None:
            found.append(suggestion)
    return sorted(found, key=lambda item: (not item.makes_it_fit, -item.gain if math.isfinite(item.gain) else 0.0,
                                           -(item.tokens_per_s or item.full_requests)))  # fmt: skip


def _judged(base: Assessment, after: Assessment, change: Change) -> Suggestion | None:
    if not after.memory.fits:
        return None
    rate = None if after.chip is None or not after.num_served else after.decode(after.num_served).tokens_per_s
    requests = after.memory.full_requests * after.scenario.num_replicas
    if base.memory.fits:
        now = None if base.chip is None or not base.num_served else base.decode(base.num_served).tokens_per_s
        gain = rate / now if rate and now else 1.0
        more = requests / (base.memory.full_requests * base.scenario.num_replicas)
        if gain < LEAST_GAIN and (more < LEAST_GAIN or gain < 1 / LEAST_GAIN):
            return None
    else:
        gain = math.inf
    return Suggestion(change.flags, change.price, not base.memory.fits, requests, after.num_served, rate, gain)


def _candidates(base: Assessment) -> Iterator[Change]:
    scenario, config = base.scenario, base.scenario.config
    cache_is_whole = config.kv_cache_dtype not in QUANTIZED_DTYPES
    if cache_is_whole:
        yield Change({"kv_cache_dtype": "int8"}, "keys and values are rounded; fp8 takes as much")
    for kind, also in (("int8", "; fp8 takes as much"), ("int4", "")) if config.quantization is None else ():
        yield Change({"quantization": kind}, f"weights are rounded{also}")
        if cache_is_whole:
            yield Change(
                {"quantization": kind, "kv_cache_dtype": "int8"}, f"weights, keys and values are rounded{also}"
            )
    if config.dtype == "float32":
        yield Change({"dtype": "bfloat16"}, "weights and activations are rounded")
    yield from _sizes(base)
    yield from _splits(base)
    for larger in larger_slices(scenario.where):
        price = f"{larger.num_devices} devices instead of {scenario.where.num_devices}"
        with contextlib.suppress(ParameterError, StartupError):
            yield Change(_best_sizes(base, larger), price, larger)


def _best_sizes(base: Assessment, where: Slice) -> dict[str, int]:
    """How the devices of ``where`` are shared out if nobody says."""
    scenario = base.scenario
    options = {**vars(scenario.args), **dict.fromkeys(SPLIT)}
    best = choose_scenario(scenario.name, scenario.values, where, options, base.temp_factor)
    return {name: getattr(best.args, name) for name in SPLIT}


def _sizes(base: Assessment) -> Iterator[Change]:
    """Limits of requests and steps."""
    config = base.scenario.config
    shortest = -(-base.memory.num_tokens // config.block_size) * config.block_size
    lengths = {config.max_model_len // 2, config.max_model_len // 4, shortest}
    for length in sorted((length for length in lengths if 1 < length < config.max_model_len), reverse=True):
        yield Change({"max_model_len": length}, "longer requests are refused")
    for count in (config.max_num_seqs // 2, config.max_num_seqs // 4):
        if count >= 1:
            yield Change({"max_num_seqs": count}, "fewer requests in a step")
    for count in (2 * config.max_num_seqs, 4 * config.max_num_seqs):
        if count <= config.max_num_batched_tokens:
            yield Change({"max_num_seqs": count}, "each request waits longer for its tokens")
    for count in (config.max_num_batched_tokens // 2, config.max_num_batched_tokens // 4):
        if count >= config.max_num_seqs:
            yield Change({"max_num_batched_tokens": count}, "prompts are computed in smaller steps")
    if base.scenario.args.gpu_memory_utilization < 0.95 and not base.scenario.where.is_cpu:
        yield Change({"gpu_memory_utilization": 0.95}, "less is left for other programs")


def _splits(base: Assessment) -> Iterator[Change]:
    """Other ways to use the same chips."""
    scenario = base.scenario
    args = scenario.args
    tensor, stages, replicas = args.tensor_parallel_size, args.pipeline_parallel_size, args.data_parallel_size
    if scenario.where.is_cpu:
        return
    best = {}
    with contextlib.suppress(ParameterError, StartupError):
        best = _best_sizes(base, scenario.where)
        yield Change(best, "each token takes longer" if best[SPLIT[0]] < tensor else "more is sent between devices")
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    for sizes, price in (
        ((tensor * 2, stages, replicas), "more devices, which send more"),
        ((tensor, stages, replicas * 2), "more devices"),
        ((tensor // 2, stages, replicas * 2), "each token takes longer"),
        ((tensor * 2, stages, replicas // 2), "more is sent between devices"),
        ((tensor // 2, stages * 2, replicas), "each token passes more stages"),
    ):
        if min(sizes) >= 1 and math.prod(sizes) <= scenario.where.num_devices:
            options: dict[str, Any] = dict(zip(names, sizes, strict=True))
            if stages != sizes[1] or best != {name: options[name] for name in SPLIT}:
                yield Change(options, price)
    if tensor > 1:
        for name in presets():
            if name != (args.sharding or "megatron"):
                yield Change({"sharding": name}, f"see configs/sharding/{name}.yaml")


def _shown(requests: float) -> str:
    return f"{requests:,.1f}" if requests < 100 else f"{requests:,.0f}"
