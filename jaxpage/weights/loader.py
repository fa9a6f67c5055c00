"""Fills a parameter tree from a checkpoint, one tensor at a time, or with random numbers.

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
from jaxpage.models.config import ModelConfig
from jaxpage.models.decoder import Params
from jaxpage.models.weight_map import ParamSpec
from jaxpage.weights.source import Checkpoint, WeightsError

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
) -> Params:
    """Reads, assembles, converts and places every parameter; at most one is held on the host at a time.

    Raises:
        WeightsError: naming the tensor that is missing, extra, misshaped or of an unknown type.
    """
    _check_names(checkpoint, config, specs)
    params = _empty_tree(config)
    for index, spec in enumerate(specs):
        parts = [_read(checkpoint, name, shape) for name, shape in spec.sources.items()]
        leaf = np.ascontiguousarray(spec.assemble(*parts).reshape(spec.shape).astype(np.dtype(dtype)))
        _put(params, spec.path, jax.device_put(leaf, device))
        progress("loading weights", index + 1, len(specs))
    return params


def dummy_params(config: ModelConfig, specs: Sequence[ParamSpec], dtype: str, device: Device, seed: int) -> Params:
    """Random weights of the right shapes: norms 1, biases 0, all else normal with the usual deviation 0.02."""
    key = jax.random.key(seed & 0x7FFFFFFF)
    params = _empty_tree(config)
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
            _put(params, spec.path, leaf)
    return params


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


def _put(tree: Any, path: tuple[str | int, ...], leaf: jax.Array) -> None:
    for part in path[:-1]:
        tree = tree[part]
    tree[path[-1]] = leaf
