"""What tests of several engines share: their size, requests to them, and their processes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any

from jaxpage import AsyncLLMEngine, RequestOutput, SamplingParams

SMALL: dict[str, Any] = {
    "max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 8, "block_size": 4,
    "num_gpu_blocks_override": 128, "enforce_eager": True,
}  # fmt: skip


def wait_for(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    """Waits until ``condition`` holds; fails the test if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def params(**values: Any) -> SamplingParams:
    """Eight greedy tokens, unless ``values`` say otherwise."""
    return SamplingParams(**({"temperature": 0, "ignore_eos": True, "max_tokens": 8} | values))


async def collect(engine: AsyncLLMEngine, prompt: Any, sampling: SamplingParams, name: str) -> list[RequestOutput]:
    """All outputs of a request."""
    prompt = {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt
    return [output async for output in engine.generate(prompt, sampling, name)]


def pids(engine: AsyncLLMEngine) -> list[int]:
    """The processes of the engines."""
    return [each.peer.pid for each in engine.group.engines]  # type: ignore[attr-defined]


def is_running(pid: int) -> bool:
    """A process that has ended and is not yet waited for counts as gone."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")
