"""Writing keys and values into the paged cache."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import write_kv

NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM = 6, 2, 4, 8


@functools.cache
def donating() -> Any:
    return jax.jit(write_kv, donate_argnums=0)


def random_values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def expected_cache(cache: np.ndarray, k: np.ndarray, v: np.ndarray, slots: list[int]) -> np.ndarray:
    cache = cache.copy()
    for token, slot in enumerate(slots):
        block, offset = divmod(slot, BLOCK_SIZE)
        cache[block, :, offset] = np.concatenate([k[token], v[token]], axis=-1)
    return cache


@pytest.mark.parametrize("slots", [[9], [4, 5, 6, 7, 8], [23, 4, 11, 17], [12, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_token_lies_in_its_slot_and_nothing_else_changes(slots: list[int], dtype: Any) -> None:
    cache = np.asarray(jnp.asarray(random_values(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_DIM), dtype))
    k, v = (random_values(len(slots), NUM_KV_HEADS, HEAD_DIM, seed=seed) for seed in (1, 2))
    written = donating()(jnp.asarray(cache), jnp.asarray(k), jnp.asarray(v), jnp.asarray(slots, jnp.int32))
    assert written.dtype == dtype
    # Block 0 is the scratch block: what padding leaves there does not matter.
    np.testing.assert_array_equal(np.asarray(written)[1:], expected_cache(cache, k, v, slots)[1:])


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_donated_cache_is_updated_in_place(num_tokens: int) -> None:
    cache = jnp.zeros((NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_DIM))
    k, v = (jnp.asarray(random_values(num_tokens, NUM_KV_HEADS, HEAD_DIM, seed=seed)) for seed in (1, 2))
    slots = jnp.arange(4, 4 + num_tokens)
    address = cache.unsafe_buffer_pointer()
    written = donating()(cache, k, v, slots)
    assert cache.is_deleted()
    assert written.unsafe_buffer_pointer() == address


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_the_program_does_not_copy_the_cache(num_tokens: int) -> None:
    cache = jax.ShapeDtypeStruct((NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_DIM), jnp.float32)
    token = jax.ShapeDtypeStruct((num_tokens, NUM_KV_HEADS, HEAD_DIM), jnp.float32)
    program = donating().lower(cache, token, token, jax.ShapeDtypeStruct((num_tokens,), jnp.int32)).compile()
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < np.prod(cache.shape) * 4


def test_without_donation_the_old_cache_stays() -> None:
    cache = jnp.zeros((NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_DIM))
    one = jnp.ones((2, NUM_KV_HEADS, HEAD_DIM))
    written = write_kv(cache, one, one, jnp.asarray([4, 9]))
    assert float(cache.sum()) == 0
    assert float(written.sum()) == 2 * 2 * NUM_KV_HEADS * HEAD_DIM
