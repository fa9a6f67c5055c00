"""Fills a parameter tree from a checkpoint, one tensor at a time, or with random numbers; quantises on the way.

Names and shapes come from ``jaxpage.models``, bytes from the checkpoint; nothing here knows a family.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxpage.errors import StartupError
from jaxpage.layers.linear import Weight, quantized_axes
from jaxpage.models.config import ModelConfig
from jaxpage.models.decoder import Params
from jaxpage.models.weight_map import ParamSpec, with_kv_heads_repeated
from jaxpage.parallel.placement import Placement
from jaxpage.weights.gguf_blocks import with_block_size
from jaxpage.weights.orbax_arrays import restored_params
from jaxpage.weights.source import Checkpoint, OrbaxCheckpoint, WeightsError
from pallas_kernels.matmul import BlockWeight, block_weight
from pallas_kernels.quantized_matmul import GROUP_SIZES, QuantizedWeight, quantize

FLOAT_TYPES = {np.dtype(kind) for kind in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)}
# Buffers that old checkpoints store beside the weights, and that are computed from the config.
COMPUTED_TENSORS = re.compile(r"rotary_emb\.inv_freq$")


def load_params(
    checkpoint: Checkpoint | OrbaxCheckpoint,
    config: ModelConfig,
    specs: Sequence[ParamSpec],
    dtype: str,
    placement: Placement,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    quantization: str | None = None,
    *,
    all_specs: Sequence[ParamSpec] | None = None,
    keeps_blocks: bool = False,
) -> Params:
    """Reads, assembles, converts and places every parameter; at most one is held on the host at a time.

    Args:
        config, specs: of the model, or of one stage of it.
        all_specs: those of the whole model, if ``specs`` are a stage's: what the checkpoint must hold.
        quantization: how linear weights are stored, a kind of ``QuantizedWeight``; None: in ``dtype`` as all else, or
            as the checkpoint has them if it is an ``OrbaxCheckpoint``, which this process reads its parts of only.
        keeps_blocks: matrices that the checkpoint holds in blocks of small numbers become ``BlockWeight``, which stands
            for the same float32 numbers; for one device.

    Raises:
        WeightsError: naming the tensor that is missing, extra, misshaped or of an unknown type.
        StartupError: naming the tensor whose columns do not divide into groups, or of experts that cannot be int4.
    """
    if isinstance(checkpoint, OrbaxCheckpoint):
        return _restore(checkpoint, config, specs, dtype, placement, progress, quantization, all_specs or specs)
    _check_names(checkpoint, config, specs if all_specs is None else all_specs)
    group_sizes = _group_sizes(specs, quantization, placement)
    params = _empty_tree(config)
    for index, spec in enumerate(specs):
        leaf: Any = _read_blocks(checkpoint, spec) if keeps_blocks and index not in group_sizes else None
        if leaf is not None:
            leaf = jax.device_put(leaf, placement.device)
        elif index in group_sizes:
            # What the checkpoint says is rounded once, not to dtype first; but no device takes float64.
            real = _read(checkpoint, spec)
            real = np.ascontiguousarray(real.astype(np.float32) if real.dtype == np.float64 else real)
            leaf = _quantize(_placed(real, spec, placement), spec, placement, quantization, group_sizes[index])
        else:
            leaf = _placed(np.ascontiguousarray(_read(checkpoint, spec).astype(np.dtype(dtype))), spec, placement)
        _put(params, spec.path, leaf)
        progress("loading weights", index + 1, len(specs))
    return params


def _restore(
    checkpoint: OrbaxCheckpoint,
    config: ModelConfig,
    specs: Sequence[ParamSpec],
    dtype: str,
    placement: Placement,
    progress: Callable[[str, int, int], None],
    quantization: str | None,
    all_specs: Sequence[ParamSpec],
) -> Params:
    checkpoint.check_quantization(quantization)
    group_sizes = _group_sizes(specs, quantization, placement) if checkpoint.quantization is None else {}
    dtypes = [None if index in group_sizes else dtype for index in range(len(specs))]
    params = _empty_tree(config)
    leaves = restored_params(checkpoint, specs, dtypes, placement, all_specs)
    for index, (spec, leaf) in enumerate(zip(specs, leaves, strict=True)):
        if index in group_sizes:
            assert not isinstance(leaf, QuantizedWeight), "nothing is quantised twice"
            leaf = _quantize(leaf, spec, placement, quantization, group_sizes[index])
        _put(params, spec.path, leaf)
        progress("loading weights", index + 1, len(specs))
    return params


def dummy_params(
    config: ModelConfig,
    specs: Sequence[ParamSpec],
    dtype: str,
    placement: Placement,
    seed: int,
    quantization: str | None = None,
) -> Params:
    """Random weights of the right shapes: norms 1, biases 0, all else normal with the usual deviation 0.02.

    Raises:
        ParameterError, StartupError: what cannot be laid out or quantised like that, as ``load_params`` says it.
    """
    key = jax.random.key(seed & 0x7FFFFFFF)
    params = _empty_tree(config)
    group_sizes = _group_sizes(specs, quantization, placement)
    for spec, group_size in zip(specs, map(group_sizes.get, range(len(specs))), strict=True):
        name = str(spec.path[-1])
        if name.endswith(("_norm", "_bias")):
            leaf = _placed(np.full(spec.shape, float(name.endswith("_norm")), np.dtype(dtype)), spec, placement)
        else:
            # By its name in the whole model: the same numbers whatever the mesh, and in whichever stage it is.
            leaf = _noise(jax.random.fold_in(key, _number(spec)), spec, dtype, placement)
            if group_size is not None:
                leaf = _quantize(leaf, spec, placement, quantization, group_size)
        _put(params, spec.path, leaf)
    return params


def param_shapes(
    config: ModelConfig, specs: Sequence[ParamSpec], dtype: str, placement: Placement, quantization: str | None = None
) -> Params:
    """What ``load_params`` makes, as ``jax.ShapeDtypeStruct`` with shardings.

    Raises:
        ParameterError, StartupError: what cannot be laid out or quantised like that.
    """
    group_sizes = _group_sizes(specs, quantization, placement)
    params = _empty_tree(config)
    for index, spec in enumerate(specs):
        leaf: Any = jax.ShapeDtypeStruct(spec.shape, np.dtype(dtype))
        axes: Any = spec.axes
        if index in group_sizes:
            assert quantization is not None, "only what is quantised has groups"
            leaf = jax.eval_shape(partial(quantize, kind=quantization, group_size=group_sizes[index]), leaf)
            axes = quantized_axes(spec.axes, quantization)
        laid_out = jax.tree.map(lambda part, axes, spec=spec: placement.laid_out(part, axes, _path(spec)), leaf, axes)
        _put(params, spec.path, laid_out)
    return params


def _number(spec: ParamSpec) -> int:
    """Of a parameter, from the names of its tensors, which do not change with a stage."""
    return zlib.crc32(" ".join(spec.sources).encode())


def _noise(key: jax.Array, spec: ParamSpec, dtype: str, placement: Placement) -> jax.Array:
    def draw(key: jax.Array) -> jax.Array:
        noise = (0.02 * jax.random.normal(key, spec.shape_without_repeats, np.float32)).astype(dtype)
        return noise if spec.kv_repeats == 1 else with_kv_heads_repeated(noise, spec.kv_repeats)

    struct = jax.ShapeDtypeStruct(spec.shape, np.dtype(dtype))
    sharding = placement.laid_out(struct, spec.axes, _path(spec)).sharding
    with jax.default_device(placement.first_device):
        return jax.jit(draw, out_shardings=sharding)(key)


def _placed(array: np.ndarray, spec: ParamSpec, placement: Placement) -> jax.Array:
    """Puts each device's part on it; other processes place theirs."""
    sharding = placement.laid_out(array, spec.axes, _path(spec)).sharding
    if sharding is None:
        return jax.device_put(array)
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])


def _path(spec: ParamSpec) -> str:
    return ".".join(map(str, spec.path))


def _group_sizes(specs: Sequence[ParamSpec], quantization: str | None, placement: Placement) -> dict[int, int]:
    """For each spec, by index, that is to be quantised: the largest group size that divides its columns on each device.

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
            ways = placement.ways(spec.axes[-1])
            fitting = [size for size in GROUP_SIZES if quantization != "int4" or spec.shape[-1] % (size * ways) == 0]
            if not fitting:
                split = f" over {ways} devices" if ways > 1 else ""
                raise StartupError(
                    f"quantization {quantization}: tensor {next(iter(spec.sources))} has {spec.shape[-1]} columns"
                    f"{split}, which is a multiple of none of the group sizes {', '.join(map(str, GROUP_SIZES))}"
                )
            sizes[index] = fitting[0]
    return sizes


def _quantize(
    weight: jax.Array, spec: ParamSpec, placement: Placement, kind: str | None, group_size: int
) -> QuantizedWeight:
    assert kind is not None, "only what is to be quantised has a group size"
    axes = quantized_axes(spec.axes, kind)
    values, scales = placement.sharding(axes.values), placement.sharding(axes.scales)
    shardings = QuantizedWeight(values, scales)  # pyright: ignore[reportArgumentType]
    stored = jax.jit(quantize, static_argnums=(1, 2), out_shardings=shardings)(weight, kind, group_size)
    # Waits, so that the full weight is gone before the next one is read.
    return jax.block_until_ready(stored)


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


def _read(checkpoint: Checkpoint, spec: ParamSpec) -> np.ndarray:
    for name, shape in spec.sources.items():
        _check(checkpoint, name, shape)
    return spec.assemble(*map(checkpoint.read, spec.sources)).reshape(spec.shape)


def _read_blocks(checkpoint: Checkpoint, spec: ParamSpec) -> BlockWeight | None:
    """A parameter as the checkpoint holds it, on the host; None if that is not in blocks or not read as a matrix is."""
    is_linear = spec.is_linear and "experts" not in spec.axes
    if not (is_linear or "vocab" in spec.axes):
        return None
    for name, shape in spec.sources.items():
        _check(checkpoint, name, shape)
    tensors = [checkpoint.read_blocks(name) for name in spec.sources]
    found = [blocks for blocks in tensors if blocks is not None]
    if len(found) < len(tensors):
        return None
    block_size = min(blocks.block_size for blocks in found)
    found = [with_block_size(blocks, block_size) for blocks in found]

    def assembled(parts: Iterable[np.ndarray]) -> np.ndarray:
        return spec.assemble(*parts).reshape(*spec.shape[:-1], -1)

    has_offsets = any(blocks.offsets is not None for blocks in found)
    offsets = [np.zeros_like(blocks.scales) if blocks.offsets is None else blocks.offsets for blocks in found]
    return block_weight(
        assembled(blocks.values for blocks in found),
        assembled(blocks.scales for blocks in found),
        assembled(offsets) if has_offsets else None,
    )


def _check(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    found = tuple(checkpoint.shape(name))
    if found != shape:
        raise WeightsError(f"{checkpoint.path.name}: tensor {name} has shape {list(found)}, expected {list(shape)}")
    if checkpoint.dtype(name) not in FLOAT_TYPES:
        raise WeightsError(
            f"{checkpoint.path.name}: tensor {name} has type {checkpoint.dtype(name)}, which is not supported; "
            "supported: float64, float32, float16, bfloat16"
        )


def _empty_tree(config: ModelConfig) -> Params:
    return {"layers": [{} for _ in range(config.num_layers)]}


def _put(tree: Any, path: tuple[str | int, ...], leaf: Weight) -> None:
    for part in path[:-1]:
        tree = tree[part]
    tree[path[-1]] = leaf
