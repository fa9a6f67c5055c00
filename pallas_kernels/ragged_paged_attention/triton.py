"""Ragged paged attention for NVIDIA GPUs (sm80, sm89, sm90) in Pallas-Triton: the kernels, their tiles and launches.

It must not know models, engines or which implementation is preferred where; it only refuses what it cannot do.

Three launches write one output that starts as zeros, each leaving the rows of the others alone (aliased, no copies):

1. ``_tile_kernel``, grid (KV heads, tiles): requests with many queries, in tiles of ``long.queries`` tokens of one
   request. The causal and the window limit bound the chunks of keys a tile walks.
2. ``_split_kernel``, grid (KV heads, splits, requests): requests whose queries fit one tile of ``short.queries``
   tokens, that is decode rows and short speculative drafts. Flash decoding (Dao et al., 2023): every program walks its
   share of the chunks of keys and leaves a partial softmax in float32. The number of splits is static per shape; a
   split beyond the real length does nothing.
3. ``_merge_kernel``, grid (KV heads x rows of a tile, requests): one program a row joins the live splits, adds the sink
   and writes the result at the row's token.

In 1 and 2 the query heads of one KV head are stacked with the queries as rows of the tensor-core products (row r is
query ``r // heads``, head ``r % heads``), so that K and V of a slot are read once per tile for the whole group. Keys
are found by vector indexing: a chunk is a range of positions, its block ids are gathered from the block table, and the
loads of K and V go straight to ``kv_cache[block, which, kv_head, offset]``, one chunk ahead of the products (Triton's
pipelining turns them into asynchronous copies). Loads are masked to the slots that some row of the tile may see:
neither the tail of a last block nor a block outside the window is read, so NaN there is harmless. Triton wants powers
of two: groups and head_dim are padded in the tile only, by masked lanes that move no bytes.

Bytes of a decode row: ``2 * num_kv_heads * head_dim * itemsize * visible keys``, plus its scales (8 bytes a slot and KV
head, dynamic quantisation only), the block table once per KV head (cached), and ``8 * splits * num_heads * head_dim``
for the float32 partials written and read: 3% of bfloat16 keys for a group of 4 at ``MIN_SPLIT_TOKENS`` a split, less
with longer splits. Decode is bound by memory bandwidth, the tiles of long requests by the tensor cores.

Quantised keys are converted to the dtype of the products (exact) and their scales multiply scores and weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

TARGET_PROGRAMS = 512
"""Programs a decode launch should have to fill a large GPU (132 SMs, several programs each)."""
MIN_SPLIT_TOKENS = 256
"""Keys below which another split costs more in partials than it wins in parallelism."""
MAX_SPLIT_TOKENS = 4096
"""Keys a split should not exceed at full length, so that one long row does not outlast a batch of short ones."""
MAX_PARTIAL_ELEMENTS = 8192
"""Elements of the partials of one row that the merge holds in registers at once."""
MAX_PARTIALS_BYTES = 128 * 2**20
"""Memory for the partials of all requests, most of which is for splits that short rows do not fill."""
MIN_ROWS = 16
"""Rows of the smallest tensor-core product."""
MASKED_SCORE = -1e30
LOWEST_BEST = -1e29
"""The running maximum starts above the masked score, so that a masked key weighs exp2(-huge) = 0 even before any key is
seen, and neither NaN nor a second mask can arise."""
LOG2_E = math.log2(math.e)
"""Scores are kept times this, for exp2 is what the hardware has."""
FP8_CAPABILITY = 8.9
"""GPUs from here on convert float8_e4m3fn; for others compilers abort, so that it is decoded by bit operations."""
KV_DTYPES = ("bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")


def ragged_paged_attention(
    q: Float[Array, "T N H"],
    kv_cache: Array,
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
    interpret: bool = False,
) -> Float[Array, "T N H"]:
    """See ``pallas_kernels.ragged_paged_attention``; ``interpret`` runs the kernels in XLA on any platform.

    Raises:
        NotImplementedError: for dtypes, head sizes and cache sizes that the Triton backend cannot take.
    """
    _refuse_unsupported(q, kv_cache, block_tables)
    capability = None if interpret else _compute_capability()
    num_tokens, num_heads, head_dim = q.shape
    num_requests = block_tables.shape[0]
    static = _Static(
        group=num_heads // kv_cache.shape[2],
        block_size=kv_cache.shape[3],
        head_dim=head_dim,
        score_factor=scale * (1.0 if k_scale is None else k_scale),
        value_factor=1.0 if v_scale is None else v_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        product_dtype=_product_dtype(q.dtype, kv_cache.dtype),
        kv_dtype=kv_cache.dtype,
        decodes_fp8=kv_cache.dtype == jnp.float8_e4m3fn and (capability or 0.0) < FP8_CAPABILITY,
    )
    operands = {"q": q, "kv": kv_cache, "tables": block_tables, "seq_lens": seq_lens, "starts": cu_seqlens_q}
    if kv_scales is not None:
        operands["scales"] = kv_scales
    if sinks is not None:
        operands["sinks"] = sinks.astype(jnp.float32)
    short, long = _short_tile(static), _long_tile(static)
    out = jnp.zeros_like(q)

    # Tiles of long requests. A long request has more queries than fit a short tile, so there cannot be many.
    max_long = min(num_requests, num_tokens // (short.queries + 1))
    if max_long:
        max_tiles = max_long + num_tokens // long.queries
        requests, firsts = _long_tiles(cu_seqlens_q, short.queries, long.queries, max_tiles)
        out = _launch(
            functools.partial(_tile_kernel, static, long, short.queries),
            (kv_cache.shape[2] * long.head_tiles, max_tiles),
            {**operands, "tile_requests": requests, "tile_firsts": firsts},
            {"out": out},
            long,
            interpret,
        )["out"]

    # Short requests: partial softmaxes, then their merge.
    splits = _num_splits(static, short, kv_cache.shape[2], block_tables.shape)
    lead = (num_requests, kv_cache.shape[2] * short.head_tiles, splits, short.rows)
    partials = _launch(
        functools.partial(_split_kernel, static, short, splits),
        (lead[1], splits, num_requests),
        operands,
        {
            "acc": jax.ShapeDtypeStruct((*lead, static.padded_dim), jnp.float32),
            "best": jax.ShapeDtypeStruct(lead, jnp.float32),
            "total": jax.ShapeDtypeStruct(lead, jnp.float32),
        },
        short,
        interpret,
    )
    del operands["q"], operands["kv"], operands["tables"]
    operands.pop("scales", None)
    return _launch(
        functools.partial(_merge_kernel, static, short, splits),
        (lead[1] * short.rows, num_requests),
        {**operands, **partials},
        {"out": out},
        short._replace(num_warps=4, num_stages=1),
        interpret,
    )["out"]


class _Static(NamedTuple):
    """What the kernels know at compile time about the call."""

    group: int
    block_size: int
    head_dim: int
    score_factor: float
    value_factor: float
    sliding_window: int | None
    soft_cap: float | None
    product_dtype: Any
    kv_dtype: Any
    decodes_fp8: bool

    @property
    def padded_dim(self) -> int:
        return max(16, pl.next_power_of_2(self.head_dim))

    def oldest_visible(self, position: Int[Array, ""]) -> Int[Array, ""]:
        """Position of the first key that a query at ``position`` sees."""
        if self.sliding_window is None:
            return jnp.zeros_like(position)
        return jnp.maximum(position - (self.sliding_window - 1), 0)


class _Tile(NamedTuple):
    """The work of one program.

    Attributes:
        heads: query heads of the group in a tile, a power of two.
        queries: query tokens in a tile.
        head_tiles: tiles that cover a group.
        chunk: keys of one step of the loop.
    """

    heads: int
    queries: int
    head_tiles: int
    chunk: int
    num_warps: int
    num_stages: int

    @property
    def rows(self) -> int:
        return self.heads * self.queries


def _make_tile(static: _Static, rows: int, chunk: int, num_warps: int, num_stages: int) -> _Tile:
    heads = min(pl.next_power_of_2(static.group), rows)
    return _Tile(heads, rows // heads, pl.cdiv(static.group, heads), chunk, num_warps, num_stages)


def _short_tile(static: _Static) -> _Tile:
    """As few rows as hold the group; a chunk of 16 KiB of keys, so that several programs share an SM.

    Three stages load block ids one chunk ahead of the keys, and those one chunk ahead of their use.
    """
    rows = min(64, max(MIN_ROWS, pl.next_power_of_2(static.group)))
    elements = 8192 if static.product_dtype.itemsize == 2 else 4096
    chunk = min(128, max(16, elements // static.padded_dim))
    # The hardware's conversion of float8_e4m3fn needs more registers than four warps have: they would spill.
    converts = static.kv_dtype == jnp.float8_e4m3fn and not static.decodes_fp8
    return _make_tile(static, rows, chunk, num_warps=8 if converts else 4, num_stages=3)


def _long_tile(static: _Static) -> _Tile:
    """As many rows as the accumulator and the keys leave room for in registers."""
    wide = static.padded_dim > 128
    if static.product_dtype.itemsize == 4:
        rows, chunk = (32, 32) if static.padded_dim <= 64 else (16, 4096 // static.padded_dim)
        return _make_tile(static, rows, chunk, num_warps=4, num_stages=2)
    if static.decodes_fp8:
        return _make_tile(static, 64, 16 if wide else 32, num_warps=8, num_stages=2)
    rows, chunk = (64, 32) if wide else (128, 64)
    return _make_tile(static, rows, chunk, num_warps=8 if static.padded_dim > 64 else 4, num_stages=2)


def _num_splits(static: _Static, tile: _Tile, num_kv_heads: int, table_shape: tuple[int, ...]) -> int:
    """Splits of a short request's keys: enough programs for the GPU, none too long, none too short; a power of two."""
    num_requests, max_blocks = table_shape
    max_keys = max_blocks * static.block_size
    if static.sliding_window is not None:
        max_keys = min(max_keys, static.sliding_window + tile.queries + tile.chunk)
    wanted = max(TARGET_PROGRAMS // (num_requests * num_kv_heads * tile.head_tiles), max_keys // MAX_SPLIT_TOKENS)
    split_bytes = 4 * num_requests * num_kv_heads * tile.head_tiles * tile.rows * static.padded_dim
    most = min(
        max_keys // MIN_SPLIT_TOKENS, MAX_PARTIAL_ELEMENTS // static.padded_dim, MAX_PARTIALS_BYTES // split_bytes
    )
    return 1 << max(1, min(wanted, most)).bit_length() - 1


def _refuse_unsupported(q: Array, kv_cache: Array, block_tables: Array) -> None:
    if q.dtype.name not in ("bfloat16", "float32"):
        raise NotImplementedError(f"queries of dtype {q.dtype.name}")
    if kv_cache.dtype.name not in KV_DTYPES:
        raise NotImplementedError(f"a KV cache of dtype {kv_cache.dtype.name}")
    if q.shape[2] > 256:
        raise NotImplementedError(f"head_dim {q.shape[2]}: a tile of more than 256 columns does not fit the registers")
    if kv_cache.dtype.itemsize == 1 and 2**31 < kv_cache.size <= 2**32:
        # Pallas addresses arrays up to 4 GiB by signed 32-bit element offsets.
        raise NotImplementedError(f"a one-byte KV cache of {kv_cache.size} elements, between 2^31 and 2^32")
    if block_tables.shape[0] > 65535:
        raise NotImplementedError(f"{block_tables.shape[0]} requests: a CUDA grid has at most 65535")


def _product_dtype(q_dtype: Any, kv_dtype: Any) -> Any:
    """The dtype of the matrix products: one that holds queries and keys without loss."""
    if kv_dtype.itemsize == 1:
        return jnp.dtype(q_dtype)
    return jnp.promote_types(q_dtype, kv_dtype)


def _compute_capability() -> float | None:
    """The lowest of the GPUs here; None without one (as when compiling for one elsewhere) or if it is no NVIDIA's."""
    try:
        return min(float(device.compute_capability) for device in jax.local_devices(backend="gpu"))
    except (RuntimeError, ValueError, AttributeError):
        return None


def _long_tiles(
    starts: Int[Array, " B+1"], short_queries: int, tile_queries: int, max_tiles: int
) -> tuple[Int[Array, " tiles"], Int[Array, " tiles"]]:
    """The request of each tile and its first query in that request; unused tiles start past the last query."""
    query_lens = jnp.diff(starts)
    tiles_of_request = jnp.where(query_lens > short_queries, (query_lens + tile_queries - 1) // tile_queries, 0)
    ends = jnp.cumsum(tiles_of_request)
    tiles = jnp.arange(max_tiles, dtype=ends.dtype)
    # All pairs are compared: a binary search would be a loop, which XLA on GPUs drives from the host.
    requests = jnp.minimum(jnp.sum(ends[None, :] <= tiles[:, None], axis=1), starts.shape[0] - 2)
    firsts = (tiles - ends[requests] + tiles_of_request[requests]) * tile_queries
    unused = jnp.iinfo(jnp.int32).max // 2
    return requests.astype(jnp.int32), jnp.where(tiles < ends[-1], firsts, unused).astype(jnp.int32)


def _launch(
    kernel: Callable[[dict[str, Any], dict[str, Any]], None],
    grid: tuple[int, ...],
    inputs: dict[str, Array],
    outputs: dict[str, Any],
    tile: _Tile,
    interpret: bool,
) -> dict[str, Array]:
    """Runs a kernel over dicts of whole arrays; an output given as an array is updated in place."""
    names, results = list(inputs), list(outputs)
    aliased = [name for name in results if not isinstance(outputs[name], jax.ShapeDtypeStruct)]

    def body(*refs: Any) -> None:
        kernel(dict(zip(names, refs, strict=False)), dict(zip(results, refs[-len(results) :], strict=True)))

    body.__name__ = kernel.func.__name__ if isinstance(kernel, functools.partial) else kernel.__name__
    values = pl.pallas_call(
        body,
        grid=grid,
        out_shape=[jax.ShapeDtypeStruct(outputs[name].shape, outputs[name].dtype) for name in results],
        input_output_aliases={len(names) + i: results.index(name) for i, name in enumerate(aliased)},
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        name=f"ragged_paged_attention{body.__name__}",
    )(*inputs.values(), *(outputs[name] for name in aliased))
    return dict(zip(results, values, strict=True))


class _Softmax(NamedTuple):
    """A softmax over part of the keys, a row each: largest score, sum of weights, weighted sum of values (Milakov and
    Gimelshein, 2018). Scores are in powers of two."""

    best: Array
    total: Array
    acc: Array


class _Rows(NamedTuple):
    """The rows of a tile: where their queries lie, and the position of each among the keys (-1: no query)."""

    tokens: Array
    heads: Array
    positions: Array


def _rows(
    static: _Static,
    tile: _Tile,
    head_tile: Array,
    row: Array,
    start: Array,
    first: Array,
    query_len: Array,
    seq_len: Array,
) -> _Rows:
    """Rows number ``row`` of the tile that begins with query ``first`` of the ``query_len`` queries at ``start``."""
    query = first + lax.div(row, jnp.full_like(row, tile.heads))
    in_group = lax.rem(head_tile, tile.head_tiles) * tile.heads + lax.rem(row, jnp.full_like(row, tile.heads))
    valid = (query < query_len) & (in_group < static.group)
    heads = lax.div(head_tile, tile.head_tiles) * static.group + in_group
    return _Rows(start + query, heads, jnp.where(valid, seq_len - query_len + query, -1))


def _grid_2d(static: _Static, rows: _Rows) -> tuple[Array, Array, Array, Array]:
    """Indices [rows, padded_dim] of a tile in an array [T, N, H], and the mask of what exists."""
    shape = (rows.tokens.shape[0], static.padded_dim)
    tokens, heads, positions = (lax.broadcast_in_dim(vector, shape, (0,)) for vector in rows)
    columns = lax.broadcasted_iota(jnp.int32, shape, 1)
    return tokens, heads, columns, (positions >= 0) & (columns < static.head_dim)


def _load_queries(static: _Static, rows: _Rows, q_ref: Any) -> Array:
    *index, exists = _grid_2d(static, rows)
    return plgpu.load(q_ref.at[tuple(index)], mask=exists, other=0.0).astype(static.product_dtype)


def _store_result(static: _Static, rows: _Rows, softmax: _Softmax, ref: dict[str, Any], out_ref: Any) -> None:
    """Divides by the sum of weights, in which the head's sink takes part, and writes the rows that have a query."""
    best, total, acc = softmax
    if "sinks" in ref:
        sink = plgpu.load(ref["sinks"].at[rows.heads], mask=rows.positions >= 0, other=0.0) * LOG2_E
        joint = jnp.maximum(best, sink)
        kept = jnp.exp2(best - joint)
        total = total * kept + jnp.exp2(sink - joint)
        acc = acc * kept[:, None]
    factor = static.value_factor / jnp.where(total > 0.0, total, 1.0)
    *index, exists = _grid_2d(static, rows)
    plgpu.store(out_ref.at[tuple(index)], (acc * factor[:, None]).astype(out_ref.dtype), mask=exists)


def _tile_kernel(static: _Static, tile: _Tile, short_queries: int, ref: dict[str, Any], out: dict[str, Any]) -> None:
    """One tile of queries of a long request against all keys it sees."""
    request, first = ref["tile_requests"][pl.program_id(1)], ref["tile_firsts"][pl.program_id(1)]
    start, seq_len = ref["starts"][request], ref["seq_lens"][request]
    query_len = ref["starts"][request + 1] - start
    is_used = (first < query_len) & (query_len > short_queries)
    row = lax.iota(jnp.int32, tile.rows)
    rows = _rows(static, tile, pl.program_id(0), row, start, first, jnp.where(is_used, query_len, 0), seq_len)
    position = seq_len - query_len + first
    oldest = static.oldest_visible(position)
    end = jnp.where(is_used, jnp.minimum(position + tile.queries, seq_len), oldest)
    q = _load_queries(static, rows, ref["q"])
    chunks = lax.div(oldest, tile.chunk), lax.div(end + (tile.chunk - 1), tile.chunk)
    softmax = _attend(static, tile, ref, q, rows.positions, request, oldest, end, chunks)
    _store_result(static, rows, softmax, ref, out["out"])


class _Short(NamedTuple):
    """What programs of one short request share; a request that is not short has no keys and rows without queries."""

    rows: _Rows
    oldest: Array
    seq_len: Array
    first_chunk: Array
    num_chunks: Array
    chunks_per_split: Array


def _short_request(
    static: _Static, tile: _Tile, splits: int, ref: dict[str, Any], request: Array, head_tile: Array, row: Array
) -> _Short:
    start, seq_len = ref["starts"][request], ref["seq_lens"][request]
    query_len = ref["starts"][request + 1] - start
    query_len = jnp.where(query_len <= tile.queries, query_len, 0)
    seq_len = jnp.where(query_len > 0, seq_len, 0)
    rows = _rows(static, tile, head_tile, row, start, jnp.zeros_like(start), query_len, seq_len)
    oldest = static.oldest_visible(seq_len - query_len)
    first_chunk = lax.div(oldest, tile.chunk)
    num_chunks = lax.div(seq_len + (tile.chunk - 1), tile.chunk) - first_chunk
    chunks_per_split = lax.div(num_chunks + (splits - 1), splits)
    chunks_per_split = jnp.maximum(chunks_per_split, max(1, MIN_SPLIT_TOKENS // tile.chunk))
    return _Short(rows, oldest, seq_len, first_chunk, num_chunks, chunks_per_split)


def _split_kernel(static: _Static, tile: _Tile, splits: int, ref: dict[str, Any], out: dict[str, Any]) -> None:
    """One split of the keys of a short request: its partial softmax in float32."""
    head_tile, split, request = (pl.program_id(axis) for axis in range(3))
    row = lax.iota(jnp.int32, tile.rows)
    short = _short_request(static, tile, splits, ref, request, head_tile, row)
    begin = split * short.chunks_per_split
    end = jnp.minimum(begin + short.chunks_per_split, short.num_chunks)
    q = _load_queries(static, short.rows, ref["q"])
    chunks = short.first_chunk + begin, short.first_chunk + end
    softmax = _attend(static, tile, ref, q, short.rows.positions, request, short.oldest, short.seq_len, chunks)
    # A split without keys writes nothing: the merge knows how many have some.
    written = (short.rows.positions >= 0) & (begin < end)
    at = tuple(jnp.full_like(row, index) for index in (request, head_tile, split))
    plgpu.store(out["best"].at[(*at, row)], softmax.best, mask=written)
    plgpu.store(out["total"].at[(*at, row)], softmax.total, mask=written)
    shape = (tile.rows, static.padded_dim)
    index = tuple(lax.broadcast_in_dim(vector, shape, (0,)) for vector in (*at, row))
    columns = lax.broadcasted_iota(jnp.int32, shape, 1)
    written = lax.broadcast_in_dim(written, shape, (0,)) & (columns < static.head_dim)
    plgpu.store(out["acc"].at[(*index, columns)], softmax.acc, mask=written)


def _merge_kernel(static: _Static, tile: _Tile, splits: int, ref: dict[str, Any], out: dict[str, Any]) -> None:
    """Joins the splits of one row of a short request and writes its result."""
    program, request = pl.program_id(0), pl.program_id(1)
    head_tile, row = lax.div(program, tile.rows), lax.rem(program, tile.rows)
    one_row = lax.iota(jnp.int32, 1) + row
    short = _short_request(static, tile, splits, ref, request, head_tile, one_row)
    split = lax.iota(jnp.int32, splits)
    has_keys = split * short.chunks_per_split < short.num_chunks
    # Rows without a query left nothing; they read nothing.
    has_keys &= jnp.max(short.rows.positions) >= 0
    at = jnp.full_like(split, request), jnp.full_like(split, head_tile), split, jnp.full_like(split, row)
    bests = plgpu.load(ref["best"].at[at], mask=has_keys, other=LOWEST_BEST)
    totals = plgpu.load(ref["total"].at[at], mask=has_keys, other=0.0)
    shape = (splits, static.padded_dim)
    index = tuple(lax.broadcast_in_dim(vector, shape, (0,)) for vector in at)
    columns = lax.broadcasted_iota(jnp.int32, shape, 1)
    mask = lax.broadcast_in_dim(has_keys, shape, (0,)) & (columns < static.head_dim)
    accs = plgpu.load(ref["acc"].at[(*index, columns)], mask=mask, other=0.0)
    best = jnp.max(bests)
    weights = jnp.exp2(bests - best)
    softmax = _Softmax(
        best=jnp.full((1,), best),
        total=jnp.full((1,), jnp.sum(totals * weights)),
        acc=jnp.sum(accs * weights[:, None], axis=0)[None, :],
    )
    _store_result(static, short.rows, softmax, ref, out["out"])


def _attend(
    static: _Static,
    tile: _Tile,
    ref: dict[str, Any],
    q: Array,
    positions: Array,
    request: Array,
    oldest: Array,
    end: Array,
    chunks: tuple[Array, Array],
) -> _Softmax:
    """The softmax of the rows over the keys of chunks ``chunks[0]`` to ``chunks[1]`` within [oldest, end)."""
    kv_head = lax.div(pl.program_id(0), tile.head_tiles)
    shape = (tile.chunk, static.padded_dim)
    columns = lax.broadcasted_iota(jnp.int32, shape, 1)
    precision = lax.Precision.HIGHEST if static.product_dtype == jnp.float32 else None

    def one_chunk(chunk: Array, softmax: _Softmax) -> _Softmax:
        keys = chunk * tile.chunk + lax.iota(jnp.int32, tile.chunk)
        live = (keys >= oldest) & (keys < end)
        ids = lax.div(keys, jnp.full_like(keys, static.block_size))
        blocks = plgpu.load(ref["tables"].at[jnp.full_like(keys, request), ids], mask=live, other=0)
        offsets = lax.rem(keys, jnp.full_like(keys, static.block_size))
        heads = jnp.full_like(keys, kv_head)
        mask = lax.broadcast_in_dim(live, shape, (0,)) & (columns < static.head_dim)

        def load(which: int) -> tuple[Array, Array | None]:
            at = blocks, jnp.full_like(keys, which), heads, offsets
            index = tuple(lax.broadcast_in_dim(vector, shape, (0,)) for vector in at)
            nothing = jnp.zeros(shape, ref["kv"].dtype)
            stored = plgpu.load(ref["kv"].at[(*index, columns)], mask=mask, other=nothing)
            scales = plgpu.load(ref["scales"].at[at], mask=live, other=0.0) if "scales" in ref else None
            return _convert(static, stored), scales

        stored, scales = load(0)
        scores = lax.dot_general(
            q, stored, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
        if scales is not None:
            scores = scores * scales[None, :]
        if static.soft_cap is None:
            scores = scores * (static.score_factor * LOG2_E)
        else:
            capped = jnp.tanh(scores * (static.score_factor / static.soft_cap))
            scores = capped * (static.soft_cap * LOG2_E)
        seen = keys[None, :] <= positions[:, None]
        if static.sliding_window is not None:
            seen &= keys[None, :] > positions[:, None] - static.sliding_window
        scores = jnp.where(seen, scores, MASKED_SCORE)

        best = jnp.maximum(softmax.best, jnp.max(scores, axis=1))
        kept = jnp.exp2(softmax.best - best)
        weights = jnp.exp2(scores - best[:, None])
        total = softmax.total * kept + jnp.sum(weights, axis=1)
        stored, scales = load(1)
        if scales is not None:
            weights = weights * scales[None, :]
        added = lax.dot_general(
            weights.astype(stored.dtype),
            stored,
            (((1,), (0,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return _Softmax(best, total, softmax.acc * kept[:, None] + added)

    empty = _Softmax(
        jnp.full((tile.rows,), LOWEST_BEST, jnp.float32),
        jnp.zeros((tile.rows,), jnp.float32),
        jnp.zeros((tile.rows, static.padded_dim), jnp.float32),
    )
    return lax.fori_loop(*chunks, one_chunk, empty)


def _convert(static: _Static, stored: Array) -> Array:
    """Stored keys or values in the dtype of the products, without loss."""
    if not static.decodes_fp8:
        return stored.astype(static.product_dtype)
    # The seven bits of exponent and mantissa, shifted, are a float16 whose exponent is biased by 8 more.
    bits = lax.bitcast_convert_type(stored, jnp.int8).astype(jnp.int16)
    halves = lax.bitcast_convert_type(((bits & 0x80) << 8) | ((bits & 0x7F) << 7), jnp.float16)
    values = halves.astype(jnp.float32) * 256.0
    return jnp.where((bits & 0x7F) == 0x7F, jnp.nan, values).astype(static.product_dtype)
