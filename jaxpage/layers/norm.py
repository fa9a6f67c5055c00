"""RMS normalisation."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*rows D"], scale: Float[Array, "... D"], eps: float) -> Float[Array, "*rows D"]:
    """``x / rms(x) * scale`` over the last axis, in float32; ``scale`` broadcasts (Zhang and Sennrich, 2019)."""
    x32 = x.astype(jnp.float32)
    normed = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)
