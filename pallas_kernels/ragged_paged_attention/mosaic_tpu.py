"""Ragged paged attention for TPUs: a Pallas kernel that walks block tables with double-buffered copies from HBM.

Owns the kernel and the choice of its tiles; knows arrays only, neither requests nor how blocks are assigned.

Work items: the kernel runs through a list of items, each one a tile of query rows against the keys of one request. The
list is built by XLA from the metadata and read by scalars. Decode rows (one query) and longer stretches (prefill) go
through two calls of one kernel, which differ in their tiles only:
    decode: a tile is one request; its rows are the query heads of a KV head, padded to the sublanes of a vector.
    prefill: a tile is an aligned stretch of the batch's tokens, whoever owns them; its rows are (query head of the
        group, token). A tile that several requests share has an item for each; rows of the others are masked.
A mixed batch goes through both, each row through the one that suits it. A call without items is branched around, with
its rearrangement of queries, and a call has as many steps as items (a grid of dynamic length), so that neither an
absent kind nor padding costs time.
Grid: (lanes, items of a lane). Two lanes share the tiles between the TensorCores of a megacore chip (v4, v5p), in turn.

Data movement: the cache stays in HBM. A chunk of several blocks of the item's request is copied to VMEM, one copy a
block, which brings keys and values of all KV heads in one piece. While a chunk is attended, the next one is on its way,
be it of this item or of the next, so that the copies never pause between items. Only blocks that hold visible keys are
copied, those before a sliding window or after the last query are not, and of the first and last of them the part that
is needed. The online softmax (Milakov and Gimelshein, 2018) keeps its maximum, sum and output of each row in float32 in
VMEM.

Rows of the cache: where head_dim is a multiple of 128 lanes, keys and values are sliced apart for free. Elsewhere (64,
80, 96) they would straddle lanes, so the whole row serves as both: queries are padded by zeros, which meet the value,
and of the sum of weighted rows the key's columns are dropped outside. Up to 2 * head_dim = 128 (the matrix unit works
on whole lanes anyway) this costs nothing; for 80 and 96 it doubles the work of the matrix unit, not the bytes.

Bytes of a decode row (counted in tests, computed by ``traffic.decode_bytes``): each visible key and value once,
``2 * num_kv_heads * head_dim * itemsize`` a token. What comes on top:
    - the last block is copied up to a multiple of 32 tokens (whole if smaller), at most 31 tokens more, and with a
      sliding window the first block from such a multiple on;
    - HBM holds rows of whole 128 lanes: 2 * head_dim is that for 64, 128 and 256; 80 and 96 move 256 lanes a token;
    - queries and results, the group padded to 8 rows;
    - the entries of block tables and items, read once into scalar memory.
Copies of the cache alone are within 10% of the floor from 310 visible tokens a row on; all of it, for bfloat16, from
350 tokens (Llama 3, 4 queries a KV head of 128) to 550 (Qwen 2.5, 7 of 64, where queries weigh most). Scales of a
dynamically quantised cache are copied with their block: 8 bytes a token and KV head if a block has whole lanes of
tokens (block_size 128 or 256; 3% of an int8 cache with head_dim 128). Smaller blocks are padded to 128 lanes in HBM, so
that a token moves 16 bytes with blocks of 64, and 64 bytes with blocks of 16. Decode is bound by these copies; prefill
by the matrix unit, with about ``tile tokens * group`` operations for a byte of the cache.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels import tiles as tile_tables

LANES = 128
SUBLANES = 8
QUERY_DTYPES = ("bfloat16", "float32")
KV_DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")
SMEM_BYTES = 928 * 1024
ITEM_BYTES = 64
"""Of SMEM's 1 MiB, what block tables and items of one launch may take; larger batches take several launches. An item
has thirteen fields, which SMEM rounds up to 16."""
PART_TOKENS = 32
"""Of the first and last blocks of a row multiples of this are copied: whole vectors of every type of cache."""
DEFAULT_VMEM_BYTES = 64 * 2**20
"""What a chip is taken to have that is not known, as in an export; v4 has less."""
MOST_VMEM_BYTES = 48 * 2**20
MOST_CHUNK_BYTES = 2 * 2**20
MOST_STATE_BYTES = 12 * 2**20
"""What the kernel uses of VMEM, and of it a chunk of the cache (there are two) and the rows of a prefill tile, on a
chip that has plenty."""
DECODE_CHUNK_TOKENS = (128, 2048)
PREFILL_CHUNK_TOKENS = (128, 512)
"""Keys of a chunk, least and most: decode wants copies long enough to hide their start, prefill bounded scores."""
PREFILL_ROWS = 512
"""Rows of a prefill tile for a KV head, enough to keep the matrix unit busy."""
UNROLLED = 4
"""Copies of blocks that are started at a time, see ``_each_of``."""
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
    SKIPPED_TOKENS = 11  # of the first block, those not to copy
    LAST_TOKENS = 12  # of the last block, those to copy, skipped ones included


class _Items(NamedTuple):
    """The work of a call: ``fields`` by ``_Item``, lane after lane, of which each lane runs its first ``steps``."""

    fields: Int[Array, "fields items"]
    steps: Int[Array, ""]


class _Tiles(NamedTuple):
    """What may be tuned: query tokens of a tile (1 for decode) and blocks of a chunk of keys."""

    tile_tokens: int
    chunk_blocks: int


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The static side of a call."""

    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    max_blocks: int
    scale: float
    v_scale: float
    sliding_window: int | None
    soft_cap: float | None
    has_scales: bool
    has_sinks: bool
    kv_dtype: Any
    q_dtype: Any
    num_cores: int
    vmem_bytes: int
    tile_tokens: int = 1
    chunk_blocks: int = 1
    lanes: int = 1

    @property
    def rows(self) -> int:
        """Rows of a tile for a KV head."""
        return _round_up(self.group, SUBLANES) if self.tile_tokens == 1 else self.group * self.tile_tokens

    @property
    def chunk_tokens(self) -> int:
        return self.chunk_blocks * self.block_size

    @property
    def is_split(self) -> bool:
        """Whether keys and values are whole lanes of a row, so that they can be sliced apart."""
        return self.head_dim % LANES == 0

    @property
    def columns(self) -> int:
        """Of queries and results in the kernel: those of a half of a row, or of all of it."""
        return self.head_dim if self.is_split else 2 * self.head_dim

    @property
    def copies_parts(self) -> bool:
        return self.block_size > PART_TOKENS and self.block_size % PART_TOKENS == 0

    @property
    def scale_blocks(self) -> int:
        """Blocks whose scales fill whole lanes; a chunk has a multiple of them."""
        return math.lcm(self.block_size, LANES) // self.block_size if self.has_scales else 1

    @property
    def dtype(self) -> Any:
        """Type of the operands of the dot products. A quantised value is exact in bfloat16."""
        return jnp.float32 if jnp.float32 in (self.q_dtype, self.kv_dtype) else jnp.bfloat16


def ragged_paged_attention(
    q: Float[Array, "T N H"],
    kv_cache: Num[Array, "num_blocks K block_size 2*H"],
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

    The cache and its scales must lie in HBM row by row, the last axis fastest. That is XLA's own choice where it is a
    multiple of 128 long: for the cache with a head_dim of 64, 128 or 256, for scales with a block_size of 128 or 256
    and 1, 2, 4 or a multiple of 8 KV heads. Elsewhere the caller should fix the layout of the jitted function's
    argument, or XLA copies the array whole.

    Raises:
        NotImplementedError: for a type, block size or table that the kernel does not take, and for scales that are
            traced values.
    """
    num_requests, max_blocks = block_tables.shape
    num_kv_heads, block_size = kv_cache.shape[1:3]
    _refuse(q, kv_cache, scale, k_scale, v_scale)
    num_cores, vmem_bytes = _chip()
    plan = _Plan(
        num_kv_heads=num_kv_heads,
        group=q.shape[1] // num_kv_heads,
        head_dim=q.shape[2],
        block_size=block_size,
        max_blocks=max_blocks,
        scale=scale * (1.0 if k_scale is None else k_scale),
        v_scale=1.0 if v_scale is None else v_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        has_scales=kv_scales is not None,
        has_sinks=sinks is not None,
        kv_dtype=kv_cache.dtype,
        q_dtype=q.dtype,
        num_cores=num_cores,
        vmem_bytes=vmem_bytes,
    )
    decode, prefill = (_tiled(plan, is_decode, q.shape[0]) for is_decode in (True, False))
    per_launch = _requests_per_launch(max_blocks, -(-q.shape[0] // prefill.tile_tokens))
    if per_launch < 1:
        raise NotImplementedError(f"a block table of {max_blocks} entries does not fit SMEM")
    arrays = (kv_cache, kv_scales, sinks)
    out = jnp.zeros_like(q)
    for first in range(0, num_requests, per_launch):
        end = min(first + per_launch, num_requests)
        metadata = (block_tables[first:end], seq_lens[first:end], cu_seqlens_q[first : end + 1])
        out = _attend_decodes(decode, q, out, arrays, *metadata)
        if q.shape[0] > 1:
            out = _attend_prefills(prefill, q, out, arrays, *metadata)
    return out


def _refuse(q: Array, kv_cache: Array, *scales: object) -> None:
    """Raises for what the kernel does not take; ``scales`` are those that must be known when it is compiled."""
    head_dim, block_size = q.shape[2], kv_cache.shape[2]
    if str(q.dtype) not in QUERY_DTYPES:
        raise NotImplementedError(f"queries of {q.dtype}; the kernel takes {', '.join(QUERY_DTYPES)}")
    if str(kv_cache.dtype) not in KV_DTYPES:
        raise NotImplementedError(f"a cache of {kv_cache.dtype}; the kernel takes {', '.join(KV_DTYPES)}")
    if block_size % 8 or block_size > 512:
        raise NotImplementedError(f"block_size {block_size} is not a multiple of 8, or above 512")
    if head_dim % 8 or head_dim > 256:
        raise NotImplementedError(f"head_dim {head_dim} is not a multiple of 8, or above 256")
    if any(isinstance(value, jax.Array) for value in scales):
        raise NotImplementedError("scale, k_scale and v_scale that are arrays")


_Arrays = tuple[Array, Array | None, Array | None]
"""Cache, scales of the cache, sinks."""


def _attend_decodes(
    plan: _Plan,
    q: Float[Array, "T N H"],
    out: Float[Array, "T N H"],
    arrays: _Arrays,
    block_tables: Int[Array, "B max_blocks"],
    seq_lens: Int[Array, " B"],
    cu_seqlens_q: Int[Array, " B+1"],
) -> Float[Array, "T N H"]:
    """``out`` with the only tokens of their requests attended. A tile is [K, padded group, columns].

    What does not depend on queries stays outside of the branch: all layers of a model have it in common.
    """
    heads, group, head_dim = plan.num_kv_heads, plan.group, plan.head_dim
    is_decode = jnp.diff(cu_seqlens_q) == 1
    order = jnp.argsort(~is_decode, stable=True)
    plan = dataclasses.replace(plan, lanes=min(plan.num_cores, len(order)))
    items = _decode_items(plan, order, jnp.sum(is_decode), seq_lens)
    tokens = cu_seqlens_q[order]
    request, is_own = _owners(q, cu_seqlens_q)
    rank, is_wanted = jnp.argsort(order)[request], (is_own & is_decode[request])[:, None, None]

    def attend(out: Float[Array, "T N H"]) -> Float[Array, "T N H"]:
        # Gathered as rows of a matrix: for more axes XLA picks layouts that are mostly padding.
        queries = q.reshape(len(q), -1).at[tokens].get(mode="clip")
        queries = queries.reshape(len(order), heads, group, head_dim)
        queries = jnp.pad(queries, ((0, 0), (0, 0), (0, plan.rows - group), (0, plan.columns - head_dim)))
        sinks = arrays[2]
        if sinks is not None:
            sinks = jnp.pad(sinks.reshape(heads, group), ((0, 0), (0, plan.rows - group)))
        attended = _call(plan, items, block_tables, queries, *arrays[:2], sinks)
        attended = attended[:, :, :group, plan.columns - head_dim :].reshape(len(order), -1)[rank].reshape(out.shape)
        return jnp.where(is_wanted, attended, out)

    return lax.cond(items.steps > 0, attend, lambda out: out, out)


def _attend_prefills(
    plan: _Plan,
    q: Float[Array, "T N H"],
    out: Float[Array, "T N H"],
    arrays: _Arrays,
    block_tables: Int[Array, "B max_blocks"],
    seq_lens: Int[Array, " B"],
    cu_seqlens_q: Int[Array, " B+1"],
) -> Float[Array, "T N H"]:
    """``out`` with the tokens of the other requests attended. A tile is [K, group * tile tokens, columns]."""
    heads, group, head_dim = plan.num_kv_heads, plan.group, plan.head_dim
    num_tokens, tile = len(q), plan.tile_tokens
    num_tiles = -(-num_tokens // tile)
    plan = dataclasses.replace(plan, lanes=min(plan.num_cores, num_tiles))
    is_prefill = jnp.diff(cu_seqlens_q) > 1
    items = _prefill_items(plan, num_tiles, is_prefill, seq_lens, cu_seqlens_q)
    request, is_own = _owners(q, cu_seqlens_q)
    is_wanted = (is_own & is_prefill[request])[:, None, None]

    def attend(out: Float[Array, "T N H"]) -> Float[Array, "T N H"]:
        queries = jnp.pad(q, ((0, num_tiles * tile - num_tokens), (0, 0), (0, plan.columns - head_dim)))
        queries = queries.reshape(num_tiles, tile, heads, group, -1).transpose(0, 2, 3, 1, 4)
        queries = queries.reshape(num_tiles, heads, group * tile, -1)
        sinks = arrays[2]
        if sinks is not None:
            sinks = jnp.repeat(sinks.reshape(heads, group), tile, axis=1)
        attended = _call(plan, items, block_tables, queries, *arrays[:2], sinks)[..., plan.columns - head_dim :]
        attended = attended.reshape(num_tiles, heads, group, tile, head_dim).transpose(0, 3, 1, 2, 4)
        attended = attended.reshape(num_tiles * tile, *out.shape[1:])[:num_tokens]
        return jnp.where(is_wanted, attended, out)

    return lax.cond(items.steps > 0, attend, lambda out: out, out)


def _owners(q: Float[Array, "T N H"], cu_seqlens_q: Int[Array, " B+1"]) -> tuple[Int[Array, " T"], Bool[Array, " T"]]:
    """The request of each token, and whether there is one."""
    tokens = jnp.arange(len(q))
    request = jnp.clip(_num_up_to(cu_seqlens_q, tokens) - 1, 0, len(cu_seqlens_q) - 2)
    return request, (tokens >= cu_seqlens_q[0]) & (tokens < cu_seqlens_q[-1])


def _num_up_to(values: Int[Array, " n"], limits: Int[Array, " m"]) -> Int[Array, " m"]:
    """How many of sorted values are at most each limit: one operation, where a binary search would be a chain."""
    return jnp.searchsorted(values, limits, side="right", method="compare_all")


# --- tiles -----------------------------------------------------------------------------------------------------------


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _requests_per_launch(max_blocks: int, num_tiles: int) -> int:
    return (SMEM_BYTES - ITEM_BYTES * (num_tiles + LANES)) // (4 * max_blocks + ITEM_BYTES)


def _chip() -> tuple[int, int]:
    """TensorCores behind one device (2 on megacore chips) and bytes of VMEM of each, for the chip traced for."""
    try:
        info = pltpu.get_tpu_info()
        return info.num_cores, info.vmem_capacity_bytes
    except (AttributeError, IndexError, ValueError):  # no TPU, or one this JAX does not know
        return 1, DEFAULT_VMEM_BYTES


def _tiled(plan: _Plan, is_decode: bool, num_tokens: int) -> _Plan:
    """The plan with tiles of the table or the heuristic, no larger than the batch and the block tables."""
    kind = "decode" if is_decode else "prefill"
    key = f"{kind} H{plan.head_dim} G{plan.group} K{plan.num_kv_heads} bs{plan.block_size} {plan.kv_dtype}"
    key += " scales" if plan.has_scales else ""

    def fits(tiles: _Tiles) -> bool:
        tile_tokens, chunk_blocks = tiles
        is_tile = tile_tokens == 1 if is_decode else tile_tokens >= 16 and tile_tokens.bit_count() == 1
        candidate = dataclasses.replace(plan, tile_tokens=tile_tokens, chunk_blocks=chunk_blocks)
        return is_tile and chunk_blocks % plan.scale_blocks == 0 and _vmem_needed(candidate) <= _vmem_limit(plan)

    heuristic = _tiles(plan, is_decode)
    if not fits(heuristic):
        raise NotImplementedError(f"{kind} with {key} does not fit a VMEM of {plan.vmem_bytes >> 20} MiB")
    tiles = tile_tables.pick("ragged_paged_attention", "mosaic_tpu", key, heuristic, fits)
    return dataclasses.replace(
        plan,
        tile_tokens=min(tiles.tile_tokens, max(16, 1 << (num_tokens - 1).bit_length())),
        chunk_blocks=min(tiles.chunk_blocks, _round_up(plan.max_blocks, plan.scale_blocks)),
    )


def _tiles(plan: _Plan, is_decode: bool) -> _Tiles:
    """The heuristic. Chunks are as long as their share of VMEM allows, within bounds; so are prefill tiles, which have
    a power of two of tokens, so that a row's token is a mask of its index."""
    chunk_bytes = min(MOST_CHUNK_BYTES, plan.vmem_bytes // 16)
    least, most = DECODE_CHUNK_TOKENS if is_decode else PREFILL_CHUNK_TOKENS
    token_bytes = plan.num_kv_heads * _round_up(2 * plan.head_dim, LANES) * plan.kv_dtype.itemsize
    chunk_tokens = min(max(chunk_bytes // token_bytes, least), most)
    chunk_tokens = 1 << (chunk_tokens.bit_length() - 1)
    chunk_blocks = _round_up(max(1, chunk_tokens // plan.block_size), plan.scale_blocks)
    if is_decode:
        return _Tiles(1, chunk_blocks)
    # State, and queries and results, each buffered twice, of a token.
    lanes = _round_up(plan.columns, LANES)
    tile_token_bytes = plan.num_kv_heads * plan.group * (lanes * (4 + 4 * plan.q_dtype.itemsize) + 2 * 4 * LANES)
    affordable = min(MOST_STATE_BYTES, plan.vmem_bytes // 4) // tile_token_bytes
    wanted = max(16, min(max(16, PREFILL_ROWS // plan.group), affordable))
    return _Tiles(1 << (wanted.bit_length() - 1), chunk_blocks)


def _vmem_limit(plan: _Plan) -> int:
    return min(MOST_VMEM_BYTES, plan.vmem_bytes * 3 // 4)


def _vmem_needed(plan: _Plan) -> int:
    """Bytes of VMEM that the kernel takes, about: buffers exactly, intermediates as four arrays of scores."""
    heads, rows, lanes = plan.num_kv_heads, plan.rows, _round_up(plan.columns, LANES)
    chunk = plan.chunk_tokens * heads * _round_up(2 * plan.head_dim, LANES) * plan.kv_dtype.itemsize
    tile = heads * rows * lanes * plan.q_dtype.itemsize
    state = heads * rows * (lanes + 2 * LANES) * 4
    needed = 2 * chunk + 4 * tile + state + 4 * rows * plan.chunk_tokens * 4
    if plan.has_scales:
        block = 2 * _round_up(heads, SUBLANES) * _round_up(plan.block_size, LANES) * 4
        needed += 2 * plan.chunk_blocks * block + 2 * _round_up(heads, SUBLANES) * plan.chunk_tokens * 4
    return needed


# --- work items ------------------------------------------------------------------------------------------------------


def _decode_items(
    plan: _Plan, order: Int[Array, " B"], num_decodes: Int[Array, ""], seq_lens: Int[Array, " B"]
) -> _Items:
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
    fields = _pack_items(plan, tile, request, active, seq_lens[request] - 1, jnp.zeros_like(tile), jnp.ones_like(tile))
    return _Items(fields, (num_decodes + plan.lanes - 1) // plan.lanes)


def _prefill_items(
    plan: _Plan,
    num_tiles: int,
    is_wanted: Bool[Array, " B"],
    seq_lens: Int[Array, " B"],
    cu_seqlens_q: Int[Array, " B+1"],
) -> _Items:
    """An item for each wanted request in each tile that has tokens of it, in order of tokens within a lane."""
    num_requests, tile_tokens, lanes = len(seq_lens), plan.tile_tokens, plan.lanes
    most_shared = min(num_requests, num_tiles * tile_tokens // 2)
    starts, ends = cu_seqlens_q[:-1], cu_seqlens_q[1:]
    counts = jnp.where(is_wanted, (ends - 1) // tile_tokens - starts // tile_tokens + 1, 0)
    item_ends = jnp.cumsum(counts)
    index = jnp.arange(num_tiles + most_shared)
    request = jnp.clip(_num_up_to(item_ends, index), 0, num_requests - 1)
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
    return _Items(_pack_items(plan, tile, request, active, seq_lens[request] - end, *bounds), jnp.max(lane_counts))


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
    first_block = first_key // plan.block_size
    num_blocks = (end_key + plan.block_size - 1) // plan.block_size - first_block
    num_chunks = jnp.where(active, (num_blocks + plan.chunk_blocks - 1) // plan.chunk_blocks, 0)
    skipped_tokens, last_tokens = jnp.zeros_like(tile), jnp.full_like(tile, plan.block_size)
    if plan.copies_parts:
        skipped_tokens = first_key % plan.block_size // PART_TOKENS * PART_TOKENS
        last_tokens = ((end_key - 1) % plan.block_size // PART_TOKENS + 1) * PART_TOKENS
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
        _Item.SKIPPED_TOKENS: skipped_tokens,
        _Item.LAST_TOKENS: last_tokens,
    }
    return jnp.stack([fields[field] for field in _Item]).astype(jnp.int32)


# --- the kernel ------------------------------------------------------------------------------------------------------


def _call(
    plan: _Plan,
    items: _Items,
    block_tables: Int[Array, "B max_blocks"],
    q: Float[Array, "tiles K rows columns"],
    kv_cache: Num[Array, "num_blocks K block_size 2*H"],
    kv_scales: Float[Array, "num_blocks 2 K block_size"] | None,
    sinks: Float[Array, "K rows"] | None,
) -> Float[Array, "tiles K rows columns"]:
    """Runs the items, one at least. A tile without items keeps whatever its memory held."""
    lane_items = items.fields.shape[1] // plan.lanes
    heads, rows, columns = plan.num_kv_heads, plan.rows, plan.columns

    def tile_of(lane: Array, step: Array, items: Any, tables: Any) -> tuple[Any, ...]:
        return items[_Item.TILE, lane * lane_items + step], 0, 0, 0

    tile_spec = pl.BlockSpec((None, heads, rows, columns), tile_of)
    in_specs = [tile_spec, pl.BlockSpec(memory_space=pl.ANY)]
    operands = [q, _in_hbm(kv_cache)]
    scratch: list[Any] = [
        pltpu.VMEM((2, plan.chunk_blocks, *kv_cache.shape[1:]), kv_cache.dtype),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.VMEM((heads, rows, 1), jnp.float32),
        pltpu.VMEM((heads, rows, 1), jnp.float32),
        pltpu.VMEM((heads, rows, columns), jnp.float32),
    ]
    if kv_scales is not None:
        in_specs.append(pl.BlockSpec(memory_space=pl.ANY))
        operands.append(_in_hbm(kv_scales.astype(jnp.float32)))
        scratch.append(pltpu.VMEM((2, plan.chunk_blocks, *kv_scales.shape[1:]), jnp.float32))
        scratch.append(pltpu.VMEM((2, heads, plan.chunk_tokens), jnp.float32))
    if sinks is not None:
        in_specs.append(pl.BlockSpec((heads, rows, 1), lambda *_: (0, 0, 0)))
        operands.append(sinks.astype(jnp.float32)[:, :, None])
    return pl.pallas_call(
        functools.partial(_kernel, plan, lane_items),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(plan.lanes, items.steps),
            in_specs=in_specs,
            out_specs=tile_spec,
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=_vmem_limit(plan),
            # They are most of the instructions that start a copy, which bound small blocks. Ids are valid by contract.
            disable_bounds_checks=True,
        ),
        name="ragged_paged_attention_decode" if plan.tile_tokens == 1 else "ragged_paged_attention_prefill",
    )(items.fields, block_tables.reshape(-1), *operands)


def _in_hbm(array: Array) -> Array:
    """Keeps XLA from bringing all of a small cache to VMEM for the sake of a call that wants little of it."""
    return pltpu.with_memory_space_constraint(array, pltpu.HBM)


def _kernel(plan: _Plan, lane_items: int, items: Any, tables: Any, *refs: Any) -> None:
    """One item: ``refs`` are inputs, output and scratch in the order of ``_call``.

    In the kernel integers are divided by ``lax.div``: none is negative, and ``//`` cannot be lowered where the chip is
    not known, as in an export.
    """
    rest: Iterator[Any] = iter(refs)
    q, kv_cache = next(rest), next(rest)
    scales = next(rest) if plan.has_scales else None
    sinks = next(rest) if plan.has_sinks else None
    out, kv_buffer, semaphores, best, total, weighted = (next(rest) for _ in range(6))
    scale_buffer, scale_rows = (next(rest) if plan.has_scales else None for _ in range(2))
    copies = _Copies(plan, items, tables, kv_cache, kv_buffer, semaphores, scales, scale_buffer)

    lane, step = pl.program_id(0), pl.program_id(1)
    is_last_step = step == pl.num_programs(1) - 1
    item = lane * lane_items + step
    tile = items[_Item.TILE, item]
    num_chunks = items[_Item.NUM_CHUNKS, item]
    following = jnp.minimum(item + 1, plan.lanes * lane_items - 1)

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
        if plan.has_scales:
            _lay_out_scales(plan, scale_buffer, scale_rows, slot, copies.num_blocks(item, chunk))
        _attend_chunk(plan, items, item, chunk, slot, q, kv_buffer, scale_rows, best, total, weighted)

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

        def whole_block(index: Array) -> None:
            self._copy(self.kv_cache.at[self.tables[first + index]], self.kv_buffer.at[slot, index], slot).start()

        def scales_of_block(index: Array) -> None:
            self._copy(self.scales.at[self.tables[first + index]], self.scale_buffer.at[slot, index], slot).start()

        begin, end = self._whole_blocks(item, chunk)
        _each_of(begin, end, whole_block)
        self._each_part(
            item, chunk, lambda index, tokens: self._part(self.tables[first + index], index, tokens, slot).start()
        )
        if self.scales is not None:
            _each_of(jnp.int32(0), self.num_blocks(item, chunk), scales_of_block)

    def wait(self, item: Array, chunk: Array, slot: Array) -> None:
        """Waiting counts bytes: one wait serves for many copies, and what they copied from does not matter."""
        begin, end = self._whole_blocks(item, chunk)

        @pl.when(begin < end)
        def _() -> None:
            blocks = self.kv_buffer.at[slot, pl.ds(0, end - begin)]
            self._copy(blocks, blocks, slot).wait()

        self._each_part(item, chunk, lambda index, tokens: self._part(0, index, tokens, slot).wait())
        if self.scales is not None:
            blocks = self.scale_buffer.at[slot, pl.ds(0, self.num_blocks(item, chunk))]
            self._copy(blocks, blocks, slot).wait()

    def num_blocks(self, item: Array, chunk: Array) -> Array:
        return jnp.minimum(self.items[_Item.NUM_BLOCKS, item] - chunk * self.plan.chunk_blocks, self.plan.chunk_blocks)

    def _whole_blocks(self, item: Array, chunk: Array) -> tuple[Any, Array]:
        """Bounds of the blocks of the chunk that are copied whole."""
        begin, end = jnp.int32(0), self.num_blocks(item, chunk)
        if not self.plan.copies_parts:
            return begin, end
        has_first, has_last = self._parts(item, chunk)
        return jnp.where(has_first, 1, begin), jnp.where(has_last, end - 1, end)

    def _parts(self, item: Array, chunk: Array) -> tuple[Array, Array]:
        """Whether of the chunk's first and last block only a part is copied."""
        is_last = chunk + 1 == self.items[_Item.NUM_CHUNKS, item]
        has_last = is_last & (self.items[_Item.LAST_TOKENS, item] < self.plan.block_size)
        return (chunk == 0) & (self.items[_Item.SKIPPED_TOKENS, item] > 0), has_last

    def _each_part(self, item: Array, chunk: Array, act: Callable[[Array, Any], None]) -> None:
        """Calls ``act`` with the index of a block and its tokens, for each block of which only a part is copied."""
        if not self.plan.copies_parts:
            return
        size = self.plan.block_size
        has_first, has_last = self._parts(item, chunk)
        last, last_tokens = self.num_blocks(item, chunk) - 1, self.items[_Item.LAST_TOKENS, item]
        if self.plan.sliding_window is None:
            is_other = has_last
        else:
            skipped = self.items[_Item.SKIPPED_TOKENS, item]
            is_other = has_last & ~(has_first & (last == 0))

            @pl.when(has_first)
            def _() -> None:
                end = jnp.where(has_last & (last == 0), last_tokens, size)
                act(jnp.int32(0), _aligned_slice(skipped, end - skipped, PART_TOKENS))

        @pl.when(is_other)
        def _() -> None:
            act(last, _aligned_slice(0, last_tokens, PART_TOKENS))

    def _part(self, block: Any, index: Array, tokens: Any, slot: Array) -> Any:
        return self._copy(self.kv_cache.at[block, :, tokens], self.kv_buffer.at[slot, index, :, tokens], slot)

    def _copy(self, source: Any, destination: Any, slot: Array) -> Any:
        return pltpu.make_async_copy(source, destination, self.semaphores.at[slot])


def _each_of(begin: Array, end: Array, body: Callable[[Array], None]) -> None:
    """A loop that takes several steps at once: starting a copy is a chain of scalar operations, which then overlap."""
    rounds = lax.div(end - begin, UNROLLED)

    def one_round(index: Array, carry: None) -> None:
        for offset in range(UNROLLED):
            body(begin + index * UNROLLED + offset)

    lax.fori_loop(0, rounds, one_round, None)
    lax.fori_loop(begin + rounds * UNROLLED, end, lambda index, _: body(index), None)


def _aligned_slice(start: Any, size: Any, multiple: int) -> Any:
    start = start if isinstance(start, int) else pl.multiple_of(start, multiple)
    return pl.ds(start, pl.multiple_of(size, multiple))


def _lay_out_scales(plan: _Plan, scale_buffer: Any, scale_rows: Any, slot: Array, num_blocks: Array) -> None:
    """Lays the scales of a chunk end to end, [2, K, chunk tokens], as far as blocks were copied."""
    size = plan.scale_blocks * plan.block_size

    def whole_lanes(index: Array, carry: None) -> None:
        for half in range(2):
            first = index * plan.scale_blocks
            blocks = [scale_buffer[slot, first + offset, half] for offset in range(plan.scale_blocks)]
            row = blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=1)
            scale_rows[half, :, pl.ds(pl.multiple_of(index * size, LANES), size)] = row

    lax.fori_loop(0, lax.div(num_blocks + plan.scale_blocks - 1, plan.scale_blocks), whole_lanes, None)


def _attend_chunk(
    plan: _Plan,
    items: Any,
    item: Array,
    chunk: Array,
    slot: Array,
    q: Any,
    kv_buffer: Any,
    scale_rows: Any,
    best: Any,
    total: Any,
    weighted: Any,
) -> None:
    """Adds the keys of a chunk to the softmax of the tile's rows."""
    first = (items[_Item.FIRST_BLOCK, item] + chunk * plan.chunk_blocks) * plan.block_size
    first_key, end_key = items[_Item.FIRST_KEY, item] - first, items[_Item.END_KEY, item] - first
    if jnp.issubdtype(plan.kv_dtype, jnp.floating):
        _clear_unseen(plan, kv_buffer, slot, first_key, end_key)

    keys = lax.broadcasted_iota(jnp.int32, (1, plan.chunk_tokens), 1)
    # Rows lie group by group: a row's token in the tile is its index modulo the tile's tokens, a power of two.
    tokens = lax.broadcasted_iota(jnp.int32, (plan.rows, 1), 0) & (plan.tile_tokens - 1)
    is_own = (tokens >= items[_Item.FIRST_TOKEN, item]) & (tokens < items[_Item.END_TOKEN, item])
    # Counted from the chunk's first key; what is no row of this request sees no key.
    newest = jnp.where(is_own, tokens + (items[_Item.POSITION, item] - first), -1)
    precision = lax.Precision.HIGHEST if plan.dtype == jnp.float32 else lax.Precision.DEFAULT

    def one_head(head: Any) -> None:
        keys_of_head = _load(plan, kv_buffer, slot, 0, head)
        values_of_head = _load(plan, kv_buffer, slot, 1, head) if plan.is_split else keys_of_head
        scores = lax.dot_general(
            q[head].astype(plan.dtype),
            keys_of_head,
            (((1,), (1,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        scores *= plan.scale
        if scale_rows is not None:
            scores *= scale_rows[0, pl.ds(head, 1), :]
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
        if scale_rows is not None:
            is_seen = (keys >= first_key) & (keys < end_key)  # a scale that nobody owns may be NaN
            weights *= jnp.where(is_seen, scale_rows[1, pl.ds(head, 1), :], 0.0)
        values = lax.dot_general(
            weights.astype(plan.dtype),
            values_of_head,
            (((1,), (0,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        weighted[head] = weighted[head] * correction + values

    _each_head(plan, one_head)


def _half(plan: _Plan, half: int) -> Any:
    """Columns of the keys (half 0) or values (half 1), or all columns if the two cannot be sliced apart."""
    return pl.ds(half * plan.head_dim, plan.head_dim) if plan.is_split else slice(None)


def _load(plan: _Plan, kv_buffer: Any, slot: Array, half: int, head: Any) -> Float[Array, "S columns"]:
    """Rows of a head in a chunk, block after block, see ``_half``."""
    blocks = kv_buffer[slot, :, head, :, _half(plan, half)]
    shape = (plan.chunk_tokens, plan.columns)
    if blocks.dtype == plan.dtype and plan.block_size % (32 // blocks.dtype.itemsize) == 0:
        return blocks.reshape(shape)
    # A block that is not whole vectors in its own type is whole vectors in float32 (8 rows), where joining is free.
    return blocks.astype(jnp.float32).reshape(shape).astype(plan.dtype)


def _clear_unseen(plan: _Plan, kv_buffer: Any, slot: Array, first_key: Array, end_key: Array) -> None:
    """Zeroes values outside ``first_key:end_key`` of the chunk, for weight zero times NaN would be NaN.

    Where keys and values are not sliced apart the keys go as well, lest the zeros that pad a query meet NaN. What lies
    inside belongs to the request, and is finite.
    """
    size, columns = plan.block_size, _half(plan, 1)

    def clear(index: Array, carry: None) -> None:
        offsets = index * size + lax.broadcasted_iota(jnp.int32, (plan.num_kv_heads, size, plan.columns), 1)
        values = kv_buffer[slot, index, :, :, columns].astype(jnp.float32)
        values = jnp.where((offsets >= first_key) & (offsets < end_key), values, 0.0)
        kv_buffer[slot, index, :, :, columns] = values.astype(kv_buffer.dtype)

    @pl.when(first_key > 0)
    def _() -> None:
        lax.fori_loop(0, jnp.minimum(lax.div(first_key + size - 1, size), plan.chunk_blocks), clear, None)

    @pl.when(end_key < plan.chunk_tokens)
    def _() -> None:
        lax.fori_loop(lax.div(end_key, size), plan.chunk_blocks, clear, None)
