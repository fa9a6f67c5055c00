"""The feed-forward block as a mixture of experts (Shazeer et al., 2017): every token goes through a few of many."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpage.layers.linear import StoredWeight, weight_axes
from jaxpage.layers.mlp import ACTIVATIONS
from jaxpage.parallel.sharding import Layout, local_index, on_local_parts, summed
from pallas_kernels import QuantizedWeight, grouped_matmul


def moe_mlp(
    x: Float[Array, "T D"],
    router: Float[Array, "E D"],
    gate_up: StoredWeight,
    down: StoredWeight,
    activation: str,
    *,
    num_experts_per_tok: int,
    norm_topk_prob: bool,
    num_tokens: Int[Array, ""],
    layout: Layout | None = None,
) -> Float[Array, "T D"]:
    """The sum of what its most likely experts make of a token, each a gated MLP, weighted by the router.

    No expert has a limit of tokens and none is dropped: a token's result is that of the token alone, to rounding (which
    other tokens share its experts decides where its row lies in their matrix products). The same batch gives the same
    bits.

    Args:
        router: weights of the logits of the experts. Logits and their softmax are float32.
        gate_up, down: weights of all experts, [E, 2, F, D] and [E, D, F]; quantised ones have a scale per channel.
        activation: a key of ACTIVATIONS.
        norm_topk_prob: the weights of a token's experts are made to sum to 1.
        num_tokens: tokens from here on are padding: they go to no expert, and their result is zero.
        layout: devices may split the experts, the inner features of each, and the hidden ones.
    """
    experts, weights = route(x, router, num_experts_per_tok, norm_topk_prob)
    is_real = (jnp.arange(len(x)) < num_tokens)[:, None]
    weights = jnp.where(is_real, weights, 0.0)
    # A row for each token and expert, sorted by expert; those of padding are last and in no group.
    expert_of_row = jnp.where(is_real, experts, len(router)).reshape(-1)
    order = jnp.argsort(expert_of_row, stable=True)
    place = jnp.argsort(order)
    group_sizes = jnp.sum(expert_of_row[:, None] == jnp.arange(len(router)), axis=0, dtype=jnp.int32)

    def through_experts(
        x: Array,
        gate_up: StoredWeight,
        down: StoredWeight,
        weights: Array,
        group_sizes: Array,
        order: Array,
        place: Array,
    ) -> Float[Array, "T D"]:
        num_local = len(_stored(gate_up))
        if num_local < len(group_sizes):
            # The rows of this device's experts come first; those of others are behind them and in no group, so that
            # they are zero.
            first_expert = local_index(layout, "experts") * num_local
            first_row = jnp.sum(jnp.where(jnp.arange(len(group_sizes)) < first_expert, group_sizes, 0))
            group_sizes = lax.dynamic_slice_in_dim(group_sizes, first_expert, num_local)
            order, place = jnp.roll(order, -first_row), (place - first_row) % len(place)
        rows = x[order // num_experts_per_tok]
        both = summed(layout, _grouped_linear(rows, gate_up, group_sizes), "hidden")
        results = _grouped_linear(ACTIVATIONS[activation](both[:, 0]) * both[:, 1], down, group_sizes)
        # Summed in order of the router's choice, whatever the order of the experts.
        results = results[place].reshape(*weights.shape, -1).astype(jnp.float32)
        # Each device has some experts, and of these a part of the inner features: a part of the sum.
        return summed(layout, jnp.sum(results * weights[:, :, None], axis=1).astype(x.dtype), "experts", "expert_ffn")

    replicated = ((None, None), (None,), (None,), (None,))
    in_axes = (
        (None, "hidden"),
        weight_axes(gate_up, ("experts", None, "expert_ffn", "hidden")),
        weight_axes(down, ("experts", "hidden", "expert_ffn")),
        *replicated,
    )
    arguments = (x, gate_up, down, weights, group_sizes, order, place)
    return on_local_parts(layout, through_experts, in_axes, (None, "hidden"), *arguments)


def route(
    x: Float[Array, "T D"], router: Float[Array, "E D"], num_experts_per_tok: int, norm_topk_prob: bool
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """The most likely experts of each token, the likeliest first (of equals the first), and their weights."""
    logits = lax.dot_general(x, router, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    weights, experts = lax.top_k(jax.nn.softmax(logits, axis=-1), num_experts_per_tok)
    if norm_topk_prob:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return experts, weights


def _grouped_linear(rows: Float[Array, "R D"], weight: StoredWeight, group_sizes: Int[Array, " E"]) -> Array:
    """Rows times the transposed weight of their group, [E, ..., D]: [R, ...]."""
    stored, scales = _stored(weight), weight.scales if isinstance(weight, QuantizedWeight) else None
    num_experts = len(group_sizes)
    y = grouped_matmul(
        rows,
        stored.reshape(num_experts, -1, stored.shape[-1]),
        group_sizes,
        scales=None if scales is None else scales.reshape(num_experts, -1),
    )
    return y.reshape(len(rows), *stored.shape[1:-1])


def _stored(weight: StoredWeight) -> Array:
    return weight.values if isinstance(weight, QuantizedWeight) else weight
