"""Ragged paged attention in plain XLA operations: online softmax over chunks of blocks, for any platform.

The work is bounded by the real lengths: every loop runs as many times as the longest request at hand needs, a number
known on the device only, so a growing context never changes a compiled shape. Requests with one query (decode) are
attended several at a time; longer stretches of queries (prefill) go through tiles of one request each.

It owns the whole contract on every platform: it refuses no case. It must not know of any other implementation.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num

DECODE_ROWS = 16
"""Decode requests attended together. More rows cost less per row, fewer rows wait less for the longest of them."""
DECODE_LANES = 2
"""Parts of a full group of decode rows that are written as independent operations, which the CPU runs side by side."""
DECODE_CHUNK_TOKENS = 64
LONG_QUERY_TOKENS = 128
SHORT_TILE = (16, 64)
LONG_TILE = (128, 256)
"""Queries in a tile and keys in a chunk, for requests with fewer and with at least LONG_QUERY_TOKENS queries."""
MASKED_SCORE = -1e30
LOWEST_BEST = -1e29
"""The running maximum starts above the masked score, so that a masked key weighs exp(-huge) = 0 even before any key is
seen, and neither NaN nor a second mask can arise."""


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
    """See ``pallas_kernels.ragged_paged_attention``."""
    num_tokens = q.shape[0]
    query_lens = jnp.diff(cu_seqlens_q)
    # A static scale of the keys is one of the scores; one of the values is one of the result.
    attend = _Attend(
        kv_cache,
        kv_scales,
        sinks,
        scale=scale if k_scale is None else scale * k_scale,
        out_scale=v_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )

    out = jnp.zeros_like(q)
    # Prefill: tiles of queries of one request. Short stretches take small tiles, which waste little; long ones take
    # large tiles, which read the keys less often.
    is_long = query_lens >= LONG_QUERY_TOKENS
    out = _attend_tiles(attend, SHORT_TILE, (query_lens > 1) & ~is_long, q, out, block_tables, seq_lens, cu_seqlens_q)
    if num_tokens >= LONG_QUERY_TOKENS:
        out = _attend_tiles(attend, LONG_TILE, is_long, q, out, block_tables, seq_lens, cu_seqlens_q)

    # Decode: the rows with one query, DECODE_ROWS at a time, the longest first: rows of a group wait for its longest.
    rows = min(DECODE_ROWS, block_tables.shape[0])
    is_decode = query_lens == 1
    order = jnp.argsort(jnp.where(is_decode, -seq_lens, 1), stable=True)
    order = jnp.pad(order, (0, -len(order) % rows))
    num_decodes = jnp.sum(is_decode)
    decode_tables = attend.pad_tables(block_tables, DECODE_CHUNK_TOKENS)

    def attend_rows(group: Int[Array, ""], out: Float[Array, "T N H"]) -> Float[Array, "T N H"]:
        requests = lax.dynamic_slice_in_dim(order, group * rows, rows)
        valid = group * rows + jnp.arange(rows) < num_decodes
        tokens = jnp.where(valid, cu_seqlens_q[requests], num_tokens)
        positions = jnp.where(valid, seq_lens[requests] - 1, -1)[:, None]
        attended = attend(
            q.at[tokens].get(mode="clip")[:, None], decode_tables[requests], positions, DECODE_CHUNK_TOKENS
        )
        return out.at[tokens].set(attended[:, 0], mode="drop")

    if rows == block_tables.shape[0]:
        return attend_rows(jnp.int32(0), out)
    return lax.fori_loop(0, (num_decodes + rows - 1) // rows, attend_rows, out)


def _attend_tiles(
    attend: _Attend,
    shape: tuple[int, int],
    is_wanted: Bool[Array, " B"],
    q: Float[Array, "T N H"],
    out: Float[Array, "T N H"],
    block_tables: Int[Array, "B max_blocks"],
    seq_lens: Int[Array, " B"],
    cu_seqlens_q: Int[Array, " B+1"],
) -> Float[Array, "T N H"]:
    """``out`` with the queries of the wanted requests attended; ``shape`` is queries a tile, keys a chunk."""
    num_tokens = q.shape[0]
    tile, chunk_tokens = min(shape[0], num_tokens), shape[1]
    tiles_of_request = jnp.where(is_wanted, (jnp.diff(cu_seqlens_q) + tile - 1) // tile, 0)
    tile_ends = jnp.cumsum(tiles_of_request)
    tables = attend.pad_tables(block_tables, chunk_tokens)

    def attend_tile(index: Int[Array, ""], out: Float[Array, "T N H"]) -> Float[Array, "T N H"]:
        request = jnp.searchsorted(tile_ends, index, side="right")
        first = cu_seqlens_q[request] + (index - tile_ends[request] + tiles_of_request[request]) * tile
        # A tile at the end of the batch is moved left to stay inside it; it then starts with queries done before.
        start = jnp.minimum(first, num_tokens - tile)
        tokens = start + jnp.arange(tile)
        positions = seq_lens[request] - cu_seqlens_q[request + 1] + tokens
        valid = (tokens >= first) & (tokens < cu_seqlens_q[request + 1])
        attended = attend(
            lax.dynamic_slice_in_dim(q, start, tile)[None],
            lax.dynamic_slice_in_dim(tables, request, 1),
            jnp.where(valid, positions, -1)[None],
            chunk_tokens,
            join_blocks=True,
        )[0]
        # Queries of other requests in the tile must keep what they have.
        kept = lax.dynamic_slice_in_dim(out, start, tile)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(valid[:, None, None], attended, kept), start, 0)

    return lax.fori_loop(0, tile_ends[-1], attend_tile, out)


class _Softmax(NamedTuple):
    """A softmax over part of the keys: largest score so far, sum of weights, weighted sum of values (Milakov and
    Gimelshein, 2018)."""

    best: Float[Array, "R K QG"]
    total: Float[Array, "R K QG"]
    out: Float[Array, "R K QG H"]


class _Attend:
    """Attention of R equally long stretches of queries, each over its own block table."""

    def __init__(
        self,
        kv_cache: Num[Array, "num_blocks K block_size 2*H"],
        kv_scales: Float[Array, "num_blocks 2 K block_size"] | None,
        sinks: Float[Array, " N"] | None,
        *,
        scale: float,
        out_scale: float | None,
        sliding_window: int | None,
        soft_cap: float | None,
    ) -> None:
        self.num_kv_heads, self.block_size = kv_cache.shape[1:3]
        self.head_dim = kv_cache.shape[3] // 2
        self.kv_cache = kv_cache
        self.kv_scales = kv_scales
        self.sinks = sinks
        self.scale = scale
        self.out_scale = out_scale
        self.sliding_window = sliding_window
        self.soft_cap = soft_cap

    def blocks_per_chunk(self, chunk_tokens: int) -> int:
        return max(1, chunk_tokens // self.block_size)

    def pad_tables(self, block_tables: Int[Array, "B max_blocks"], chunk_tokens: int) -> Int[Array, "B padded"]:
        """Tables whose width is a whole number of chunks, so that slicing the last chunk cannot shift."""
        return jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % self.blocks_per_chunk(chunk_tokens))))

    def __call__(
        self,
        q: Float[Array, "R Q N H"],
        block_tables: Int[Array, "R padded"],
        positions: Int[Array, "R Q"],
        chunk_tokens: int,
        join_blocks: bool = False,
    ) -> Float[Array, "R Q N H"]:
        """Attends queries at ``positions``; a position of -1 marks a query that sees nothing and yields zeros.

        ``join_blocks`` lays the blocks of a chunk end to end before the dot products: a copy that pays for itself with
        many queries; with one query a dot product per block is faster.
        """
        num_rows, num_queries, num_heads, head_dim = q.shape
        dtype = q.dtype
        group = num_heads // self.num_kv_heads
        num_blocks = self.blocks_per_chunk(chunk_tokens)
        chunk = num_blocks * self.block_size
        # [R, K, Q * G, H]: the queries that share a KV head are one matrix.
        q = q.reshape(num_rows, num_queries, self.num_kv_heads, group, head_dim).astype(jnp.float32) * self.scale
        q = jnp.moveaxis(q, 1, 2).reshape(num_rows, self.num_kv_heads, num_queries * group, head_dim)
        pieces = 1 if join_blocks else num_blocks
        # The dot products of quantised keys are those of what is stored, exact in any type of query.
        dot_dtype = dtype if self.kv_cache.dtype.itemsize == 1 else self.kv_cache.dtype
        q = jnp.broadcast_to(q[:, None], (num_rows, pieces, *q.shape[1:])).astype(dot_dtype)
        query_positions = jnp.repeat(positions, group, axis=1)[:, None, None, :, None]  # [R, 1, 1, Q * G, 1]

        def visible(first: Int[Array, ""]) -> Bool[Array, "R pieces 1 QG S"]:
            keys = first + jnp.arange(chunk).reshape(pieces, 1, 1, chunk // pieces)
            mask = keys <= query_positions
            return mask if self.sliding_window is None else mask & (keys > query_positions - self.sliding_window)

        lanes = DECODE_LANES if not join_blocks and num_rows >= DECODE_ROWS else 1
        lane_rows = [slice(lane * num_rows // lanes, (lane + 1) * num_rows // lanes) for lane in range(lanes)]

        def one_chunk(state: tuple[Array, list[_Softmax]]) -> tuple[Array, list[_Softmax]]:
            index, softmaxes = state
            ids = lax.dynamic_slice_in_dim(block_tables, index * num_blocks, num_blocks, axis=1)
            mask = visible(index * chunk)
            return index + 1, [
                self._add_chunk(softmax, q[rows], ids[rows], mask[rows], join_blocks)
                for softmax, rows in zip(softmaxes, lane_rows, strict=True)
            ]

        end = jnp.max(positions) // chunk + 1  # -1 // chunk + 1 == 0: nothing to do
        start = jnp.int32(0)
        if self.sliding_window is not None:
            oldest = jnp.min(jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, positions))
            start = jnp.minimum(jnp.maximum(oldest - self.sliding_window + 1, 0) // chunk, end).astype(jnp.int32)
        first = self._before_any_key(num_rows // lanes, num_queries, group)
        _, softmaxes = lax.while_loop(lambda state: state[0] < end, one_chunk, (start, [first] * lanes))
        out = jnp.concatenate(
            [softmax.out / jnp.where(softmax.total > 0, softmax.total, 1.0)[..., None] for softmax in softmaxes]
        )
        if self.out_scale is not None:
            out = out * self.out_scale
        out = out.reshape(num_rows, self.num_kv_heads, num_queries, group, head_dim)
        return jnp.moveaxis(out, 2, 1).reshape(num_rows, num_queries, num_heads, head_dim).astype(dtype)

    def _before_any_key(self, num_rows: int, num_queries: int, group: int) -> _Softmax:
        """The softmax over no key: over the sinks alone, where there are any, whose values are zero."""
        shape = (num_rows, self.num_kv_heads, num_queries * group)
        out = jnp.zeros((*shape, self.head_dim))
        if self.sinks is None:
            return _Softmax(jnp.full(shape, LOWEST_BEST), jnp.zeros(shape), out)
        sinks = jnp.tile(self.sinks.astype(jnp.float32).reshape(self.num_kv_heads, group), (1, num_queries))
        best = jnp.broadcast_to(jnp.maximum(sinks, LOWEST_BEST), shape)
        return _Softmax(best, jnp.exp(sinks - best), out)

    def _add_chunk(
        self,
        softmax: _Softmax,
        q: Float[Array, "R pieces K QG H"],
        ids: Int[Array, "R blocks"],
        mask: Bool[Array, "R pieces 1 QG S"],
        join_blocks: bool,
    ) -> _Softmax:
        """Takes the keys and values of some blocks into the running softmax."""
        # The barrier keeps the gathers whole copies, which read far faster than gathers fused into dot operands.
        keys, values = lax.optimization_barrier((self._gather(ids, 0), self._gather(ids, 1)))
        if join_blocks:
            keys, values = self._join(keys), self._join(values)
        if keys.dtype != q.dtype:
            keys = keys.astype(q.dtype)
        # Accelerators round float32 operands unless told not to; the weights may be rounded where the keys are.
        precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else lax.Precision.DEFAULT
        scores = lax.dot_general(
            q, keys, (((4,), (4,)), ((0, 1, 2), (0, 1, 2))), precision, preferred_element_type=jnp.float32
        )
        if self.kv_scales is not None:
            scores = scores * self._gather_scales(ids, 0, join_blocks)
        if self.soft_cap is not None:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        scores = jnp.where(mask, scores, MASKED_SCORE)
        best = jnp.maximum(softmax.best, jnp.max(scores, axis=(1, 4)))
        decay = jnp.exp(softmax.best - best)
        weights = jnp.exp(scores - best[:, None, :, :, None])
        # A weight of zero times NaN is NaN: values that no query of the row sees are selected away.
        seen = jnp.swapaxes(jnp.any(mask, axis=3, keepdims=True), 3, 4)
        values = jnp.where(seen, values, 0).astype(jnp.float32)
        total = softmax.total * decay + jnp.sum(weights, axis=(1, 4))
        if self.kv_scales is not None:
            scales = self._gather_scales(ids, 1, join_blocks)
            weights = weights * jnp.where(jnp.swapaxes(seen, 3, 4), scales, 0.0)
        update = lax.dot_general(weights, values, (((4,), (3,)), ((0, 1, 2), (0, 1, 2))), precision).sum(axis=1)
        return _Softmax(best, total, softmax.out * decay[..., None] + update)

    def _gather(self, ids: Int[Array, "R blocks"], half: int) -> Float[Array, "R blocks K block_size H"]:
        """Keys (half 0) or values (half 1) of some blocks; the other half is not touched."""
        return lax.gather(
            self.kv_cache,
            jnp.stack([ids, jnp.full_like(ids, half * self.head_dim)], axis=-1),
            lax.GatherDimensionNumbers(offset_dims=(2, 3, 4), collapsed_slice_dims=(0,), start_index_map=(0, 3)),
            slice_sizes=(1, self.num_kv_heads, self.block_size, self.head_dim),
            mode="promise_in_bounds",
        )

    def _gather_scales(
        self, ids: Int[Array, "R blocks"], half: int, join_blocks: bool
    ) -> Float[Array, "R pieces K 1 S"]:
        assert self.kv_scales is not None
        scales = self.kv_scales.at[ids, half].get(mode="promise_in_bounds").astype(jnp.float32)
        if join_blocks:
            scales = jnp.moveaxis(scales, 2, 1).reshape(len(ids), 1, self.num_kv_heads, -1)
        return scales[:, :, :, None]

    def _join(self, blocks: Float[Array, "R blocks K block_size H"]) -> Float[Array, "R 1 K S H"]:
        return jnp.moveaxis(blocks, 2, 1).reshape(len(blocks), 1, self.num_kv_heads, -1, self.head_dim)
