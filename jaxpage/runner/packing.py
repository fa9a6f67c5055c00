"""All host metadata of a step as one int32 array: one transfer, split again on the device.

The layout is written once, in ``Packing``; host and device both follow it.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int


@dataclasses.dataclass(frozen=True)
class Field:
    """One piece of the packed array: its shape and the type its words stand for."""

    name: str
    shape: tuple[int, ...]
    dtype: type = np.int32


class Packing:
    """The layout for a bucket of T tokens and B rows.

    Fields: token_ids (-1: take the slot's last sampled token), prompt_targets (the prompt token after each position
    that is to be scored, else -1), per-row metadata and sampling settings, and ``flags`` of the whole step. A row
    samples from the logits of token ``logits_indices``, which is its own last one or, after a fork, its parent's; a
    forked row has no tokens and a seq_len of 0.
    """

    FLAGS = ("has_edits", "has_randomness", "has_filters", "has_logprobs", "has_prompt_logprobs", "has_pooling")

    def __init__(self, num_tokens: int, num_rows: int, max_blocks: int) -> None:
        self.num_tokens = num_tokens
        self.num_rows = num_rows
        rows = (num_rows,)
        self.fields = (
            Field("token_ids", (num_tokens,)),
            Field("prompt_targets", (num_tokens,)),
            Field("cu_seqlens_q", (num_rows + 1,)),
            Field("seq_lens", rows),
            Field("logits_indices", rows),
            Field("sample_positions", rows),
            Field("block_tables", (num_rows, max_blocks)),
            Field("slots", rows),
            Field("samples", rows),
            Field("seeds", (num_rows, 3), np.uint32),
            Field("temperature", rows, np.float32),
            Field("top_k", rows),
            Field("top_p", rows, np.float32),
            Field("min_p", rows, np.float32),
            Field("presence_penalty", rows, np.float32),
            Field("frequency_penalty", rows, np.float32),
            Field("repetition_penalty", rows, np.float32),
            Field("suppress_stop", rows),
            Field("has_bias", rows),
            Field("has_mask", rows),
            Field("pools_mean", rows),
            Field("flags", (len(self.FLAGS),)),
        )
        self.size = sum(math.prod(field.shape) for field in self.fields)

    def allocate(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """A zeroed packed array and views of its fields."""
        packed = np.zeros(self.size, np.int32)
        views, start = {}, 0
        for field in self.fields:
            size = math.prod(field.shape)
            views[field.name] = packed[start : start + size].view(field.dtype).reshape(field.shape)
            start += size
        return packed, views

    def flags(self, packed: np.ndarray) -> dict[str, bool]:
        """The flags of a packed array: they are its end."""
        return dict(zip(self.FLAGS, (packed[-len(self.FLAGS) :] != 0).tolist(), strict=True))

    def split(self, packed: Int[Array, " words"]) -> dict[str, Array]:
        """The fields of a packed array on the device."""
        views, start = {}, 0
        for field in self.fields:
            size = math.prod(field.shape)
            words = lax.slice_in_dim(packed, start, start + size).reshape(field.shape)
            views[field.name] = (
                words if field.dtype is np.int32 else lax.bitcast_convert_type(words, jnp.dtype(field.dtype))
            )
            start += size
        return views
