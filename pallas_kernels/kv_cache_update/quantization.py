"""What a cache stores for keys and values: rows in its type, and their scales if it is quantised.

Owns the arithmetic of quantising, one for all implementations, so that they store the same bits; must not know where
rows are stored.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
"""Largest magnitude that is stored, for each quantised type."""


def is_quantized(dtype: Any) -> bool:
    return jnp.dtype(dtype).name in LARGEST


def stored_rows(
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    dtype: Any,
    *,
    dynamic: bool,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> tuple[Num[Array, "T K 2*H"], Float[Array, "T 2 K"] | None]:
    """Rows of the cache, and with ``dynamic`` the scales of each token's key and value for each KV head.

    A dynamic scale is the vector's largest magnitude over ``LARGEST``: 0, which stores zeros, for a vector of zeros or
    of magnitudes too small for a normal float32 scale. A vector with NaN or infinity gets a scale that is one as well,
    and stands for NaN.
    """
    if not is_quantized(dtype):
        return jnp.concatenate([k, v], axis=-1).astype(dtype), None
    largest = LARGEST[jnp.dtype(dtype).name]
    stored, scales = [], []
    for values, static_scale in ((k, k_scale), (v, v_scale)):
        real = values.astype(jnp.float32)
        if dynamic:
            scale = jnp.max(jnp.abs(real), axis=-1) / largest
            scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 0.0, scale)
            scales.append(scale)
            real = jnp.where(scale[..., None] == 0, 0.0, real / jnp.where(scale == 0, 1.0, scale)[..., None])
        elif static_scale is not None:
            real = real / static_scale
        real = jnp.clip(real, -largest, largest)  # NaN stays NaN
        stored.append((jnp.round(real) if dtype == jnp.int8 else real).astype(dtype))
    return jnp.concatenate(stored, axis=-1), jnp.stack(scales, axis=1) if dynamic else None
