"""What is done to logits before a token is drawn: penalties, biases, masks, and the filters top-k, top-p and min-p.

A row with neutral settings passes through unchanged, bit for bit.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxpage.batch import SamplingState, SamplingTensors

PROMPT_FLAG = 1 << 24
"""Set in ``SamplingState.token_counts`` where the id occurs in the prompt; counts stay below it."""


def edit_logits(logits: Float[Array, "B V"], sampling: SamplingTensors, state: SamplingState) -> Float[Array, "B V"]:
    """Penalties, then the bias, then the masks of tokens and of end ids, where a row asks."""
    rows = jnp.arange(len(logits))
    counts = state.token_counts[sampling.slots]
    generated = counts & (PROMPT_FLAG - 1)
    seen = counts > 0
    repetition = sampling.repetition_penalty[:, None]
    penalised = jnp.where(logits > 0, logits / repetition, logits * repetition)
    edited = jnp.where(seen & (repetition != 1), penalised, logits)
    has_counts = ((sampling.presence_penalty != 0) | (sampling.frequency_penalty != 0))[:, None]
    counted = edited - sampling.frequency_penalty[:, None] * generated.astype(jnp.float32)
    counted -= sampling.presence_penalty[:, None] * (generated > 0)
    edited = jnp.where(has_counts, counted, edited)
    edited = jnp.where(sampling.has_bias[:, None], edited + state.logit_bias[sampling.slots], edited)
    may_come = _unpacked(state.token_mask[sampling.slots], logits.shape[1])
    edited = jnp.where(sampling.has_mask[:, None] & ~may_come, -jnp.inf, edited)
    stop_ids = jnp.where(sampling.suppress_stop[:, None], state.stop_ids[sampling.slots], logits.shape[1])
    return edited.at[rows[:, None], stop_ids].set(-jnp.inf, mode="drop")


def _unpacked(words: Int[Array, "B W"], vocab_size: int) -> Bool[Array, "B V"]:
    """One boolean a token from masks of 32 tokens a word."""
    bits = (words[:, :, None] >> jnp.arange(32)) & 1
    return bits.reshape(len(words), -1)[:, :vocab_size] != 0


def filter_logits(logits: Float[Array, "B V"], sampling: SamplingTensors) -> Float[Array, "B V"]:
    """-inf for all but the candidates of top-k, then of top-p and min-p among these.

    All three keep the tokens above some logit, so a threshold is searched for instead of sorting the vocabulary: exact,
    and tokens that tie with the last candidate are candidates too. ``logits`` are scaled by the temperature already.
    """
    vocab_size = logits.shape[1]
    top_k = jnp.where((sampling.top_k <= 0) | (sampling.top_k > vocab_size), vocab_size, sampling.top_k)
    keys = _ordered_keys(logits)
    threshold = _largest_key(lambda key: jnp.sum(keys >= key[:, None], axis=1) >= top_k, len(logits))
    kept = jnp.where(keys >= threshold[:, None], logits, -jnp.inf)
    best = jnp.max(kept, axis=1, keepdims=True)
    weights = jnp.exp(kept - best)
    wanted = sampling.top_p * jnp.sum(weights, axis=1)

    def holds_top_p(key: UInt[Array, " B"]) -> Array:
        return jnp.sum(jnp.where(keys >= key[:, None], weights, 0.0), axis=1) >= wanted

    threshold = jnp.where(sampling.top_p < 1, _largest_key(holds_top_p, len(logits)), 0)
    kept = jnp.where(keys >= threshold[:, None], kept, -jnp.inf)
    is_likely = weights >= sampling.min_p[:, None]
    return jnp.where(is_likely | (kept == best), kept, -jnp.inf)


def _ordered_keys(x: Float[Array, "B V"]) -> UInt[Array, "B V"]:
    """Unsigned integers in the order of the floats; both zeros count as equal."""
    # Adding +0.0 would not do: XLA drops that addition.
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x.astype(jnp.float32)), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest_key(holds, num_rows: int) -> UInt[Array, " B"]:
    """Per row the largest key for which ``holds`` is true; it is true for 0 and false above some key."""

    def try_bit(index: Int[Array, ""], key: UInt[Array, " B"]) -> UInt[Array, " B"]:
        candidate = key | (jnp.uint32(1) << (31 - index).astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, key)

    # The barrier hides that there are always 32 bits: XLA would unroll the loop, which doubles a step's compile time.
    num_bits = lax.optimization_barrier(jnp.int32(32))
    return lax.fori_loop(0, num_bits, try_bit, jnp.zeros(num_rows, jnp.uint32))
