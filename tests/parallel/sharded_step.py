"""A program: runs a step of a small model on one device and split over eight, and compares them. Prints what it found.

Usage: python sharded_step.py KV_CACHE_DTYPE. Not a test itself, for it needs eight devices: see test_sharded_step.py.
"""

from __future__ import annotations

import os
import re
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.config import EngineArgs, resolve
from jaxpage.engine.build import configure_jax
from jaxpage.models.registry import build_config
from jaxpage.parallel.placement import Placement
from jaxpage.parallel.sharding import choose_layout
from jaxpage.runner.programs import StagePrograms
from jaxpage.weights.loader import dummy_params

NUM_LAYERS, NUM_BLOCKS, NUM_TOKENS = 3, 9, 16
HF_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "attention_bias": True,
}


def main(kv_cache_dtype: str) -> None:
    configure_jax()
    model, specs = build_config(HF_CONFIG)
    args = EngineArgs(
        max_num_batched_tokens=NUM_TOKENS,
        max_num_seqs=4,
        max_model_len=32,
        block_size=8,
        kv_cache_dtype=kv_cache_dtype,
        tensor_parallel_size=8,
    )
    config = resolve(args, model_max_len=64, vocab_size=model.vocab_size, platform="cpu")
    alone = StagePrograms(model, config, Placement(device=jax.devices()[0]))
    together = StagePrograms(model, config, Placement(layout=choose_layout(args, model, jax.devices())))
    # Equal numbers, each device its part.
    params, split = (
        dummy_params(model, specs, "float32", programs.placement, seed=0) for programs in (alone, together)
    )

    packing = alone.packing(NUM_TOKENS)
    # A prompt of eight tokens and one of three, each in blocks of its own.
    prompt = np.random.default_rng(0).integers(0, model.vocab_size, 11)
    packed, fields = packing.allocate()
    fields["token_ids"][:11] = prompt
    fields["cu_seqlens_q"][:] = [0, 8, 11, 11, 11]
    fields["seq_lens"][:2] = [8, 3]
    fields["logits_indices"][:2] = [7, 10]
    fields["block_tables"][:2] = [[1, 2, 3, 4], [5, 6, 7, 8]]
    fields["slots"][:] = [0, 1, 4, 4]
    fields["samples"][:2] = 1

    results = []
    for programs, weights in ((alone, params), (together, split)):
        shapes = (programs.cache_shapes(NUM_BLOCKS), programs.state_shapes())
        cache, state = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), shapes)
        compiled = programs.lower(NUM_TOKENS, weights, NUM_BLOCKS).compile()
        results.append((compiled(weights, cache, state, packed), compiled))
    ((cache, _, output), _), ((split_cache, _, split_output), program) = results

    # Only two of the four rows sample; the others mean nothing.
    np.testing.assert_array_equal(output.token_ids[:2], split_output.token_ids[:2])
    for layer, split_layer in zip(cache, split_cache, strict=True):
        exact = kv_cache_dtype == "float32"
        np.testing.assert_allclose(layer.kv[1:], split_layer.kv[1:], atol=1e-5 if exact else 1)
        assert len(split_layer.kv.sharding.device_set) == 8
        assert split_layer.kv.addressable_shards[0].data.shape[1] == 1, "a device holds its own KV head only"
    sums = re.findall(r"all-reduce\(.*layer_(\d+)", program.as_text())
    others = re.findall(r"(?:all-gather|all-to-all|collective-permute)\(.*layer_(\d+)", program.as_text())
    print({"sums": sorted(map(int, sums)), "others": others, "kept": program.memory_analysis().alias_size_in_bytes > 0})


main(sys.argv[1])
