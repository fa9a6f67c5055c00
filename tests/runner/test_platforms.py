"""The step lowers for accelerators on a machine that has none: nothing in it is made for CPU only."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxpage.batch import SamplingState
from jaxpage.layers.kv_cache import layer_cache_shape
from jaxpage.models.registry import build_config
from jaxpage.runner.packing import Packing
from jaxpage.runner.step import StepOptions, step

HF_CONFIG = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 16,
}


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_step_lowers(platform: str, dtype: str) -> None:
    config, specs = build_config(HF_CONFIG)
    packing = Packing(num_tokens=32, num_rows=8, max_blocks=8)
    params: dict = {"layers": [{} for _ in config.layers]}
    for spec in specs:
        *parents, name = spec.path
        node = params
        for part in parents:
            node = node[part]
        node[name] = jax.ShapeDtypeStruct(spec.shape, jnp.dtype(dtype))
    cache = [layer_cache_shape(9, config.num_kv_heads, 16, config.head_dim, dtype)] * config.num_layers
    shape = jax.ShapeDtypeStruct
    state = SamplingState(
        shape((9,), jnp.int32),
        shape((9, 512), jnp.int32),
        shape((9, 512), jnp.float32),
        shape((9, 130), jnp.int32),
        shape((9, 16), jnp.int32),
    )  # type: ignore[arg-type]
    options = StepOptions(
        config=config, packing=packing, block_size=16, num_logprobs=20, attention_implementation="auto"
    )
    function = jax.jit(partial(step, options=options), donate_argnums=(1, 2))
    traced = function.trace(params, cache, state, shape((packing.size,), jnp.int32))
    lowered = traced.lower(lowering_platforms=(platform,))
    _, _, output = lowered.out_info
    assert output.token_ids.shape == (8,)
    assert output.sampled.top_ids.shape == (8, 20)
