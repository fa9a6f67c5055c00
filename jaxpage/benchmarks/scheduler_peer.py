"""Runs vLLM's scheduler in the workload of ``jaxpage.benchmarks.scheduler``, in vLLM's own Python environment.

This file is also the script that runs there: it must not import jaxpage.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 32000,
    "max_position_embeddings": 65536,
    "torch_dtype": "float32",
}
"""Only its length limit matters: no model runs."""


def measure(python: str, jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """vLLM's version, and its microseconds a request a step for each job.

    Args:
        python: interpreter of an environment that has vLLM.
        jobs: num_requests, num_prompt_tokens, num_blocks, block_size, caching, warm_up, steps, rounds of each.

    Raises:
        RuntimeError: with the end of its output if it fails.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(MODEL))
        done = subprocess.run(
            [python, __file__, json.dumps({"model": directory, "jobs": jobs})],
            capture_output=True, text=True, env=environment, cwd=directory, check=False,
        )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(f"vllm failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def best_of(rounds: int, steps: int, warm_up: int, step: Callable[[], int]) -> float:
    """Microseconds a request a step in the best of some rounds; ``step`` says how many requests it served."""
    for _ in range(warm_up):
        step()
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        served = sum(step() for _ in range(steps))
        best = min(best, (time.perf_counter() - started) / served)
    return 1e6 * best


def _step_of(model: str, job: dict[str, Any]) -> Callable[[], int]:
    """vLLM's scheduler with all requests in decode; the function makes one step."""
    import torch  # pyright: ignore[reportMissingImports]
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.config import (  # pyright: ignore[reportMissingImports]
        CacheConfig,
        DeviceConfig,
        ModelConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.utils.hashing import sha256  # pyright: ignore[reportMissingImports]
    from vllm.v1.core.kv_cache_utils import (  # pyright: ignore[reportMissingImports]
        get_request_block_hasher,
        init_none_hash,
    )
    from vllm.v1.core.sched.scheduler import Scheduler  # pyright: ignore[reportMissingImports]
    from vllm.v1.kv_cache_interface import (  # pyright: ignore[reportMissingImports]
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
    )
    from vllm.v1.outputs import ModelRunnerOutput  # pyright: ignore[reportMissingImports]
    from vllm.v1.request import Request  # pyright: ignore[reportMissingImports]
    from vllm.v1.structured_output import StructuredOutputManager  # pyright: ignore[reportMissingImports]

    num_blocks, block_size = job["num_blocks"], job["block_size"]
    max_model_len = MODEL["max_position_embeddings"]
    cache = CacheConfig(block_size=block_size, enable_prefix_caching=job["caching"])
    cache.num_gpu_blocks = num_blocks
    config = VllmConfig(
        model_config=ModelConfig(model=model, dtype="float32", skip_tokenizer_init=True, max_model_len=max_model_len),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=job["num_requests"],
            max_num_batched_tokens=8192,
            max_model_len=max_model_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
        ),
        device_config=DeviceConfig("cpu"),
    )
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.float32)
    scheduler = Scheduler(
        config,
        KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        StructuredOutputManager(config),
        block_size=block_size,
    )
    init_none_hash(sha256)
    hasher = get_request_block_hasher(block_size, sha256) if job["caching"] else None
    params = SamplingParams(max_tokens=4096, ignore_eos=True)
    params.update_from_generation_config({}, eos_token_id=2)
    for index in range(job["num_requests"]):
        prompt = [index] * job["num_prompt_tokens"]
        scheduler.add_request(Request(f"request-{index}", prompt, params, None, block_hasher=hasher))

    def step() -> int:
        schedule = scheduler.schedule()
        ids = list(schedule.num_scheduled_tokens)
        tokens = [[7]] * len(ids)
        places = {request_id: place for place, request_id in enumerate(ids)}
        output = ModelRunnerOutput(req_ids=ids, req_id_to_index=places, sampled_token_ids=tokens)
        scheduler.update_from_output(schedule, output)
        return len(ids)

    while True:
        before = scheduler.requests
        step()
        if all(request.num_output_tokens for request in before.values()):
            return step


def _main(work: dict[str, Any]) -> None:
    import vllm  # pyright: ignore[reportMissingImports]

    figures = []
    for job in work["jobs"]:
        step = _step_of(work["model"], job)
        figures.append(best_of(job["rounds"], job["steps"], job["warm_up"], step))
    print("RESULT " + json.dumps({"version": vllm.__version__, "us": figures}), flush=True)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: peers have modules of the same names, such as "kernels"
    _main(json.loads(sys.argv[1]))
