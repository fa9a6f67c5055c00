"""Moves whole KV blocks before a step: copies on the device, and swaps between the device and host memory.

Owns the swapped blocks and the programs that move blocks; must not know who holds a block or why it moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array, Int

from jaxpage.batch import Device
from jaxpage.errors import StartupError
from jaxpage.kv.block_ops import BlockOp, BlockOpKind
from jaxpage.layers.kv_cache import KVCache, LayerCache
from pallas_kernels import copy_blocks, gather_blocks, scatter_blocks

SMALL_BATCH, LARGE_BATCH = 4, 16
"""Blocks moved by one device call. Padding moves bytes too, so the small size bounds what is wasted, and the large one
what a call keeps on the device beside the cache: about two copies of its blocks."""

HostBlock = LayerCache
"""One block of every layer, in the host's memory: the arrays of a ``LayerCache`` with layers in place of blocks."""


class BlockMover:
    """Carries out block operations on a KV cache, in their order, without waiting for the device.

    A swapped block is one array in pinned host memory, made by the program that takes it out of the cache and read by
    the one that puts it back. A host block that is used again gets a new array and the old one lives until its last
    reader is done, so the order of calls is the order of effects, though everything runs later.

    Only what JAX documents and tests for TPU and GPU is used: ``device_put`` between the memories inside a program, and
    results in host memory. One pool array updated in place would save nothing but allocations, and needs indexed writes
    into host memory, which not every backend does. All this runs on CPU and compiles ahead of time for TPU and GPU, but
    has not run on these yet: a machine where it fails says so in ``warm_up``.
    """

    def __init__(self, cache_shapes: KVCache, num_host_blocks: int, device: Device) -> None:
        """Sets up the host blocks, filled with zeros.

        Args:
            cache_shapes: of the cache, one a layer, all alike; those without a sharding are on ``device``.
            num_host_blocks: 0: nothing can be swapped.
            device: one of the cache's.

        Raises:
            StartupError: if host blocks are wanted and the device reaches no pinned host memory.
        """
        if num_host_blocks < 0:
            raise ValueError(f"num_host_blocks: must be at least 0, got {num_host_blocks}")
        if any(shape != cache_shapes[0] for shape in cache_shapes):
            raise ValueError(f"cache_shapes: layers must have one shape, got {str(set(cache_shapes))[:200]}")
        self.num_host_blocks = num_host_blocks
        here = SingleDeviceSharding(device)
        self._cache_shapes = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=shape.sharding or here), cache_shapes
        )
        self._programs: dict[tuple[BlockOpKind, int], Any] = {}
        self._host_blocks: list[HostBlock] = []
        if num_host_blocks:
            if "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
                raise StartupError(f"{device.device_kind} reaches no pinned host memory; start with swap_space 0")
            # Layers take the place of blocks, which no device splits: a device's part of a block stays its own.
            self._host_shape: HostBlock = jax.tree.map(
                lambda shape: jax.ShapeDtypeStruct(
                    (len(cache_shapes), *shape.shape[1:]),
                    shape.dtype,
                    sharding=shape.sharding.with_memory_kind("pinned_host"),
                ),
                self._cache_shapes[0],
            )
            self._padding: HostBlock = jax.tree.map(
                lambda shape: jax.make_array_from_callback(
                    shape.shape, shape.sharding, lambda part: np.zeros(shape.shape, shape.dtype)[part]
                ),
                self._host_shape,
            )
            self.forget()

    def forget(self) -> None:
        """Host blocks are as at the start."""
        if self.num_host_blocks:
            self._host_blocks = [self._padding] * self.num_host_blocks

    def run(self, kv_cache: KVCache, ops: Sequence[BlockOp]) -> KVCache:
        """The cache after ``ops``, done one after the other; ``kv_cache`` is donated. Returns at once."""
        for batch in batches(ops):
            kv_cache = self._run_batch(kv_cache, batch)
        return kv_cache

    def warm_up(self, kv_cache: KVCache) -> KVCache:
        """Compiles every program and allocates every host block, so that serving does neither.

        Changes nothing but the scratch block and the host blocks, and donates ``kv_cache``.

        Raises:
            StartupError: if blocks cannot be moved to host memory or back.
        """
        for size in (SMALL_BATCH, LARGE_BATCH):
            kv_cache = self._run_batch(kv_cache, [BlockOp(BlockOpKind.COPY, 0, 0)] * size)
        if not self.num_host_blocks:
            return kv_cache
        try:
            for start in range(0, self.num_host_blocks, LARGE_BATCH):
                ids = range(start, min(start + LARGE_BATCH, self.num_host_blocks))
                self._run_batch(kv_cache, [BlockOp(BlockOpKind.SWAP_OUT, 0, block_id) for block_id in ids])
            for size in (SMALL_BATCH, LARGE_BATCH):
                self._run_batch(kv_cache, [BlockOp(BlockOpKind.SWAP_OUT, 0, 0)] * size)
                kv_cache = self._run_batch(kv_cache, [BlockOp(BlockOpKind.SWAP_IN, 0, 0)] * size)
            jax.block_until_ready((kv_cache, self._host_blocks))
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).splitlines()[0][:200]
            raise StartupError(
                f"no swapping of KV blocks to host memory ({reason}); start with swap_space 0"
            ) from error
        return kv_cache

    def _run_batch(self, kv_cache: KVCache, batch: list[BlockOp]) -> KVCache:
        kind = batch[0].kind
        size = SMALL_BATCH if len(batch) <= SMALL_BATCH else LARGE_BATCH
        # What is not set is padding: the scratch block.
        sources, destinations = np.zeros((2, size), np.int32)
        sources[: len(batch)] = [op.source for op in batch]
        destinations[: len(batch)] = [op.destination for op in batch]
        program = self._program(kind, size)
        if kind is BlockOpKind.COPY:
            return program(kv_cache, sources, destinations)
        if kind is BlockOpKind.SWAP_IN:
            blocks = [self._host_blocks[op.source] for op in batch]
            return program(kv_cache, blocks + [self._padding] * (size - len(batch)), destinations)
        blocks = program(kv_cache, sources)
        for op, block in zip(batch, blocks, strict=False):
            self._host_blocks[op.destination] = block
        return kv_cache

    def _program(self, kind: BlockOpKind, size: int) -> Any:
        if (kind, size) not in self._programs:
            ids = jax.ShapeDtypeStruct((size,), jnp.int32)
            shardings = jax.tree.map(lambda shape: shape.sharding, self._cache_shapes)
            if kind is BlockOpKind.SWAP_OUT:
                on_host = jax.tree.map(lambda shape: shape.sharding, self._host_shape)
                function = jax.jit(partial(_swap_out, shardings), out_shardings=[on_host] * size)
                lowered = function.lower(self._cache_shapes, ids)
            elif kind is BlockOpKind.COPY:
                function = jax.jit(partial(_copy, shardings), donate_argnums=0, out_shardings=shardings)
                lowered = function.lower(self._cache_shapes, ids, ids)
            else:
                function = jax.jit(partial(_swap_in, shardings), donate_argnums=0, out_shardings=shardings)
                lowered = function.lower(self._cache_shapes, [self._host_shape] * size, ids)
            self._programs[kind, size] = lowered.compile()
        return self._programs[kind, size]


def batches(ops: Sequence[BlockOp]) -> Iterator[list[BlockOp]]:
    """Cuts ``ops``, in order, into batches that one device call may do: read all sources, then write all destinations.

    That equals one after the other as long as a batch is of one kind, writes no block twice and reads none that it
    wrote earlier. Sizes: LARGE_BATCH, or at most SMALL_BATCH.
    """
    run: list[BlockOp] = []
    written: set[int] = set()
    for op in ops:
        if run and (
            op.kind is not run[0].kind
            or op.destination in written
            # The source of a swap lies in the other memory: its number says nothing about a destination's.
            or (op.kind is BlockOpKind.COPY and op.source in written)
        ):
            yield from _pieces(run)
            run, written = [], set()
        run.append(op)
        written.add(op.destination)
    yield from _pieces(run)


def _pieces(run: list[BlockOp]) -> Iterator[list[BlockOp]]:
    start = 0
    while start < len(run):
        size = LARGE_BATCH if len(run) - start >= LARGE_BATCH else SMALL_BATCH
        yield run[start : start + size]
        start += size


Shardings = list[Any]
"""Of the cache: like a ``KVCache``, a sharding for each array."""


def _copy(
    shardings: Shardings, kv_cache: KVCache, sources: Int[Array, " n"], destinations: Int[Array, " n"]
) -> KVCache:
    with jax.named_scope("copy_blocks"):
        return jax.tree.map(
            lambda layer, sharding: _on_parts(copy_blocks, sharding, layer, sources, destinations), kv_cache, shardings
        )


def _swap_out(shardings: Shardings, kv_cache: KVCache, sources: Int[Array, " n"]) -> list[HostBlock]:
    with jax.named_scope("swap_out"):
        gathered = jax.tree.map(
            lambda layer, sharding: _on_parts(gather_blocks, sharding, layer, sources), kv_cache, shardings
        )
        taken = jax.tree.map(lambda *layers: jnp.stack(layers, axis=1), *gathered)
        blocks = [jax.tree.map(lambda array, index=index: array[index], taken) for index in range(len(sources))]
        return jax.device_put(blocks, jax.memory.Space.Host)


def _swap_in(
    shardings: Shardings, kv_cache: KVCache, blocks: list[HostBlock], destinations: Int[Array, " n"]
) -> KVCache:
    with jax.named_scope("swap_in"):
        layers = jax.tree.map(
            lambda *arrays: jnp.stack(arrays, axis=1), *jax.device_put(blocks, jax.memory.Space.Device)
        )
        return [
            jax.tree.map(
                lambda layer, put, sharding, index=index: _on_parts(
                    scatter_blocks, sharding, layer, put[index], destinations
                ),
                cache, layers, sharding,
            )
            for index, (cache, sharding) in enumerate(zip(kv_cache, shardings, strict=True))
        ]  # fmt: skip


def _on_parts(function: Callable[..., Any], sharding: Any, cache: Array, *arguments: Array) -> Array:
    """``function(cache, *arguments)`` on each device's part: kernels cannot be split by the compiler.

    Arguments with as many dimensions as the cache are blocks, split like its own; others are block ids.
    """
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return function(cache, *arguments)
    specs = [sharding.spec if argument.ndim == cache.ndim else PartitionSpec() for argument in arguments]
    in_specs = (sharding.spec, *specs)
    return jax.shard_map(function, mesh=sharding.mesh, in_specs=in_specs, out_specs=sharding.spec, check_vma=False)(
        cache, *arguments
    )
