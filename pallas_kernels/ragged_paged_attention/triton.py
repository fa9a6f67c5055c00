"""Ragged paged attention for NVIDIA GPUs (sm80, sm89, sm90, sm100) in Pallas-Triton: kernels, their tiles and launches.

It must not know models, engines or which implementation is preferred where; it only refuses what it cannot do.

Up to three launches write one output that starts as zeros, each leaving the rows of the others alone (aliased, no
copies):

1. ``_tile_kernel``, grid (KV heads, tiles): requests with many queries, in tiles of ``long.queries`` tokens of one
   request. The causal and the window limit bound the chunks of keys a tile walks.
2. ``_split_kernel``, grid (KV heads, splits, requests): requests whose queries fit one tile of ``short.queries``
   tokens, that is decode rows and short speculative drafts. Flash decoding (Dao et al., 2023): every program walks its
   share of the chunks of keys. Where one split has all keys of a row it writes the result, else a partial softmax in
   float32. The number of splits is static per shape; a split beyond the real length does nothing.
3. ``_merge_kernel``, grid (KV heads x parts of a tile's rows, requests), if there can be several splits: joins those of
   each row, adds the sink and writes the result at the row's token.

In 1 and 2 the query heads of one KV head are stacked with the queries as rows of the tensor-core products (row r is
query ``r // heads``, head ``r % heads``), so that K and V of a slot are read once per tile for the whole group. Keys
are found by vector indexing: a chunk is a range of positions, its block ids are gathered from the block table, one a
key and chunk for K and V together, and the loads of K and V go straight to the two halves of a slot's row, one chunk
ahead of the products. Triton's pipelining turns them into asynchronous copies of 16 bytes, 4 for ids and scales. Loads
are masked to the slots that some row of the tile may see: neither the tail of a last block nor a block outside the
window is read, so NaN there is harmless. Triton wants powers of two: groups and head_dim are padded in the tile only,
by masked lanes that move no bytes.

Bytes of a decode row (``traffic.decode_bytes``): ``2 * num_kv_heads * head_dim * itemsize`` a visible key, and beside
them

- partials, written and read, ``8 * num_heads * (head_dim + 2)`` a split of a row that has several. A row is divided
  into no more splits than it has ``_min_split_tokens`` keys, so that this is at most 1/16 of the bytes of keys and
  values for any dtype of the cache, and 1/32 for bfloat16 and a group of 4. A row of less than twice as many keys has
  none.
- queries and results, ``4 * num_heads * head_dim`` for bfloat16: ``group`` keys' worth, 1/32 for a group of 8 and 256
  keys. Splits read the same queries, from the L2 cache.
- the block table, 4 bytes a block, again by other KV heads from the L2 cache.
- with dynamic quantisation the scales, 8 bytes a slot and KV head: ``4 / head_dim`` of a one-byte cache, that is 6% for
  a head_dim of 64 and 3% for 128. Any kernel reads them.

So rows of 32 keys and more for each query head of a group stay within 10% of keys and values, with one-byte caches too;
only dynamic scales come on top. Decode is bound by memory bandwidth, the tiles of long requests by the tensor cores.

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
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import tiles
from pallas_kernels.targets import compute_capability

TARGET_PROGRAMS = 1024
"""Programs a decode launch should have to fill a large GPU: twice what 132 SMs hold at once (four each), for batches
are padded and their rows of unequal length."""
MIN_SPLIT_TOKENS = 256
"""Keys below which another split costs more in partials than it wins in parallelism."""
MAX_SPLIT_TOKENS = 4096
"""Keys a split should not exceed at full length, so that one long row does not outlast a batch of short ones."""
MAX_PARTIAL_ELEMENTS = 8192
"""Elements of partials that a program of the merge holds in registers."""
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
SHARED_OPERANDS = (9.0, 12.0)
"""GPUs from the first to below the second (Hopper, Blackwell for servers) multiply from shared memory; others hold all
operands in registers."""
TENSOR_MEMORY = (10.0, 12.0)
"""These (Blackwell for servers) accumulate outside of registers too."""
KV_DTYPES = ("bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")


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
    interpret: bool = False,
) -> Float[Array, "T N H"]:
    """See ``pallas_kernels.ragged_paged_attention``; ``interpret`` runs the kernels in XLA on any platform.

    Raises:
        NotImplementedError: for dtypes, head sizes and cache sizes that the Triton backend cannot take.
    """
    _refuse_unsupported(q, kv_cache, block_tables)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[1:3]
    num_requests = block_tables.shape[0]
    static = _Static(
        group=num_heads // num_kv_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        score_factor=scale * (1.0 if k_scale is None else k_scale),
        value_factor=1.0 if v_scale is None else v_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        product_dtype=_product_dtype(q.dtype, kv_cache.dtype),
        kv_dtype=kv_cache.dtype,
        capability=0.0 if interpret else compute_capability() or 0.0,
        interpret=interpret,
    )
    slots = kv_cache.reshape(-1, 2 * head_dim)
    operands = {"q": q, "slots": slots, "tables": block_tables, "seq_lens": seq_lens, "starts": cu_seqlens_q}
    if kv_scales is not None:
        operands["scales"] = kv_scales.reshape(-1)
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
            (num_kv_heads * long.head_tiles, max_tiles),
            {**operands, "tile_requests": requests, "tile_firsts": firsts},
            {"out": out},
            long,
            interpret,
        )["out"]

    # Short requests: their results if a split holds all keys, else partial softmaxes and their merge.
    splits = _num_splits(static, short, num_kv_heads, block_tables.shape)
    lead = (num_requests, num_kv_heads * short.head_tiles, splits, short.rows)
    partials = {
        "acc": jax.ShapeDtypeStruct((*lead, static.padded_dim), jnp.float32),
        "best": jax.ShapeDtypeStruct(lead, jnp.float32),
        "total": jax.ShapeDtypeStruct(lead, jnp.float32),
    }
    results = _launch(
        functools.partial(_split_kernel, static, short, splits),
        (lead[1], splits, num_requests),
        operands,
        {"out": out} if splits == 1 else {"out": out, **partials},
        short,
        interpret,
    )
    if splits == 1:
        return results["out"]
    rows = min(short.rows, MAX_PARTIAL_ELEMENTS // (splits * static.padded_dim))
    read = {name: operands[name] for name in ("starts", "seq_lens", "sinks") if name in operands}
    return _launch(
        functools.partial(_merge_kernel, static, short, splits, rows),
        (lead[1] * (short.rows // rows), num_requests),
        {**read, **{name: results[name] for name in partials}},
        {"out": results["out"]},
        short._replace(num_warps=8, num_stages=1),
        interpret,
    )["out"]


class _Static(NamedTuple):
    """What the kernels know at compile time about the call."""

    group: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    score_factor: float
    value_factor: float
    sliding_window: int | None
    soft_cap: float | None
    product_dtype: Any
    kv_dtype: Any
    capability: float
    interpret: bool

    @property
    def padded_dim(self) -> int:
        return max(16, pl.next_power_of_2(self.head_dim))

    @property
    def decodes_fp8(self) -> bool:
        return self.kv_dtype == jnp.float8_e4m3fn and self.capability < FP8_CAPABILITY

    def oldest_visible(self, position: Int[Array, ""]) -> Int[Array, ""]:
        """Position of the first key that a query at ``position`` sees."""
        if self.sliding_window is None:
            return jnp.zeros_like(position)
        return jnp.maximum(position - (self.sliding_window - 1), 0)


class _Sizes(NamedTuple):
    """What a table of tiles may set; all are powers of two.

    Attributes:
        rows: rows of the products, which are query heads of a group times query tokens.
        chunk: keys of one step of the loop.
    """

    rows: int
    chunk: int
    num_warps: int
    num_stages: int


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


def _tile(static: _Static, kind: str, heuristic: _Sizes) -> _Tile:
    key = f"{kind} G{static.group} H{static.head_dim} bs{static.block_size} {static.kv_dtype} {static.product_dtype}"
    sizes = tiles.pick("ragged_paged_attention", "triton", key, heuristic, _fits)
    heads = min(pl.next_power_of_2(static.group), sizes.rows)
    head_tiles = pl.cdiv(static.group, heads)
    return _Tile(heads, sizes.rows // heads, head_tiles, sizes.chunk, sizes.num_warps, sizes.num_stages)


def _fits(sizes: _Sizes) -> bool:
    return (
        all(size & (size - 1) == 0 for size in (sizes.rows, sizes.chunk, sizes.num_warps))
        and MIN_ROWS <= sizes.rows <= 256
        and 16 <= sizes.chunk <= MIN_SPLIT_TOKENS
        and sizes.num_warps <= 16
        and sizes.num_stages <= 8
    )


def _short_tile(static: _Static) -> _Tile:
    """As few rows as hold the group; a chunk of 16 KiB of bfloat16 keys, so that several programs share an SM.

    Three stages load block ids one chunk ahead of the keys, and those one chunk ahead of their use.
    """
    rows = min(64, max(MIN_ROWS, pl.next_power_of_2(static.group)))
    elements = 8192 if static.product_dtype.itemsize == 2 else 4096
    chunk = min(128, max(16, elements // static.padded_dim))
    # Queries of 256 columns leave four warps too few registers for the conversion of keys.
    num_warps = 8 if static.padded_dim > 128 and static.kv_dtype.itemsize == 1 else 4
    return _tile(static, "short", _Sizes(rows, chunk, num_warps, num_stages=3))


def _long_tile(static: _Static) -> _Tile:
    """As many rows as the accumulator and the keys leave room for in registers."""
    wide = static.padded_dim > 128
    num_warps = 8
    shares_operands, has_tensor_memory = (
        least <= static.capability < limit for least, limit in (SHARED_OPERANDS, TENSOR_MEMORY)
    )
    if static.product_dtype.itemsize == 4:
        rows, chunk, num_warps = (32, 32, 8) if static.padded_dim <= 64 else (16, 4096 // static.padded_dim, 4)
    elif static.decodes_fp8:
        rows, chunk = 64, min(64, 4096 // static.padded_dim)
    elif wide:
        rows, chunk = 128 if has_tensor_memory else 64, 32
    else:
        rows, chunk = 128, 64 if shares_operands or static.padded_dim <= 64 else 32
    return _tile(static, "long", _Sizes(rows, chunk, num_warps, num_stages=2))


def _num_splits(static: _Static, tile: _Tile, num_kv_heads: int, table_shape: tuple[int, ...]) -> int:
    """Splits of a short request's keys: enough programs for the GPU, none too long, none too short; a power of two."""
    num_requests, max_blocks = table_shape
    max_keys = max_blocks * static.block_size
    if static.sliding_window is not None:
        max_keys = min(max_keys, static.sliding_window + tile.queries + tile.chunk)
    wanted = max(TARGET_PROGRAMS // (num_requests * num_kv_heads * tile.head_tiles), max_keys // MAX_SPLIT_TOKENS)
    # The rest of a tile's rows, and splits that short rows do not fill, are memory that is never touched.
    split_bytes = 4 * num_requests * num_kv_heads * tile.head_tiles * tile.rows * static.padded_dim
    most = min(
        max_keys // _min_split_tokens(static),
        MAX_PARTIAL_ELEMENTS // static.padded_dim,
        MAX_PARTIALS_BYTES // split_bytes,
    )
    return 1 << max(1, min(wanted, most)).bit_length() - 1


def _min_split_tokens(static: _Static) -> int:
    """Keys of a row for each split that it is divided into: partials are then at most 1/16 of keys and values.

    A key and its value are ``2 * head_dim * itemsize`` bytes, the partials ``8 * group * head_dim`` a split.
    """
    return max(MIN_SPLIT_TOKENS, pl.next_power_of_2(64 * static.group // static.kv_dtype.itemsize))


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

    def only(self, condition: Array) -> _Rows:
        """These rows if a scalar condition holds, else no row has a query."""
        return self._replace(positions=jnp.where(condition, self.positions, -1))


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


def _along(vector: Array, shape: tuple[int, ...], axis: int) -> Array:
    return lax.broadcast_in_dim(vector, shape, (axis,))


def _grid_2d(static: _Static, rows: _Rows) -> tuple[Array, Array, Array, Array]:
    """Indices [rows, padded_dim] of a tile in an array [T, N, H], and the mask of what exists."""
    shape = (rows.tokens.shape[0], static.padded_dim)
    tokens, heads, positions = (_along(vector, shape, 0) for vector in rows)
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
    within = start, first, jnp.where(is_used, query_len, 0), seq_len
    rows = _rows(static, tile, pl.program_id(0), row, *within)
    position = seq_len - query_len + first
    oldest = static.oldest_visible(position)
    end = jnp.where(is_used, jnp.minimum(position + tile.queries, seq_len), oldest)
    q = _load_queries(static, rows, ref["q"])
    chunks = lax.div(oldest, tile.chunk), lax.div(end + (tile.chunk - 1), tile.chunk)
    softmax = _attend(static, tile, ref, q, rows.positions, request, oldest, end, chunks)
    rows = _rows(static, tile, pl.program_id(0), _after(row, softmax), *within)
    _store_result(static, rows, softmax, ref, out["out"])


class _Short(NamedTuple):
    """What programs of one short request share; a request that is not short has no keys and rows without queries.

    Attributes:
        splits: how many splits its keys have; one or none leave no partials.
    """

    rows: _Rows
    oldest: Array
    seq_len: Array
    first_chunk: Array
    num_chunks: Array
    chunks_per_split: Array
    splits: Array


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
    # Rounded down, so that no row leaves more partials than _min_split_tokens allows for.
    used = jnp.clip(lax.div(seq_len - oldest, _min_split_tokens(static)), 1, splits)
    chunks_per_split = jnp.maximum(lax.div(num_chunks + (used - 1), used), 1)
    used = lax.div(num_chunks + (chunks_per_split - 1), chunks_per_split)
    return _Short(rows, oldest, seq_len, first_chunk, num_chunks, chunks_per_split, used)


def _split_kernel(static: _Static, tile: _Tile, splits: int, ref: dict[str, Any], out: dict[str, Any]) -> None:
    """One split of the keys of a short request: its result if there is no other split, else a partial softmax."""
    head_tile, split, request = (pl.program_id(axis) for axis in range(3))
    row = lax.iota(jnp.int32, tile.rows)
    short = _short_request(static, tile, splits, ref, request, head_tile, row)
    begin = split * short.chunks_per_split
    end = jnp.minimum(begin + short.chunks_per_split, short.num_chunks)
    q = _load_queries(static, short.rows, ref["q"])
    chunks = short.first_chunk + begin, short.first_chunk + end
    softmax = _attend(static, tile, ref, q, short.rows.positions, request, short.oldest, short.seq_len, chunks)
    row = _after(row, softmax)
    short = _short_request(static, tile, splits, ref, request, head_tile, row)
    _store_result(static, short.rows.only((short.splits <= 1) & (split == 0)), softmax, ref, out["out"])
    if splits == 1:
        return
    # A split without keys writes nothing: the merge knows how many have some.
    rows = short.rows.only((short.splits > 1) & (begin < end))
    at = tuple(jnp.full_like(row, index) for index in (request, head_tile, split))
    plgpu.store(out["best"].at[(*at, row)], softmax.best, mask=rows.positions >= 0)
    plgpu.store(out["total"].at[(*at, row)], softmax.total, mask=rows.positions >= 0)
    *_, columns, written = _grid_2d(static, rows)
    index = tuple(_along(vector, columns.shape, 0) for vector in (*at, row))
    plgpu.store(out["acc"].at[(*index, columns)], softmax.acc, mask=written)


def _merge_kernel(
    static: _Static, tile: _Tile, splits: int, num_rows: int, ref: dict[str, Any], out: dict[str, Any]
) -> None:
    """Joins the splits of ``num_rows`` rows of a short request that has several, and writes their results."""
    program, request = pl.program_id(0), pl.program_id(1)
    parts = tile.rows // num_rows
    head_tile = lax.div(program, parts)
    row = lax.iota(jnp.int32, num_rows) + lax.rem(program, parts) * num_rows
    short = _short_request(static, tile, splits, ref, request, head_tile, row)
    rows = short.rows.only(short.splits > 1)
    shape = (splits, num_rows, static.padded_dim)
    split = lax.broadcasted_iota(jnp.int32, shape[:2], 0)
    at = jnp.full_like(split, request), jnp.full_like(split, head_tile), split, _along(row, shape[:2], 1)
    # Rows without a query left nothing; they read nothing.
    exists = (split < short.splits) & (_along(rows.positions, shape[:2], 1) >= 0)
    bests = plgpu.load(ref["best"].at[at], mask=exists, other=LOWEST_BEST)
    totals = plgpu.load(ref["total"].at[at], mask=exists, other=0.0)
    index = tuple(lax.broadcast_in_dim(indices, shape, (0, 1)) for indices in at)
    columns = lax.broadcasted_iota(jnp.int32, shape, 2)
    mask = lax.broadcast_in_dim(exists, shape, (0, 1)) & (columns < static.head_dim)
    accs = plgpu.load(ref["acc"].at[(*index, columns)], mask=mask, other=0.0)
    best = jnp.max(bests, axis=0)
    weights = jnp.exp2(bests - best[None, :])
    total = jnp.sum(totals * weights, axis=0)
    acc = jnp.sum(accs * lax.broadcast_in_dim(weights, shape, (0, 1)), axis=0)
    _store_result(static, rows, _Softmax(best, total, acc), ref, out["out"])


def _after(row: Array, softmax: _Softmax) -> Array:
    """``row`` as it is, but not before the softmax is known: no sum of weights is negative.

    What is computed from it, addresses above all, would otherwise be computed once, before the loop over the keys, and
    take registers from it.
    """
    return row + (softmax.total < 0).astype(row.dtype)


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
    kv_head, num_kv_heads = lax.div(pl.program_id(0), tile.head_tiles), static.num_kv_heads
    shape = (tile.chunk, static.padded_dim)
    columns = lax.broadcasted_iota(jnp.int32, shape, 1)
    precision = lax.Precision.HIGHEST if static.product_dtype == jnp.float32 else None

    def one_chunk(chunk: Array, softmax: _Softmax) -> _Softmax:
        keys = chunk * tile.chunk + lax.iota(jnp.int32, tile.chunk)
        live = (keys >= oldest) & (keys < end)
        ids = lax.div(keys, jnp.full_like(keys, static.block_size))
        blocks = plgpu.load(ref["tables"].at[jnp.full_like(keys, request), ids], mask=live, other=0)
        offsets = lax.rem(keys, jnp.full_like(keys, static.block_size))
        slots = _along((blocks * num_kv_heads + kv_head) * static.block_size + offsets, shape, 0)
        mask = _along(live, shape, 0) & (columns < static.head_dim)
        key_scales = (blocks * (2 * num_kv_heads) + kv_head) * static.block_size + offsets

        def load(which: int) -> tuple[Array, Array | None]:
            nothing = jnp.zeros(shape, ref["slots"].dtype)
            at = slots, columns + which * static.head_dim
            stored = plgpu.load(ref["slots"].at[at], mask=mask, other=nothing)
            scales = None
            if "scales" in ref:
                at = key_scales + which * (num_kv_heads * static.block_size)
                scales = plgpu.load(ref["scales"].at[at], mask=live, other=0.0)
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
        if static.kv_dtype != static.product_dtype and not static.interpret:
            stored = _keep_layout(stored, _along(keys, shape, 0))
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


def _keep_layout(values: Array, keys: Array) -> Array:
    """``values`` as they are, converted before they are rearranged for the matrix product.

    Triton would convert after, in the layout of the operand. But a transposed operand narrower than 16 bits leaves
    shared memory byte by byte, and so that it may, the asynchronous copies become 8 bytes long. It moves a conversion
    only if that is the one widening on the way, and ``keys``, a broadcast vector, is another; it costs no instruction.
    """
    pack = 4 // values.dtype.itemsize
    [kept] = plgpu.elementwise_inline_asm(
        "mov.b32 $0, $1;",
        args=[values, keys],
        constraints=",".join(["=r", "r", *["r"] * pack]),
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(values.shape, values.dtype)],
    )
    return kept


def _convert(static: _Static, stored: Array) -> Array:
    """Stored keys or values in the dtype of the products, without loss."""
    if not static.decodes_fp8:
        if stored.dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2):
            # By way of float32, for the hardware's direct conversion to bfloat16 has a quarter of the throughput.
            stored = stored.astype(jnp.float32)
        return stored.astype(static.product_dtype)
    # The seven bits of exponent and mantissa, shifted, are a float16 whose exponent is biased by 8 more.
    bits = lax.bitcast_convert_type(stored, jnp.int8).astype(jnp.int16)
    halves = lax.bitcast_convert_type(((bits & 0x80) << 8) | ((bits & 0x7F) << 7), jnp.float16)
    values = halves.astype(jnp.float32) * 256.0
    return jnp.where((bits & 0x7F) == 0x7F, jnp.nan, values).astype(static.product_dtype)
