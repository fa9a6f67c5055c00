"""What one step of the model takes and gives, as pytrees of device arrays.

Shapes: T tokens of the ragged batch (padded to a bucket), B rows of requests (padded), K listed logprobs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int, UInt

from pallas_kernels import AttentionMetadata

Device = Any
"""A ``jax.Device``, which type checkers see as a variable and not as a type."""


class ModelInputs(NamedTuple):
    """What the forward pass reads.

    Attributes:
        positions: index of each token in its sequence; 0 for padding.
        slot_mapping: where each token's key and value go: ``block_id * block_size + offset``; padding goes to block 0.
    """

    token_ids: Int[Array, " T"]
    positions: Int[Array, " T"]
    slot_mapping: Int[Array, " T"]
    attention: AttentionMetadata


class SamplingTensors(NamedTuple):
    """Per-row sampling settings. A row that does not sample in this step is padding.

    Attributes:
        slots: row of the per-request device state; the last, spare one for padding.
        seeds: two words of the 64-bit seed, sample index.
        positions: index in the sequence of the token being sampled; it keys the noise.
        suppress_stop: end ids are masked (min_tokens not reached).
        has_mask: only the tokens in ``SamplingState.token_mask`` may come.
    """

    slots: Int[Array, " B"]
    seeds: UInt[Array, "B 3"]
    positions: Int[Array, " B"]
    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    presence_penalty: Float[Array, " B"]
    frequency_penalty: Float[Array, " B"]
    repetition_penalty: Float[Array, " B"]
    suppress_stop: Bool[Array, " B"]
    has_bias: Bool[Array, " B"]
    has_mask: Bool[Array, " B"]


class SamplingState(NamedTuple):
    """Device state of running requests by slot; S slots, the last one spare.

    Attributes:
        last_token: the token sampled last, which the next step reads without a detour over the host.
        token_counts: times each id was generated; ``PROMPT_FLAG`` is added where the id is in the prompt.
            Only requests with penalties have meaningful rows.
        logit_bias: added to the logits; -inf forbids. Only requests with a bias have meaningful rows.
        stop_ids: ids masked until min_tokens; padded with the vocabulary size.
        token_mask: bit i % 32 of word i // 32 is set if token i may come next. Only requests with a constraint have
            meaningful rows; these are written before every step.
    """

    last_token: Int[Array, " S"]
    token_counts: Int[Array, "S V"]
    logit_bias: Float[Array, "S V"]
    stop_ids: Int[Array, "S E"]
    token_mask: Int[Array, "S W"]


class ScoredTokens(NamedTuple):
    """Log-softmax of the raw logits at some positions: of the token taken, and of the K most likely ones."""

    logprob: Float[Array, " R"]
    rank: Int[Array, " R"]
    top_ids: Int[Array, "R K"]
    top_logprobs: Float[Array, "R K"]


class StepOutput(NamedTuple):
    """What the host may read after a step.

    Attributes:
        token_ids: the sampled ids by row; meaningless for padding rows.
        sampled: scores of the sampled tokens; zeros unless some row asked for logprobs.
        prompt: scores of the next prompt token at each position; zeros unless some row asked for them.
        pooled: per row the hidden state of its last token in the step, or the sum over its tokens if it wants a mean;
            zeros unless some row is pooled.
        fingerprint: of the batch and the last hidden states as each device has them, which must be equal; None unless
            several processes compute the step.
    """

    token_ids: Int[Array, " B"]
    sampled: ScoredTokens
    prompt: ScoredTokens
    pooled: Float[Array, "B D"]
    fingerprint: Int[Array, " devices"] | None = None
