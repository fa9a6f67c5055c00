"""Ragged paged attention for TPUs: a Pallas kernel that walks block tables with double-buffered copies from HBM.

Owns the kernel and the choice of its tiles; knows arrays only, neither requests nor how blocks are assigned.

Work items: the kernel runs through a list of items, each one a tile of query rows against the keys of one request. The
list is built by XLA from the metadata and read by scalars. Decode rows (one query) and longer stretches (prefill) go
through two calls of one kernel and differ in their tiles only:
    decode: a tile is one request; its rows are the query heads of a KV head, padded to the sublanes of a vector.
    prefill: a tile is an aligned stretch of the batch's tokens, whoever owns them; its rows are (query head of the
        group, token). A tile that several requests share has an item for each; rows of the others are masked.
Grid: (lanes, items of a lane). Two lanes share the tiles between the TensorCores of a megacore chip (v4, v5p), in turn.

Data movement: the cache stays in HBM. A chunk of several blocks of the item's request is copied to VMEM, one copy a
block, which brings keys and values of all KV heads in one piece. While a chunk is attended, the next one is on its way,
be it of this item or of the next, so that the copies never pause between items. Only blocks that hold visible keys are
copied: whole chunks before a sliding window or after the last query are skipped. The online softmax (Milakov and
Gimelshein, 2018) keeps its maximum, sum and output of each row in float32 in VMEM.

Bytes of a decode row: each visible block once, ``2 * num_kv_heads * head_dim * itemsize`` a token, up to block_size - 1
tokens more at its end (and at its start with a window). Scales of a dynamically quantised cache (4 bytes a token, KV
head and half) are laid end to end by XLA for the width of the block table before they are read. HBM stores rows of
whole 128 lanes, so that a head_dim below that moves 128 values. Decode is bound by these copies; prefill by the matrix
unit, with about ``tile tokens * group`` operations for a byte of the cache.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

LANES = 128
QUERY_DTYPES = ("bfloat16", "float32")
KV_DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")
SMEM_BYTES = 928 * 1024
ITEM_BYTES = 64
"""Of SMEM's 1 MiB, what block tables and items of one launch may take; larger batches take several launches. An item
has eleven fields, which SMEM rounds up to 16."""
CHUNK_BYTES = 2 * 2**20
DECODE_CHUNK_TOKENS = (128, 2048)
PREFILL_CHUNK_TOKENS = (128, 512)
"""Keys of a chunk, least and most: decode wants copies long enough to hide their start, prefill bounded scores."""
PREFILL_ROWS = 512
PREFILL_STATE_BYTES = 12 * 2**20
"""Rows of a prefill tile for a KV head, enough to keep the matrix unit busy, and what all its rows may hold in VMEM."""
VMEM_BYTES = 48 * 2**20
MASKED_SCORE = -1e30
LOWEST_BEST = -1e29
"""The running maximum starts above the masked score, so that a masked key weighs exp(-huge) = 0 even before any key is
seen, and neither NaN nor a second mask can arise."""


class _Item(enum.IntEnum):
    """What is known of a work item: the rows of the array of items, which has a column an item."""

    TILE = 0
    TABLE = 1  # request, as a row of the block tables
    FIRST_BLOCK = 2  # of the request's blocks, the one that the first chunk starts with
    NUM_BLOCKS = 3  # from there to the last visible key
    NUM_CHUNKS = 4  # 0 for the items at the end that stand for nothing
    PARITY = 5  # buffer of the first chunk
    FIRST_TOKEN, END_TOKEN = 6, 7  # the request's tokens, counted in the tile
    POSITION = 8  # that the tile's token 0 has or would have in the request
    FIRST_KEY, END_KEY = 9, 10  # positions of the keys that any row may see


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The static side of a launch."""

    num_kv_heads: int
    rows: int
    tile_tokens: int
    head_dim: int
    block_size: int
    chunk_blocks: int
    max_blocks: int
    scale: float
    v_scale: float
    sliding_window: int | None
    soft_cap: float | None
    has_scales: bool
    has_sinks: bool
    kv_dtype: Any
    q_dtype: Any
    lanes: int = 1

    @property
    def chunk_tokens(self) -> int:
        return self.chunk_blocks * self.block_size

    @property
    def dtype(self) -> Any:
        """Type of the operands of the dot products. A quantised value is exact in bfloat16."""
        return jnp.float32 if jnp.float32 in (self.q_dtype, self.kv_dtype) else jnp.bfloat16


def ragged_paged_attention(
    q: Float[Array, "T N H"],
    kv_cache: Float[Array, "num_blocks 2 K block_size H"],
    block_tables: Int[Array, "B max_blocks"],
    seq_lens: Int[Array, " B"],
    cu_seqlens_q: Int[Array, " B+1"],
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    kv_scales: Float[Array, "num_blocks 2 K block_size"] | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> Float[Array, "T N H"]:
    """See ``pallas_kernels.ragged_paged_attention``.

    The cache must lie in HBM with head_dim as its fastest axis. That is XLA's own choice where head_dim is a multiple
    of 128; elsewhere the caller should fix the layout of the jitted function's argument, or XLA copies the cache.

    Raises:
        NotImplementedError: for a type, block size or table that the kernel does not take, and for scales that are
            traced values.
    """
    num_requests, max_blocks = block_tables.shape
    _refuse(q, kv_cache, scale, k_scale, v_scale)
    num_tiles = -(-q.shape[0] // _tile_tokens(q, q.shape[1] // kv_cache.shape[2]))
    per_launch = _requests_per_launch(max_blocks, num_tiles)
    if per_launch < 1:
        raise NotImplementedError(f"a block table of {max_blocks} entries does not fit SMEM")
    options = {"sliding_window": sliding_window, "soft_cap": soft_cap, "sinks": sinks, "kv_scales": kv_scales}
    options |= {"scale": scale * (1.0 if k_scale is None else k_scale), "v_scale": 1.0 if v_scale is None else v_scale}
    out = jnp.zeros_like(q)
    for first in range(0, num_requests, per_launch):
        end = min(first + per_launch, num_requests)
        tables, lens, starts = block_tables[first:end], seq_lens[first:end], cu_seqlens_q[first : end + 1]
        out = _launch(q, kv_cache, tables, lens, starts, out, **options)
    return out


def _refuse(q: Array, kv_cache: Array, *scales: object) -> None:
    """Raises for what the kernel does not take; ``scales`` are those that must be known when it is compiled."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[2:4]
    if str(q.dtype) not in QUERY_DTYPES:
        raise NotImplementedError(f"queries of {q.dtype}; the kernel takes {', '.join(QUERY_DTYPES)}")
    if str(kv_cache.dtype) not in KV_DTYPES:
        raise NotImplementedError(f"a cache of {kv_cache.dtype}; the kernel takes {', '.join(KV_DTYPES)}")
    if block_size % 8 or block_size > 512:
        raise NotImplementedError(f"block_size {block_size} is not a multiple of 8, or above 512")
    if head_dim % 8 or head_dim > 256:
        raise NotImplementedError(f"head_dim {head_dim} is not a multiple of 8, or above 256")
    if num_kv_heads * block_size * _padded(head_dim) * kv_cache.dtype.itemsize * 2 > 2 * CHUNK_BYTES:
        raise NotImplementedError(f"a block of {num_kv_heads} KV heads x {block_size} tokens is too large for VMEM")
    if _prefill_token_bytes(num_heads, head_dim, q.dtype) * 16 > PREFILL_STATE_BYTES:
        raise NotImplementedError(f"{num_heads} heads of {head_dim} do not leave room for a tile in VMEM")
    if any(isinstance(value, jax.Array) for value in scales):
        raise NotImplementedError("scale, k_scale and v_scale that are arrays")


def _launch(
    q: Array,
    kv_cache: Array,
    block_tables: Int[Array, "B max_blocks"],
    seq_lens: Int[Array, " B"],
    cu_seqlens_q: Int[Array, " B+1"],
    out: Float[Array, "T N H"],
    *,
    scale: float,
    v_scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Array | None,
    kv_scales: Array | None,
) -> Float[Array, "T N H"]:
    """``out`` with the tokens of these requests attended: one call for the decode rows, one for the others."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    num_requests, max_blocks = block_tables.shape
    group = num_heads // num_kv_heads
    plan = _Plan(
        num_kv_heads=num_kv_heads,
        rows=0,
        tile_tokens=0,
        head_dim=head_dim,
        block_size=block_size,
        chunk_blocks=0,
        max_blocks=max_blocks,
        scale=scale,
        v_scale=v_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        has_scales=kv_scales is not None,
        has_sinks=sinks is not None,
        kv_dtype=kv_cache.dtype,
        q_dtype=q.dtype,
    )
    scales = None if kv_scales is None else _laid_out_scales(plan, kv_scales, block_tables)
    metadata = (seq_lens, cu_seqlens_q)
    query_lens = jnp.diff(cu_seqlens_q)
    tokens = jnp.arange(num_tokens)
    request = jnp.clip(jnp.searchsorted(cu_seqlens_q, tokens, side="right") - 1, 0, num_requests - 1)
    is_own = (tokens >= cu_seqlens_q[0]) & (tokens < cu_seqlens_q[-1])
    is_decode = query_lens == 1

    # Decode: the rows with one query first, [B, K, padded group, H].
    rows = _round_up(group, 8 if q.dtype.itemsize == 4 else 16)
    decode = dataclasses.replace(
        plan,
        rows=rows,
        tile_tokens=1,
        chunk_blocks=_chunk_blocks(plan, *DECODE_CHUNK_TOKENS),
        lanes=min(_num_cores(), num_requests),
    )
    order = jnp.argsort(~is_decode, stable=True)
    queries = q.at[cu_seqlens_q[order]].get(mode="clip").reshape(num_requests, num_kv_heads, group, head_dim)
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, rows - group), (0, 0)))
    sink_rows = None if sinks is None else jnp.pad(sinks.reshape(num_kv_heads, group), ((0, 0), (0, rows - group)))
    items = _decode_items(decode, order, jnp.sum(is_decode), *metadata)
    attended = _call(decode, items, block_tables, queries, kv_cache, scales, sink_rows)
    attended = attended[jnp.argsort(order)[request], :, :group].reshape(q.shape)
    out = jnp.where((is_own & is_decode[request])[:, None, None], attended, out)
    if num_tokens == 1:
        return out

    # Prefill: tiles of tokens, [tiles, K, group * tile tokens, H].
    tile = _tile_tokens(q, group)
    num_tiles = -(-num_tokens // tile)
    prefill = dataclasses.replace(
        plan,
        rows=group * tile,
        tile_tokens=tile,
        chunk_blocks=_chunk_blocks(plan, *PREFILL_CHUNK_TOKENS),
        lanes=min(_num_cores(), num_tiles),
    )
    queries = jnp.pad(q, ((0, num_tiles * tile - num_tokens), (0, 0), (0, 0)))
    queries = queries.reshape(num_tiles, tile, num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    queries = queries.reshape(num_tiles, num_kv_heads, group * tile, head_dim)
    sink_rows = None if sinks is None else jnp.repeat(sinks.reshape(num_kv_heads, group), tile, axis=1)
    items = _prefill_items(prefill, num_tiles, query_lens > 1, *metadata)
    attended = _call(prefill, items, block_tables, queries, kv_cache, scales, sink_rows)
    attended = attended.reshape(num_tiles, num_kv_heads, group, tile, head_dim).transpose(0, 3, 1, 2, 4)
    attended = attended.reshape(num_tiles * tile, num_heads, head_dim)[:num_tokens]
    return jnp.where((is_own & ~is_decode[request])[:, None, None], attended, out)


# --- tiles -----------------------------------------------------------------------------------------------------------


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _padded(head_dim: int) -> int:
    return _round_up(head_dim, LANES)


def _requests_per_launch(max_blocks: int, num_tiles: int) -> int:
    return (SMEM_BYTES - ITEM_BYTES * (num_tiles + LANES)) // (4 * max_blocks + ITEM_BYTES)


def _num_cores() -> int:
    """TensorCores behind one device: 2 on megacore chips, else 1; 1 where the target is not known."""
    try:
        return pltpu.get_tpu_info().num_cores
    except (AttributeError, IndexError, ValueError):
        return 1


def _prefill_token_bytes(num_heads: int, head_dim: int, dtype: Any) -> int:
    """Bytes of VMEM that a token of a prefill tile takes: its state, and queries and results, each buffered twice."""
    return num_heads * (_padded(head_dim) * (4 + 4 * dtype.itemsize) + 2 * 4 * LANES)


def _tile_tokens(q: Array, group: int) -> int:
    """Tokens of a prefill tile: a power of two, so that a row's token is a mask of its index."""
    num_tokens, num_heads, head_dim = q.shape
    affordable = PREFILL_STATE_BYTES // _prefill_token_bytes(num_heads, head_dim, q.dtype)
    wanted = min(max(16, PREFILL_ROWS // group), affordable)
    return min(1 << (wanted.bit_length() - 1), max(16, 1 << (num_tokens - 1).bit_length()))


def _alignment_blocks(plan: _Plan) -> int:
    """Blocks that chunks start at a multiple of: 1, but with scales whole lanes of them."""
    return math.lcm(plan.block_size, LANES) // plan.block_size if plan.has_scales else 1


def _chunk_blocks(plan: _Plan, least_tokens: int, most_tokens: int) -> int:
    """Blocks of a chunk: as many as CHUNK_BYTES hold, within bounds and no more than a table has."""
    token_bytes = 2 * plan.num_kv_heads * _padded(plan.head_dim) * jnp.dtype(plan.kv_dtype).itemsize
    tokens = min(max(CHUNK_BYTES // token_bytes, least_tokens), most_tokens)
    tokens = 1 << (tokens.bit_length() - 1)
    blocks = min(max(1, tokens // plan.block_size), plan.max_blocks)
    return _round_up(blocks, _alignment_blocks(plan))


def _laid_out_scales(
    plan: _Plan, kv_scales: Float[Array, "num_blocks 2 K block_size"], block_tables: Int[Array, "B max_blocks"]
) -> Float[Array, "B 2 K S"]:
    """Scales of each request in order of position, padded so that a chunk at any aligned start lies within."""
    num_requests, max_blocks = block_tables.shape
    scales = kv_scales[block_tables].transpose(0, 2, 3, 1, 4).astype(jnp.float32)
    scales = scales.reshape(num_requests, 2, plan.num_kv_heads, max_blocks * plan.block_size)
    longest = max(_chunk_blocks(plan, *bounds) for bounds in (DECODE_CHUNK_TOKENS, PREFILL_CHUNK_TOKENS))
    size = _round_up(max_blocks * plan.block_size, LANES) + longest * plan.block_size
    return jnp.pad(scales, ((0, 0), (0, 0), (0, 0), (0, size - scales.shape[3])))


# --- work items ------------------------------------------------------------------------------------------------------


def _decode_items(
    plan: _Plan,
    order: Int[Array, " B"],
    num_decodes: Int[Array, ""],
    seq_lens: Int[Array, " B"],
    cu_seqlens_q: Int[Array, " B+1"],
) -> Int[Array, "fields items"]:
    """An item for each of the first ``num_decodes`` requests of ``order``; the lanes take turns."""
    num_requests = len(order)
    steps = -(-num_requests // plan.lanes)
    index = (jnp.arange(plan.lanes)[:, None] + plan.lanes * jnp.arange(steps)).reshape(-1)
    active = index < num_decodes
    lane = jnp.arange(plan.lanes).repeat(steps)
    # As for prefill, an item that stands for nothing stays on a tile of its lane.
    last = lane + plan.lanes * (jnp.maximum(num_decodes - 1 - lane, 0) // plan.lanes)
    tile = jnp.minimum(jnp.where(active, index, last), num_requests - 1)
    request = order[tile]
    position = seq_lens[request] - 1
    bounds = (jnp.zeros_like(tile), jnp.ones_like(tile))
    return _pack_items(plan, tile, request, active, position, *bounds)


def _prefill_items(
    plan: _Plan,
    num_tiles: int,
    is_wanted: Bool[Array, " B"],
    seq_lens: Int[Array, " B"],
    cu_seqlens_q: Int[Array, " B+1"],
) -> Int[Array, "fields items"]:
    """An item for each wanted request in each tile that has tokens of it, in order of tokens within a lane."""
    num_requests, tile_tokens, lanes = len(seq_lens), plan.tile_tokens, plan.lanes
    most_shared = min(num_requests, num_tiles * tile_tokens // 2)
    starts, ends = cu_seqlens_q[:-1], cu_seqlens_q[1:]
    counts = jnp.where(is_wanted, (ends - 1) // tile_tokens - starts // tile_tokens + 1, 0)
    item_ends = jnp.cumsum(counts)
    index = jnp.arange(num_tiles + most_shared)
    request = jnp.clip(jnp.searchsorted(item_ends, index, side="right"), 0, num_requests - 1)
    tile = starts[request] // tile_tokens + index - (item_ends - counts)[request]

    # Lanes take the tiles in turn, for later ones have more keys; all items of a tile stay on its lane.
    lane_of = jnp.where(index < item_ends[-1], tile % lanes, lanes)
    order = jnp.argsort(lane_of, stable=True)
    steps = -(-num_tiles // lanes) + most_shared
    lane, step = jnp.arange(lanes).repeat(steps), jnp.tile(jnp.arange(steps), lanes)
    lane_counts = jnp.sum(lane_of == jnp.arange(lanes)[:, None], axis=1)
    active = step < lane_counts[lane]
    # An item that stands for nothing stays on a tile of its lane, which then is neither read nor written again.
    kept = jnp.clip(step, 0, jnp.maximum(lane_counts[lane] - 1, 0)) + (jnp.cumsum(lane_counts) - lane_counts)[lane]
    kept = order[jnp.minimum(kept, len(order) - 1)]
    request, tile = request[kept], jnp.where(lane_counts[lane] > 0, tile[kept], lane)
    first, end = starts[request] - tile * tile_tokens, ends[request] - tile * tile_tokens
    bounds = (jnp.maximum(first, 0), jnp.minimum(end, tile_tokens))
    return _pack_items(plan, tile, request, active, seq_lens[request] - end, *bounds)


def _pack_items(
    plan: _Plan,
    tile: Int[Array, " items"],
    request: Int[Array, " items"],
    active: Bool[Array, " items"],
    position: Int[Array, " items"],
    first_token: Int[Array, " items"],
    end_token: Int[Array, " items"],
) -> Int[Array, "fields items"]:
    # An active item has a chunk at least, or the chain of copies, each started by the item before, would break.
    end_key = jnp.clip(position + end_token, 1, plan.max_blocks * plan.block_size)
    first_key = jnp.zeros_like(tile)
    if plan.sliding_window is not None:
        first_key = jnp.clip(position + first_token - plan.sliding_window + 1, 0, end_key - 1)
    alignment = _alignment_blocks(plan)
    first_block = first_key // plan.block_size // alignment * alignment
    num_blocks = (end_key + plan.block_size - 1) // plan.block_size - first_block
    num_chunks = jnp.where(active, (num_blocks + plan.chunk_blocks - 1) // plan.chunk_blocks, 0)
    before = jnp.cumsum(num_chunks.reshape(plan.lanes, -1), axis=1).reshape(-1) - num_chunks
    fields = {
        _Item.TILE: tile,
        _Item.TABLE: request,
        _Item.FIRST_BLOCK: first_block,
        _Item.NUM_BLOCKS: num_blocks,
        _Item.NUM_CHUNKS: num_chunks,
        _Item.PARITY: before % 2,
        _Item.FIRST_TOKEN: first_token,
        _Item.END_TOKEN: end_token,
        _Item.POSITION: position,
        _Item.FIRST_KEY: first_key,
        _Item.END_KEY: end_key,
    }
    return jnp.stack([fields[field] for field in _Item]).astype(jnp.int32)


# --- the kernel ------------------------------------------------------------------------------------------------------


def _call(
    plan: _Plan,
    items: Int[Array, "fields items"],
    block_tables: Int[Array, "B max_blocks"],
    q: Float[Array, "tiles K rows H"],
    kv_cache: Float[Array, "num_blocks 2 K block_size H"],
    scales: Float[Array, "B 2 K S"] | None,
    sinks: Float[Array, "K rows"] | None,
) -> Float[Array, "tiles K rows H"]:
    """Runs the items. A tile without items keeps whatever its memory held."""
    steps = items.shape[1] // plan.lanes
    heads, rows, head_dim = plan.num_kv_heads, plan.rows, plan.head_dim

    def tile_of(lane: Array, step: Array, items: Any, tables: Any) -> tuple[Any, ...]:
        return items[_Item.TILE, lane * steps + step], 0, 0, 0

    tile_spec = pl.BlockSpec((None, heads, rows, head_dim), tile_of)
    in_specs = [tile_spec, pl.BlockSpec(memory_space=pl.ANY)]
    operands = [q, kv_cache]
    scratch: list[Any] = [
        pltpu.VMEM((2, plan.chunk_blocks, *kv_cache.shape[1:]), kv_cache.dtype),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.VMEM((heads, rows, 1), jnp.float32),
        pltpu.VMEM((heads, rows, 1), jnp.float32),
        pltpu.VMEM((heads, rows, head_dim), jnp.float32),
    ]
    if scales is not None:
        in_specs.append(pl.BlockSpec(memory_space=pl.ANY))
        operands.append(scales)
        scratch.append(pltpu.VMEM((2, 2, heads, plan.chunk_tokens), jnp.float32))
    if sinks is not None:
        in_specs.append(pl.BlockSpec((heads, rows, 1), lambda *_: (0, 0, 0)))
        operands.append(sinks.astype(jnp.float32)[:, :, None])
    return pl.pallas_call(
        functools.partial(_kernel, plan, steps),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(plan.lanes, steps),
            in_specs=in_specs,
            out_specs=tile_spec,
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        name="ragged_paged_attention_decode" if plan.tile_tokens == 1 else "ragged_paged_attention_prefill",
    )(items, block_tables.reshape(-1), *operands)


def _kernel(plan: _Plan, steps: int, items: Any, tables: Any, *refs: Any) -> None:
    """One item: ``refs`` are inputs, output and scratch in the order of ``_call``.

    In the kernel integers are divided by ``lax.div``: none is negative, and ``//`` cannot be lowered where the chip is
    not known, as in an export.
    """
    rest: Iterator[Any] = iter(refs)
    q, kv_cache = next(rest), next(rest)
    scales = next(rest) if plan.has_scales else None
    sinks = next(rest) if plan.has_sinks else None
    out, kv_buffer, semaphores, best, total, weighted = (next(rest) for _ in range(6))
    scale_buffer = next(rest) if plan.has_scales else None
    copies = _Copies(plan, items, tables, kv_cache, kv_buffer, semaphores, scales, scale_buffer)

    lane, step = pl.program_id(0), pl.program_id(1)
    item = lane * steps + step
    tile = items[_Item.TILE, item]
    num_chunks = items[_Item.NUM_CHUNKS, item]
    following = jnp.minimum(item + 1, plan.lanes * steps - 1)
    is_last_step = step == steps - 1

    @pl.when((step == 0) | (items[_Item.TILE, jnp.maximum(item - 1, 0)] != tile))
    def _() -> None:
        # A sink is a key of its own with the value zero, seen before all others.
        best[...] = jnp.full(best.shape, LOWEST_BEST) if sinks is None else jnp.maximum(sinks[...], LOWEST_BEST)
        total[...] = jnp.zeros(total.shape) if sinks is None else jnp.exp(sinks[...] - best[...])
        weighted[...] = jnp.zeros(weighted.shape)

    @pl.when((step == 0) & (num_chunks > 0))
    def _() -> None:
        copies.start(item, jnp.int32(0), items[_Item.PARITY, item])

    def one_chunk(chunk: Array, carry: None) -> None:
        slot = (items[_Item.PARITY, item] + chunk) & 1
        is_more = chunk + 1 < num_chunks

        @pl.when(is_more | (~is_last_step & (items[_Item.NUM_CHUNKS, following] > 0)))
        def _() -> None:
            copies.start(jnp.where(is_more, item, following), jnp.where(is_more, chunk + 1, 0), 1 - slot)

        copies.wait(item, chunk, slot)
        _attend_chunk(plan, items, item, chunk, slot, q, kv_buffer, scale_buffer, best, total, weighted)

    lax.fori_loop(0, num_chunks, one_chunk, None)

    @pl.when(is_last_step | (items[_Item.TILE, following] != tile))
    def _() -> None:
        def finish(head: Any) -> None:
            seen = total[head]
            result = jnp.where(seen > 0, weighted[head] / jnp.where(seen > 0, seen, 1.0), 0.0)
            out[head] = (result * plan.v_scale).astype(out.dtype)

        _each_head(plan, finish)


def _each_head(plan: _Plan, body: Callable[[Any], None]) -> None:
    """Heads with few rows are unrolled, so that one's dot products overlap another's softmax.

    With many rows they overlap within a head; unrolling those, or very many heads, would only compile for long.
    """
    if plan.tile_tokens == 1 and plan.num_kv_heads <= 8:
        for head in range(plan.num_kv_heads):
            body(head)
    else:
        lax.fori_loop(0, plan.num_kv_heads, lambda head, _: body(head), None)


@dataclasses.dataclass(frozen=True)
class _Copies:
    """The copies of chunks from HBM. A buffer belongs to the copies from ``start`` to ``wait``, then to the reader."""

    plan: _Plan
    items: Any
    tables: Any
    kv_cache: Any
    kv_buffer: Any
    semaphores: Any
    scales: Any
    scale_buffer: Any

    def start(self, item: Array, chunk: Array, slot: Array) -> None:
        row = self.items[_Item.TABLE, item]
        first = row * self.plan.max_blocks + self.items[_Item.FIRST_BLOCK, item] + chunk * self.plan.chunk_blocks

        def one_block(index: Array, carry: None) -> None:
            self._block_copy(self.tables[first + index], index, slot).start()

        lax.fori_loop(0, self._num_blocks(item, chunk), one_block, None)
        if self.scales is not None:
            self._scales_copy(item, chunk, slot).start()

    def wait(self, item: Array, chunk: Array, slot: Array) -> None:
        def one_block(index: Array, carry: None) -> None:
            self._block_copy(0, index, slot).wait()  # waiting counts bytes: any block serves as the source

        lax.fori_loop(0, self._num_blocks(item, chunk), one_block, None)
        if self.scales is not None:
            self._scales_copy(item, chunk, slot).wait()

    def _num_blocks(self, item: Array, chunk: Array) -> Array:
        return jnp.minimum(self.items[_Item.NUM_BLOCKS, item] - chunk * self.plan.chunk_blocks, self.plan.chunk_blocks)

    def _block_copy(self, block: Any, index: Array, slot: Array) -> Any:
        return pltpu.make_async_copy(self.kv_cache.at[block], self.kv_buffer.at[slot, index], self.semaphores.at[slot])

    def _scales_copy(self, item: Array, chunk: Array, slot: Array) -> Any:
        first = (self.items[_Item.FIRST_BLOCK, item] + chunk * self.plan.chunk_blocks) * self.plan.block_size
        source = self.scales.at[
            self.items[_Item.TABLE, item], :, :, pl.ds(pl.multiple_of(first, LANES), self.plan.chunk_tokens)
        ]
        return pltpu.make_async_copy(source, self.scale_buffer.at[slot], self.semaphores.at[slot])


def _attend_chunk(
    plan: _Plan,
    items: Any,
    item: Array,
    chunk: Array,
    slot: Array,
    q: Any,
    kv_buffer: Any,
    scale_buffer: Any,
    best: Any,
    total: Any,
    weighted: Any,
) -> None:
    """Adds the keys of a chunk to the softmax of the tile's rows."""
    first = (items[_Item.FIRST_BLOCK, item] + chunk * plan.chunk_blocks) * plan.block_size
    first_key, end_key = items[_Item.FIRST_KEY, item] - first, items[_Item.END_KEY, item] - first
    if jnp.issubdtype(plan.kv_dtype, jnp.floating):
        _clear_unseen_values(plan, kv_buffer, slot, first_key, end_key)

    keys = lax.broadcasted_iota(jnp.int32, (1, plan.chunk_tokens), 1)
    # Rows lie group by group: a row's token in the tile is its index modulo the tile's tokens, a power of two.
    tokens = lax.broadcasted_iota(jnp.int32, (plan.rows, 1), 0) & (plan.tile_tokens - 1)
    is_own = (tokens >= items[_Item.FIRST_TOKEN, item]) & (tokens < items[_Item.END_TOKEN, item])
    # Counted from the chunk's first key; what is no row of this request sees no key.
    newest = jnp.where(is_own, tokens + (items[_Item.POSITION, item] - first), -1)
    precision = lax.Precision.HIGHEST if plan.dtype == jnp.float32 else lax.Precision.DEFAULT

    def one_head(head: Any) -> None:
        scores = lax.dot_general(
            q[head].astype(plan.dtype),
            _load(plan, kv_buffer, slot, 0, head),
            (((1,), (1,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        scores *= plan.scale
        if scale_buffer is not None:
            scores *= scale_buffer[slot, 0, pl.ds(head, 1), :]
        if plan.soft_cap is not None:
            scores = plan.soft_cap * jnp.tanh(scores / plan.soft_cap)
        visible = keys <= newest
        if plan.sliding_window is not None:
            visible &= keys > newest - plan.sliding_window
        scores = jnp.where(visible, scores, MASKED_SCORE)
        previous = best[head]
        largest = jnp.maximum(previous, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scores - largest)
        correction = jnp.exp(previous - largest)
        best[head] = largest
        total[head] = total[head] * correction + jnp.sum(weights, axis=1, keepdims=True)
        if scale_buffer is not None:
            is_seen = (keys >= first_key) & (keys < end_key)  # a scale that nobody owns may be NaN
            weights *= jnp.where(is_seen, scale_buffer[slot, 1, pl.ds(head, 1), :], 0.0)
        values = lax.dot_general(
            weights.astype(plan.dtype),
            _load(plan, kv_buffer, slot, 1, head),
            (((1,), (0,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        weighted[head] = weighted[head] * correction + values

    _each_head(plan, one_head)


def _load(plan: _Plan, kv_buffer: Any, slot: Array, half: int, head: Any) -> Float[Array, "S H"]:
    """Keys (half 0) or values (half 1) of a head in a chunk, block after block."""
    blocks = kv_buffer[slot, :, half, head]
    shape = (plan.chunk_tokens, plan.head_dim)
    if blocks.dtype == plan.dtype and plan.block_size % (32 // blocks.dtype.itemsize) == 0:
        return blocks.reshape(shape)
    # A block that is not whole vectors in its own type is whole vectors in float32 (8 rows), where joining is free.
    return blocks.astype(jnp.float32).reshape(shape).astype(plan.dtype)


def _clear_unseen_values(plan: _Plan, kv_buffer: Any, slot: Array, first_key: Array, end_key: Array) -> None:
    """Zeroes the values outside ``first_key:end_key`` of the chunk: weight zero times NaN would be NaN."""
    size = plan.block_size

    def clear(index: Array, carry: None) -> None:
        offsets = index * size + lax.broadcasted_iota(jnp.int32, (plan.num_kv_heads, size, plan.head_dim), 1)
        values = kv_buffer[slot, index, 1].astype(jnp.float32)
        values = jnp.where((offsets >= first_key) & (offsets < end_key), values, 0.0)
        kv_buffer[slot, index, 1] = values.astype(kv_buffer.dtype)

    @pl.when(first_key > 0)
    def _() -> None:
        lax.fori_loop(0, jnp.minimum(lax.div(first_key + size - 1, size), plan.chunk_blocks), clear, None)

    @pl.when(end_key < plan.chunk_tokens)
    def _() -> None:
        lax.fori_loop(lax.div(end_key, size), plan.chunk_blocks, clear, None)
