"""Whole blocks of the paged cache: copied, taken out, put back."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import copy_blocks, gather_blocks, scatter_blocks

SHAPE = (7, 2, 4, 16)
SCALES_SHAPE = (7, 2, 2, 4)
DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")


@functools.cache
def donating(function: Any) -> Any:
    return jax.jit(function, donate_argnums=0)


def random_blocks(
    num_blocks: int, dtype: Any = jnp.float32, seed: int = 0, block: tuple[int, ...] = SHAPE[1:]
) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((num_blocks, *block), np.float32) * 50
    return np.array(jnp.asarray(values, dtype))


def ids(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sources", "destinations"),
    [([1], [4]), ([1, 3], [2, 1]), ([2, 2, 5], [3, 4, 6]), ([1, 2, 0, 0], [2, 1, 0, 0])],
    ids=str,
)
def test_copies_read_before_they_write(sources: list[int], destinations: list[int], dtype: Any) -> None:
    cache = random_blocks(SHAPE[0], dtype)
    expected = cache.copy()
    expected[destinations] = cache[sources]
    copied = donating(copy_blocks)(jnp.asarray(cache), ids(*sources), ids(*destinations))
    assert copied.dtype == dtype
    np.testing.assert_array_equal(np.asarray(copied), expected)


def test_blocks_of_scales_are_moved_alike() -> None:
    scales = random_blocks(SCALES_SHAPE[0], block=SCALES_SHAPE[1:])
    scales[5] = np.nan
    expected = scales.copy()
    expected[[2, 1]] = scales[[1, 5]]
    copied = donating(copy_blocks)(jnp.asarray(scales), ids(1, 5, 0), ids(2, 1, 0))
    np.testing.assert_array_equal(copied, expected)
    taken = gather_blocks(copied, ids(2, 1))
    np.testing.assert_array_equal(taken, scales[[1, 5]])
    put = donating(scatter_blocks)(jnp.zeros(SCALES_SHAPE), taken, ids(6, 3))
    np.testing.assert_array_equal(np.asarray(put)[[6, 3]], scales[[1, 5]])


def test_taken_out_and_put_back() -> None:
    cache = random_blocks(SHAPE[0])
    blocks = jax.jit(gather_blocks)(jnp.asarray(cache), ids(3, 1, 3, 0))
    np.testing.assert_array_equal(blocks, cache[[3, 1, 3, 0]])
    other = random_blocks(SHAPE[0], seed=1)
    expected = other.copy()
    expected[[5, 2]] = cache[[3, 1]]
    put = donating(scatter_blocks)(jnp.asarray(other), blocks[:2], ids(5, 2))
    np.testing.assert_array_equal(put, expected)


def test_padding_changes_only_the_scratch_block() -> None:
    cache = random_blocks(SHAPE[0])
    put = donating(scatter_blocks)(jnp.asarray(cache), jnp.asarray(random_blocks(4, seed=1)), ids(0, 0, 0, 0))
    np.testing.assert_array_equal(np.asarray(put)[1:], cache[1:])


@pytest.mark.parametrize("num_copies", [1, 4])
def test_a_donated_cache_is_updated_in_place(num_copies: int) -> None:
    cache = jnp.zeros(SHAPE)
    copies = jnp.arange(num_copies)
    program = donating(copy_blocks).lower(cache, copies, copies).compile()
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < cache.nbytes
    address = cache.unsafe_buffer_pointer()
    copied = program(cache, copies, copies)
    assert cache.is_deleted()
    assert copied.unsafe_buffer_pointer() == address


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_every_function_lowers_for_accelerators(platform: str) -> None:
    shape = jax.ShapeDtypeStruct
    cache, blocks, some = shape(SHAPE, jnp.bfloat16), shape((4, *SHAPE[1:]), jnp.bfloat16), shape((4,), jnp.int32)
    for function, arguments in (
        (copy_blocks, (some, some)),
        (gather_blocks, (some,)),
        (scatter_blocks, (blocks, some)),
    ):
        lowered = jax.jit(function).trace(cache, *arguments).lower(lowering_platforms=(platform,))
        assert lowered.out_info.shape == (blocks.shape if function is gather_blocks else SHAPE)


def test_blocks_that_do_not_fit_are_refused() -> None:
    cache = jnp.zeros(SHAPE)
    with pytest.raises(ValueError, match="blocks must be 2 of a cache"):
        scatter_blocks(cache, jnp.zeros((3, *SHAPE[1:])), ids(1, 2))
    with pytest.raises(ValueError, match="blocks must be 3 of a cache"):
        scatter_blocks(cache, jnp.zeros((3, *SHAPE[1:]), jnp.bfloat16), ids(1, 2, 3))


def test_one_after_the_other_gives_the_same() -> None:
    # What runs on TPU; plain jax.numpy, so it runs here too.
    from pallas_kernels.kv_cache_update.xla import _scatter_in_turn

    cache, blocks = jnp.asarray(random_blocks(SHAPE[0])), jnp.asarray(random_blocks(3, seed=1))
    expected = scatter_blocks(cache, blocks, ids(4, 1, 6))
    np.testing.assert_array_equal(jax.jit(_scatter_in_turn)(cache, blocks, ids(4, 1, 6)), expected)
