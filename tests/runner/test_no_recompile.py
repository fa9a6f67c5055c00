"""After construction nothing is compiled any more, whatever is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from jaxpage import LLM, SamplingParams

if TYPE_CHECKING:
    from numpy_reference import RandomModel

FEATURES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "seed": 1, "top_k": 5, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.8, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 0, "logit_bias": {3: 2.0}, "min_tokens": 4},
    {"temperature": 0, "allowed_token_ids": [1, 2, 3]},
    {"temperature": 0, "logprobs": 5, "prompt_logprobs": 5},
    {"temperature": 1.0, "n": 3, "logprobs": 1},
    {"temperature": 0, "stop": ["e"], "stop_token_ids": [5]},
    {"temperature": 0, "max_tokens": 0, "prompt_logprobs": 0},
]


def test_serving_compiles_nothing(
    random_model: Callable[..., RandomModel], random_ids: Callable[..., list[int]]
) -> None:
    llm = LLM(
        model=str(random_model().directory),
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        block_size=4,
        num_gpu_blocks_override=16,
    )
    runner, scheduler = llm.engine.core.runner, llm.engine.core.scheduler
    sizes = set()
    obey = runner.worker.obey
    runner.worker.obey = lambda command: sizes.add(command.num_tokens) or obey(command)
    params = [SamplingParams(**({"max_tokens": 12} | feature)) for feature in FEATURES]
    compiled: list[str] = []

    def listen(event: str, duration_s: float, **details: Any) -> None:
        if "backend_compile" in event:
            compiled.append(f"{event} {details}")

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x + 1)(3.0)
        assert compiled, "the listener hears nothing"
        compiled.clear()
        for each in params:
            llm.generate({"prompt_token_ids": random_ids(9)}, each, use_tqdm=False)
        prompts: list[Any] = [{"prompt_token_ids": random_ids(1 + 7 * index % 25)} for index in range(30)]
        for _ in range(2):
            llm.generate(prompts, [params[index % len(params)] for index in range(30)], use_tqdm=False)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []
    assert sizes == {1, 8, 16}
    assert scheduler.stats.num_preemptions > 0
    assert scheduler.kv.counters.num_hit_tokens > 0
