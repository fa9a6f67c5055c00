"""How many KV blocks fit: on the device, beside what the compiled step needs, and in the host's memory."""

from __future__ import annotations

import dataclasses
import logging
import os

from jaxpage.batch import Device
from jaxpage.config import EngineArgs, EngineConfig
from jaxpage.errors import StartupError
from jaxpage.runner.gpu_pool import GPU_PLATFORMS, pool_share, usable_share

logger = logging.getLogger("jaxpage")

CPU_DEFAULT_BYTES = 2 << 30
"""KV cache on a CPU if nobody says otherwise: plenty for tens of requests, and no burden for a laptop."""
CPU_MEMORY_SHARE = 0.25


@dataclasses.dataclass(frozen=True)
class KVCachePlan:
    """The size of the cache. ``num_blocks`` counts the scratch block."""

    num_blocks: int
    block_size: int
    bytes_per_block: int
    max_model_len: int

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def num_tokens(self) -> int:
        """Tokens that requests can store."""
        return (self.num_blocks - 1) * self.block_size

    def describe(self) -> str:
        """The plan in words."""
        full = (self.num_blocks - 1) / -(-self.max_model_len // self.block_size)
        return (
            f"KV cache: {self.num_blocks - 1:,} blocks of {self.block_size} tokens = {self.num_tokens:,} tokens "
            f"({gib(self.total_bytes)}); {full:.1f} requests of max_model_len {self.max_model_len:,} fit at once"
        )


def gib(num_bytes: float) -> str:
    """Bytes in words a person reads."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"


def free_bytes(device: Device, utilization: float, share_of_gpu: float | None = None) -> int:
    """Bytes the engine may still take on ``device``.

    Args:
        utilization: share of the device's memory that it may use.
        share_of_gpu: of a GPU's memory, what jax has there and ``device`` tells of; None: what it has here.
    """
    if device.platform == "cpu":
        return int(available_host_bytes() * CPU_MEMORY_SHARE)
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise StartupError(
            f"{device.device_kind} does not tell its memory; give kv_cache_memory_bytes or num_gpu_blocks_override"
        )
    if share_of_gpu is None and device.platform in GPU_PLATFORMS:
        share_of_gpu = pool_share()
    share = utilization if share_of_gpu is None else usable_share(utilization, share_of_gpu)
    return int(stats["bytes_limit"] * share) - stats["bytes_in_use"]


def available_host_bytes() -> int:
    """Memory the host can still give, in bytes."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def plan_kv_cache(
    args: EngineArgs,
    config: EngineConfig,
    bytes_per_block: int,
    device: Device,
    step_bytes: int,
    share_of_gpu: float | None = None,
) -> KVCachePlan:
    """Decides the number of blocks.

    Args:
        bytes_per_block: on ``device``, if a block is split over several.
        step_bytes: what steps need beside parameters and cache: compiled temporaries, outputs, sampling state.
        share_of_gpu: see ``free_bytes``.

    Raises:
        StartupError: with the numbers, if not even one request of two tokens fits.
    """
    wanted = config.max_num_seqs * config.max_blocks_per_request + 1

    def free(utilization: float) -> int:
        return free_bytes(device, utilization, share_of_gpu) - step_bytes

    if args.num_gpu_blocks_override is not None:
        num_blocks = args.num_gpu_blocks_override + 1
        available = available_host_bytes() if device.platform == "cpu" else free(1.0)
        if num_blocks * bytes_per_block > available:
            raise StartupError(
                f"not enough memory: num_gpu_blocks_override {args.num_gpu_blocks_override} needs "
                f"{gib(num_blocks * bytes_per_block)}, {gib(max(available, 0))} are free"
            )
    else:
        if args.kv_cache_memory_bytes is not None:
            budget = args.kv_cache_memory_bytes
            available = available_host_bytes() if device.platform == "cpu" else free(1.0)
            if budget > available:
                raise StartupError(
                    f"not enough memory: kv_cache_memory_bytes {gib(budget)}, {gib(max(available, 0))} are free"
                )
        else:
            budget = free(args.gpu_memory_utilization)
            if device.platform == "cpu":
                budget = min(budget, max(CPU_DEFAULT_BYTES, config.max_blocks_per_request * bytes_per_block))
        num_blocks = min(wanted, budget // bytes_per_block)
    if num_blocks < 2 and args.kv_cache_memory_bytes is not None:
        raise StartupError(
            f"kv_cache_memory_bytes {args.kv_cache_memory_bytes:,} holds fewer than the two blocks of "
            f"{bytes_per_block:,} bytes that are the least; raise it or lower block_size"
        )
    if num_blocks < 2:
        raise StartupError(
            f"not enough memory: no KV block of {gib(bytes_per_block)} fits beside the weights and the step's "
            f"{gib(step_bytes)}; lower max_num_batched_tokens, max_num_seqs or block_size"
        )
    return KVCachePlan(num_blocks, config.block_size, bytes_per_block, config.max_model_len)


def num_host_blocks(swap_space_bytes: int, bytes_per_block: int, most_blocks: int) -> int:
    """Decides how many swapped blocks the host's memory holds.

    Args:
        most_blocks: what requests can use at most: more is never set aside.

    Raises:
        StartupError: if the host has not that much memory, or swap_space holds no block at all.
    """
    if swap_space_bytes == 0:
        return 0
    count = min(swap_space_bytes // bytes_per_block, most_blocks)
    if count == 0:
        raise StartupError(
            f"swap_space {gib(swap_space_bytes)} holds no KV block of {bytes_per_block:,} bytes; "
            "raise it, or set it to 0 and never swap"
        )
    needed, available = count * bytes_per_block, available_host_bytes()
    if needed > available:
        raise StartupError(
            f"not enough memory: swap_space {gib(swap_space_bytes)} would take {gib(needed)} of host memory, "
            f"{gib(available)} are free; lower it"
        )
    logger.info("Swap space: %s blocks in host memory (%s)", f"{count:,}", gib(needed))
    return count
