"""Collective matmuls: products that pass tokens, or sums, from device to device while they compute.

Between the blocks of a layer tokens are split over the devices, inside a block heads or features are. A product that
reads hidden states needs all tokens, and one that writes them leaves sums to be added up. Done in one go, the devices
would wait for all of that to arrive. Here each hop moves one device's share while the product of another is computed,
so that a compiler which schedules transfers beside work hides them; what is moved is the same.

Must not know what is multiplied. Both functions run inside ``on_local_parts``.
Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models",
ASPLOS 2023.
"""

from __future__ import annotations

from collections.abc import Callable

from jax import lax
from jax import numpy as jnp
from jaxtyping import Array

Product = Callable[[Array], Array]
"""Takes rows of tokens, gives as many."""


def product_of_all(product: Product, share: Array, axis: str) -> Array:
    """``product`` of the tokens of all devices along a mesh axis, in their order; ``share`` are this device's."""
    size, index = lax.axis_size(axis), lax.axis_index(axis)
    result = None
    for hop in range(size):
        # Sent on before it is used: nothing waits for the product.
        next_share = lax.ppermute(share, axis, _onward(size)) if hop + 1 < size else share
        rows = product(share)
        if result is None:
            result = jnp.zeros((size * rows.shape[0], *rows.shape[1:]), rows.dtype)
        result = lax.dynamic_update_slice_in_dim(result, rows, (index - hop) % size * rows.shape[0], 0)
        share = next_share
    assert result is not None, "an axis has a device"
    return result


def share_of_sum(product: Product, tokens: Array, axis: str) -> Array:
    """This device's share of the tokens of the sum, over all devices along a mesh axis, of ``product(tokens)``."""
    size, index = lax.axis_size(axis), lax.axis_index(axis)
    num_rows = tokens.shape[0] // size
    total = None
    for hop in range(size):
        # The sum that arrives in this hop is of the share whose owner it reaches after the last one.
        owner = (index - hop - 1) % size
        rows = product(lax.dynamic_slice_in_dim(tokens, owner * num_rows, num_rows))
        total = rows if total is None else lax.ppermute(total, axis, _onward(size)) + rows
    assert total is not None, "an axis has a device"
    return total


def _onward(size: int) -> list[tuple[int, int]]:
    return [(device, (device + 1) % size) for device in range(size)]
