"""Fills a parameter tree from a checkpoint, one tensor at a time, or with random numbers; quantises on the way.

Names and shapes come from ``jaxpage.models``, bytes from the checkpoint; nothing here knows a family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxpage.batch import Device
from jaxpage.errors import StartupError
from jaxpage.models.config import ModelConfig
from jaxpage.models.decoder import Params
from jaxpage.models.weight_map import ParamSpec
from jaxpage.weights.source import Checkpoint, WeightsError
from pallas_kernels.quantized_matmul import GROUP_SIZES, QuantizedWeight, quantize

FLOAT_TYPES = {np.dtype(kind) for kind in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)}
# Buffers that old checkpoints store beside the weights, and that are computed from the config.
COMPUTED_TENSORS = re.compile(r"rotary_emb\.inv_freq$")


def load_params(
    checkpoint: Checkpoint,
    config: ModelConfig,
    specs: Sequence[ParamSpec],
    dtype: str,
    device: Device,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    quantization: str | None = None,
) -> Params:
    """Reads, assembles, converts and places every parameter; at most one is held on the host at a time.

    Args:
        quantization: how linear weights are stored, a kind of ``QuantizedWeight``; None: in ``dtype`` as all else.

    Raises:
        WeightsError: naming the tensor that is missing, extra, misshaped or of an unknown type.
        StartupError: naming the tensor whose columns do not divide into groups, or of experts that cannot be int4.
    """
    _check_names(checkpoint, config, specs)
    group_sizes = _group_sizes(specs, quantization)
    params = _empty_tree(config)
    for index, spec in enumerate(specs):
        parts = [_read(checkpoint, name, shape) for name, shape in spec.sources.items()]
        leaf = spec.assemble(*parts).reshape(spec.shape)
        if index in group_sizes:
            # What the checkpoint says is rounded once, not to dtype first; but no device takes float64.
            real = np.ascontiguousarray(leaf.astype(np.float32) if leaf.dtype == np.float64 else leaf)
            leaf = _quantize(jax.device_put(real, device), quantization, group_sizes[index])
        else:
            leaf = jax.device_put(np.ascontiguousarray(leaf.astype(np.dtype(dtype))), device)
        _put(params, spec.path, leaf)
        progress("loading weights", index + 1, len(specs))
    return params


def dummy_params(
    config: ModelConfig,
    specs: Sequence[ParamSpec],
    dtype: str,
    device: Device,
    seed: int,
    quantization: str | None = None,
) -> Params:
    """Random weights of the right shapes: norms 1, biases 0, all else normal with the usual deviation 0.02."""
    key = jax.random.key(seed & 0x7FFFFFFF)
    params = _empty_tree(config)
    group_sizes = _group_sizes(specs, quantization)
    with jax.default_device(device):
        for index, spec in enumerate(specs):
            name = str(spec.path[-1])
            if name.endswith("_norm"):
                leaf = jax.numpy.ones(spec.shape, dtype)
            elif name.endswith("_bias"):
                leaf = jax.numpy.zeros(spec.shape, dtype)
            else:
                noise = jax.random.normal(jax.random.fold_in(key, index), spec.shape, np.float32)
                leaf = (0.02 * noise).astype(dtype)
                if index in group_sizes:
                    leaf = _quantize(leaf, quantization, group_sizes[index])
            _put(params, spec.path, leaf)
    return params


def _group_sizes(specs: Sequence[ParamSpec], quantization: str | None) -> dict[int, int]:
    """For each spec, by index, that is to be quantised: the largest group size that divides its columns.

    Kinds without groups take any size.
    """
    sizes = {}
    for index, spec in enumerate(specs):
        if quantization is not None and spec.is_linear:
            if quantization == "int4" and "experts" in spec.axes:
                raise StartupError(
                    f"quantization int4: tensor {next(iter(spec.sources))} is of a mixture of experts, "
                    "which can be int8 or fp8"
                )
            fitting = [size for size in GROUP_SIZES if quantization != "int4" or spec.shape[-1] % size == 0]
            if not fitting:
                raise StartupError(
                    f"quantization {quantization}: tensor {next(iter(spec.sources))} has {spec.shape[-1]} columns, "
                    f"which is a multiple of none of the group sizes {', '.join(map(str, GROUP_SIZES))}"
                )
            sizes[index] = fitting[0]
    return sizes


_quantize_jit = jax.jit(quantize, static_argnums=(1, 2))


def _quantize(weight: jax.Array, kind: str | None, group_size: int) -> QuantizedWeight:
    # Waits, so that the full weight is gone before the next one is read.
    return jax.block_until_ready(_quantize_jit(weight, kind, group_size))


def _check_names(checkpoint: Checkpoint, config: ModelConfig, specs: Sequence[ParamSpec]) -> None:
    wanted = {name for spec in specs for name in spec.sources}
    present = set(checkpoint.names())
    missing = sorted(wanted - present)
    if missing:
        raise WeightsError(f"{checkpoint.path.name}: tensor {missing[0]} is missing{_and_more(missing)}")
    extra = sorted(name for name in present - wanted if not COMPUTED_TENSORS.search(name))
    if config.tied_embeddings:
        # Some writers store the tied table twice; the config says which one counts.
        extra = [name for name in extra if name != "lm_head.weight"]
    if extra:
        raise WeightsError(f"{checkpoint.path.name}: tensor {extra[0]} is not part of this model{_and_more(extra)}")


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _read(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> np.ndarray:
    found = tuple(checkpoint.shape(name))
    if found != shape:
        raise WeightsError(f"{checkpoint.path.name}: tensor {name} has shape {list(found)}, expected {list(shape)}")
    if checkpoint.dtype(name) not in FLOAT_TYPES:
        raise WeightsError(
            f"{checkpoint.path.name}: tensor {name} has type {checkpoint.dtype(name)}, which is not supported; "
            "supported: float64, float32, float16, bfloat16"
        )
    return checkpoint.read(name)


def _empty_tree(config: ModelConfig) -> Params:
    return {"layers": [{} for _ in range(config.num_layers)]}


def _put(tree: Any, path: tuple[str | int, ...], leaf: jax.Array | QuantizedWeight) -> None:
    for part in path[:-1]:
        tree = tree[part]
    tree[path[-1]] = leaf
