"""The step: one pure function from parameters, cache, sampling state and a packed batch to the next of each."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxpage.batch import ModelInputs, SamplingState, SamplingTensors, ScoredTokens, StepOutput
from jaxpage.layers.kv_cache import KVCache
from jaxpage.models.config import ModelConfig
from jaxpage.models.decoder import Params, apply_layers, embed, final_norm, unembed
from jaxpage.parallel.sharding import Layout
from jaxpage.runner.packing import Packing
from jaxpage.sampling.sampler import no_scores, sample, score
from pallas_kernels import AttentionMetadata

PROMPT_SCORE_ROWS = 64
"""Prompt positions scored together: bounds the logits that exist at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What a step is compiled for. ``config`` and ``layout`` are those of a stage where a model has several.

    Attributes:
        layout: how arrays lie over devices; None: on one.
        has_fingerprint: see ``StepOutput``; for several devices.
    """

    config: ModelConfig
    packing: Packing
    block_size: int
    num_logprobs: int
    attention_implementation: str
    layout: Layout | None = None
    has_fingerprint: bool = False


def step(
    params: Params, kv_cache: KVCache, state: SamplingState, packed: Int[Array, " words"], options: StepOptions
) -> tuple[KVCache, SamplingState, StepOutput]:
    """Computes the scheduled tokens, writes their keys and values, and samples one token for the rows that ask.

    Row ``num_rows - 1`` may be a padding row; padding rows use the spare slot of ``state``.
    """
    kv_cache, x = first_stage(params, kv_cache, state.last_token, packed, options)
    return kv_cache, *_sample(params, state, x, packed, options)


def first_stage(
    params: Params, kv_cache: KVCache, last_token: Int[Array, " S"], packed: Int[Array, " words"], options: StepOptions
) -> tuple[KVCache, Float[Array, "T D"]]:
    """The beginning of a step: the embedding and the first layers. Gives what the next stage takes.

    Args:
        last_token: by slot, the token sampled last (see ``SamplingState``).
    """
    fields = options.packing.split(packed)
    inputs = model_inputs(fields, last_token, options.block_size)
    x = embed(params, options.config, inputs.token_ids, options.layout)
    return _layers(params, kv_cache, x, inputs, options)


def middle_stage(
    params: Params, kv_cache: KVCache, x: Float[Array, "T D"], packed: Int[Array, " words"], options: StepOptions
) -> tuple[KVCache, Float[Array, "T D"]]:
    """Some layers in the middle."""
    inputs = model_inputs(options.packing.split(packed), None, options.block_size)
    return _layers(params, kv_cache, x, inputs, options)


def last_stage(
    params: Params,
    kv_cache: KVCache,
    state: SamplingState,
    x: Float[Array, "T D"],
    packed: Int[Array, " words"],
    options: StepOptions,
) -> tuple[KVCache, SamplingState, StepOutput]:
    """The last layers, and the sampler."""
    fields = options.packing.split(packed)
    kv_cache, x = _layers(params, kv_cache, x, model_inputs(fields, None, options.block_size), options)
    return kv_cache, *_sample(params, state, x, packed, options)


def _layers(
    params: Params, kv_cache: KVCache, x: Float[Array, "T D"], inputs: ModelInputs, options: StepOptions
) -> tuple[KVCache, Float[Array, "T D"]]:
    return apply_layers(params, options.config, kv_cache, x, inputs, options.attention_implementation, options.layout)


def _sample(
    params: Params, state: SamplingState, x: Float[Array, "T D"], packed: Int[Array, " words"], options: StepOptions
) -> tuple[SamplingState, StepOutput]:
    """The end of a step: logits, tokens, and what else the host asked for."""
    fields = options.packing.split(packed)
    config, packing, num_logprobs = options.config, options.packing, options.num_logprobs
    hidden = final_norm(params, config, x, options.layout)
    flags = dict(zip(Packing.FLAGS, fields["flags"] != 0, strict=True))
    with jax.named_scope("logits"):
        # Rows that sample come first, as a rule: what lies behind the last of them costs nothing.
        end = jnp.max(jnp.where(fields["samples"] != 0, jnp.arange(1, packing.num_rows + 1), 0))
        logits = unembed(params, config, hidden[fields["logits_indices"]], options.layout, end)
    with jax.named_scope("sample"):
        sampling = sampling_tensors(fields)
        token_ids = sample(logits, sampling, state, flags["has_edits"], flags["has_randomness"], flags["has_filters"])
        sampled = lax.cond(
            flags["has_logprobs"],
            lambda: score(logits, token_ids, num_logprobs),
            lambda: no_scores(packing.num_rows, num_logprobs),
        )
        prompt = lax.cond(
            flags["has_prompt_logprobs"],
            lambda: score_prompt(params, hidden, fields["prompt_targets"], options),
            lambda: no_scores(packing.num_tokens, num_logprobs),
        )
        # Rows that do not sample write to the spare slot.
        slots = jnp.where(fields["samples"] != 0, sampling.slots, len(state.last_token) - 1)
        state = state._replace(
            last_token=state.last_token.at[slots].set(token_ids),
            token_counts=state.token_counts.at[slots, token_ids].add(1),
        )
    with jax.named_scope("pool"):
        pooled = lax.cond(
            flags["has_pooling"],
            lambda: pool(hidden, fields["cu_seqlens_q"], fields["logits_indices"], fields["pools_mean"] != 0),
            lambda: jnp.zeros((packing.num_rows, config.hidden_size), jnp.float32),
        )
    return state, StepOutput(token_ids, sampled, prompt, pooled, _fingerprint(hidden, packed, options))


def _fingerprint(
    hidden: Float[Array, "T D"], packed: Int[Array, " words"], options: StepOptions
) -> Int[Array, " devices"] | None:
    """A number from the bits of what each device was told, and of the hidden states it has of its own."""
    if options.layout is None or not options.has_fingerprint:
        return None
    mesh = options.layout.mesh

    def add_up(*arrays: Array) -> Int[Array, " 1"]:
        return sum((_checksum(array) for array in arrays), start=jnp.int32(0))[None]

    # Both are whole on every device: in_specs split nothing, and nothing is compared on the way.
    each, whole = PartitionSpec(mesh.axis_names), (PartitionSpec(), PartitionSpec())
    return jax.shard_map(add_up, mesh=mesh, in_specs=whole, out_specs=each, check_vma=False)(hidden, packed)


def _checksum(array: Array) -> Int[Array, ""]:
    words = lax.bitcast_convert_type(array, jnp.int32 if array.dtype.itemsize == 4 else jnp.int16)
    places = jnp.arange(words.size, dtype=jnp.int32).reshape(words.shape) % 8191 + 1
    return jnp.sum(words.astype(jnp.int32) * places, dtype=jnp.int32)


def model_inputs(fields: dict[str, Array], last_token: Int[Array, " S"] | None, block_size: int) -> ModelInputs:
    """What the forward pass reads, derived from the per-row metadata.

    Args:
        last_token: by slot, what takes the place of tokens that the host does not know; None where nobody reads these.
    """
    cu_seqlens_q, seq_lens, block_tables = fields["cu_seqlens_q"], fields["seq_lens"], fields["block_tables"]
    tokens = jnp.arange(len(fields["token_ids"]))
    num_rows = len(seq_lens)
    is_real = tokens < cu_seqlens_q[-1]
    rows = jnp.minimum(jnp.searchsorted(cu_seqlens_q, tokens, side="right") - 1, num_rows - 1)
    positions = jnp.where(is_real, seq_lens[rows] - cu_seqlens_q[rows + 1] + tokens, 0)
    blocks = block_tables[rows, positions // block_size]
    slot_mapping = jnp.where(is_real, blocks * block_size + positions % block_size, 0)
    token_ids = fields["token_ids"]
    if last_token is not None:
        token_ids = jnp.where(token_ids < 0, last_token[fields["slots"][rows]], token_ids)
    metadata = AttentionMetadata(block_tables, seq_lens, cu_seqlens_q)
    return ModelInputs(token_ids, positions, slot_mapping, metadata)


def sampling_tensors(fields: dict[str, Array]) -> SamplingTensors:
    """The per-row settings of the sampler."""
    values = {name: fields[name] for name in SamplingTensors._fields if name in fields}
    values["suppress_stop"] = values["suppress_stop"] != 0
    values["has_bias"] = values["has_bias"] != 0
    values["has_mask"] = values["has_mask"] != 0
    return SamplingTensors(**values, positions=fields["sample_positions"])


def pool(
    hidden: Float[Array, "T D"],
    cu_seqlens_q: Int[Array, " B+1"],
    last_tokens: Int[Array, " B"],
    wants_mean: Bool[Array, " B"],
) -> Float[Array, "B D"]:
    """Each row's last hidden state or, if it wants a mean, the sum over its tokens of this step; in float32."""
    hidden = hidden.astype(jnp.float32)
    tokens, num_rows = jnp.arange(len(hidden)), len(last_tokens)
    rows = jnp.where(tokens < cu_seqlens_q[-1], jnp.searchsorted(cu_seqlens_q, tokens, side="right") - 1, num_rows)
    # What lies behind the last token may hold anything.
    sums = jax.ops.segment_sum(jnp.where(rows[:, None] < num_rows, hidden, 0), rows, num_rows)
    return jnp.where(wants_mean[:, None], sums, hidden[last_tokens])


def score_prompt(
    params: Params, hidden: Float[Array, "T D"], targets: Int[Array, " T"], options: StepOptions
) -> ScoredTokens:
    """Scores of ``targets`` (the next prompt tokens; -1: not wanted) at each position, some rows at a time."""
    num_tokens, num_logprobs = len(hidden), options.num_logprobs
    rows = min(PROMPT_SCORE_ROWS, num_tokens)
    padding = -num_tokens % rows
    hidden = jnp.pad(hidden, ((0, padding), (0, 0)))
    targets = jnp.pad(targets, (0, padding), constant_values=-1)
    wanted = jnp.max(jnp.where(targets >= 0, jnp.arange(len(targets)), -1)) + 1

    def some_rows(index: Int[Array, ""], scores: ScoredTokens) -> ScoredTokens:
        start = index * rows
        some = lax.dynamic_slice_in_dim(hidden, start, rows)
        logits = unembed(params, options.config, some, options.layout, jnp.minimum(wanted - start, rows))
        part = score(logits, jnp.maximum(lax.dynamic_slice_in_dim(targets, start, rows), 0), num_logprobs)
        return jax.tree.map(lambda whole, piece: lax.dynamic_update_slice_in_dim(whole, piece, start, 0), scores, part)

    scores = lax.fori_loop(0, (wanted + rows - 1) // rows, some_rows, no_scores(len(targets), num_logprobs))
    return jax.tree.map(lambda whole: whole[:num_tokens], scores)
