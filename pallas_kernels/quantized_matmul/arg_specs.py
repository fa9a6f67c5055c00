"""Calls of ``quantized_matmul`` by shapes alone, for a model's sizes: what is compiled ahead of time.

Must not know how any implementation works.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.case import NUM_REQUESTS, PREFILL_TOKENS, Case, num_bytes, struct
from pallas_kernels.geometries import Geometry
from pallas_kernels.quantized_matmul import GROUP_SIZES, IMPLEMENTATIONS, KINDS, quantize, quantized_matmul


def cases(geometry: Geometry) -> list[Case]:
    """The matrices of a layer in each kind of quantisation for a decode step, and one of them for a prefill step."""
    names = list(geometry.projections)
    found = []
    for kind in KINDS:
        found += [_case(geometry, name, kind, "decode", NUM_REQUESTS) for name in names]
        found.append(_case(geometry, names[-1], kind, "prefill", PREFILL_TOKENS))
    return found


def _case(geometry: Geometry, name: str, kind: str, step: str, num_tokens: int) -> Case:
    num_rows, num_columns = geometry.projections[name]
    group_size = next((size for size in GROUP_SIZES if num_columns % size == 0), GROUP_SIZES[-1])
    make = functools.partial(quantize, kind=kind, group_size=group_size)
    weight = jax.eval_shape(make, struct((num_rows, num_columns), jnp.float32))
    x = struct((num_tokens, num_columns), jnp.bfloat16)
    return Case(
        operation="quantized_matmul",
        model=geometry.name,
        size=f"{num_columns} to {num_rows}",
        shape=f"{step} {num_tokens}",
        dtype=f"int4/{group_size}" if kind == "int4" else kind,
        function=quantized_matmul,
        arguments={"x": x, "weight": weight},
        options={},
        implementations=IMPLEMENTATIONS,
        minimum_bytes=num_bytes((x, weight)) + num_tokens * num_rows * x.dtype.itemsize,
    )
