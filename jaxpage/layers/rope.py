"""Rotary position embedding (Su et al., 2021), in the half-rotation layout of Hugging Face checkpoints."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Rotation = tuple[Float[Array, "T 1 half"], Float[Array, "T 1 half"]]


def rotation(inverse_frequencies: np.ndarray, positions: Int[Array, " T"]) -> Rotation:
    """Cosines and sines, float32, of the angles at ``positions``; frequencies are [head_dim // 2] per position."""
    angles = positions.astype(jnp.float32)[:, None, None] * inverse_frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "T heads H"], rotation: Rotation) -> Float[Array, "T heads H"]:
    """Each pair (x[i], x[i + H/2]) turned by its angle."""
    cos, sin = rotation
    # Halves as an axis: one fused loop, where concatenating two halves would be a copy of its own.
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    signed_sin = jnp.stack([-sin, sin], axis=-2)
    turned = halves * cos[..., None, :] + jnp.flip(halves, axis=-2) * signed_sin
    return turned.reshape(x.shape).astype(x.dtype)
