"""What a weight in blocks is: 8-bit numbers with a scale and an offset for each block of columns, as GGUF files have.

Knows its stored form and what it stands for; nothing of products or of files.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int8

PANEL_ROWS = 16
"""Rows whose numbers of a column lie side by side: what the widest vectors of a CPU hold in float32."""
BLOCK_SIZES = (16, 32)
"""Columns that may share a scale."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("values", "scales", "offsets"), meta_fields=("row_shape",)
)
@dataclasses.dataclass(frozen=True)
class BlockWeight:
    """A weight [*row_shape, D] whose last axis is contracted: each number is ``value * scale + offset`` in float32.

    Where ``value * scale`` needs no rounding, as in all that GGUF has, the number is the same whether or not the sum is
    fused with it: a product with the weight in blocks is one with these float32 numbers. Rows come in panels of
    ``PANEL_ROWS``; a last panel that is not full has rows of zeros.

    Attributes:
        values: int8 [panels, D, PANEL_ROWS].
        scales: float32 [panels, D / block size, PANEL_ROWS].
        offsets: likewise; None where all are zero.
        row_shape: the dimensions before the last.
    """

    values: Int8[Array, "P D R"]
    scales: Float[Array, "P B R"]
    offsets: Float[Array, "P B R"] | None
    row_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight that this stands for."""
        return (*self.row_shape, self.values.shape[1])

    @property
    def dtype(self) -> np.dtype:
        """Of the numbers that this stands for."""
        return np.dtype(np.float32)

    @property
    def num_rows(self) -> int:
        """Of the weight as a matrix."""
        return math.prod(self.row_shape)


def block_weight(values: np.ndarray, scales: np.ndarray, offsets: np.ndarray | None = None) -> BlockWeight:
    """The stored form of a weight, on the host.

    Args:
        values: int8 [..., D].
        scales: float32 [..., D / block size].
        offsets: likewise, or None.

    Raises:
        ValueError: for types or shapes that do not fit each other, no columns, or a block size that is not in
            ``BLOCK_SIZES``.
    """
    if values.ndim < 1 or values.dtype != np.int8 or not values.shape[-1]:
        raise ValueError(f"values must be int8 with rows of columns, got {values.dtype} {list(values.shape)}")
    *row_shape, depth = values.shape
    for name, array in (("scales", scales), ("offsets", offsets)):
        if array is None:
            continue
        if array.dtype != np.float32:
            raise ValueError(f"{name} must be float32, got {array.dtype}")
        if array.shape[:-1] != tuple(row_shape) or depth not in [size * array.shape[-1] for size in BLOCK_SIZES]:
            raise ValueError(
                f"{name} must have shape {[*row_shape, depth]} with {' or '.join(map(str, BLOCK_SIZES))} times fewer "
                f"columns, got {list(array.shape)}"
            )
    if offsets is not None and offsets.shape != scales.shape:
        raise ValueError(f"offsets must have the shape of scales, {list(scales.shape)}, got {list(offsets.shape)}")

    def in_panels(array: np.ndarray) -> np.ndarray:
        rows = array.reshape(math.prod(row_shape), array.shape[-1])
        rows = np.pad(rows, ((0, -len(rows) % PANEL_ROWS), (0, 0)))
        panels = rows.reshape(len(rows) // PANEL_ROWS, PANEL_ROWS, rows.shape[1])
        return np.ascontiguousarray(panels.swapaxes(1, 2))

    parts = (in_panels(values), in_panels(scales), None if offsets is None else in_panels(offsets))
    return BlockWeight(*parts, tuple(row_shape))  # pyright: ignore[reportArgumentType]


def real_panels(
    values: Int8[Array, "P D R"], scales: Float[Array, "P B R"], offsets: Float[Array, "P B R"] | None
) -> Float[Array, "P D R"]:
    """The numbers that a weight in blocks stands for, in its panels."""
    block_size = values.shape[1] // scales.shape[1]
    blocks = values.reshape(*scales.shape[:2], block_size, values.shape[-1]).astype(jnp.float32) * scales[:, :, None]
    return (blocks if offsets is None else blocks + offsets[:, :, None]).reshape(values.shape)


def real_rows(weight: BlockWeight, rows: Int[Array, " N"]) -> Float[Array, "N D"]:
    """Some rows of a weight [F, D], in float32; ``rows`` must be from 0 to F - 1."""
    panel, place = rows // PANEL_ROWS, rows % PANEL_ROWS

    def panels_of_one(part: Array) -> Array:
        return part[panel, :, place][:, :, None]

    offsets = None if weight.offsets is None else panels_of_one(weight.offsets)
    return real_panels(panels_of_one(weight.values), panels_of_one(weight.scales), offsets)[:, :, 0]


def dequantize(weight: BlockWeight) -> Float[Array, "..."]:
    """What ``weight`` stands for, in float32."""
    panels = real_panels(weight.values, weight.scales, weight.offsets)
    rows = panels.swapaxes(1, 2).reshape(len(panels) * PANEL_ROWS, weight.shape[-1])
    return rows[: weight.num_rows].reshape(weight.shape)
