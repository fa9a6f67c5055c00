"""A program: runs the forward pass of small models on one device and laid over several, and prints what it found.

Usage: python sharded_forward.py. Not a test itself, for it needs eight devices: see test_layouts.py, which reads the
line of JSON a case: the largest difference of logits and of the cache, collectives by layer and elsewhere.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import os
import re
import zlib
from pathlib import Path
from typing import Any

# Compiling takes nearly all of the time.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.batch import ModelInputs
from jaxpage.config import EngineArgs
from jaxpage.layers.kv_cache import KVCache, layer_cache_shape
from jaxpage.layers.linear import weight_axes
from jaxpage.models.config import ModelConfig
from jaxpage.models.decoder import Params, forward, unembed
from jaxpage.models.registry import build_config
from jaxpage.models.weight_map import ParamSpec, repeat_kv_heads
from jaxpage.parallel.sharding import Layout, choose_layout, kv_repeats
from pallas_kernels import AttentionMetadata
from pallas_kernels.quantized_matmul import quantize

TINY = Path(__file__).parents[1] / "data" / "golden" / "tiny"
NUM_TOKENS, NUM_BLOCKS, BLOCK_SIZE = 16, 9, 8
MANY_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8}
SMOLLM2 = {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 96, "vocab_size": 528}


@dataclasses.dataclass(frozen=True)
class Model:
    """A tiny family's model, with what is changed in its config, and how it is stored."""

    family: str
    changes: tuple[tuple[str, Any], ...] = ()
    quantized: str | None = None
    kv_cache_dtype: str = "float32"
    num_tokens: int = NUM_TOKENS


def case(
    family: str,
    tensor_size: int,
    changes: dict[str, Any] | None = None,
    stored: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Model, EngineArgs]:
    changes = {"num_hidden_layers": 1, "layer_types": None} | (changes or {})
    return Model(family, tuple(changes.items()), **stored or {}), EngineArgs(
        tensor_parallel_size=tensor_size, **options
    )


CASES = {
    **{f"megatron {size}": case("qwen3", size, MANY_HEADS) for size in (1, 2, 4)},
    "megatron 8": case("qwen3", 8, MANY_HEADS | {"num_hidden_layers": 2}),
    "post norms": case("gemma3_text", 2),
    "repeated KV heads": case("llama", 4),
    "repeated KV heads, biases": case("llama_bias_headdim", 4),
    "smollm2 2": case("llama", 2, SMOLLM2),
    "smollm2 3": case("llama", 3, SMOLLM2),
    "smollm2 8": case("llama", 8, SMOLLM2),
    "int8 KV": case("qwen3", 4, MANY_HEADS, stored={"kv_cache_dtype": "int8"}),
    **{kind: case("llama", 2, stored={"quantized": kind}) for kind in ("int8", "int4", "fp8")},
    "two_dimensional": case("qwen3", 8, MANY_HEADS, sharding="two_dimensional"),
    "two_dimensional int4": case("llama", 4, sharding="two_dimensional", stored={"quantized": "int4"}),
    "two_dimensional experts": case("mixtral", 4, sharding="two_dimensional"),
    "sequence_sharded": case("qwen3", 8, MANY_HEADS | {"num_hidden_layers": 2}, sharding="sequence_sharded"),
    "sequence_sharded, post norms": case("gemma3_text", 2, sharding="sequence_sharded"),
    "sequence_sharded, one token": case("llama", 2, sharding="sequence_sharded", stored={"num_tokens": 1}),
    "collective_matmul": case("qwen3", 8, MANY_HEADS | {"num_hidden_layers": 2}, sharding="collective_matmul"),
    "collective_matmul, post norms": case("gemma3_text", 2, sharding="collective_matmul"),
    "collective_matmul, biases": case("llama_bias_headdim", 2, sharding="collective_matmul"),
    "collective_matmul, one token": case("llama", 2, sharding="collective_matmul", stored={"num_tokens": 1}),
    **{
        f"collective_matmul, {kind}": case("llama", 2, sharding="collective_matmul", stored={"quantized": kind})
        for kind in ("int8", "int4")
    },
    "collective_matmul, experts": case("mixtral", 2, sharding="collective_matmul"),
    "replicated_kv": case("llama", 4, sharding="replicated_kv"),
    "experts by features": case("mixtral", 4),
    "mixtral EP 4": case("mixtral", 4, enable_expert_parallel=True),
    "mixtral EP 4 x 2": case("mixtral", 8, MANY_HEADS, enable_expert_parallel=True),
    "qwen3_moe EP 4": case("qwen3_moe", 4, enable_expert_parallel=True),
    "qwen3_moe EP 8, int8": case("qwen3_moe", 8, enable_expert_parallel=True, stored={"quantized": "int8"}),
}  # fmt: skip


def main() -> None:
    jax.config.update("jax_default_matmul_precision", "highest")
    for name, (what, args) in CASES.items():
        print(json.dumps({"case": name} | compare(what, args)), flush=True)


def compare(what: Model, args: EngineArgs) -> dict[str, Any]:
    model, specs = build(what)
    layout = choose_layout(args, model, jax.devices()[: args.tensor_parallel_size])
    repeats = kv_repeats(layout, model)
    expected, expected_cache = alone(what)
    logits, cache, hlo = run(*repeat_kv_heads(model, specs, repeats), what, layout)
    cache_difference = max(
        np.abs(np.repeat(one.kv, repeats, axis=1)[1:].astype(float) - np.asarray(other.kv)[1:]).max()
        for one, other in zip(expected_cache, cache, strict=True)
    )
    layers, others = collectives(hlo, model.num_layers)
    return {
        "difference": float(np.abs(expected - logits).max()),
        "largest": float(np.abs(expected).max()),
        "cache_difference": float(cache_difference),
        "local_kv_heads": cache[0].kv.addressable_shards[0].data.shape[1],
        "layers": layers,
        "others": others,
    }


def build(what: Model) -> tuple[ModelConfig, list[ParamSpec]]:
    values = json.loads((TINY / what.family / "config.json").read_text()) | dict(what.changes)
    return build_config({name: value for name, value in values.items() if value is not None})


@functools.cache
def alone(what: Model) -> tuple[np.ndarray, KVCache]:
    """What one device computes without a layout."""
    return run(*build(what), what, None)[:2]


def model_inputs(model: ModelConfig, num_tokens: int) -> ModelInputs:
    """A prompt of most tokens, one of two, and some padding; or a prompt of one token."""
    first = max(1, num_tokens - 5)
    lengths = np.array([first, 2 if num_tokens > 1 else 0], np.int32)
    ids = np.random.default_rng(0).integers(0, model.vocab_size, num_tokens).astype(np.int32)
    positions, slots = np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.int32)
    tables = np.arange(1, 9, dtype=np.int32).reshape(2, 4)
    start = 0
    for length, table in zip(lengths, tables, strict=True):
        here = np.arange(length)
        positions[start : start + length] = here
        slots[start : start + length] = table[here // BLOCK_SIZE] * BLOCK_SIZE + here % BLOCK_SIZE
        start += length
    cu_seqlens_q = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    metadata = AttentionMetadata(*map(jnp.asarray, (tables, lengths, cu_seqlens_q)))
    return ModelInputs(jnp.asarray(ids), jnp.asarray(positions), jnp.asarray(slots), metadata)


def run(
    model: ModelConfig,
    specs: list[ParamSpec],
    what: Model,
    layout: Layout | None,
) -> tuple[np.ndarray, KVCache, str]:
    """Logits of the real tokens, the cache, and the compiled program."""
    inputs = model_inputs(model, what.num_tokens)
    params = random_params(model, specs, what.quantized, layout)
    shape = layer_cache_shape(NUM_BLOCKS, model.num_kv_heads, BLOCK_SIZE, model.head_dim, what.kv_cache_dtype)
    cache = [
        jax.tree.map(lambda x, axes: placed(np.zeros(x.shape, x.dtype), axes, layout, "cache"), shape, shape.axes)
        for _ in model.layers
    ]

    @functools.partial(jax.jit, donate_argnums=1)
    def step(params: Params, cache: KVCache, inputs: ModelInputs) -> tuple[KVCache, jax.Array]:
        cache, hidden = forward(params, model, cache, inputs, "reference", layout)
        return cache, unembed(params, model, hidden, layout)

    compiled = step.lower(params, cache, inputs).compile()
    cache, logits = compiled(params, cache, inputs)
    num_real = int(inputs.attention.cu_seqlens_q[-1])
    return np.asarray(logits)[:num_real], cache, compiled.as_text() or ""


def random_params(model: ModelConfig, specs: list[ParamSpec], quantized: str | None, layout: Layout | None) -> Params:
    """Weights that do not depend on the layout: from sources whose numbers come from their names."""
    params: Params = {"layers": [{} for _ in model.layers]}
    for spec in specs:
        sources = [
            np.random.default_rng(zlib.crc32(name.encode())).normal(0, 0.1, shape).astype(np.float32)
            for name, shape in spec.sources.items()
        ]
        leaf: Any = spec.assemble(*sources).reshape(spec.shape)
        path = ".".join(map(str, spec.path))
        if quantized and spec.is_linear:
            leaf = quantize(jnp.asarray(leaf), quantized, 32)
        leaf = jax.tree.map(
            lambda array, axes, path=path: placed(np.asarray(array), axes, layout, path),
            leaf,
            weight_axes(leaf, spec.axes),
        )
        node: Any = params
        for parent in spec.path[:-1]:
            node = node[parent]
        node[spec.path[-1]] = leaf
    return params


def placed(array: np.ndarray, axes: tuple[str | None, ...], layout: Layout | None, path: str) -> jax.Array:
    if layout is None:
        return jax.device_put(array, jax.devices()[0])
    return jax.device_put(array, layout.laid_out(array, axes, path).sharding)  # type: ignore[arg-type]


def collectives(hlo: str, num_layers: int) -> tuple[list[dict[str, int]], dict[str, int]]:
    """Those of each layer, and those elsewhere."""
    names = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    layers = [collections.Counter() for _ in range(num_layers)]
    others: collections.Counter[str] = collections.Counter()
    for line in hlo.splitlines():
        found = re.search(rf" = .*? ({names})(?:-start)?\(", line)
        if found is not None:
            layer = re.search(r'op_name="[^"]*\blayer_(\d+)\b', line)
            (layers[int(layer[1])] if layer else others)[found[1]] += 1
    return [dict(layer) for layer in layers], dict(others)


main()
