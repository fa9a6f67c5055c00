"""Rotary position embedding (Su et al., 2021), in the half-rotation layout of Hugging Face checkpoints."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Rotation = Float[Array, "T 1 4 half"]


def rotation(inverse_frequencies: np.ndarray, positions: Int[Array, " T"]) -> Rotation:
    """Of the angles at ``positions``, in float32: cos, cos, -sin, sin; frequencies are [head_dim // 2] per position."""
    angles = positions.astype(jnp.float32)[:, None, None] * inverse_frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    # One array, which XLA makes once. Cosines of their own it would compute anew in every layer, for every head.
    return jnp.stack([cos, cos, -sin, sin], axis=-2)


def rotate(x: Float[Array, "T heads H"], rotation: Rotation) -> Float[Array, "T heads H"]:
    """Each pair (x[i], x[i + H/2]) turned by its angle."""
    # Halves as an axis: one fused loop, where concatenating two halves would be a copy of its own.
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    turned = halves * rotation[..., :2, :] + jnp.flip(halves, axis=-2) * rotation[..., 2:, :]
    return turned.reshape(x.shape).astype(x.dtype)
