"""Builds the inputs of the sampler for a batch of rows, everything neutral unless given."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.batch import SamplingState, SamplingTensors
from jaxpage.sampling.sampler import sample

NEUTRAL: dict[str, tuple[Any, type]] = {
    "slots": (0, np.int32),
    "positions": (0, np.int32),
    "temperature": (0, np.float32),
    "top_k": (0, np.int32),
    "top_p": (1, np.float32),
    "min_p": (0, np.float32),
    "presence_penalty": (0, np.float32),
    "frequency_penalty": (0, np.float32),
    "repetition_penalty": (1, np.float32),
    "suppress_stop": (False, np.bool_),
    "has_bias": (False, np.bool_),
    "has_mask": (False, np.bool_),
}


def settings(num_rows: int, seeds: Any = 0, sample_index: Any = 0, **fields: Any) -> SamplingTensors:
    """Sampling settings; each value is for all rows or one a row. Seeds are 64-bit."""
    words = np.zeros((num_rows, 3), np.uint32)
    numbers = np.broadcast_to(np.asarray(seeds, np.int64), (num_rows,)).astype(np.uint64)
    words[:, 0], words[:, 1] = numbers >> np.uint64(32), numbers & np.uint64(0xFFFFFFFF)
    words[:, 2] = sample_index
    values = {
        name: np.array(np.broadcast_to(np.asarray(fields.pop(name, default), dtype), (num_rows,)))
        for name, (default, dtype) in NEUTRAL.items()
    }
    assert not fields, fields
    return SamplingTensors(seeds=words, **values)


def state(num_slots: int, vocab_size: int) -> SamplingState:
    """Device state that edits nothing; what a slot holds is meaningless unless a row asks for it."""
    return SamplingState(
        last_token=np.zeros(num_slots, np.int32),
        token_counts=np.zeros((num_slots, vocab_size), np.int32),
        logit_bias=np.full((num_slots, vocab_size), np.nan, np.float32),
        stop_ids=np.full((num_slots, 4), vocab_size, np.int32),
        token_mask=np.zeros((num_slots, -(-vocab_size // 32)), np.int32),
    )


_sample = jax.jit(sample)


def draw(logits: np.ndarray, rows: SamplingTensors, device_state: SamplingState | None = None, **flags: bool) -> Any:
    """The token of each row. All work is done unless a flag is given as False."""
    names = ("has_edits", "has_randomness", "has_filters")
    device_state = device_state or state(2, logits.shape[1])
    tokens = _sample(
        jnp.asarray(logits, jnp.float32),
        jax.tree.map(jnp.asarray, rows),
        jax.tree.map(jnp.asarray, device_state),
        *(jnp.asarray(flags.get(name, True)) for name in names),
    )
    return np.asarray(tokens)
