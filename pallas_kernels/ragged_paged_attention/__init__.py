"""Causal attention of a ragged batch of query tokens over a paged KV cache: the contract and its dispatch."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float, Int

from pallas_kernels.ragged_paged_attention import reference, xla

IMPLEMENTATIONS = {"xla": xla.ragged_paged_attention, "reference": reference.ragged_paged_attention}
"""By preference: the first that does not raise NotImplementedError is taken when none is asked for."""


class AttentionMetadata(NamedTuple):
    """Where the queries of each request are, and where its keys and values lie.

    Attributes:
        block_tables: block ids of each request, position ``p`` lies in block ``block_tables[b, p // block_size]``.
            Entries past the request's last block are not read as data; they must be valid ids (0 is usual).
        seq_lens: tokens of each request in the cache, the queries of this call included; 0 for padding rows.
        cu_seqlens_q: query tokens of the requests before, so that request b owns queries
            ``cu_seqlens_q[b]:cu_seqlens_q[b + 1]``: its last ones by position. Padding rows own none.
    """

    block_tables: Int[Array, "B max_blocks"]
    seq_lens: Int[Array, " B"]
    cu_seqlens_q: Int[Array, " B+1"]


def ragged_paged_attention(
    q: Float[Array, "T N H"],
    kv_cache: Float[Array, "num_blocks 2 K block_size H"],
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    implementation: str = "auto",
) -> Float[Array, "T N H"]:
    """Softmax attention of every query over the keys of its own request at or before its position.

    Query head n reads KV head ``n // (N // K)``. Accumulation is float32 whatever the dtypes.

    Args:
        q: queries, request after request; tokens past ``cu_seqlens_q[-1]`` are padding.
        kv_cache: index 0 of axis 1 holds keys, 1 values. The keys of the queries themselves are already written.
            Slots that no request owns may hold anything, NaN included.
        scale: factor on the dot products.
        sliding_window: a query at position p sees keys at ``p - sliding_window + 1`` to p; None means all.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``.
        implementation: a key of ``IMPLEMENTATIONS``, or "auto".

    Returns:
        The attended values in q's dtype; zeros for padding tokens.

    Raises:
        ValueError: for an unknown implementation.
        NotImplementedError: if the implementation asked for does not take this case.
    """
    if q.shape[1] % kv_cache.shape[2]:
        raise ValueError(f"num_heads {q.shape[1]} is not a multiple of num_kv_heads {kv_cache.shape[2]}")
    if implementation != "auto" and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be auto or one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
    names = list(IMPLEMENTATIONS) if implementation == "auto" else [implementation]
    refusals = []
    for name in names:
        try:
            return IMPLEMENTATIONS[name](
                q, kv_cache, *metadata, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap
            )
        except NotImplementedError as error:
            refusals.append(f"{name}: {error}")
    raise NotImplementedError("; ".join(refusals))
