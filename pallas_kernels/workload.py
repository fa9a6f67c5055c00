"""Calls of operations with data in them, to run on the device at hand, and how long they take there.

It owns how the arrays of a case are filled and how runs are timed; it must not know what is compared or chosen by it.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.case import Case, is_quantized, struct
from pallas_kernels.geometries import Geometry
from pallas_kernels.ragged_paged_attention import IMPLEMENTATIONS, AttentionMetadata, ragged_paged_attention

PATTERN = 2**20 + 3
"""Random numbers that larger arrays repeat: making gigabytes of them would take longer than what is measured."""


def positive(text: str) -> int:
    """A type for argparse: a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def attention_case(
    geometry: Geometry,
    *,
    num_requests: int,
    num_queries: int,
    context: int,
    block_size: int,
    dtype: str,
    kv_dtype: str | None = None,
) -> tuple[Case, dict[str, Any]]:
    """Requests of equal length, ``context`` tokens of which the last ``num_queries`` are queries; and its arguments."""
    kv_dtype = kv_dtype or dtype
    max_blocks = -(-context // block_size)
    num_blocks, num_tokens = num_requests * max_blocks + 1, num_requests * num_queries
    table, per_request, bounds = (num_requests, max_blocks), (num_requests,), (num_requests + 1,)
    structs: dict[str, Any] = {
        "q": struct((num_tokens, geometry.num_heads, geometry.head_dim), dtype),
        "kv_cache": struct((num_blocks, geometry.num_kv_heads, block_size, 2 * geometry.head_dim), kv_dtype),
        "metadata": AttentionMetadata(*(struct(shape, jnp.int32) for shape in (table, per_request, bounds))),  # type: ignore[arg-type]
    }
    if is_quantized(kv_dtype):
        structs["kv_scales"] = struct((num_blocks, 2, geometry.num_kv_heads, block_size), jnp.float32)
    kind = "decode" if num_queries == 1 else "prefill"
    case = Case(
        operation="ragged_paged_attention",
        model=geometry.name,
        size=geometry.heads,
        shape=f"{kind} {num_requests} x {context if num_queries == 1 else num_queries}",
        dtype=kv_dtype,
        function=ragged_paged_attention,
        arguments=structs,
        options={"scale": geometry.head_dim**-0.5},
        implementations=IMPLEMENTATIONS,
    )
    # Every request has its blocks scattered over the cache; block 0 belongs to nobody, as in the engine.
    tables = np.random.default_rng(0).permutation(np.arange(1, num_blocks)).reshape(num_requests, max_blocks)
    metadata = AttentionMetadata(
        jnp.asarray(tables, jnp.int32),
        jnp.full(num_requests, context, jnp.int32),
        jnp.arange(num_requests + 1, dtype=jnp.int32) * num_queries,
    )
    return case, {**filled({name: x for name, x in structs.items() if name != "metadata"}), "metadata": metadata}


def filled(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays for pytrees of shapes: random numbers, small positive scales, rows in equal groups."""
    num_rows = arguments["x"].shape[0] if "x" in arguments else 0

    def fill(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        last = path[-1]
        name = str(getattr(last, "key", getattr(last, "name", last)))
        if name == "group_sizes":
            sizes = np.full(leaf.shape, num_rows // leaf.shape[0])
            sizes[: num_rows % leaf.shape[0]] += 1
            return jnp.asarray(sizes, leaf.dtype)
        rng = np.random.default_rng(len(jax.tree_util.keystr(path)))
        count = min(PATTERN, math.prod(leaf.shape))
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            limits = jnp.iinfo(leaf.dtype)
            pattern = rng.integers(max(limits.min, -100), min(limits.max, 100), count)
        else:
            pattern = rng.standard_normal(count, np.float32)
            if name.endswith("scales"):
                pattern = 0.01 * (1.0 + np.abs(pattern))
        return _repeated(jnp.asarray(pattern, leaf.dtype), leaf.shape)

    return dict(jax.tree_util.tree_map_with_path(fill, dict(arguments)))


class Stopwatch:
    """Times functions in turns, so that a device whose speed drifts is fair to them.

    Short runs are repeated until ``least`` seconds have passed and queue up on the device, which hides what it takes
    to start them. A run before them is not timed: who had its turn before left caches to itself.
    """

    def __init__(self, runs: Mapping[str, Callable[[], Any]], least: float = 0.005) -> None:
        self.runs = dict(runs)
        self.repeats = {}
        for name, run in self.runs.items():
            jax.block_until_ready(run())  # compiles, and fills caches
            self.repeats[name] = max(1, min(1000, round(least / max(1e-7, _timed(run, 1)))))

    def round(self) -> dict[str, float]:
        """Seconds of a run of each function."""
        seconds = {}
        for name, run in self.runs.items():
            _timed(run, 1)
            seconds[name] = _timed(run, self.repeats[name])
        return seconds


def seconds(runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of a run of each function, once a round."""
    stopwatch = Stopwatch(runs)
    times = [stopwatch.round() for _ in range(rounds)]
    return {name: [each[name] for each in times] for name in runs}


def relative_error(value: Any, reference: Any) -> float:
    """Largest difference, relative to the largest value of the reference; NaN if there is any."""
    value, reference = (np.asarray(x, np.float32) for x in (value, reference))
    if value.size == 0:
        return 0.0
    return float(np.max(np.abs(value - reference)) / max(float(np.max(np.abs(reference))), 1e-30))


@functools.partial(jax.jit, static_argnums=1)
def _repeated(pattern: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    size = math.prod(shape)
    lines = jnp.broadcast_to(pattern, (-(-size // len(pattern)), len(pattern)))
    return lines.reshape(-1)[:size].reshape(shape)


def _timed(run: Callable[[], Any], repeats: int) -> float:
    started = time.perf_counter()
    out = None
    for _ in range(repeats):
        out = run()
    jax.block_until_ready(out)
    return (time.perf_counter() - started) / repeats
