"""Ragged paged attention in plain XLA operations: online softmax over chunks of blocks, for any platform.

The work is bounded by the real lengths: every loop runs as many times as the longest request at hand needs, a number
known on the device only, so a growing context never changes a compiled shape. Requests with one query (decode) are
attended several at a time; longer stretches of queries (prefill) go through tiles of one request each.

Decode copies whole blocks, keys and values at once, in pieces that fit the CPU's caches: a block is one contiguous
stretch, which compilers copy far faster than halves of its rows. Both products take the rows as they are, with zeros
against the half that is not meant. Prefill is bound by its products and gathers keys and values apart.

It owns the whole contract on every platform: it refuses no case. It must not know of any other implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels import tiles

DECODE_LANES = 2
"""Parts of a group of decode rows that are written as independent operations, which the CPU runs side by side."""
STEP_BYTES = 2 * 2**20
"""Of keys and values that a step of decode gathers for all its rows: they should stay in the CPU's inner caches."""
LONG_QUERY_TOKENS = 128
MASKED_SCORE = -1e30
LOWEST_BEST = -1e29
"""The running maximum starts above the masked score, so that a masked key weighs exp(-huge) = 0 even before any key is
seen, and neither NaN nor a second mask can arise."""

StateT = TypeVar("StateT")


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
    is_short = (query_lens > 1) & ~is_long
    tile = _prefill_tile(q, kv_cache, is_long=False)
    out = _attend_tiles(attend, tile, is_short, q, out, block_tables, seq_lens, cu_seqlens_q)
    if num_tokens >= LONG_QUERY_TOKENS:
        tile = _prefill_tile(q, kv_cache, is_long=True)
        out = _attend_tiles(attend, tile, is_long, q, out, block_tables, seq_lens, cu_seqlens_q)

    # Decode: rows with one query, several at a time, the longest first: rows of a group wait for its longest.
    decode = _decode_tile(q, kv_cache)
    rows = min(decode.rows, block_tables.shape[0])
    is_decode = query_lens == 1
    order = jnp.argsort(jnp.where(is_decode, -seq_lens, 1), stable=True)
    order = jnp.pad(order, (0, -len(order) % rows))
    num_decodes = jnp.sum(is_decode)
    decode_tables = attend.pad_tables(block_tables, decode.chunk)

    def attend_rows(group: Int[Array, ""], out: Float[Array, "T N H"]) -> Float[Array, "T N H"]:
        requests = lax.dynamic_slice_in_dim(order, group * rows, rows)
        valid = group * rows + jnp.arange(rows) < num_decodes
        tokens = jnp.where(valid, cu_seqlens_q[requests], num_tokens)
        positions = jnp.where(valid, seq_lens[requests] - 1, -1)
        lanes = DECODE_LANES if rows == decode.rows and rows % DECODE_LANES == 0 else 1
        attended = attend.decode(q.at[tokens].get(mode="clip"), decode_tables[requests], positions, decode.chunk, lanes)
        return out.at[tokens].set(attended, mode="drop")

    if rows == block_tables.shape[0]:
        return attend_rows(jnp.int32(0), out)
    return lax.fori_loop(0, (num_decodes + rows - 1) // rows, attend_rows, out)


class _DecodeTile(NamedTuple):
    """Requests attended together, and keys of a step. More rows cost less per row, fewer wait less for the longest."""

    rows: int
    chunk: int


class _PrefillTile(NamedTuple):
    """Queries attended together, all of one request, and keys of a step."""

    queries: int
    chunk: int


def _decode_tile(q: Float[Array, "T N H"], kv_cache: Num[Array, "num_blocks K block_size 2*H"]) -> _DecodeTile:
    """16 rows x 64 keys, or as much as STEP_BYTES holds: what is gathered is converted to float32 on the way."""
    num_kv_heads, block_size, row = kv_cache.shape[1:]
    rows, chunk = 16, 64
    while rows * max(chunk, block_size) * num_kv_heads * row * 4 > STEP_BYTES and rows > 4:
        rows, chunk = (rows, chunk // 2) if chunk > 32 else (rows // 2, chunk)
    return tiles.pick("ragged_paged_attention", "xla", f"decode {_case(q, kv_cache)}", _DecodeTile(rows, chunk))


def _prefill_tile(
    q: Float[Array, "T N H"], kv_cache: Num[Array, "num_blocks K block_size 2*H"], *, is_long: bool
) -> _PrefillTile:
    """For requests with fewer and with at least LONG_QUERY_TOKENS queries."""
    kind, tile = ("long", _PrefillTile(128, 256)) if is_long else ("short", _PrefillTile(16, 64))
    return tiles.pick("ragged_paged_attention", "xla", f"{kind} {_case(q, kv_cache)}", tile)


def _case(q: Float[Array, "T N H"], kv_cache: Num[Array, "num_blocks K block_size 2*H"]) -> str:
    num_kv_heads, block_size = kv_cache.shape[1:3]
    return f"K{num_kv_heads} G{q.shape[1] // num_kv_heads} H{q.shape[2]} bs{block_size} {q.dtype} {kv_cache.dtype}"


def _attend_tiles(
    attend: _Attend,
    shape: _PrefillTile,
    is_wanted: Bool[Array, " B"],
    q: Float[Array, "T N H"],
    out: Float[Array, "T N H"],
    block_tables: Int[Array, "B max_blocks"],
    seq_lens: Int[Array, " B"],
    cu_seqlens_q: Int[Array, " B+1"],
) -> Float[Array, "T N H"]:
    """``out`` with the queries of the wanted requests attended."""
    num_tokens = q.shape[0]
    tile, chunk_tokens = min(shape.queries, num_tokens), shape.chunk
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
        attended = attend.prefill(
            lax.dynamic_slice_in_dim(q, start, tile)[None],
            lax.dynamic_slice_in_dim(tables, request, 1),
            jnp.where(valid, positions, -1)[None],
            chunk_tokens,
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
    out: Float[Array, "R K QG D"]

    def add(
        self, scores: Float[Array, "R pieces K QG S"], seen: Bool[Array, "R pieces 1 QG S"]
    ) -> tuple[Float[Array, "R pieces K QG S"], Float[Array, "R K QG"], _Softmax]:
        """Weights of more keys, the factor on what was weighed before, and the softmax without the keys' values."""
        scores = jnp.where(seen, scores, MASKED_SCORE)
        best = jnp.maximum(self.best, jnp.max(scores, axis=(1, 4)))
        decay = jnp.exp(self.best - best)
        weights = jnp.exp(scores - best[:, None, :, :, None])
        return weights, decay, self._replace(best=best, total=self.total * decay + jnp.sum(weights, axis=(1, 4)))


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

    def decode(
        self,
        q: Float[Array, "R N H"],
        block_tables: Int[Array, "R padded"],
        positions: Int[Array, " R"],
        chunk_tokens: int,
        lanes: int,
    ) -> Float[Array, "R N H"]:
        """Attends a query a row at ``positions``; a position of -1 marks a row whose result is not used.

        Chunks that a row sees from end to end need no mask, which without a sliding window are all but its newest.
        """
        num_rows, num_heads, head_dim = q.shape
        num_blocks = self.blocks_per_chunk(chunk_tokens)
        chunk = num_blocks * self.block_size
        queries = self._scaled(q.reshape(num_rows, 1, self.num_kv_heads, -1, head_dim), q.dtype)
        queries = jnp.pad(queries, ((0, 0),) * 4 + ((0, head_dim),))  # zeros against the values in a cache's row
        queries = jnp.broadcast_to(queries, (num_rows, num_blocks, *queries.shape[2:]))
        tables = block_tables.reshape(num_rows, -1, num_blocks)
        newest = positions // chunk  # -1 // chunk == -1
        key_offsets = jnp.arange(chunk).reshape(num_blocks, 1, 1, self.block_size)
        lane_rows = [slice(lane * num_rows // lanes, (lane + 1) * num_rows // lanes) for lane in range(lanes)]

        def add_whole_chunk(softmaxes: list[_Softmax], index: Int[Array, ""]) -> list[_Softmax]:
            """For rows that are past their last whole chunk, the others' run on: what they read is not used."""
            ids = lax.dynamic_index_in_dim(tables, index, axis=1, keepdims=False)
            wanted = (index < newest)[:, None, None, None, None]
            return [
                self._add_rows(softmax, queries[rows], self._gather(ids[rows]), ids[rows], wanted[rows])
                for softmax, rows in zip(softmaxes, lane_rows, strict=True)
            ]

        def add_masked_chunk(softmaxes: list[_Softmax], index: Int[Array, " R"]) -> list[_Softmax]:
            """A chunk of each row, of which the row may see any part. Lanes share nothing: none waits for the other."""
            added = []
            for softmax, rows in zip(softmaxes, lane_rows, strict=True):
                own = index[rows]
                inside = jnp.clip(own, 0, tables.shape[1] - 1)[:, None, None]
                ids = jnp.take_along_axis(tables[rows], inside, axis=1, mode="promise_in_bounds")[:, 0]
                seen = self._visible(own[:, None, None, None, None] * chunk + key_offsets, positions[rows])
                # A weight of zero times NaN is NaN: what the query does not see is selected away.
                both = jnp.where(jnp.swapaxes(seen, 3, 4), self._gather(ids), 0)
                added.append(self._add_rows(softmax, queries[rows], both, ids, seen))
            return added

        first = self._before_any_key(num_rows // lanes, 1, num_heads // self.num_kv_heads, 2 * head_dim)
        softmaxes = [first] * lanes
        if self.sliding_window is None:
            softmaxes = _repeat(jnp.max(newest), add_whole_chunk, softmaxes)
            softmaxes = add_masked_chunk(softmaxes, newest)
        else:
            oldest = jnp.maximum(positions - self.sliding_window + 1, 0) // chunk
            count = jnp.max(newest - oldest) + 1
            softmaxes = _repeat(count, lambda parts, index: add_masked_chunk(parts, oldest + index), softmaxes)
        out = jnp.concatenate([self._result(softmax)[..., head_dim:] for softmax in softmaxes])
        return out.reshape(q.shape).astype(q.dtype)

    def prefill(
        self,
        q: Float[Array, "R Q N H"],
        block_tables: Int[Array, "R padded"],
        positions: Int[Array, "R Q"],
        chunk_tokens: int,
    ) -> Float[Array, "R Q N H"]:
        """Attends queries at ``positions``; a position of -1 marks a query that sees nothing and yields zeros."""
        num_rows, num_queries, num_heads, head_dim = q.shape
        dtype = q.dtype
        group = num_heads // self.num_kv_heads
        num_blocks = self.blocks_per_chunk(chunk_tokens)
        chunk = num_blocks * self.block_size
        # [R, 1, K, Q * G, H]: the queries that share a KV head are one matrix.
        q = self._scaled(q.reshape(num_rows, num_queries, self.num_kv_heads, group, head_dim), dtype)
        q = jnp.moveaxis(q, 1, 2).reshape(num_rows, 1, self.num_kv_heads, num_queries * group, head_dim)
        query_positions = jnp.repeat(positions, group, axis=1)

        def add_chunk(softmax: _Softmax, index: Int[Array, ""]) -> _Softmax:
            ids = lax.dynamic_slice_in_dim(block_tables, index * num_blocks, num_blocks, axis=1)
            seen = self._visible((index * chunk + jnp.arange(chunk))[None, None, None, None], query_positions)
            return self._add_halves(softmax, q, ids, seen)

        end = jnp.max(positions) // chunk + 1  # -1 // chunk + 1 == 0: nothing to do
        start = jnp.int32(0)
        if self.sliding_window is not None:
            oldest = jnp.min(jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, positions))
            start = jnp.minimum(jnp.maximum(oldest - self.sliding_window + 1, 0) // chunk, end).astype(jnp.int32)
        first = self._before_any_key(num_rows, num_queries, group, head_dim)
        softmax = _repeat(end - start, lambda softmax, index: add_chunk(softmax, start + index), first)
        out = self._result(softmax).reshape(num_rows, self.num_kv_heads, num_queries, group, head_dim)
        return jnp.moveaxis(out, 2, 1).reshape(num_rows, num_queries, num_heads, head_dim).astype(dtype)

    def _scaled(self, q: Float[Array, "*shape H"], dtype: Any) -> Float[Array, "*shape H"]:
        """Queries as operands: products with quantised keys are those of what is stored, exact in any type of query."""
        dot_dtype = dtype if self.kv_cache.dtype.itemsize == 1 else self.kv_cache.dtype
        return (q.astype(jnp.float32) * self.scale).astype(dot_dtype)

    def _visible(
        self, keys: Int[Array, "R pieces 1 1 S"], queries: Int[Array, "R ..."]
    ) -> Bool[Array, "R pieces 1 QG S"]:
        """Which of the keys at some positions each query sees."""
        queries = queries.reshape(len(queries), 1, 1, -1, 1)
        seen = keys <= queries
        return seen if self.sliding_window is None else seen & (keys > queries - self.sliding_window)

    def _before_any_key(self, num_rows: int, num_queries: int, group: int, width: int) -> _Softmax:
        """The softmax over no key: over the sinks alone, where there are any, whose values are zero."""
        shape = (num_rows, self.num_kv_heads, num_queries * group)
        out = jnp.zeros((*shape, width))
        if self.sinks is None:
            return _Softmax(jnp.full(shape, LOWEST_BEST), jnp.zeros(shape), out)
        sinks = jnp.tile(self.sinks.astype(jnp.float32).reshape(self.num_kv_heads, group), (1, num_queries))
        best = jnp.broadcast_to(jnp.maximum(sinks, LOWEST_BEST), shape)
        return _Softmax(best, jnp.exp(sinks - best), out)

    def _add_rows(
        self,
        softmax: _Softmax,
        q: Float[Array, "R pieces K G 2*H"],
        both: Num[Array, "R pieces K S 2*H"],
        ids: Int[Array, "R pieces"],
        seen: Bool[Array, "R pieces 1 1 S"],
    ) -> _Softmax:
        """Takes whole rows of the cache into the running softmax; the keys' half of its output means nothing.

        ``both`` is free of NaN where a row sees some of it.
        """
        scores = self._scores(q, both, None if self.kv_scales is None else self._gather_scales(ids, 0))
        weights, decay, softmax = softmax.add(scores, seen)
        if self.kv_scales is not None:
            weights = weights * jnp.where(seen, self._gather_scales(ids, 1), 0.0)
        update = _dot(weights, both.astype(jnp.float32), 3, q.dtype).sum(axis=1)
        update = jnp.where(jnp.any(seen, axis=(1, 4))[..., None], update, 0.0)
        return softmax._replace(out=softmax.out * decay[..., None] + update)

    def _add_halves(
        self,
        softmax: _Softmax,
        q: Float[Array, "R 1 K QG H"],
        ids: Int[Array, "R blocks"],
        seen: Bool[Array, "R 1 1 QG S"],
    ) -> _Softmax:
        """Takes the keys and values of some blocks, laid end to end, into the running softmax."""
        # The barrier keeps the gathers whole copies, which read far faster than gathers fused into dot operands.
        keys, values = lax.optimization_barrier((self._gather(ids, 0), self._gather(ids, 1)))
        scales: list[Array | None] = [None, None]
        if self.kv_scales is not None:
            # As columns they join like keys of one element.
            columns = [jnp.swapaxes(self._gather_scales(ids, half), 3, 4) for half in (0, 1)]
            scales = [jnp.swapaxes(self._join(column), 3, 4) for column in columns]
        weights, decay, softmax = softmax.add(self._scores(q, self._join(keys), scales[0]), seen)
        # A weight of zero times NaN is NaN: values that no query of the row sees are selected away.
        any_seen = jnp.any(seen, axis=3, keepdims=True)
        values = jnp.where(jnp.swapaxes(any_seen, 3, 4), self._join(values), 0).astype(jnp.float32)
        if scales[1] is not None:
            weights = weights * jnp.where(any_seen, scales[1], 0.0)
        update = _dot(weights, values, 3, q.dtype).sum(axis=1)
        return softmax._replace(out=softmax.out * decay[..., None] + update)

    def _scores(
        self, q: Float[Array, "R pieces K QG D"], keys: Num[Array, "R pieces K S D"], scales: Array | None
    ) -> Float[Array, "R pieces K QG S"]:
        scores = _dot(q, keys.astype(q.dtype), 4, q.dtype)
        if scales is not None:
            scores = scores * scales
        return scores if self.soft_cap is None else self.soft_cap * jnp.tanh(scores / self.soft_cap)

    def _result(self, softmax: _Softmax) -> Float[Array, "R K QG D"]:
        out = softmax.out / jnp.where(softmax.total > 0, softmax.total, 1.0)[..., None]
        return out if self.out_scale is None else out * self.out_scale

    def _gather(self, ids: Int[Array, "R blocks"], half: int | None = None) -> Num[Array, "R blocks K block_size D"]:
        """Some blocks: keys (half 0) or values (half 1), without touching the others, or whole rows."""
        # Where XLA widens a small type before it gathers, it must do so for these blocks alone: tied to the ids, the
        # cache does not look like a constant of the loop, whose conversion could be done once and for all blocks.
        cache, ids = lax.optimization_barrier((self.kv_cache, ids))
        if half is None:
            blocks = cache.reshape(len(cache), -1).at[ids].get(mode="promise_in_bounds")
            return blocks.reshape(*ids.shape, *cache.shape[1:])
        return lax.gather(
            cache,
            jnp.stack([ids, jnp.full_like(ids, half * self.head_dim)], axis=-1),
            lax.GatherDimensionNumbers(offset_dims=(2, 3, 4), collapsed_slice_dims=(0,), start_index_map=(0, 3)),
            slice_sizes=(1, self.num_kv_heads, self.block_size, self.head_dim),
            mode="promise_in_bounds",
        )

    def _gather_scales(self, ids: Int[Array, "R blocks"], half: int) -> Float[Array, "R blocks K 1 block_size"]:
        assert self.kv_scales is not None
        return self.kv_scales.at[ids, half].get(mode="promise_in_bounds").astype(jnp.float32)[:, :, :, None]

    def _join(self, blocks: Num[Array, "R blocks K block_size D"]) -> Num[Array, "R 1 K S D"]:
        """Lays the blocks of a chunk end to end, a copy that pays for itself with many queries."""
        return jnp.moveaxis(blocks, 2, 1).reshape(len(blocks), 1, self.num_kv_heads, -1, blocks.shape[4])


def _repeat(count: Int[Array, ""], body: Callable[[StateT, Int[Array, ""]], StateT], state: StateT) -> StateT:
    return lax.fori_loop(0, count, lambda index, current: body(current, index), state)


def _dot(
    a: Float[Array, "R pieces K M D"], b: Float[Array, "R pieces K *rest"], contracted: int, dtype: Any
) -> Float[Array, "R pieces K M D2"]:
    """Products of the matrices of ``a`` with those of ``b``, contracting an axis of ``b``, in float32.

    Accelerators round float32 operands unless told not to, which they may where the queries are of ``dtype`` bfloat16.
    """
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((4,), (contracted,)), ((0, 1, 2), (0, 1, 2)))

    def native(a: Array, b: Array) -> Array:
        return lax.dot_general(a, b, dimensions, precision, preferred_element_type=jnp.float32)

    if a.dtype == b.dtype == jnp.float32:
        return native(a, b)
    # CPUs have no fast products of small types.
    widened = lambda a, b: native(a.astype(jnp.float32), b.astype(jnp.float32))  # noqa: E731
    return lax.platform_dependent(a, b, cpu=widened, default=native)
