"""Changes of the paged cache on TPUs, in place, by copies of whole tiles of memory.

Owns the kernels and the choice of their tiles; must not know how values are quantised (``quantization``).

Writing. Memory holds an array in tiles of 8 rows (32 for 8-bit types, in blocks that are multiples of it), and only
whole tiles can be copied. So the unit of work is a group: the tokens of a batch that lie in one tile's rows of one
block. A group's rows are read for all KV heads, merged with the new ones and written back; where the new ones fill
them, as they do in prefill, nothing is read. Groups are disjoint, so that none waits for another: several are on their
way at any time, and the two TensorCores of a megacore chip (v4, v5p) share them. Padding tokens belong to no group.

Rows are merged as 32-bit words, each with the bits of one to four neighbours: nothing is converted, every type of cache
is treated alike, and what is not written keeps its bits, NaN included.

Bytes: a decoded token moves its group there and back, as much as attention reads for 16 tokens of context, 64 with
8-bit types in long blocks: 2 or 6 percent of a context of a thousand. In prefill a token moves once more than if
attention wrote it, which is little beside the weights. A write fused with attention would have to move the same tiles;
it could save their reading only, and would tie its tiles to those of attention.

Scales of dynamic quantisation are merged block by block, for which their array has to lie in rows of block_size. XLA's
own choice for a block_size that is no multiple of 128 is to have the blocks in the lanes; the caller should fix the
layout of the jitted function's argument and result, or XLA copies all scales. Then they are padded to 128 a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Num, Shaped

from pallas_kernels.kv_cache_update.quantization import stored_rows

LANES = 128
MOST_TOKENS = 32768
"""Of a batch: SMEM holds four numbers a token."""
MOST_BUFFERS = 8
BUFFER_BYTES = 16 * 2**20
"""Groups on their way at a time, and what they may take of VMEM."""
COPIES_AHEAD = 16
"""Copies of blocks on their way at a time."""
VMEM_BYTES = 48 * 2**20
WORDS = {4: jnp.int32, 2: jnp.int16, 1: jnp.int8}
"""Integers that hold the bits of an element, by its bytes."""

Act = Callable[[Any], None]
"""Starts a copy or waits for it."""


def write_kv(
    kv_cache: Num[Array, "num_blocks K block_size 2*H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int[Array, " T"],
    kv_scales: Float[Array, "num_blocks 2 K block_size"] | None = None,
    *,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> Array | tuple[Array, Array]:
    """See ``pallas_kernels.write_kv``.

    Raises:
        NotImplementedError: for a block size or a number of tokens that the kernel does not take.
    """
    block_size, itemsize = kv_cache.shape[2], kv_cache.dtype.itemsize
    if block_size % 8 or (itemsize == 1 and block_size > 32 and block_size % 32):
        raise NotImplementedError(f"block_size {block_size} is not a multiple of 8, or of 32 for longer 8-bit blocks")
    if len(slot_mapping) > MOST_TOKENS:
        raise NotImplementedError(f"{len(slot_mapping)} tokens are more than {MOST_TOKENS}")
    if kv_cache.shape[1] * kv_cache.shape[3] * _group_rows(kv_cache) * itemsize * 4 > BUFFER_BYTES:
        raise NotImplementedError(f"{kv_cache.shape[1]} KV heads of {kv_cache.shape[3] // 2} are too large for VMEM")
    rows, scales = stored_rows(k, v, kv_cache.dtype, dynamic=kv_scales is not None, k_scale=k_scale, v_scale=v_scale)
    kv_cache = _write_rows(kv_cache, rows, slot_mapping)
    if kv_scales is None or scales is None:
        return kv_cache
    return kv_cache, _write_scales(kv_scales, scales, slot_mapping)


def _num_cores() -> int:
    """TensorCores behind one device: 2 on megacore chips, else 1; 1 where the target is not known."""
    try:
        return pltpu.get_tpu_info().num_cores
    except (AttributeError, IndexError, ValueError):
        return 1


def _group_rows(kv_cache: Array) -> int:
    """Rows of a group: a tile's, a power of two."""
    block_size = kv_cache.shape[2]
    return 32 if kv_cache.dtype.itemsize == 1 and block_size % 32 == 0 else 8


# --- groups of tokens ------------------------------------------------------------------------------------------------


class _Groups(NamedTuple):
    """Tokens by the stretch of slots they lie in; group i has places ``firsts[i]`` to ``firsts[i + 1] - 1`` in order.

    Attributes:
        total: number of groups.
        firsts: what follows the last group is where its tokens end.
        slots: of the tokens in order.
        order: the tokens by slot, padding at the end.
        bases: the first of ``group_rows`` tokens of the batch that have the group among them; -1 if it lies scattered.
    """

    total: Int[Array, " 1"]
    firsts: Int[Array, " T+1"]
    slots: Int[Array, " T"]
    order: Int[Array, " T"]
    bases: Int[Array, " T"]


def _group(slot_mapping: Int[Array, " T"], block_size: int, group_rows: int) -> _Groups:
    """The groups. All layers of a model have the same, which XLA computes once."""
    num_tokens = len(slot_mapping)
    never = jnp.iinfo(jnp.int32).max
    keys = jnp.where(slot_mapping < block_size, never, slot_mapping).astype(jnp.int32)
    order = jnp.argsort(keys, stable=True).astype(jnp.int32)
    slots = keys[order]
    end = jnp.sum(slots != never, dtype=jnp.int32)
    place = jnp.arange(num_tokens, dtype=jnp.int32)
    stretch = slots // group_rows
    is_first = (place < end) & ((place == 0) | (stretch != jnp.roll(stretch, 1)))
    firsts = jnp.append(jnp.sort(jnp.where(is_first, place, end)), end)
    breaks = jnp.cumsum(order != jnp.roll(order, 1) + 1)
    is_run = breaks[firsts[:-1]] == breaks[firsts[1:] - 1]
    bases = jnp.minimum(order[firsts[:-1]], max(num_tokens - group_rows, 0))
    return _Groups(jnp.sum(is_first, dtype=jnp.int32)[None], firsts, slots, order, jnp.where(is_run, bases, -1))


def _each_group(
    groups: _Groups,
    num_buffers: int,
    read: Callable[[Array, Array, Act], None],
    merge: Callable[[Array, Array], None],
    write: Callable[[Array, Array, Act], None],
) -> None:
    """Takes this lane's share of the groups through ``read``, ``merge`` and ``write``, half the buffers ahead.

    Each is called with a group and its buffer. A buffer is the group's from the start of its reads to the end of its
    write, for which the other half of the buffers gives time.
    """
    lane, lanes = pl.program_id(0), pl.num_programs(0)
    # In a kernel integers are divided by lax.div: none is negative, and ``//`` cannot be lowered where the chip is not
    # known, as in an export.
    start, end = (lax.div(groups.total[0] * place, lanes) for place in (lane, lane + 1))
    ahead = num_buffers // 2

    def buffer_of(group: Array) -> Array:
        return lax.rem(group, num_buffers)

    def start_reads(group: Array, carry: None) -> None:
        read(group, buffer_of(group), lambda copy: copy.start())

    def wait_for_write(group: Array, carry: None) -> None:
        write(group, buffer_of(group), lambda copy: copy.wait())

    def one_group(group: Array, carry: None) -> None:
        following = group + ahead

        @pl.when(following < end)
        def _() -> None:
            @pl.when(following - num_buffers >= start)
            def _() -> None:
                wait_for_write(following - num_buffers, None)

            start_reads(following, None)

        read(group, buffer_of(group), lambda copy: copy.wait())
        merge(group, buffer_of(group))
        write(group, buffer_of(group), lambda copy: copy.start())

    lax.fori_loop(start, jnp.minimum(start + ahead, end), start_reads, None)
    lax.fori_loop(start, end, one_group, None)
    lax.fori_loop(jnp.maximum(start, end - num_buffers), end, wait_for_write, None)


# --- rows ------------------------------------------------------------------------------------------------------------


def _write_rows(
    kv_cache: Num[Array, "num_blocks K block_size 2*H"], rows: Num[Array, "T K 2*H"], slot_mapping: Int[Array, " T"]
) -> Num[Array, "num_blocks K block_size 2*H"]:
    num_tokens, num_kv_heads, width = rows.shape
    itemsize = kv_cache.dtype.itemsize
    group_rows = _group_rows(kv_cache)
    groups = _group(slot_mapping, kv_cache.shape[2], group_rows)
    bits = lax.bitcast_convert_type(rows, WORDS[itemsize])
    bits = jnp.pad(bits, ((0, max(group_rows - num_tokens, 0)), (0, 0), (0, 0)))
    group_bytes = (num_kv_heads + max(num_kv_heads, 32 // itemsize)) * group_rows * width * itemsize
    num_buffers = min(MOST_BUFFERS, max(2, BUFFER_BYTES // group_bytes))
    return pl.pallas_call(
        functools.partial(_write_rows_kernel, kv_cache.shape[2]),
        out_shape=jax.ShapeDtypeStruct(kv_cache.shape, kv_cache.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(groups),
            grid=(min(_num_cores(), num_tokens),),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((num_buffers, num_kv_heads, group_rows, width), kv_cache.dtype),
                pltpu.VMEM((num_buffers, group_rows, num_kv_heads, width), bits.dtype),
                pltpu.VMEM((num_kv_heads, group_rows * itemsize // 4, width), jnp.int32),
                pltpu.SemaphoreType.DMA((num_buffers,)),
                pltpu.SemaphoreType.DMA((num_buffers,)),
            ],
        ),
        input_output_aliases={len(groups) + 1: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=VMEM_BYTES),
        name="write_kv",
    )(*groups, bits, kv_cache)


def _write_rows_kernel(block_size: int, *refs: Any) -> None:
    """``refs``: groups, new rows, cache, the cache as output, then the scratch of ``_write_rows``."""
    groups = _Groups(*refs[:5])
    bits, _, cache, tiles, news, words, read_done, write_done = refs[5:]
    num_buffers, num_kv_heads, group_rows, _ = tiles.shape
    per_word = 4 // tiles.dtype.itemsize
    element_bits = 32 // per_word
    element_mask = jnp.int32(-1 if per_word == 1 else (1 << element_bits) - 1)

    def is_full(group: Array) -> Array:
        return groups.firsts[group + 1] - groups.firsts[group] == group_rows

    def rows_of(group: Array) -> Any:
        slot = groups.slots[groups.firsts[group]]
        block = lax.div(slot, block_size)
        first = lax.div(slot - block * block_size, group_rows) * group_rows
        return cache.at[block, :, pl.ds(pl.multiple_of(first, group_rows), group_rows)]

    def read(group: Array, buffer: Array, act: Act) -> None:
        def copy(source: Any, destination: Any) -> None:
            act(pltpu.make_async_copy(source, destination, read_done.at[buffer]))

        @pl.when(~is_full(group))
        def _() -> None:
            copy(rows_of(group), tiles.at[buffer])

        first, base = groups.firsts[group], groups.bases[group]

        @pl.when(base >= 0)
        def _() -> None:
            copy(bits.at[pl.ds(base, group_rows)], news.at[buffer])

        @pl.when(base < 0)
        def _() -> None:
            def one_token(place: Array, carry: None) -> None:
                copy(bits.at[groups.order[place]], news.at[buffer, place - first])

            lax.fori_loop(first, groups.firsts[group + 1], one_token, None)

    def merge(group: Array, buffer: Array) -> None:
        first, base = groups.firsts[group], groups.bases[group]

        @pl.when(~is_full(group))
        def _() -> None:
            words[...] = pltpu.bitcast(tiles[buffer], jnp.int32)

        def one_token(place: Array, carry: None) -> None:
            row = groups.slots[place] & (group_rows - 1)
            shift = (row & (per_word - 1)) * element_bits
            mask = lax.shift_left(element_mask, shift)
            new = news[buffer, jnp.where(base >= 0, groups.order[place] - base, place - first)].astype(jnp.int32)
            new = lax.shift_left(new, jnp.full(new.shape, shift)) & mask
            for head in range(num_kv_heads):
                word = head, pl.ds(lax.div(row, per_word), 1)
                words[word] = (words[word] & ~mask) | new[head : head + 1]

        lax.fori_loop(first, groups.firsts[group + 1], one_token, None)
        tiles[buffer] = pltpu.bitcast(words[...], tiles.dtype)

    def write(group: Array, buffer: Array, act: Act) -> None:
        act(pltpu.make_async_copy(tiles.at[buffer], rows_of(group), write_done.at[buffer]))

    _each_group(groups, num_buffers, read, merge, write)


# --- scales ----------------------------------------------------------------------------------------------------------


def _write_scales(
    kv_scales: Float[Array, "num_blocks 2 K block_size"],
    scales: Float[Array, "T 2 K"],
    slot_mapping: Int[Array, " T"],
) -> Float[Array, "num_blocks 2 K block_size"]:
    num_tokens, _, num_kv_heads = scales.shape
    block_size = kv_scales.shape[3]
    groups = _group(slot_mapping, block_size, block_size)
    # [tokens / LANES, 2, K, LANES]: tokens in the lanes, as in kv_scales.
    news = jnp.pad(scales, ((0, -num_tokens % LANES), (0, 0), (0, 0))).reshape(-1, LANES, 2, num_kv_heads)
    news = news.transpose(0, 2, 3, 1)
    return pl.pallas_call(
        functools.partial(_write_scales_kernel, block_size),
        out_shape=jax.ShapeDtypeStruct(kv_scales.shape, kv_scales.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(groups),
            grid=(min(_num_cores(), num_tokens),),
            in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((MOST_BUFFERS, 2, num_kv_heads, block_size), kv_scales.dtype),
                pltpu.SemaphoreType.DMA((MOST_BUFFERS,)),
                pltpu.SemaphoreType.DMA((MOST_BUFFERS,)),
            ],
        ),
        input_output_aliases={len(groups) + 1: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=VMEM_BYTES),
        name="write_kv_scales",
    )(*groups, news, kv_scales)


def _write_scales_kernel(block_size: int, *refs: Any) -> None:
    """``refs``: groups, new scales, all scales, those as output, then the scratch of ``_write_scales``."""
    groups = _Groups(*refs[:5])
    news, _, kv_scales, blocks, read_done, write_done = refs[5:]
    num_buffers, _, num_kv_heads, _ = blocks.shape

    def block_of(group: Array) -> Any:
        return kv_scales.at[lax.div(groups.slots[groups.firsts[group]], block_size)]

    def read(group: Array, buffer: Array, act: Act) -> None:
        act(pltpu.make_async_copy(block_of(group), blocks.at[buffer], read_done.at[buffer]))

    def merge(group: Array, buffer: Array) -> None:
        tokens = lax.broadcasted_iota(jnp.int32, (2, num_kv_heads, LANES), 2)
        offsets = lax.broadcasted_iota(jnp.int32, (2, num_kv_heads, block_size), 2)

        def one_token(place: Array, carry: None) -> None:
            token = groups.order[place]
            offset = lax.rem(groups.slots[place], block_size)
            lanes = news[lax.div(token, LANES)]
            new = jnp.sum(jnp.where(tokens == lax.rem(token, LANES), lanes, 0.0), axis=2, keepdims=True)
            blocks[buffer] = jnp.where(offsets == offset, new, blocks[buffer])

        lax.fori_loop(groups.firsts[group], groups.firsts[group + 1], one_token, None)

    def write(group: Array, buffer: Array, act: Act) -> None:
        act(pltpu.make_async_copy(blocks.at[buffer], block_of(group), write_done.at[buffer]))

    _each_group(groups, num_buffers, read, merge, write)


# --- whole blocks ----------------------------------------------------------------------------------------------------


def copy_blocks(
    cache: Shaped[Array, "num_blocks ..."], sources: Int[Array, " n"], destinations: Int[Array, " n"]
) -> Shaped[Array, "num_blocks ..."]:
    """See ``pallas_kernels.copy_blocks``."""
    return scatter_blocks(cache, gather_blocks(cache, sources), destinations)


def gather_blocks(cache: Shaped[Array, "num_blocks ..."], block_ids: Int[Array, " n"]) -> Shaped[Array, "n ..."]:
    """See ``pallas_kernels.gather_blocks``."""
    blocks = jax.ShapeDtypeStruct((len(block_ids), *cache.shape[1:]), cache.dtype)
    return _move_blocks(cache, blocks, block_ids, jnp.arange(len(block_ids), dtype=jnp.int32))


def scatter_blocks(
    cache: Shaped[Array, "num_blocks ..."], blocks: Shaped[Array, "n ..."], block_ids: Int[Array, " n"]
) -> Shaped[Array, "num_blocks ..."]:
    """See ``pallas_kernels.scatter_blocks``. Padding is not stored."""
    return _move_blocks(blocks, cache, jnp.arange(len(block_ids), dtype=jnp.int32), block_ids)


def _move_blocks(
    source: Shaped[Array, "M ..."],
    destination: Shaped[Array, "N ..."] | jax.ShapeDtypeStruct,
    source_ids: Int[Array, " n"],
    destination_ids: Int[Array, " n"],
) -> Shaped[Array, "N ..."]:
    """``destination`` with some blocks of ``source``, by copies within HBM; a new array where it is a shape only."""
    if source.shape[-1] % LANES:
        raise NotImplementedError(f"rows of {source.shape[-1]}, which XLA may not keep as rows, are left to XLA")
    is_update = isinstance(destination, jax.Array)
    return pl.pallas_call(
        functools.partial(_move_blocks_kernel, is_update),
        out_shape=jax.ShapeDtypeStruct(destination.shape, destination.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * (1 + is_update),
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        input_output_aliases={3: 0} if is_update else {},
        name="move_blocks",
    )(source_ids.astype(jnp.int32), destination_ids.astype(jnp.int32), source, *([destination] if is_update else []))


def _move_blocks_kernel(is_update: bool, source_ids: Any, destination_ids: Any, source: Any, *refs: Any) -> None:
    """``refs``: the destination as input, if there is one, and as output, and a semaphore."""
    *_, destination, done = refs
    count = source_ids.shape[0]

    def act(index: Any, do: Act) -> None:
        @pl.when((destination_ids[index] != 0) | (not is_update))  # padding would write one block several times at once
        def _() -> None:
            do(pltpu.make_async_copy(source.at[source_ids[index]], destination.at[destination_ids[index]], done))

    def one_block(index: Array, carry: None) -> None:
        act(index, lambda copy: copy.start())

        @pl.when(index >= COPIES_AHEAD)
        def _() -> None:
            act(index - COPIES_AHEAD, lambda copy: copy.wait())

    lax.fori_loop(0, count, one_block, None)
    lax.fori_loop(max(count - COPIES_AHEAD, 0), count, lambda index, _: act(index, lambda copy: copy.wait()), None)
