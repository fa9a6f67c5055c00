"""Reads the quantised blocks of a GGUF tensor as what they hold: 8-bit numbers, scales and offsets, nothing rounded.

The layouts are those of ggml's quantisation types; ``gguf.quants`` says what numbers they stand for, and tests compare.
Knows neither files nor models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType


class Blocks(NamedTuple):
    """A weight [..., D] whose numbers are ``values * scales + offsets``, exactly, in float32.

    Attributes:
        values: int8 [..., D].
        scales: float32 [..., D / block size].
        offsets: likewise; None where all are zero.
    """

    values: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None

    @property
    def block_size(self) -> int:
        """Columns that share a scale."""
        return self.values.shape[-1] // self.scales.shape[-1]


def unpack(rows: np.ndarray, quantization: GGMLQuantizationType) -> Blocks | None:
    """The blocks in rows of bytes, uint8 [..., bytes]; None for a type that is no such blocks."""
    reader = _READERS.get(quantization)
    if reader is None:
        return None
    block_bytes = GGML_QUANT_SIZES[quantization][1]
    parts = reader(rows.reshape(-1, block_bytes))
    shape = (*rows.shape[:-1], -1)
    return Blocks(*(None if part is None else np.ascontiguousarray(part).reshape(shape) for part in parts))  # pyright: ignore[reportArgumentType]


def with_block_size(blocks: Blocks, block_size: int) -> Blocks:
    """The same weight with scales for smaller blocks of columns."""
    times = blocks.block_size // block_size
    scales, offsets = (None if part is None else np.repeat(part, times, axis=-1) for part in blocks[1:])
    assert scales is not None, "only offsets may be missing"
    return Blocks(blocks.values, scales, offsets)


_Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""Of [blocks, bytes]: values [blocks, columns], scales and offsets [blocks, groups]."""


def _float16(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _halves(packed: np.ndarray, run: int) -> np.ndarray:
    """Numbers of 4 bits: of each ``run`` bytes first those in the low halves, then those in the high ones."""
    runs = packed.reshape(len(packed), -1, 1, run)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(packed), -1).astype(np.int8)


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    """The fifth bits of 32 numbers, from 4 bytes, in their place."""
    return (np.unpackbits(packed, axis=1, bitorder="little") << 4).astype(np.int8)


def _q4_0(blocks: np.ndarray) -> _Parts:
    return _halves(blocks[:, 2:], 16) - np.int8(8), _float16(blocks, 0), None


def _q4_1(blocks: np.ndarray) -> _Parts:
    return _halves(blocks[:, 4:], 16), _float16(blocks, 0), _float16(blocks, 2)


def _q5_0(blocks: np.ndarray) -> _Parts:
    return (_halves(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])) - np.int8(16), _float16(blocks, 0), None


def _q5_1(blocks: np.ndarray) -> _Parts:
    return _halves(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8]), _float16(blocks, 0), _float16(blocks, 2)


def _q8_0(blocks: np.ndarray) -> _Parts:
    return blocks[:, 2:].view(np.int8), _float16(blocks, 0), None


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and offsets of the 8 groups of 32 in a block: two float16 times numbers of 6 bits, from 12 bytes.

    The first four of each have a byte, whose upper two bits are the upper bits of the last four.
    """
    packed = blocks[:, 4:16]
    first, second, lower = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (lower & 15) | (first >> 6 << 4)], axis=1)
    offsets = np.concatenate([second & 63, (lower >> 4) | (second >> 6 << 4)], axis=1)
    return _float16(blocks, 0) * scales.astype(np.float32), -(_float16(blocks, 2) * offsets.astype(np.float32))


def _q4_k(blocks: np.ndarray) -> _Parts:
    return _halves(blocks[:, 16:], 32), *_k_scales(blocks)


def _q5_k(blocks: np.ndarray) -> _Parts:
    # Bit i of byte j is the fifth of column j of group i.
    groups = np.arange(8, dtype=np.uint8)[:, None]
    fifth = (blocks[:, None, 16:48] >> groups & 1).reshape(len(blocks), -1) << 4
    return _halves(blocks[:, 48:], 32) | fifth.astype(np.int8), *_k_scales(blocks)


def _q6_k(blocks: np.ndarray) -> _Parts:
    # For each half of the block 64 bytes have the lower four bits, two numbers a byte, and 32 bytes the upper two of
    # four numbers each.
    lower = _halves(blocks[:, :128], 64)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    upper = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3).reshape(len(blocks), -1) << 4
    scales = _float16(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (lower | upper.astype(np.int8)) - np.int8(32), scales, None


_READERS: dict[GGMLQuantizationType, Callable[[np.ndarray], _Parts]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
}
