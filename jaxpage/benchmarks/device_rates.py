"""What the device at hand is and the most it can be seen to do: bytes copied and numbers multiplied in a second.

It must not know what is measured against these rates.
"""

from __future__ import annotations

import subprocess
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.workload import seconds

ROUNDS = 10
COPY_BYTES = {"cpu": 256 * 2**20}
MATMUL_SIZE = {"cpu": 1536}
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=driver_version,power.limit,clocks.max.sm,clocks.max.mem",
    "--format=csv,noheader",
)


def device_facts() -> dict[str, Any]:
    """Kind, memory, driver and versions, as far as they are known here."""
    device = jax.local_devices()[0]
    try:
        stats = device.memory_stats() or {}  # None on CPU
    except Exception:  # not every backend has them
        stats = {}
    facts = {
        "device": device.device_kind,
        "compute_capability": getattr(device, "compute_capability", None),
        "memory_bytes": stats.get("bytes_limit"),
        "driver": _nvidia_smi() if device.platform == "gpu" else None,
    }
    for name in PLUGINS:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {name: value for name, value in facts.items() if value is not None}


def copy_bandwidth() -> float:
    """Bytes a second that are read and written where an array is copied, here onto itself with the sign changed."""
    size = COPY_BYTES.get(jax.local_devices()[0].platform, 2 * 2**30)
    arrays = [jnp.ones(size // 4, jnp.float32)]
    flip = jax.jit(lambda x: -x, donate_argnums=0)  # fresh memory would cost a CPU more than the copy

    def run() -> jax.Array:
        arrays.append(flip(arrays.pop()))
        return arrays[0]

    return 2 * size / min(seconds({"": run}, ROUNDS)[""])


def matmul_rate(dtype: str) -> float:
    """Operations a second of a product of large square matrices."""
    size = MATMUL_SIZE.get(jax.local_devices()[0].platform, 8192)
    x = jnp.ones((size, size), dtype)
    product = jax.jit(lambda x: x @ x)
    return 2 * size**3 / min(seconds({"": lambda: product(x)}, ROUNDS)[""])


def _nvidia_smi() -> str | None:
    try:
        done = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)
