"""What a quantised weight is: its stored form, how it is made and what it stands for. Knows nothing of products."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

KINDS = ("int8", "int4", "fp8")
GROUP_SIZES = (128, 64, 32)
"""Columns of an int4 weight that may share a scale, best (fewest scales) first."""
ZERO = 1e-30
"""A row or group whose largest magnitude is below counts as zeros: its scale would leave float32's normal numbers."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=("values", "scales"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A weight [..., D] whose last axis is contracted, as stored numbers and float32 scales. A pytree of two leaves.

    Attributes:
        values: int8 and float8_e4m3fn have the weight's own shape. int4 is uint8 [..., D / 2], two numbers a byte,
            each plus 8. A byte holds columns of one group only, byte i of a group its column i in the low half and
            column ``i + group_size / 2`` in the high half, so that a weight can be split between groups.
        scales: a number stands for itself times its scale. int8 and fp8 have one a row, [...]; int4 one a group of
            columns, [D / group_size, ...]. Groups come first because the last axis is padded to 128 in a TPU's memory:
            behind the rows, the scales could take more room than the weight.
    """

    values: Num[Array, "..."]
    scales: Float[Array, "..."]

    @property
    def kind(self) -> str:
        """One of KINDS."""
        return kind_of(self.values.dtype)

    @property
    def group_size(self) -> int | None:
        """Columns that share a scale; None if all of a row do."""
        return group_size_of(self.values, self.scales)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight that this stands for."""
        return (*self.values.shape[:-1], self.values.shape[-1] * (2 if self.kind == "int4" else 1))

    @property
    def size(self) -> int:
        """Elements of the weight that this stands for."""
        return self.values.size * (2 if self.kind == "int4" else 1)

    def as_matrix(self) -> QuantizedWeight:
        """The same with all dimensions but the last made one."""
        values = self.values.reshape(-1, self.values.shape[-1])
        groups = self.scales.shape[:1] if self.kind == "int4" else ()
        return QuantizedWeight(values, self.scales.reshape(*groups, -1))


def kind_of(dtype: Any) -> str:
    """The kind that is stored in ``dtype``; raises ValueError if none is."""
    kinds = {jnp.dtype(jnp.int8): "int8", jnp.dtype(jnp.uint8): "int4", jnp.dtype(jnp.float8_e4m3fn): "fp8"}
    if jnp.dtype(dtype) not in kinds:
        raise ValueError(f"values of a quantised weight must be int8, uint8 or float8_e4m3fn, got {dtype}")
    return kinds[jnp.dtype(dtype)]


def group_size_of(values: Any, scales: Any) -> int | None:
    """Columns that share a scale; None if all of a row do."""
    return values.shape[-1] * 2 // scales.shape[0] if kind_of(values.dtype) == "int4" else None


def key_of(x: Any, values: Any, scales: Any) -> str:
    """Name of a product's shape in tables of tiles."""
    group_size = group_size_of(values, scales)
    kind = kind_of(values.dtype) + ("" if group_size is None else f" g{group_size}")
    return f"T{x.shape[0]} F{values.shape[0]} D{x.shape[1]} {kind} {x.dtype}"


def check_group_size(num_columns: int, group_size: int) -> None:
    """Raises ValueError unless int4 can have ``num_columns`` in groups of this size."""
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size must be one of {', '.join(map(str, GROUP_SIZES))}, got {group_size!r:.200}")
    if num_columns % group_size:
        raise ValueError(f"group_size {group_size} does not divide the weight's {num_columns} columns")


def quantize(weight: Float[Array, "*rows D"], kind: str, group_size: int = 128) -> QuantizedWeight:
    """The nearest stored numbers, with scales that make the largest magnitude of a row or group fit.

    int8 and fp8 are symmetric. int4 has one more number below zero than above: the element of largest magnitude gets
    it, so that a scale may be negative.

    Args:
        kind: one of KINDS.
        group_size: columns that share a scale, for int4 only.

    Raises:
        ValueError: for an unknown kind, or a group size that is not in GROUP_SIZES or does not divide the columns.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r:.200}")
    weight = weight.astype(jnp.float32)
    if kind != "int4":
        most = 127.0 if kind == "int8" else float(jnp.finfo(jnp.float8_e4m3fn).max)
        scales = _scales(jnp.max(jnp.abs(weight), axis=-1), most)
        numbers = jnp.clip(weight / scales[..., None], -most, most)
        values = jnp.round(numbers).astype(jnp.int8) if kind == "int8" else numbers.astype(jnp.float8_e4m3fn)
        return QuantizedWeight(values, scales)
    check_group_size(weight.shape[-1], group_size)
    grouped = weight.reshape(*weight.shape[:-1], -1, group_size)
    highest, lowest = jnp.max(grouped, axis=-1), jnp.min(grouped, axis=-1)
    scales = _scales(jnp.where(highest > -lowest, highest, lowest), -8.0)
    numbers = (jnp.clip(jnp.round(grouped / scales[..., None]), -8, 7) + 8).astype(jnp.uint8)
    low, high = jnp.split(numbers, 2, axis=-1)
    packed = (low | (high << 4)).reshape(*weight.shape[:-1], -1)
    return QuantizedWeight(packed, jnp.moveaxis(scales, -1, 0))


def _scales(extreme: Array, number: float) -> Array:
    return jnp.where(jnp.abs(extreme) < ZERO, jnp.ones_like(extreme), extreme / number)


def dequantize(weight: QuantizedWeight) -> Float[Array, "*rows D"]:
    """What ``weight`` stands for, in float32."""
    if weight.kind != "int4":
        return weight.values.astype(jnp.float32) * weight.scales[..., None]
    grouped = weight.values.reshape(*weight.values.shape[:-1], weight.scales.shape[0], -1)
    numbers = jnp.concatenate([grouped & 15, grouped >> 4], axis=-1).astype(jnp.float32) - 8.0
    return (numbers * jnp.moveaxis(weight.scales, 0, -1)[..., None]).reshape(weight.shape)


def decode_fp8(stored: Num[Array, "..."]) -> Float[Array, "..."]:
    """float8_e4m3fn, given as int8, in float32: by bit operations, for what cannot convert it or is slow to."""
    # The seven bits of exponent and mantissa, shifted, are a float16 whose exponent is biased by 8 more.
    bits = stored.astype(jnp.int16)
    halves = lax.bitcast_convert_type(((bits & 0x80) << 8) | ((bits & 0x7F) << 7), jnp.float16)
    values = halves.astype(jnp.float32) * 256.0
    return jnp.where((bits & 0x7F) == 0x7F, jnp.nan, values)
