"""Ragged paged attention for NVIDIA Hopper (sm90) and Blackwell (sm100) in Pallas Mosaic GPU: kernels, tiles, launches.

It must not know models, engines or which implementation is preferred where; it only refuses what it cannot do.

Both kernels are warp-specialised. In a program the last warpgroup only copies: it reads block ids from the block table
and has the TMA unit bring those blocks, keys and values side by side as they lie, into a ring of ``stages`` buffers in
shared memory. The others compute: scores on the tensor cores from shared memory, softmax in registers, weights times
values on the tensor cores. A buffer goes round by two barriers, "full" and "empty". On Hopper (wgmma) a warpgroup has
64 rows, weights and accumulator are in registers; on Blackwell (tcgen05) it has 128 and they are in tensor memory.

1. ``_tile_kernel``, grid (tiles of queries, query heads): requests with many queries. Each computing warpgroup has rows
   of one head; all walk the same keys. Tiles with most keys start first. The result is written in place, rows of other
   requests are left alone.
2. ``_split_kernel``, grid (requests, KV heads, splits): requests whose queries times the group fit a few rows, that is
   decode rows and short drafts. Flash decoding (Dao et al., 2023): the query heads of a KV head are stacked as rows, a
   computing warpgroup walks its own range of keys and leaves a partial softmax in float32. XLA merges the partials.

A chunk of keys starts at a block boundary and is ``chunk`` positions long; chunks in which every row sees every key are
not masked. No block outside a row's window or past its request's end is copied. Slots past the end in the last block
may hold anything, so before the last product the values there are overwritten by zeros in shared memory (0 * NaN is
NaN).

Bytes of a decode row: ``2 * num_kv_heads * head_dim * itemsize * visible keys``, rounded up to blocks, the block table
once per KV head and ``8 * splits * num_kv_heads * partial_rows * head_dim`` for the float32 partials written and read.

JAX before 0.12 lacks stores that choose their own instructions (``store``): importing this there raises ImportError.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import tiles

if jax.__version_info__ < (0, 12, 0):
    raise ImportError(f"these Mosaic GPU kernels need JAX 0.12, this is {jax.__version__}")

plgpu: Any = mosaic_gpu  # type checkers may see an older JAX

TARGET_PROGRAMS = 264
"""Programs a decode launch should have: two waves on 132 SMs, one program on each at a time."""
MIN_SPLIT_TOKENS = 512
"""Keys below which another split costs more in partials than it wins in parallelism."""
MAX_SPLIT_TOKENS = 16384
"""Keys a split should not exceed at full length, so that one long row does not outlast a batch of short ones."""
MAX_PARTIALS_BYTES = 64 * 2**20
"""Memory for the partials of all requests, which the merge reads whole though most of it is for absent splits."""
LOWEST_BEST = -1e30
"""The running maximum starts finite, so that a masked score (-inf) weighs exp2(-inf) = 0 before any key is seen too."""
LOG2_E = math.log2(math.e)
"""Scores are kept times this, for exp2 is what the hardware has."""
SHARED_BYTES = 226 * 2**10
"""Shared memory of a program, less some for barriers."""
TENSOR_COLUMNS = 512
"""Tensor memory of a Blackwell SM."""
BROKEN_CUDA = range(12080, 12091)
"""CUDA versions whose ptxas miscompiles masked loops around wgmma (JAX's own Hopper attention refuses them too)."""


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
    """See ``pallas_kernels.ragged_paged_attention``; ``interpret`` runs the kernels in JAX's GPU simulator, which looks
    for races.

    Raises:
        NotImplementedError: for dtypes, sizes and GPUs that the kernels do not take.
    """
    _refuse_unsupported(q, kv_cache, block_tables, kv_scales, interpret)
    num_tokens, num_heads, head_dim = q.shape
    num_requests, num_kv_heads = block_tables.shape[0], kv_cache.shape[1]
    static = _Static(
        group=num_heads // num_kv_heads,
        block_size=kv_cache.shape[2],
        head_dim=head_dim,
        score_factor=scale * (1.0 if k_scale is None else k_scale),
        value_factor=1.0 if v_scale is None else v_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        blackwell=_is_blackwell(),
        interpret=interpret,
    )
    split, long = _split_tile(static), _long_tile(static)
    lens = {
        "tables": block_tables,
        "seq_lens": seq_lens,
        "starts": cu_seqlens_q,
    }
    sinks = None if sinks is None else sinks.astype(jnp.float32)

    out = jnp.zeros_like(q)
    max_long = min(num_requests, num_tokens // (split.queries + 1))
    if max_long:
        max_tiles = max_long + num_tokens // (long.groups * static.rows)
        out = _attend_long(static, long, split.queries, max_tiles, q, kv_cache, lens, sinks, out)
    num_splits = _num_splits(static, split, num_kv_heads, block_tables.shape)
    return _attend_short(static, split, num_splits, q, kv_cache, lens, sinks, out)


class _Static(NamedTuple):
    """What the kernels know at compile time about the call."""

    group: int
    block_size: int
    head_dim: int
    score_factor: float
    value_factor: float
    sliding_window: int | None
    soft_cap: float | None
    blackwell: bool
    interpret: bool

    @property
    def rows(self) -> int:
        """Rows of a product: one warpgroup's share."""
        return 128 if self.blackwell else 64

    @property
    def layout(self) -> Any:
        """How the scores of a product lie in the registers of a warpgroup."""
        return plgpu.Layout.TCGEN05_TMEM_NATIVE if self.blackwell else plgpu.Layout.WGMMA

    @property
    def heads(self) -> int:
        """Query heads of a KV head in one tile of the split kernel."""
        return min(self.group, self.rows)

    @property
    def head_tiles(self) -> int:
        return pl.cdiv(self.group, self.rows)

    @property
    def tile_width(self) -> int:
        """Columns of a tile of swizzled shared memory; it divides head_dim."""
        return plgpu.find_swizzle(self.head_dim * 16) // 2

    @property
    def width(self) -> int:
        """Columns of an accumulator that leave at a time: on Hopper they all are in registers anyway."""
        return self.tile_width if self.blackwell else self.head_dim

    @property
    def scales_first(self) -> bool:
        """Whether scores are scaled before their maximum is taken. A positive factor can wait for the exponent."""
        return self.soft_cap is not None or self.score_factor <= 0

    def origin(self, position: Any) -> Any:
        """Position of the first slot of the first block that a query at ``position`` sees a key of."""
        if self.sliding_window is None:
            return 0
        return lax.div(jnp.maximum(position - (self.sliding_window - 1), 0), self.block_size) * self.block_size


class _Tile(NamedTuple):
    """Sizes of a kernel.

    Attributes:
        chunk: keys of one product.
        stages: buffers of a ring.
        groups: computing warpgroups of a program.
        queries: most queries of a request in the split kernel.
        partial_rows: rows of a partial softmax, a multiple of 8.
    """

    chunk: int
    stages: int
    groups: int
    queries: int = 0
    partial_rows: int = 0

    def piece(self, static: _Static) -> int:
        """Keys of one copy: no copy crosses a block."""
        return math.gcd(self.chunk, static.block_size)


def _split_tile(static: _Static) -> _Tile:
    """Decode: 64 KiB and more in flight per SM covers the latency of memory; two warpgroups hide each other's softmax
    where registers and shared memory allow it."""
    rows = -(-static.heads // 8) * 8
    groups, stages = (2, 4) if static.head_dim <= 64 else (2, 2) if static.head_dim <= 128 else (1, 2)
    tile = _Tile(64, stages, groups, max(1, rows // static.heads), rows)

    def fits(tile: _Tile) -> bool:
        ring = tile.groups * tile.stages * tile.chunk * 4 * static.head_dim
        used = ring + static.rows * (2 * static.head_dim + tile.groups * 4 * static.width)
        rows = tile.partial_rows
        return _fits(static, tile, used) and rows % 8 == 0 and tile.queries * static.heads <= rows <= static.rows

    return _pick(static, "decode", tile, fits)


def _long_tile(static: _Static) -> _Tile:
    """Prefill: the largest chunks whose scores, weights and accumulators fit the registers of a warpgroup (Hopper) or
    tensor memory (Blackwell)."""
    tile = _Tile(64 if static.blackwell or static.head_dim > 128 else 128, 2, 2 if static.head_dim <= 128 else 1)

    def fits(tile: _Tile) -> bool:
        ring = tile.stages * tile.chunk * 4 * static.head_dim
        return _fits(static, tile, ring + tile.groups * static.rows * 2 * (static.head_dim + static.width))

    return _pick(static, "prefill", tile, fits)


def _fits(static: _Static, tile: _Tile, shared_bytes: int) -> bool:
    """Whether the memories hold a kernel, and a warpgroup's registers its rows."""
    columns = tile.groups * (tile.chunk + tile.chunk // 2 + static.head_dim)
    in_registers = tile.chunk if static.blackwell else tile.chunk + static.head_dim
    return (
        tile.chunk % 64 == 0
        and tile.groups <= 2
        and shared_bytes <= SHARED_BYTES
        and (columns <= TENSOR_COLUMNS or not static.blackwell)
        and in_registers <= (256 if tile.groups > 1 else 320)
    )


def _pick(static: _Static, kind: str, tile: _Tile, fits: Callable[[_Tile], bool]) -> _Tile:
    key = f"{kind} G{static.group} H{static.head_dim} bs{static.block_size} bfloat16"
    return tiles.pick("ragged_paged_attention", "mosaic_gpu", key, tile, fits)


def _num_splits(static: _Static, tile: _Tile, num_kv_heads: int, table_shape: tuple[int, ...]) -> int:
    """Programs along the keys of a short request: enough to fill the GPU, none too long, none too short."""
    num_requests, max_blocks = table_shape
    max_keys = max_blocks * static.block_size
    if static.sliding_window is not None:
        max_keys = min(max_keys, static.sliding_window + tile.queries + tile.chunk)
    wanted = max(
        TARGET_PROGRAMS // (num_requests * num_kv_heads * static.head_tiles),
        max_keys // (MAX_SPLIT_TOKENS * tile.groups),
    )
    split_bytes = 4 * num_requests * num_kv_heads * static.head_tiles * tile.groups * tile.partial_rows
    split_bytes *= static.head_dim
    most = min(max_keys // (MIN_SPLIT_TOKENS * tile.groups), MAX_PARTIALS_BYTES // split_bytes)
    return max(1, min(wanted, most))


def _refuse_unsupported(
    q: Array, kv_cache: Array, block_tables: Array, kv_scales: Array | None, interpret: bool
) -> None:
    head_dim, block_size = q.shape[2], kv_cache.shape[2]
    if q.dtype != jnp.bfloat16:
        raise NotImplementedError(f"queries of dtype {q.dtype.name}: the tensor cores have no float32 products")
    if kv_cache.dtype != jnp.bfloat16 or kv_scales is not None:
        raise NotImplementedError(f"a KV cache of dtype {kv_cache.dtype.name}: products take it as it is stored")
    if head_dim % 16 or head_dim > 256:
        raise NotImplementedError(f"head_dim {head_dim} is no multiple of 16 up to 256")
    if block_size % 8:
        raise NotImplementedError(f"block_size {block_size} is no multiple of 8, the rows of a swizzled tile")
    if max(q.shape[0], block_tables.shape[0]) > 65535:
        raise NotImplementedError(
            f"{q.shape[0]} tokens, {block_tables.shape[0]} requests: a CUDA grid has at most 65535"
        )
    if interpret:
        return
    for device in jax.local_devices() if jax.default_backend() == "gpu" else ():
        if str(getattr(device, "compute_capability", "")).split(".")[0] not in ("9", "10"):
            raise NotImplementedError(f"{device.device_kind} has neither wgmma nor tcgen05 instructions")
    if _cuda_version() in BROKEN_CUDA:
        raise NotImplementedError(f"ptxas of CUDA {_cuda_version()} miscompiles these kernels")


def _is_blackwell() -> bool:
    """Whether a program traced now is for sm100 and not sm90."""
    return re.match(r"g?b\d", tiles.target_chip() or "") is not None


def _cuda_version() -> int | None:
    """Of the runtime at hand, as 1000 * major + 10 * minor; None without one."""
    try:
        from jax._src.lib import cuda_versions  # JAX shows it nowhere else

        return None if cuda_versions is None else cuda_versions.cuda_runtime_get_version()
    except (ImportError, AttributeError, RuntimeError):
        return None


def _smem(*shape: int, dtype: Any = jnp.bfloat16, row: int | None = None) -> Any:
    """Shared memory; with ``row``, tiled and swizzled as operands of products are, no tile crossing ``row`` columns."""
    if row is None:
        return plgpu.SMEM(shape, dtype)
    swizzle = plgpu.find_swizzle(row * 16)
    transforms = plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _barrier(count: int = 1, arrivals: int = 1) -> Any:
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


def _launch(
    kernel: Any,
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    scratch: dict[str, Any],
    grid: dict[str, int],
    groups: int,
) -> Any:
    """Runs a kernel over dicts of whole arrays with ``groups`` computing warpgroups and one that copies."""
    names, results, scratch_names = list(inputs), list(outputs), list(scratch)

    def body(*refs: Any) -> None:
        kernel(dict(zip([*names, *results, *scratch_names], refs, strict=True)))

    body.__name__ = f"ragged_paged_attention{kernel.func.__name__}"
    static = kernel.args[0]
    values = plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=list(scratch.values()),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=groups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if static.interpret else None,
    )(*inputs.values())
    return dict(zip(results, values, strict=True))


# Kernels address their arrays by name in a dict ``ref``; scalars are int32.


class _Span(NamedTuple):
    """Chunks ``begin`` to ``end`` of the keys of a request; chunk c starts at position ``origin + c * chunk``. Every
    row sees every key of chunks ``clear_begin`` to ``clear_end``."""

    origin: Any
    begin: Any
    end: Any
    clear_begin: Any
    clear_end: Any
    seq_len: Any


def _clear_chunks(
    static: _Static, tile: _Tile, origin: Any, lowest: Any, highest: Any, seq_len: Any
) -> tuple[Any, Any]:
    """First chunk and end of the chunks that queries at positions ``lowest`` to ``highest`` see all of. Those positions
    may lie past the end of the request, but a chunk that does is none for anybody: ``_clear_tail`` is for it."""
    begin = 0
    if static.sliding_window is not None:
        oldest = highest - (static.sliding_window - 1)
        begin = lax.div(jnp.maximum(oldest - origin, 0) + (tile.chunk - 1), tile.chunk)
    return begin, lax.div(jnp.minimum(lowest + 1, seq_len) - origin, tile.chunk)


def _share_registers(tile: _Tile, computes: bool) -> None:
    """Of the 168 registers that a thread of three warpgroups has, those that copy give most to those that compute."""
    if tile.groups > 1:
        plgpu.set_max_registers(232 if computes else 40, action="increase" if computes else "decrease")


def _copy_chunks(
    static: _Static, tile: _Tile, ref: dict[str, Any], request: Any, kv_head: Any, spans: list[_Span]
) -> None:
    """The copying warpgroup: brings the chunks of each span into the span's ring."""
    piece = tile.piece(static)

    @pl.loop(0, functools.reduce(jnp.maximum, [span.end - span.begin for span in spans]))
    def _(step: Any) -> None:
        for lane, span in enumerate(spans):
            slot = lane * tile.stages + lax.rem(step, tile.stages)

            @pl.when(span.begin + step < span.end)
            def _(span: _Span = span, slot: Any = slot) -> None:
                start = span.origin + (span.begin + step) * tile.chunk
                positions = [start + i * piece for i in range(tile.chunk // piece)]
                # Ids are read before the wait, so that their latency is hidden by it. A copy past the end is none.
                ids = [
                    ref["tables"][request, lax.div(jnp.minimum(position, span.seq_len - 1), static.block_size)]
                    for position in positions
                ]

                @pl.when(step >= tile.stages)
                def _() -> None:
                    plgpu.barrier_wait(ref["empty"].at[slot])

                for i, position in enumerate(positions):
                    exists = position < span.seq_len

                    @pl.when(exists)
                    def _(i: int = i, position: Any = position) -> None:
                        # Written so that it is seen to be a multiple of the piece.
                        offset = lax.rem(lax.div(position, piece), static.block_size // piece) * piece
                        plgpu.copy_gmem_to_smem(
                            ref["kv"].at[ids[i], kv_head, pl.ds(offset, piece)],
                            ref["ring"].at[slot, pl.ds(i * piece, piece)],
                            ref["full"].at[slot],
                        )

                    @pl.when(jnp.logical_not(exists))
                    def _() -> None:
                        plgpu.barrier_arrive(ref["full"].at[slot])


class _Softmax(NamedTuple):
    """A softmax over part of the keys, a row each: largest score, sum of weights, weighted sum of values (Milakov and
    Gimelshein, 2018). Scores are in powers of two."""

    best: Any
    total: Any
    acc: Any


def _attend(
    static: _Static,
    tile: _Tile,
    ref: dict[str, Any],
    q: Any,
    positions: Any,
    span: _Span,
    group: Any,
    lane: Any,
    shared: bool,
) -> _Softmax:
    """A computing warpgroup: the softmax of its rows over a span.

    Args:
        q: its queries in shared memory.
        positions: of its rows; a scalar if all have the same.
        lane: its ring.
        shared: whether all warpgroups walk this ring together.
    """
    head_dim, chunk = static.head_dim, tile.chunk
    layout = static.layout
    factor = static.score_factor * LOG2_E

    def one_chunk(number: Any, softmax: _Softmax, masked: bool) -> _Softmax:
        slot = lane * tile.stages + lax.rem(number - span.begin, tile.stages)
        start = span.origin + number * chunk
        plgpu.barrier_wait(ref["full"].at[slot])
        keys, values = ref["ring"].at[slot, :, pl.ds(0, head_dim)], ref["ring"].at[slot, :, pl.ds(head_dim, head_dim)]
        scores = _multiply_keys(static, tile, ref, q, keys, group)
        if static.soft_cap is not None:
            # tanh by exp2: the hardware's own tanh is good to 11 bits only.
            grown = jnp.exp2(scores * (2.0 * LOG2_E * static.score_factor / static.soft_cap))
            scores = static.soft_cap * LOG2_E - (2.0 * static.soft_cap * LOG2_E) / (grown + 1.0)
        elif static.scales_first:
            scores = scores * factor
        if masked:
            key = plgpu.broadcasted_iota(jnp.int32, (static.rows, chunk), 1, layout=layout) + start
            position = lax.broadcast_in_dim(positions, (static.rows, chunk), (0,)) if positions.ndim else positions
            seen = key <= position
            if static.sliding_window is not None:
                seen &= key > position - static.sliding_window
            scores = jnp.where(seen, scores, -jnp.inf)
        largest = scores.max(axis=1)
        best = jnp.maximum(softmax.best, largest if static.scales_first else largest * factor)
        kept = jnp.exp2(softmax.best - best)
        scaled = scores if static.scales_first else scores * factor
        weights = jnp.exp2(scaled - lax.broadcast_in_dim(best, scores.shape, (0,)))
        total = softmax.total * kept + weights.sum(axis=1)
        if masked:
            _clear_tail(static, tile, ref, values, start, span, group, shared)
        add = _add_values_in_tmem if static.blackwell else _add_values
        weights, has_acc = weights.astype(jnp.bfloat16), number > span.begin
        acc = add(static, tile, ref, softmax.acc, kept, weights, values, group, has_acc)
        plgpu.barrier_arrive(ref["empty"].at[slot])
        return _Softmax(best, total, acc)

    softmax = _Softmax(
        plgpu.layout_cast(jnp.full((static.rows,), LOWEST_BEST, jnp.float32), layout.reduce(1)),
        plgpu.layout_cast(jnp.zeros((static.rows,), jnp.float32), layout.reduce(1)),
        () if static.blackwell else plgpu.layout_cast(jnp.zeros((static.rows, head_dim), jnp.float32), layout),
    )
    first = span.begin
    if static.sliding_window is not None:
        clear = jnp.clip(span.clear_begin, first, span.end)
        softmax = lax.fori_loop(first, clear, functools.partial(one_chunk, masked=True), softmax)
        first = clear
    last = jnp.clip(span.clear_end, first, span.end)
    softmax = lax.fori_loop(first, last, functools.partial(one_chunk, masked=False), softmax)
    return lax.fori_loop(last, span.end, functools.partial(one_chunk, masked=True), softmax)


def _clear_tail(
    static: _Static, tile: _Tile, ref: dict[str, Any], values: Any, start: Any, span: _Span, group: Any, shared: bool
) -> None:
    """Overwrites the values of slots past the end of the request by zeros. In a ring that all share one warpgroup does
    so and the others wait; this happens once at most, for only the last chunk reaches past the end."""

    @pl.when(start + tile.chunk > span.seq_len)
    def _() -> None:
        def clear() -> None:
            # By pieces, which take few registers.
            width = static.tile_width
            for row, column in itertools.product(range(0, tile.chunk, 64), range(0, static.head_dim, width)):
                position = plgpu.broadcasted_iota(jnp.int32, (64, width), 0, layout=plgpu.Layout.WGMMA) + (start + row)
                piece = values.at[pl.ds(row, 64), pl.ds(column, width)]
                stored = plgpu.load(piece, layout=plgpu.Layout.WGMMA)
                plgpu.store(piece, jnp.where(position < span.seq_len, stored, 0))
            plgpu.commit_smem()

        if not shared:
            clear()
            return
        pl.when(group == 0)(clear)
        plgpu.barrier_arrive(ref["cleared"])
        plgpu.barrier_wait(ref["cleared"])


def _multiply_keys(static: _Static, tile: _Tile, ref: dict[str, Any], q: Any, keys: Any, group: Any) -> Any:
    """``q @ keys.T`` in registers."""
    if not static.blackwell:

        def multiply(acc: Any) -> Any:
            plgpu.wgmma(acc, q, keys.transpose((1, 0)))
            return acc[...]

        return pl.run_scoped(multiply, plgpu.ACC((static.rows, tile.chunk), jnp.float32))
    scores = ref["scores"].at[:, pl.ds(group * tile.chunk, tile.chunk)]
    plgpu.tcgen05_mma(scores, q, keys.transpose((1, 0)), ref["multiplied"].at[group], accumulate=False)
    plgpu.barrier_wait(ref["multiplied"].at[group])
    loaded = plgpu.async_load_tmem(scores, layout=static.layout)
    plgpu.wait_load_tmem()
    return loaded


def _add_values(
    static: _Static,
    tile: _Tile,
    ref: dict[str, Any],
    acc: Any,
    kept: Any,
    weights: Any,
    values: Any,
    group: Any,
    has_acc: Any,
) -> Any:
    """``acc * kept + weights @ values``, the weights from registers; the simulator has them only from shared memory."""
    del tile, has_acc  # it starts at zero
    acc = acc * lax.broadcast_in_dim(kept, acc.shape, (0,))
    if not static.interpret:

        def accumulate(acc_ref: Any) -> None:
            plgpu.wgmma(acc_ref, weights, values)

        return pl.run_state(accumulate)(plgpu.ACC.init(acc))

    staged = ref["weights"].at[group]
    staged[...] = weights
    plgpu.commit_smem()

    def multiply(acc_ref: Any) -> Any:
        plgpu.wgmma(acc_ref, staged, values)
        return acc_ref[...]

    return acc + pl.run_scoped(multiply, plgpu.ACC(acc.shape, jnp.float32))


def _add_values_in_tmem(
    static: _Static,
    tile: _Tile,
    ref: dict[str, Any],
    acc: Any,
    kept: Any,
    weights: Any,
    values: Any,
    group: Any,
    has_acc: Any,
) -> Any:
    """The same with accumulator and weights in tensor memory."""

    @pl.when(has_acc)
    def _() -> None:
        width = min(32, static.tile_width)  # few registers are left beside the weights
        for column in range(0, static.head_dim, width):
            piece = _acc_columns(static, ref, group, column, width)
            loaded = plgpu.async_load_tmem(piece, layout=static.layout)
            plgpu.wait_load_tmem()
            plgpu.async_store_tmem(piece, loaded * lax.broadcast_in_dim(kept, loaded.shape, (0,)))

    staged = ref["weights"].at[:, pl.ds(group * tile.chunk, tile.chunk)]
    plgpu.async_store_tmem(staged, weights)
    plgpu.commit_tmem()
    whole = _acc_columns(static, ref, group, 0, static.head_dim)
    plgpu.tcgen05_mma(whole, staged, values, ref["multiplied"].at[group], accumulate=has_acc)
    plgpu.barrier_wait(ref["multiplied"].at[group])
    return acc


def _acc_columns(static: _Static, ref: dict[str, Any], group: Any, column: int, width: int) -> Any:
    return ref["acc_columns"].at[:, pl.ds(group * static.head_dim + column, width)]


def _acc_pieces(static: _Static, ref: dict[str, Any], acc: Any, group: Any) -> Iterator[tuple[int, Any]]:
    """The accumulator by pieces of ``static.width`` columns: where each begins, and its values in registers."""
    if not static.blackwell:
        yield 0, acc
        return
    for column in range(0, static.head_dim, static.width):
        piece = _acc_columns(static, ref, group, column, static.width)
        yield column, plgpu.async_load_tmem(piece, layout=static.layout)


def _ring(static: _Static, tile: _Tile, lanes: int) -> dict[str, Any]:
    """Scratch memory of both kernels."""
    slots = lanes * tile.stages
    consumers = tile.groups // lanes
    scratch = {
        "ring": _smem(slots, tile.chunk, 2 * static.head_dim, row=static.head_dim),
        "full": _barrier(slots, tile.chunk // tile.piece(static)),
        "empty": _barrier(slots, consumers),
    }
    if static.blackwell:
        scratch |= {
            "scores": plgpu.TMEM((static.rows, tile.groups * tile.chunk), jnp.float32),
            "weights": plgpu.TMEM((static.rows, tile.groups * tile.chunk), jnp.bfloat16, packed=True),
            "acc_columns": plgpu.TMEM((static.rows, tile.groups * static.head_dim), jnp.float32),
            "multiplied": plgpu.Barrier(num_barriers=tile.groups, orders_tensor_core=True),
        }
    elif static.interpret:
        scratch["weights"] = _smem(tile.groups, static.rows, tile.chunk)
    return scratch


# Long requests.


def _attend_long(
    static: _Static,
    tile: _Tile,
    short_queries: int,
    max_tiles: int,
    q: Array,
    kv_cache: Array,
    lens: dict[str, Array],
    sinks: Array | None,
    out: Array,
) -> Array:
    """Writes the rows of all requests with more than ``short_queries`` queries into ``out``."""
    rows = tile.groups * static.rows
    requests, firsts = _long_tiles(lens["starts"], short_queries, rows, max_tiles)
    absent = static.rows - q.shape[0]
    if absent > 0:  # a copy may reach past the end of an array but not be longer than it
        q, out = (jnp.pad(x, ((0, absent), (0, 0), (0, 0))) for x in (q, out))
    out_ref = jax.new_ref(out)
    inputs = {"q": q, "kv": kv_cache, **lens, "tile_requests": requests, "tile_firsts": firsts}
    if sinks is not None:
        inputs["sinks"] = sinks
    scratch = {
        "q_tile": _smem(tile.groups, static.rows, static.head_dim, row=static.head_dim),
        "staged": _smem(tile.groups, static.rows, static.width),
        "q_full": _barrier(tile.groups),
        "cleared": _barrier(1, tile.groups),
        **_ring(static, tile, 1),
    }
    _launch(
        functools.partial(_tile_kernel, static, tile),
        {**inputs, "out": out_ref},
        {},
        scratch,
        {"tile": max_tiles, "head": q.shape[1]},
        tile.groups,
    )
    return jax.freeze(out_ref)


def _long_tiles(
    starts: Int[Array, " B+1"], short_queries: int, tile_queries: int, max_tiles: int
) -> tuple[Int[Array, " tiles"], Int[Array, " tiles"]]:
    """The request of each tile and its first query in that request; unused tiles start past the last query. The last
    tiles of a request, which have most keys, come first."""
    query_lens = jnp.diff(starts)
    tiles_of_request = jnp.where(query_lens > short_queries, (query_lens + tile_queries - 1) // tile_queries, 0)
    ends = jnp.cumsum(tiles_of_request)
    tiles = jnp.arange(max_tiles - 1, -1, -1, dtype=ends.dtype)
    requests = jnp.minimum(jnp.sum(ends[None, :] <= tiles[:, None], axis=1), starts.shape[0] - 2)
    firsts = (tiles - ends[requests] + tiles_of_request[requests]) * tile_queries
    unused = jnp.iinfo(jnp.int32).max // 2
    return requests.astype(jnp.int32), jnp.where(tiles < ends[-1], firsts, unused).astype(jnp.int32)


def _tile_kernel(static: _Static, tile: _Tile, ref: dict[str, Any]) -> None:
    """One tile of queries of a long request and one query head, against all keys the tile sees."""
    number, head, group = (lax.axis_index(name) for name in ("tile", "head", "warpgroup"))
    request, first = ref["tile_requests"][number], ref["tile_firsts"][number]
    start, seq_len = ref["starts"][request], ref["seq_lens"][request]
    query_len = ref["starts"][request + 1] - start
    position = seq_len - query_len + first
    end = jnp.minimum(position + tile.groups * static.rows, seq_len)
    origin = static.origin(position)
    num_chunks = lax.div(end - origin + (tile.chunk - 1), tile.chunk)
    is_used = first < query_len

    @pl.when(is_used & (group < tile.groups))
    def _() -> None:
        _share_registers(tile, computes=True)
        offset = group * static.rows
        token = start + first + offset
        q_tile, staged = ref["q_tile"].at[group], ref["staged"].at[group]
        # Tiled memory takes copies from aligned rows only, so the queries go through memory that is not.
        for column in range(0, static.head_dim, static.width):
            columns = pl.ds(column, static.width)
            plgpu.copy_gmem_to_smem(
                ref["q"].at[pl.ds(token, static.rows), head, columns], staged, ref["q_full"].at[group]
            )
            plgpu.barrier_wait(ref["q_full"].at[group])
            plgpu.store(q_tile.at[:, columns], plgpu.load(staged, layout=plgpu.Layout.WGMMA, optimized=False))
            plgpu.commit_smem()
        lowest = position + offset
        row = plgpu.broadcasted_iota(jnp.int32, (static.rows,), 0, layout=static.layout.reduce(1))
        clear = _clear_chunks(static, tile, origin, lowest, lowest + (static.rows - 1), seq_len)
        span = _Span(origin, 0, num_chunks, *clear, seq_len)
        best, total, acc = _attend(static, tile, ref, q_tile, row + lowest, span, group, 0, shared=True)
        # Rows past the last query may have seen no key; they are not written.
        factor = static.value_factor / jnp.where(total > 0.0, total, 1.0)
        if "sinks" in ref:
            sink = ref["sinks"][head] * LOG2_E
            joint = jnp.maximum(best, sink)
            kept = jnp.exp2(best - joint)
            factor = static.value_factor * kept / (total * kept + jnp.exp2(sink - joint))
        for column, piece in _acc_pieces(static, ref, acc, group):
            result = piece * lax.broadcast_in_dim(factor, piece.shape, (0,))
            plgpu.store(staged, result.astype(jnp.bfloat16), optimized=False)
            plgpu.commit_smem()
            out = ref["out"].at[:, head, pl.ds(column, static.width)]
            _write_rows(static, staged, out, token, jnp.clip(query_len - first - offset, 0, static.rows))

    @pl.when(is_used & (group == tile.groups))
    def _() -> None:
        _share_registers(tile, computes=False)
        span = _Span(origin, 0, num_chunks, 0, 0, jnp.minimum(seq_len, origin + num_chunks * tile.chunk))
        _copy_chunks(static, tile, ref, request, lax.div(head, static.group), [span])


def _write_rows(static: _Static, staged: Any, out: Any, token: Any, count: Any) -> None:
    """Writes the first ``count`` rows, in pieces of powers of two since copies have static sizes."""
    size = static.rows
    while size:
        done = count - lax.rem(count, 2 * size)

        @pl.when(lax.rem(count, 2 * size) >= size)
        def _(size: int = size, done: Any = done) -> None:
            plgpu.copy_smem_to_gmem(staged.at[pl.ds(done, size)], out.at[pl.ds(token + done, size)])

        size //= 2
    plgpu.wait_smem_to_gmem(0)


# Short requests.


class _Splits(NamedTuple):
    """How the keys of short requests are split; of scalars in the kernel, of arrays over requests in the merge. Another
    request has no keys."""

    query_len: Any
    position: Any
    origin: Any
    num_chunks: Any
    chunks_per_split: Any


def _split_keys(static: _Static, tile: _Tile, num_splits: int, query_len: Any, seq_len: Any) -> _Splits:
    """``num_splits`` counts warpgroups, not programs."""
    query_len = jnp.where(query_len <= tile.queries, query_len, 0)
    position = seq_len - query_len
    origin = static.origin(position)
    num_chunks = jnp.where(query_len > 0, lax.div(seq_len - origin + (tile.chunk - 1), tile.chunk), 0)
    chunks_per_split = lax.div(num_chunks + (num_splits - 1), num_splits)
    chunks_per_split = jnp.maximum(chunks_per_split, max(1, MIN_SPLIT_TOKENS // tile.chunk))
    return _Splits(query_len, position, origin, num_chunks, chunks_per_split)


def _attend_short(
    static: _Static,
    tile: _Tile,
    num_programs: int,
    q: Array,
    kv_cache: Array,
    lens: dict[str, Array],
    sinks: Array | None,
    out: Array,
) -> Array:
    """Writes the rows of all requests with up to ``tile.queries`` queries into ``out``, which may have been padded."""
    num_tokens, _, head_dim = q.shape
    num_requests, num_kv_heads = lens["seq_lens"].shape[0], kv_cache.shape[1]
    num_splits = num_programs * tile.groups
    query = jnp.arange(tile.queries, dtype=jnp.int32)
    tokens = lens["starts"][:-1, None] + query  # [B, Q]
    packed = _pack_heads(static, tile, num_kv_heads, q.at[tokens].get(mode="clip"))
    lead = (num_requests, num_kv_heads * static.head_tiles, num_splits)
    partials = _launch(
        functools.partial(_split_kernel, static, tile, num_splits),
        {"q": packed, "kv": kv_cache, **lens},
        {
            "best": jax.ShapeDtypeStruct((*lead, static.rows), jnp.float32),
            "total": jax.ShapeDtypeStruct((*lead, static.rows), jnp.float32),
            "acc": jax.ShapeDtypeStruct((*lead, tile.partial_rows, head_dim), jnp.float32),
        },
        {
            "q_tile": _smem(static.rows, head_dim, row=head_dim),
            "staged": _smem(tile.groups, static.rows, static.width, dtype=jnp.float32),
            "q_full": _barrier(),
            **_ring(static, tile, tile.groups),
        },
        {"request": num_requests, "head": lead[1], "split": num_programs},
        tile.groups,
    )
    splits = _split_keys(static, tile, num_splits, jnp.diff(lens["starts"]), lens["seq_lens"])
    if sinks is not None:
        sinks = jnp.pad(sinks.reshape(num_kv_heads, -1), ((0, 0), (0, static.head_tiles * static.heads - static.group)))
        sinks = jnp.tile(sinks.reshape(lead[1], static.heads), (1, tile.queries))
    result = _merge(static, tile, splits, partials, sinks).astype(q.dtype)
    result = _unpack_heads(static, tile, num_kv_heads, result)
    tokens = jnp.where(query < splits.query_len[:, None], tokens, out.shape[0])
    return out.at[tokens].set(result, mode="drop")[:num_tokens]


def _merge(
    static: _Static, tile: _Tile, splits: _Splits, partials: dict[str, Array], sinks: Float[Array, "K R"] | None
) -> Float[Array, "B K R H"]:
    """Joins the partial softmaxes of short requests and the sinks of their rows."""
    rows, num_splits = tile.queries * static.heads, partials["best"].shape[2]
    has_keys = jnp.arange(num_splits) * splits.chunks_per_split[:, None] < splits.num_chunks[:, None]
    has_keys = has_keys[:, None, :, None]  # [B, 1, S, 1]. What an absent split left is whatever lay there.
    bests = jnp.where(has_keys, partials["best"][..., :rows], LOWEST_BEST)
    best = jnp.max(bests, axis=2)
    if sinks is not None:
        best = jnp.maximum(best, sinks * LOG2_E)
    weights = jnp.exp2(bests - best[:, :, None])
    total = jnp.sum(jnp.where(has_keys, partials["total"][..., :rows] * weights, 0.0), axis=2)
    if sinks is not None:
        total = total + jnp.exp2(sinks * LOG2_E - best)
    acc = partials["acc"][..., :rows, :] * weights[..., None]
    acc = jnp.sum(jnp.where(has_keys[..., None], acc, 0.0), axis=2)
    return acc * (static.value_factor / jnp.where(total > 0.0, total, 1.0))[..., None]


def _pack_heads(static: _Static, tile: _Tile, num_kv_heads: int, q: Float[Array, "B Q N H"]) -> Float[Array, "B K R H"]:
    """Queries as rows of the tiles of heads: row r is query ``r // heads`` and head ``r % heads``."""
    num_requests, num_queries, _, head_dim = q.shape
    q = q.reshape(num_requests, num_queries, num_kv_heads, static.group, head_dim)
    absent = static.head_tiles * static.heads - static.group
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, absent), (0, 0)))
    q = q.reshape(num_requests, num_queries, num_kv_heads * static.head_tiles, static.heads, head_dim)
    q = jnp.swapaxes(q, 1, 2).reshape(num_requests, q.shape[2], num_queries * static.heads, head_dim)
    return jnp.pad(q, ((0, 0), (0, 0), (0, tile.partial_rows - q.shape[2]), (0, 0)))


def _unpack_heads(
    static: _Static, tile: _Tile, num_kv_heads: int, rows: Float[Array, "B K R H"]
) -> Float[Array, "B Q N H"]:
    """The inverse of ``_pack_heads`` but for the padding rows, which are gone already."""
    num_requests, head_dim = rows.shape[0], rows.shape[-1]
    rows = rows.reshape(num_requests, -1, tile.queries, static.heads, head_dim)
    rows = jnp.swapaxes(rows, 1, 2).reshape(num_requests, tile.queries, num_kv_heads, -1, head_dim)
    return rows[:, :, :, : static.group].reshape(num_requests, tile.queries, -1, head_dim)


def _split_kernel(static: _Static, tile: _Tile, num_splits: int, ref: dict[str, Any]) -> None:
    """Ranges of the keys of a short request and one KV head, one for each computing warpgroup."""
    request, head, program, group = (lax.axis_index(name) for name in ("request", "head", "split", "warpgroup"))
    seq_len = ref["seq_lens"][request]
    query_len = ref["starts"][request + 1] - ref["starts"][request]
    splits = _split_keys(static, tile, num_splits, query_len, seq_len)

    def span_of(split: Any) -> _Span:
        begin = split * splits.chunks_per_split
        end = jnp.minimum(begin + splits.chunks_per_split, splits.num_chunks)
        return _Span(
            splits.origin,
            begin,
            end,
            *_clear_chunks(static, tile, splits.origin, splits.position, seq_len - 1, seq_len),
            seq_len,
        )

    first_split = program * tile.groups

    @pl.when(group < tile.groups)
    def _() -> None:
        split = first_split + group
        span = span_of(split)

        @pl.when(span.begin < span.end)
        def _() -> None:
            _share_registers(tile, computes=True)
            _attend_split(static, tile, ref, request, head, split, span, splits.position, group)

    @pl.when((group == tile.groups) & (first_split * splits.chunks_per_split < splits.num_chunks))
    def _() -> None:
        _share_registers(tile, computes=False)
        kv_head = lax.div(head, static.head_tiles)
        packed = ref["q_tile"].at[pl.ds(0, tile.partial_rows)]
        plgpu.copy_gmem_to_smem(ref["q"].at[request, head], packed, ref["q_full"])
        _copy_chunks(static, tile, ref, request, kv_head, [span_of(first_split + i) for i in range(tile.groups)])


def _attend_split(
    static: _Static,
    tile: _Tile,
    ref: dict[str, Any],
    request: Any,
    head: Any,
    split: Any,
    span: _Span,
    position: Any,
    group: Any,
) -> None:
    """A computing warpgroup's range of keys: writes its partial softmax."""
    plgpu.barrier_wait(ref["q_full"])
    # Rows past the packed ones hold anything: no row has a part in another's result.
    if tile.queries > 1:
        row = plgpu.broadcasted_iota(jnp.int32, (static.rows,), 0, layout=static.layout.reduce(1))
        position = position + lax.div(row, static.heads)
    best, total, acc = _attend(static, tile, ref, ref["q_tile"], position, span, group, group, shared=False)
    ref["best"].at[request, head, split][...] = best
    ref["total"].at[request, head, split][...] = total
    staged = ref["staged"].at[group]
    for column, piece in _acc_pieces(static, ref, acc, group):
        staged[...] = piece
        plgpu.commit_smem()
        out = ref["acc"].at[request, head, split, :, pl.ds(column, static.width)]
        plgpu.copy_smem_to_gmem(staged.at[pl.ds(0, tile.partial_rows)], out)
        plgpu.wait_smem_to_gmem(0)
