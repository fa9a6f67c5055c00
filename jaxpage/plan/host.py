"""What this machine's CPU can do, measured: no document tells. It must not know what is planned."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpage.runner.memory import available_host_bytes
from pallas_kernels.targets.chips import Chip

COPY_BYTES = 2**27
MATMUL_SIZE = 1024
ROUNDS = 5


@functools.cache
def cpu_chip(num_devices: int) -> Chip:
    """The limits of one of ``num_devices`` virtual devices, which share the cores and the memory."""
    (device,) = jax.local_devices(backend="cpu")[:1]
    with jax.default_device(device):
        array = jnp.ones(COPY_BYTES // 4, jnp.float32)
        copied = 2 * COPY_BYTES / _seconds(jax.jit(lambda: -array))
        rates = {dtype: 2 * MATMUL_SIZE**3 / _seconds(_product(dtype)) for dtype in ("float32", "bfloat16")}
    share = 1 / num_devices
    return Chip(
        memory_bytes=available_host_bytes() * share,
        bytes_per_s=copied * share,
        flops_per_s={dtype: rate * share for dtype, rate in rates.items()},
        interconnect_bytes_per_s=copied * share,
        source=f"measured here: a copy of {COPY_BYTES >> 20} MiB and products of {MATMUL_SIZE} x {MATMUL_SIZE} numbers",
    )


def _product(dtype: str) -> Callable[[], jax.Array]:
    matrix = jnp.ones((MATMUL_SIZE, MATMUL_SIZE), dtype)
    return jax.jit(lambda: matrix @ matrix)


def _seconds(run: Callable[[], jax.Array]) -> float:
    """The fastest of some rounds."""
    best = float("inf")
    run().block_until_ready()
    for _ in range(ROUNDS):
        started = time.perf_counter()
        run().block_until_ready()
        best = min(best, time.perf_counter() - started)
    return best
