"""How many KV blocks there are, and what is said when there is no room for them."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

from jaxpage.config import EngineArgs, EngineConfig, resolve
from jaxpage.errors import ParameterError, StartupError
from jaxpage.runner import memory
from jaxpage.runner.memory import CPU_DEFAULT_BYTES, KVCachePlan, gib, num_host_blocks, plan_kv_cache

BYTES_PER_TOKEN = 1 << 20
GIB = 1 << 30


@dataclasses.dataclass
class FakeDevice:
    """The part of ``jax.Device`` that the plan looks at."""

    platform: str = "tpu"
    limit_bytes: int | None = 16 * GIB
    used_bytes: int = 4 * GIB
    device_kind: str = "a fake device"

    def memory_stats(self) -> dict[str, int]:
        if self.limit_bytes is None:
            return {}
        return {"bytes_limit": self.limit_bytes, "bytes_in_use": self.used_bytes}


@pytest.fixture(autouse=True)
def host_with_32_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 32 * GIB)


def plan(device: FakeDevice, step_bytes: int = GIB, **options: Any) -> KVCachePlan:
    args = EngineArgs(**({"block_size": 16, "max_num_seqs": 256, "max_model_len": 4096} | options))
    config = resolve(args, model_max_len=4096, vocab_size=1000, platform=device.platform)
    return plan_kv_cache(args, config, BYTES_PER_TOKEN * config.block_size, device, step_bytes)  # type: ignore[arg-type]


def test_an_accelerator_gives_its_share_without_weights_and_step() -> None:
    # 90% of 16 GiB without 4 GiB in use and 1 GiB for the step, in blocks of 16 MiB.
    assert plan(FakeDevice()).num_blocks == int((16 * 0.9 - 4 - 1) * 64)
    assert plan(FakeDevice(), gpu_memory_utilization=0.5).num_blocks == (8 - 4 - 1) * 64


def test_no_more_blocks_than_requests_can_use() -> None:
    assert plan(FakeDevice(), max_num_seqs=2, max_model_len=64).num_blocks == 2 * 4 + 1


def test_a_cpu_takes_little_unless_told() -> None:
    assert plan(FakeDevice("cpu")).num_blocks == CPU_DEFAULT_BYTES // (16 * BYTES_PER_TOKEN) * 2
    assert plan(FakeDevice("cpu"), kv_cache_memory_bytes=10 * GIB).num_blocks == 640


def test_overrides_are_exact() -> None:
    for platform in ("cpu", "tpu", "gpu"):
        assert plan(FakeDevice(platform), num_gpu_blocks_override=7).num_blocks == 8
        assert plan(FakeDevice(platform), kv_cache_memory_bytes=GIB).num_blocks == 64


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        (FakeDevice(), {"num_gpu_blocks_override": 1023}, r"num_gpu_blocks_override 1023 needs 16.00 GiB, 11.00"),
        (FakeDevice("cpu"), {"num_gpu_blocks_override": 2048}, r"override 2048 needs 32.02 GiB, 32.00 GiB are free"),
        (FakeDevice(), {"kv_cache_memory_bytes": 12 * GIB}, r"kv_cache_memory_bytes 12.00 GiB, 11.00 GiB are free"),
        (FakeDevice(), {"gpu_memory_utilization": 0.3}, r"no KV block of 16.0 MiB fits .* step's 1.00 GiB; lower max"),
        (FakeDevice(), {"kv_cache_memory_bytes": 1}, r"bytes 1 holds fewer than the two blocks of 16,777,216"),
        (FakeDevice(limit_bytes=None), {}, r"a fake device does not tell its memory; give kv_cache_memory_bytes or"),
    ],
)  # fmt: skip
def test_too_little_memory_is_said_with_the_numbers(device: FakeDevice, options: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        plan(device, **options)


def test_the_plan_in_words() -> None:
    made = KVCachePlan(num_blocks=1025, block_size=16, bytes_per_block=1 << 20, max_model_len=4096)
    assert made.num_tokens == 16384
    assert made.describe() == (
        "KV cache: 1,024 blocks of 16 tokens = 16,384 tokens (1.00 GiB); "
        "4.0 requests of max_model_len 4,096 fit at once"
    )
    assert gib(3 << 20) == "3.0 MiB"


def test_the_host_tells_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert 2**20 < memory.available_host_bytes() < 2**50


def test_resolve_decides_every_size() -> None:
    def resolved(**options: Any) -> EngineConfig:
        return resolve(EngineArgs(**options), model_max_len=1000, vocab_size=50, platform="cpu")

    default = resolved()
    assert (default.max_model_len, default.block_size, default.max_blocks_per_request) == (1000, 32, 32)
    assert default.num_logprobs == 20
    assert resolved(max_logprobs=-1).num_logprobs == 50
    assert resolved(max_num_batched_tokens=4).max_num_seqs == 4
    assert resolved(enable_chunked_prefill=False).max_num_batched_tokens == 1000
    assert (default.dtype, default.kv_cache_dtype) == ("float32", "float32")
    assert resolved(dtype="bfloat16").kv_cache_dtype == "bfloat16"
    assert resolved(kv_cache_dtype="fp8").kv_cache_dtype == "float8_e4m3fn"
    for kv_cache_dtype, block_size in (("auto", 64), ("float32", 64), ("int8", 128)):
        args = EngineArgs(kv_cache_dtype=kv_cache_dtype)
        assert resolve(args, model_max_len=1000, vocab_size=50, platform="tpu").block_size == block_size
    assert resolve(EngineArgs(), model_max_len=1000, vocab_size=50, platform="gpu").dtype == "bfloat16"


def test_host_blocks_fill_the_swap_space_but_never_more_than_requests_can_use(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "jaxpage"):
        assert num_host_blocks(4 * GIB, 2 << 20, most_blocks=10_000) == 2048
        assert caplog.messages == ["Swap space: 2,048 blocks in host memory (4.00 GiB)"]
        assert num_host_blocks(4 * GIB, 2 << 20, most_blocks=100) == 100
        assert num_host_blocks((4 << 20) - 1, 2 << 20, most_blocks=100) == 1
        assert num_host_blocks(0, 2 << 20, most_blocks=100) == 0
    assert len(caplog.messages) == 3


def test_too_little_host_memory_is_said_with_the_numbers() -> None:
    # 32 GiB are free.
    assert num_host_blocks(64 * GIB, GIB, most_blocks=32) == 32
    with pytest.raises(StartupError, match=r"swap_space 64.00 GiB would take 33.00 GiB of host memory, 32.00 GiB"):
        num_host_blocks(64 * GIB, GIB, most_blocks=33)
    with pytest.raises(StartupError, match=r"swap_space 1.0 MiB holds no KV block of 2,097,152 bytes; raise it, or"):
        num_host_blocks(1 << 20, 2 << 20, most_blocks=100)


@pytest.mark.parametrize(
    ("platform", "options", "swap_space_gib", "mode"),
    [
        ("gpu", {}, 4, "auto"),
        ("tpu", {"swap_space": 0.5}, 0.5, "auto"),
        ("tpu", {"swap_space": 0}, 0, "recompute"),
        ("gpu", {"preemption_mode": "swap"}, 4, "swap"),
        ("gpu", {"preemption_mode": "recompute", "swap_space": 8}, 0, "recompute"),
        ("cpu", {}, 0, "recompute"),
        ("cpu", {"swap_space": 2}, 2, "auto"),
        ("cpu", {"preemption_mode": "swap"}, 1, "swap"),
    ],
    ids=str,
)
def test_swap_space_and_preemption_mode(
    platform: str, options: dict[str, Any], swap_space_gib: float, mode: str
) -> None:
    config = resolve(EngineArgs(**options), model_max_len=1000, vocab_size=50, platform=platform)
    assert (config.swap_space_bytes, config.preemption_mode) == (swap_space_gib * GIB, mode)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"swap_space": -1}, r"swap_space: must be .* got -1"),
        ({"swap_space": float("inf")}, r"swap_space: must be finite, got inf"),
        ({"swap_space": "4"}, r"swap_space: must be a number, got '4'"),
        ({"preemption_mode": "abort"}, r"preemption_mode: must be one of auto, swap, recompute, got 'abort'"),
        ({"preemption_mode": "swap", "swap_space": 0}, r"preemption_mode: 'swap' needs a swap_space above 0"),
    ],
)  # fmt: skip
def test_wrong_swap_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        resolve(EngineArgs(**options), model_max_len=1000, vocab_size=50, platform="gpu")
