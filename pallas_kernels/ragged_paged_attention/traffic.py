"""Bytes that attention of decode rows moves to and from device memory, by implementation, and the least it could.

Owns formulas; must not know arrays or JAX: kernels argue their bytes in their docstrings, benchmarks and tables of
ahead-of-time compiling compute them here. A test counts the copies of ``mosaic_tpu`` and finds these bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

SCALE_BYTES = 4
TABLE_BYTES = 4
PARTIAL_BYTES = 4
TPU_LANES = 128
TPU_SUBLANES = 8
TPU_PART_TOKENS = 32
"""On TPU multiples of this are copied of the first and last blocks of a row, if blocks are longer."""
TPU_ITEM_BYTES = 52
TRITON_SPLIT_TOKENS = 256
MOSAIC_GPU_SPLIT_TOKENS = 512
"""Keys that a split of a decode row has at least on GPUs."""
XLA_GROUP_ROWS = 16
XLA_CHUNK_TOKENS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Decode:
    """A batch of decode rows; ``first`` and ``end`` bound the visible positions of each row."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_itemsize: int
    q_itemsize: int
    has_scales: bool
    max_blocks: int
    first: np.ndarray
    end: np.ndarray

    @property
    def visible(self) -> np.ndarray:
        return self.end - self.first

    @property
    def blocks(self) -> np.ndarray:
        """Blocks of each row that hold a visible key."""
        return -(-self.end // self.block_size) - self.first // self.block_size

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def token_bytes(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * self.kv_itemsize

    @property
    def token_scale_bytes(self) -> int:
        return 2 * self.num_kv_heads * SCALE_BYTES if self.has_scales else 0

    @property
    def query_bytes(self) -> int:
        """Queries in and results out."""
        return 2 * len(self.end) * self.num_heads * self.head_dim * self.q_itemsize


def minimum_bytes(
    *,
    num_kv_heads: int,
    head_dim: int,
    kv_itemsize: int,
    seq_lens: Sequence[int] | np.ndarray,
    sliding_window: int | None = None,
    has_scales: bool = False,
) -> int:
    """Each visible key and value once, and its scales: ``2 * num_kv_heads * head_dim * kv_itemsize`` bytes a token.

    Args: as for ``decode_bytes``.
    """
    end, first = _bounds(seq_lens, sliding_window)
    token_bytes = 2 * num_kv_heads * (head_dim * kv_itemsize + (SCALE_BYTES if has_scales else 0))
    return int(np.sum(end - first)) * token_bytes


def decode_bytes(
    implementation: str,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    kv_itemsize: int,
    q_itemsize: int,
    seq_lens: Sequence[int] | np.ndarray,
    sliding_window: int | None = None,
    has_scales: bool = False,
    max_blocks: int,
) -> int:
    """Bytes read and written for one decode step of a layer: cache, scales, queries, results and what is in between.

    Args:
        seq_lens: tokens in the cache of each row, its own included; a row of 0 tokens is padding.
        has_scales: whether each slot and KV head has its own scales (dynamic quantisation).
        max_blocks: width of the block tables.

    Raises:
        ValueError: for an implementation without a formula (the reference is not meant to be fast).
    """
    if implementation not in _FORMULAS:
        raise ValueError(f"implementation must be one of {', '.join(_FORMULAS)}, got {implementation!r:.200}")
    end, first = _bounds(seq_lens, sliding_window)
    decode = _Decode(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        kv_itemsize=kv_itemsize,
        q_itemsize=q_itemsize,
        has_scales=has_scales,
        max_blocks=max_blocks,
        first=first,
        end=end,
    )
    return int(_FORMULAS[implementation](decode)) if len(end) else 0


def mosaic_tpu_cache_bytes(
    *,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    kv_itemsize: int,
    seq_lens: Sequence[int] | np.ndarray,
    sliding_window: int | None = None,
) -> int:
    """The part of ``decode_bytes("mosaic_tpu", ...)`` that is copied from the cache."""
    end, first = _bounds(seq_lens, sliding_window)
    return int(np.sum(_tpu_tokens(first, end, block_size))) * _tpu_token_bytes(num_kv_heads, head_dim, kv_itemsize)


def _bounds(seq_lens: Sequence[int] | np.ndarray, sliding_window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Ends and starts of what each row sees, without padding rows."""
    end = np.asarray(seq_lens, np.int64)
    end = end[end > 0]
    return end, np.zeros_like(end) if sliding_window is None else np.maximum(end - sliding_window, 0)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _tpu_tokens(first: np.ndarray, end: np.ndarray, block_size: int) -> np.ndarray:
    """Tokens of each row that are copied: whole blocks, but of the first and last no more than is needed."""
    is_part = block_size > TPU_PART_TOKENS and block_size % TPU_PART_TOKENS == 0
    multiple = TPU_PART_TOKENS if is_part else block_size
    return -(-end // multiple) * multiple - first // multiple * multiple


def _tpu_token_bytes(num_kv_heads: int, head_dim: int, kv_itemsize: int) -> int:
    return num_kv_heads * _round_up(2 * head_dim, TPU_LANES) * kv_itemsize


def _mosaic_tpu(decode: _Decode) -> int:
    """Whole rows of lanes; queries and results also as tiles of padded groups, each written once and read once."""
    tokens = np.sum(_tpu_tokens(decode.first, decode.end, decode.block_size))
    moved = tokens * _tpu_token_bytes(decode.num_kv_heads, decode.head_dim, decode.kv_itemsize)
    if decode.has_scales:
        heads = decode.num_kv_heads
        # Of an array whose second last axis is short, tiles have 1, 2 or 4 rows instead of 8.
        heads = 1 << (heads - 1).bit_length() if heads < TPU_SUBLANES else _round_up(heads, TPU_SUBLANES)
        moved += np.sum(decode.blocks) * 2 * heads * _round_up(decode.block_size, TPU_LANES) * SCALE_BYTES
    columns = decode.head_dim if decode.head_dim % TPU_LANES == 0 else _round_up(2 * decode.head_dim, TPU_LANES)
    tile_bytes = decode.num_kv_heads * _round_up(decode.group, TPU_SUBLANES) * columns * decode.q_itemsize
    metadata = len(decode.end) * (decode.max_blocks * TABLE_BYTES + TPU_ITEM_BYTES)
    return moved + len(decode.end) * 4 * tile_bytes + decode.query_bytes + metadata


def _triton(decode: _Decode) -> int:
    """Visible tokens alone; partial results in float32 of as many splits as there can be, written once, read once.

    A row has no more than it has whole ones, rounded down, and only if there are several does it leave partial results.
    """
    group_tokens = 1 << max(64 * decode.group // decode.kv_itemsize - 1, 0).bit_length()
    splits = decode.visible // max(TRITON_SPLIT_TOKENS, group_tokens)
    partials = 2 * np.sum(np.where(splits > 1, splits, 0)) * decode.num_heads * (decode.head_dim + 2) * PARTIAL_BYTES
    return _gpu(decode, decode.visible) + partials


def _mosaic_gpu(decode: _Decode) -> int:
    """Whole blocks; partial results in float32 of as many splits as there can be, the group padded to 8 rows."""
    splits = _splits(decode, MOSAIC_GPU_SPLIT_TOKENS)
    rows = decode.num_kv_heads * _round_up(decode.group, TPU_SUBLANES)
    partials = 2 * np.sum(splits) * rows * (decode.head_dim + 2) * PARTIAL_BYTES
    return _gpu(decode, decode.blocks * decode.block_size) + partials


def _gpu(decode: _Decode, tokens: np.ndarray) -> int:
    """The table is read once a KV head, all but once from the cache."""
    moved = np.sum(tokens) * (decode.token_bytes + decode.token_scale_bytes)
    return moved + decode.query_bytes + np.sum(decode.blocks) * TABLE_BYTES


def _native(decode: _Decode) -> int:
    """Visible tokens alone, once; the table of a row once a KV head, all but once from the cache."""
    return _gpu(decode, decode.visible)


def _splits(decode: _Decode, least_tokens: int) -> np.ndarray:
    return -(-decode.visible // least_tokens)


def _xla(decode: _Decode) -> int:
    """Chunks are gathered, that is read, written and read again; a row waits for the longest of its group."""
    chunk = max(XLA_CHUNK_TOKENS, decode.block_size)
    order = np.argsort(-decode.end)
    moved = 0
    for start in range(0, len(order), XLA_GROUP_ROWS):
        rows = order[start : start + XLA_GROUP_ROWS]
        end = _round_up(int(decode.end[rows].max()), chunk)
        moved += len(rows) * (end - int(decode.first[rows].min()) // chunk * chunk)
    metadata = len(order) * decode.max_blocks * TABLE_BYTES
    return 3 * moved * (decode.token_bytes + decode.token_scale_bytes) + decode.query_bytes + metadata


_FORMULAS: dict[str, Callable[[_Decode], int]] = {
    "mosaic_tpu": _mosaic_tpu,
    "mosaic_gpu": _mosaic_gpu,
    "triton": _triton,
    "native": _native,
    "xla": _xla,
}
