"""The gated feed-forward block."""

from __future__ import annotations

from functools import partial

import jax
from jaxtyping import Array, Float, Int

from jaxpage.layers.linear import Weight, linear
from jaxpage.parallel.sharding import Layout

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


def gated_mlp(
    x: Float[Array, "T D"],
    gate_up: Weight,
    down: Weight,
    activation: str,
    gate_up_bias: Float[Array, "2 F"] | None = None,
    down_bias: Float[Array, " D"] | None = None,
    num_tokens: Int[Array, ""] | None = None,
    layout: Layout | None = None,
) -> Float[Array, "T D"]:
    """``down(activation(gate(x)) * up(x))`` (Shazeer, 2020), ``activation`` a key of ACTIVATIONS.

    Weights are [2, F, D] and [D, F]; for ``num_tokens`` see ``linear``.
    """
    between = partial(linear, num_tokens=num_tokens, layout=layout, is_between_blocks=True)
    both = between(x, gate_up, gate_up_bias, axes=(None, "ffn", "hidden"))
    return between(ACTIVATIONS[activation](both[:, 0]) * both[:, 1], down, down_bias, axes=("hidden", "ffn"))
