"""What a call of an operation looks like by shapes alone: a case to compile or to test.

It owns the form of a case, which every ``arg_specs`` of an operation fills in, and the names of dtypes; it must not
know any operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

KV_DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")
"""Dtypes of KV caches that there are cases for; float16 is in the contract but no kernel has it."""
DTYPE_NAMES = {"bf16": "bfloat16", "f32": "float32", "fp32": "float32", "fp8": "float8_e4m3fn"}
DTYPE_NAMES |= {"fp8_e4m3": "float8_e4m3fn", "float8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
PREFILL_KV_DTYPES = ("bfloat16", "int8", "float8_e4m3fn")
"""Those that there are cases of prefill for."""
NUM_REQUESTS = 32
CONTEXT_TOKENS = 8192
PREFILL_TOKENS = 2048


class Case(NamedTuple):
    """One call.

    Attributes:
        operation: name of the function.
        model: name of the geometry; several, joined by commas, where they give the same call.
        size: what the geometry makes of the operation, e.g. heads or features.
        shape: what the batch is.
        dtype: of what the operation is about, the cache or the weights, and how it is quantised.
        function: takes ``arguments`` and ``options`` by name and, if there are ``implementations``, one of these.
        arguments: pytrees of ``jax.ShapeDtypeStruct``.
        options: hashable.
        implementations: names that ``function`` takes as ``implementation``; empty if there is but one.
        donated: arguments that are updated in place.
        minimum_bytes: what has to move to and from memory; None if that is not known from shapes.
        moved_bytes: what an implementation moves, by its name; only those that are known.
    """

    operation: str
    model: str
    size: str
    shape: str
    dtype: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    options: Mapping[str, Any]
    implementations: tuple[str, ...] = ()
    donated: tuple[str, ...] = ()
    minimum_bytes: int | None = None
    moved_bytes: Mapping[str, int] = {}

    @property
    def identity(self) -> object:
        """Equal for cases that are one to a compiler."""
        leaves, structure = jax.tree.flatten(dict(self.arguments))
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
        return self.operation, self.shape, self.dtype, shapes, structure, tuple(sorted(self.options.items()))


def struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def num_bytes(tree: Any) -> int:
    """Bytes of all arrays of a pytree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def kv_dtype_name(name: str) -> str:
    """The full name of a dtype of KV caches; raises ValueError for others."""
    full = DTYPE_NAMES.get(name, name)
    if full not in KV_DTYPES:
        raise ValueError(f"kv-dtype must be one of {', '.join(KV_DTYPES)}, got {name!r:.200}")
    return full


def is_quantized(kv_dtype: str) -> bool:
    return jnp.dtype(kv_dtype).itemsize == 1


def block_size_on(platform: str, kv_dtype: str) -> int:
    """Tokens of a block, as the engine has them by default."""
    if platform == "tpu":
        return 128 if is_quantized(kv_dtype) else 64  # rows of scales are whole lanes
    return 16 if platform == "gpu" else 32
