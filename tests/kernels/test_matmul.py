"""``matmul``: the contract through every implementation, padding, what is refused, and who is picked."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cpp import NATIVE, ON_CPU, needs_compiler

from pallas_kernels.matmul import (
    IMPLEMENTATIONS,
    BlockWeight,
    block_weight,
    dequantize,
    explain,
    matmul,
    multiplies_blocks,
    real_rows,
)

BOUNDS = {"float32": 1e-5, "bfloat16": 1e-2}
"""Largest error allowed, relative to the largest magnitude of the result in float64."""
SHAPES = (
    (1, (96,), 576),
    (1, (5,), 7),
    (2, (17, 3), 64),
    (4, (31,), 100),
    (8, (3, 2, 10), 576),
    (13, (130,), 40),
    (32, (2, 96), 1536),
    (33, (50,), 2000),
    (70, (49,), 16),
)
"""Tokens, rows of the weight, depth: multiples of tiles and not, shallower than a vector, deeper than a stretch."""


@functools.cache
def arguments(shape: tuple[int, tuple[int, ...], int], dtype: str) -> tuple[jax.Array, jax.Array]:
    num_tokens, rows, depth = shape
    random = np.random.default_rng(num_tokens + depth)
    x, weight = random.standard_normal((num_tokens, depth)), random.standard_normal((*rows, depth))
    return jnp.asarray(x, dtype), jnp.asarray(weight, dtype)


def product(implementation: str, x: Any, weight: Any, **options: Any) -> np.ndarray:
    call = jax.jit(functools.partial(matmul, implementation=implementation, **options))
    y = call(x, weight)
    assert y.shape == (len(x), *weight.shape[:-1]) and y.dtype == x.dtype
    return np.asarray(y, np.float32)


@pytest.mark.parametrize("implementation", [NATIVE, *IMPLEMENTATIONS[1:]])
class TestContract:
    @pytest.mark.parametrize("dtype", BOUNDS)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_error(self, implementation: str, shape: tuple[int, tuple[int, ...], int], dtype: str) -> None:
        x, weight = arguments(shape, dtype)
        exact = np.einsum("td,...d->t...", np.asarray(x, np.float64), np.asarray(weight, np.float64))
        error = np.max(np.abs(product(implementation, x, weight) - exact)) / np.max(np.abs(exact))
        assert error < BOUNDS[dtype]

    def test_the_same_call_gives_the_same_bits(self, implementation: str) -> None:
        x, weight = arguments((33, (50,), 2000), "float32")
        first = product(implementation, x, weight)
        for _ in range(5):
            np.testing.assert_array_equal(product(implementation, x, weight), first)

    @pytest.mark.parametrize("num_tokens", [8, 33])
    def test_a_row_does_not_notice_the_others(self, implementation: str, num_tokens: int) -> None:
        x, weight = arguments((33, (50,), 2000), "float32")
        x = x[:num_tokens]
        alone = product(implementation, jnp.full_like(x, jnp.nan).at[3].set(x[3]), weight)
        np.testing.assert_array_equal(alone[3], product(implementation, x, weight)[3])

    @pytest.mark.parametrize("dtype", BOUNDS)
    @pytest.mark.parametrize("num_real", [0, 1, 7, 32, 33])
    def test_padding(self, implementation: str, num_real: int, dtype: str) -> None:
        """Bits do not depend on how many rows count; what does not count is at least a number."""
        x, weight = arguments((33, (50,), 2000), dtype)
        y = product(implementation, x, weight, num_real=jnp.int32(num_real))
        np.testing.assert_array_equal(y[:num_real], product(implementation, x, weight)[:num_real])
        assert np.isfinite(y).all()

    def test_nothing_to_multiply(self, implementation: str) -> None:
        assert product(implementation, jnp.ones((0, 8)), jnp.ones((3, 8))).shape == (0, 3)
        assert not product(implementation, jnp.ones((2, 0)), jnp.ones((3, 0)), num_real=jnp.int32(2)).any()


@needs_compiler
def test_a_token_has_the_same_bits_in_batches_of_any_size() -> None:
    """More than the contract asks for, and true of the C++ one only: sums have one order, whatever the tile."""
    x, weight = arguments((33, (50,), 2000), "float32")
    whole = product("native", x, weight)
    for num_tokens in (1, 2, 5, 8, 31):
        np.testing.assert_array_equal(product("native", x[:num_tokens], weight), whole[:num_tokens])


def blocks(shape: tuple[int, tuple[int, ...], int], size: int, has_offsets: bool) -> BlockWeight:
    _, rows, depth = shape
    random = np.random.default_rng(size + depth)
    values = random.integers(-128, 128, (*rows, depth), dtype=np.int8)
    scales, offsets = random.standard_normal((2, *rows, depth // size)).astype(np.float32)
    return jax.device_put(block_weight(values, scales, 100 * offsets if has_offsets else None))


BLOCKS = (((1, (5,), 32), 32, True), ((2, (3, 16), 64), 16, False), ((8, (3, 2, 10), 576), 32, False),
          ((33, (113,), 1536), 32, True), ((70, (48,), 160), 16, True), ((13, (160,), 2048), 16, True))  # fmt: skip
"""Shapes as in ``SHAPES``, rows of full and other panels; the size of a block, whether there are offsets."""


@pytest.mark.parametrize("implementation", [NATIVE, *IMPLEMENTATIONS[1:]])
class TestBlocks:
    @pytest.mark.parametrize("dtype", BOUNDS)
    @pytest.mark.parametrize("case", BLOCKS, ids=str)
    def test_error(self, implementation: str, case: Any, dtype: str) -> None:
        weight = blocks(*case)
        x, _ = arguments(case[0], dtype)
        exact = np.einsum("td,...d->t...", np.asarray(x, np.float64), np.asarray(dequantize(weight), np.float64))
        error = np.max(np.abs(product(implementation, x, weight) - exact)) / np.max(np.abs(exact))
        assert error < BOUNDS[dtype]

    def test_the_same_call_gives_the_same_bits(self, implementation: str) -> None:
        shape = (33, (113,), 1536)
        x, weight = arguments(shape, "float32")[0], blocks(shape, 32, True)
        first = product(implementation, x, weight)
        for _ in range(5):
            np.testing.assert_array_equal(product(implementation, x, weight), first)

    @pytest.mark.parametrize("num_tokens", [8, 33])
    def test_a_row_does_not_notice_the_others(self, implementation: str, num_tokens: int) -> None:
        shape = (33, (113,), 1536)
        x, weight = arguments(shape, "float32")[0][:num_tokens], blocks(shape, 32, True)
        alone = product(implementation, jnp.full_like(x, jnp.nan).at[3].set(x[3]), weight)
        np.testing.assert_array_equal(alone[3], product(implementation, x, weight)[3])

    @pytest.mark.parametrize("dtype", BOUNDS)
    @pytest.mark.parametrize("num_real", [0, 1, 7, 32, 33])
    def test_padding(self, implementation: str, num_real: int, dtype: str) -> None:
        shape = (33, (113,), 1536)
        x, weight = arguments(shape, dtype)[0], blocks(shape, 32, True)
        y = product(implementation, x, weight, num_real=jnp.int32(num_real))
        np.testing.assert_array_equal(y[:num_real], product(implementation, x, weight)[:num_real])
        assert np.isfinite(y).all()

    def test_no_tokens(self, implementation: str) -> None:
        assert product(implementation, jnp.ones((0, 32)), blocks((0, (3,), 32), 32, True)).shape == (0, 3)


@needs_compiler
def test_a_token_has_the_same_bits_in_batches_of_any_size_with_blocks() -> None:
    shape = (33, (113,), 1536)
    x, weight = arguments(shape, "float32")[0], blocks(shape, 32, True)
    whole = product("native", x, weight)
    for num_tokens in (1, 2, 3, 5, 8, 31):
        np.testing.assert_array_equal(product("native", x[:num_tokens], weight), whole[:num_tokens])


@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize("size", [16, 32])
def test_blocks_stand_for_their_numbers(size: int, has_offsets: bool) -> None:
    random = np.random.default_rng(size)
    values = random.integers(-128, 128, (3, 7, 96), dtype=np.int8)
    scales, offsets = random.standard_normal((2, 3, 7, 96 // size)).astype(np.float32)
    weight = block_weight(values, scales, offsets if has_offsets else None)
    expected = values * np.repeat(scales, size, axis=-1)
    if has_offsets:
        expected = expected + np.repeat(offsets, size, axis=-1)
    assert weight.shape == values.shape and weight.num_rows == 21
    np.testing.assert_array_equal(dequantize(weight), expected)
    rows = jnp.asarray([20, 0, 16, 15, 0])
    np.testing.assert_array_equal(real_rows(weight, rows), expected.reshape(-1, 96)[np.asarray(rows)])


@pytest.mark.parametrize(
    ("scales", "offsets", "message"),
    [
        ((3, 3), None, r"scales must have shape \[3, 64\] with 16 or 32 times fewer columns, got \[3, 3\]"),
        ((2, 2), None, r"scales must have shape"),
        ((3, 2), (3, 1), r"offsets must have shape"),
        ((3, 2), (3, 4), r"offsets must have the shape of scales, \[3, 2\], got \[3, 4\]"),
    ],
)
def test_blocks_that_do_not_fit(scales: tuple[int, ...], offsets: tuple[int, ...] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        block_weight(np.zeros((3, 64), np.int8), np.ones(scales, np.float32), offsets and np.ones(offsets, np.float32))


def test_blocks_of_other_types() -> None:
    values, scales = np.zeros((3, 64), np.int8), np.ones((3, 2), np.float32)
    with pytest.raises(ValueError, match=r"values must be int8 with rows of columns, got int32 \[3, 64\]"):
        block_weight(values.astype(np.int32), scales)
    with pytest.raises(ValueError, match="values must be int8"):
        block_weight(values[:, :0], scales[:, :0])
    with pytest.raises(ValueError, match="scales must be float32, got float64"):
        block_weight(values, scales.astype(np.float64))


@pytest.mark.parametrize("implementation", [NATIVE, *IMPLEMENTATIONS[1:]])
def test_blocks_without_rows(implementation: str) -> None:
    weight = blocks((2, (0,), 64), 32, True)
    assert dequantize(weight).shape == (0, 64)
    assert product(implementation, jnp.ones((2, 64)), weight).shape == (2, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row_shape": (17,)}, r"values must be int8 \(2, 64, 16\) for x of shape \(2, 64\) and rows of shape \(17,\)"),
        ({"values": jnp.ones((1, 24, 16), jnp.int8)}, "values must be int8"),
        ({"values": jnp.ones((1, 64, 16))}, "values must be int8 .* got float32"),
        ({"scales": jnp.ones((1, 1, 16))}, r"scales must be float32 of shape \[\(1, 4, 16\), \(1, 2, 16\)\]"),
        ({"offsets": jnp.ones((1, 2, 16), jnp.int32)}, "offsets must be float32 .* got int32"),
        ({"offsets": jnp.ones((1, 4, 16))}, "offsets must have the shape of scales"),
    ],
)
def test_wrong_blocks(changes: dict[str, Any], message: str) -> None:
    weight = dataclasses.replace(blocks((1, (16,), 64), 32, False), **changes)
    with pytest.raises(ValueError, match=message):
        matmul(jnp.ones((2, 64)), weight)


def test_blocks_have_whole_blocks_of_columns() -> None:
    weight = BlockWeight(jnp.ones((1, 24, 16), jnp.int8), jnp.ones((1, 1, 16)), None, (16,))
    with pytest.raises(ValueError, match=r"a multiple of 16 columns, x has shape \(2, 24\)"):
        matmul(jnp.ones((2, 24)), weight)


@pytest.mark.parametrize("implementation", [NATIVE, *IMPLEMENTATIONS[1:]])
def test_a_scale_that_is_no_number_spoils_its_row_only(implementation: str) -> None:
    shape = (33, (113,), 1536)
    x, weight = arguments(shape, "float32")[0], blocks(shape, 32, True)
    whole = product(implementation, x, weight)
    spoilt = dataclasses.replace(weight, scales=weight.scales.at[3, 7, 5].set(jnp.nan))
    y = product(implementation, x, spoilt)
    assert np.isnan(y[:, 53]).all()
    np.testing.assert_array_equal(np.delete(y, 53, axis=1), np.delete(whole, 53, axis=1))


def test_blocks_are_multiplied_as_they_are_by_cpp_only() -> None:
    assert multiplies_blocks() == multiplies_blocks("cpu") == (ON_CPU == "native")
    assert not multiplies_blocks("gpu") and not multiplies_blocks("tpu")


def test_auto_takes_cpp_on_cpu_and_xla_elsewhere() -> None:
    x, weight = arguments(SHAPES[0], "float32")
    assert explain(x, weight).implementation == ON_CPU
    assert explain(x, weight, platform="gpu").implementation == "xla"
    assert explain(x, weight, platform="tpu").implementation == "xla"


@pytest.mark.parametrize(
    ("x", "weight", "options", "message"),
    [
        (jnp.ones((2, 8)), jnp.ones((3, 9)), {}, r"weight must be float32 of shape \[..., 8\].* got float32 \(3, 9\)"),
        (jnp.ones((2, 8)), jnp.ones((3, 8), jnp.bfloat16), {}, "weight must be float32 .* got bfloat16"),
        (jnp.ones((2, 8), jnp.float16), jnp.ones((3, 8), jnp.float16), {}, "x must be a matrix of bfloat16 or float32"),
        (jnp.ones(8), jnp.ones((3, 8)), {}, "x must be a matrix"),
        (jnp.ones((2, 8)), jnp.ones((3, 8)), {"implementation": "fast"}, "implementation must be auto or one of"),
    ],
)
def test_wrong_arguments(x: Any, weight: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        matmul(x, weight, **options)
