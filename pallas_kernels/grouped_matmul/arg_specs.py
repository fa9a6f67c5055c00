"""Calls of ``grouped_matmul`` by shapes alone, for a model's sizes: what is compiled ahead of time.

Must not know how any implementation works.
"""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.case import NUM_REQUESTS, PREFILL_TOKENS, Case, num_bytes, struct
from pallas_kernels.geometries import Geometry
from pallas_kernels.grouped_matmul import IMPLEMENTATIONS, grouped_matmul

NUM_ADAPTERS = 8
ADAPTER_RANK = 16


def cases(geometry: Geometry) -> list[Case]:
    """The experts of a mixture in each dtype of weights, else low-rank adapters of the largest matrix."""
    steps = (("decode", NUM_REQUESTS), ("prefill", PREFILL_TOKENS))
    if geometry.num_experts:
        return [
            _case(
                geometry, f"{step} {tokens}", geometry.num_experts, size, tokens * geometry.num_experts_per_tok, dtype
            )
            for dtype in ("bfloat16", "int8", "float8_e4m3fn")
            for step, tokens in steps
            for size in geometry.feed_forward.values()
        ]
    num_rows, num_columns = geometry.feed_forward["gate_up"]
    return [
        _case(geometry, f"{step} {tokens}, rank {ADAPTER_RANK}", NUM_ADAPTERS, size, tokens, "bfloat16")
        for step, tokens in steps
        for size in ((ADAPTER_RANK, num_columns), (num_rows, ADAPTER_RANK))
    ]


def _case(geometry: Geometry, shape: str, num_groups: int, size: tuple[int, int], num_tokens: int, dtype: str) -> Case:
    num_rows, num_columns = size
    arguments = {
        "x": struct((num_tokens, num_columns), jnp.bfloat16),
        "weights": struct((num_groups, num_rows, num_columns), dtype),
        "group_sizes": struct((num_groups,), jnp.int32),
    }
    if dtype != "bfloat16":
        arguments["scales"] = struct((num_groups, num_rows), jnp.float32)
    return Case(
        operation="grouped_matmul",
        model=geometry.name,
        size=f"{num_groups} x {num_columns} to {num_rows}",
        shape=shape,
        dtype=dtype,
        function=grouped_matmul,
        arguments=arguments,
        options={},
        implementations=IMPLEMENTATIONS,
        minimum_bytes=num_bytes(arguments) + num_tokens * num_rows * 2,  # where every group has rows
    )
