"""Tests for quantised weights and their product: storage, the contract on CPU, dispatch, errors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantized_matmul_contract as contract
from cpp import NATIVE, ON_CPU
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import is_nightly
from quantized_matmul_contract import make

from pallas_kernels.quantized_matmul import (
    QuantizedWeight,
    dequantize,
    explain,
    native,
    quantize,
    quantized_matmul,
    xla,
)
from pallas_kernels.quantized_matmul.weight import decode_fp8

QUICK_CASES = ("int8", "int8 many tokens", "fp8 f32", "int4", "int4 groups of 32", "int4 one token")
"""The rest differ from these in sizes, or combine them; they are for the night."""


@pytest.mark.parametrize("name", sorted(contract.CASES) if is_nightly else QUICK_CASES)
@pytest.mark.parametrize("implementation", [NATIVE, "xla"])
def test_contract(implementation: str, name: str) -> None:
    function = {"native": native, "xla": xla}[implementation].quantized_matmul
    contract.check_contract(function, contract.CASES[name])


@pytest.mark.parametrize("name", ["int8", "fp8 f32", "int4 groups of 64"])
def test_what_xla_does_on_accelerators(name: str) -> None:
    contract.check_error(xla._at_once, contract.CASES[name])


def test_decoded_float8_is_exact() -> None:
    """All 256 values."""
    stored = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), jnp.int8)
    expected = np.asarray(jax.lax.bitcast_convert_type(stored, jnp.float8_e4m3fn)).astype(np.float32)
    np.testing.assert_array_equal(decode_fp8(stored), expected)


@pytest.mark.parametrize(
    ("kind", "group_size", "bound"),
    [("int8", 128, 0.01), ("fp8", 128, 0.03), ("int4", 128, 0.11), ("int4", 64, 0.1), ("int4", 32, 0.09)],
)
def test_error_of_normal_weights(kind: str, group_size: int, bound: float) -> None:
    """Root of the mean square, relative."""
    weight = jax.random.normal(jax.random.key(0), (64, 2048))
    error = dequantize(make(weight, kind, group_size)) - weight
    assert 0.5 * bound < float(jnp.linalg.norm(error) / jnp.linalg.norm(weight)) < bound


@given(st.integers(0, 2**32 - 1), st.sampled_from(["int8", "fp8", "int4"]), st.integers(-60, 60))
def test_stored_numbers_are_the_nearest(seed: int, kind: str, exponent: int) -> None:
    weight = np.random.default_rng(seed).standard_normal((2, 64)).astype(np.float32) * np.float32(2.0**exponent)
    made = make(jnp.asarray(weight), kind, 32)
    real = np.asarray(dequantize(made))
    scales = np.asarray(made.scales)
    # Half a step of int8 and int4, but a whole one where int4 has no number: 8 steps opposite the extreme.
    step = np.repeat(np.abs(scales.T), 32, axis=1) if kind == "int4" else np.abs(scales)[:, None]
    if kind == "fp8":
        limit = np.maximum(np.abs(weight) * 2**-4, step * 2**-10)
    else:
        limit = 0.5 * step
        if kind == "int4":
            limit = np.where(weight / np.repeat(scales.T, 32, axis=1) > 7.5, step, limit)
    assert np.all(np.abs(real - weight) <= limit * 1.0001)


def test_zeros_and_tiny_numbers_stay_finite() -> None:
    weight = jnp.zeros((3, 64)).at[1, 3].set(1e-38).at[2, 4].set(1e-20)
    for kind in ("int8", "int4", "fp8"):
        real = np.asarray(dequantize(make(weight, kind, 64)))
        assert np.isfinite(real).all() and not real[:2].any()
        assert abs(real[2, 4] - 1e-20) < 1e-22


def test_bytes_of_int4_hold_columns_of_one_group() -> None:
    """Column i and column i + group_size / 2, so that a weight can be split between groups."""
    weight = jax.random.normal(jax.random.key(1), (3, 256))
    whole, halves = make(weight, "int4", 64), [make(part, "int4", 64) for part in jnp.split(weight, 2, axis=1)]
    np.testing.assert_array_equal(whole.values, jnp.concatenate([half.values for half in halves], axis=1))
    np.testing.assert_array_equal(whole.scales, jnp.concatenate([half.scales for half in halves], axis=0))
    numbers = np.round(np.asarray(dequantize(whole))[1, 64:128] / np.asarray(whole.scales)[1, 1]) + 8
    np.testing.assert_array_equal(np.asarray(whole.values)[1, 32:64] & 15, numbers[:32])
    np.testing.assert_array_equal(np.asarray(whole.values)[1, 32:64] >> 4, numbers[32:])


@pytest.mark.parametrize(("kind", "group_size"), [("int8", None), ("fp8", None), ("int4", 32)])
def test_a_weight_is_a_pytree_with_a_shape(kind: str, group_size: int | None) -> None:
    weight = jax.random.normal(jax.random.key(2), (2, 3, 5, 64))
    made = jax.jit(lambda weight: quantize(weight, kind, group_size or 128))(weight)
    assert (made.kind, made.group_size, made.shape, made.size) == (kind, group_size, weight.shape, weight.size)
    assert len(jax.tree.leaves(made)) == 2
    matrix = made.as_matrix()
    assert matrix.shape == (30, 64)
    np.testing.assert_array_equal(dequantize(matrix), dequantize(made).reshape(30, 64))
    shapes = jax.eval_shape(lambda weight: quantize(weight, kind, group_size or 128), weight)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), made) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), shapes
    )


@pytest.mark.parametrize("num_real", [0, 1, 30, 136])
@pytest.mark.parametrize("name", ["int8 many tokens", "int4 many tokens"])
def test_padding_may_be_left_out(name: str, num_real: int) -> None:
    x, weight = contract.arguments(contract.CASES[name])
    y = np.asarray(quantized_matmul(x, weight, num_real=jnp.int32(num_real)), np.float32)
    np.testing.assert_array_equal(y[:num_real], np.asarray(quantized_matmul(x, weight), np.float32)[:num_real])
    assert np.isfinite(y).all()


def test_auto_takes_a_kernel_everywhere() -> None:
    x, weight = contract.arguments(contract.CASES["int4"])
    assert explain(x, weight).implementation == ON_CPU
    assert explain(x, weight, platform="tpu").implementation == "mosaic_tpu"
    np.testing.assert_array_equal(
        quantized_matmul(x, weight), quantized_matmul(x, weight, implementation=ON_CPU), strict=True
    )


GOOD = QuantizedWeight(jnp.zeros((4, 64), jnp.int8), jnp.ones(4))
GOOD_INT4 = QuantizedWeight(jnp.zeros((4, 32), jnp.uint8), jnp.ones((2, 4)))


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (jnp.zeros((2, 32)), GOOD, r"weight must have shape \[F, 32\] for x of shape \(2, 32\), got \(4, 64\)"),
        (jnp.zeros((2, 64), jnp.float16), GOOD, "x must be a matrix of bfloat16 or float32, got float16"),
        (jnp.zeros((2, 1, 64)), GOOD, "x must be a matrix"),
        (jnp.zeros((2, 64)), QuantizedWeight(GOOD.values, jnp.ones(5)), r"scales must have shape \(4,\), got \(5,\)"),
        (
            jnp.zeros((2, 64)),
            QuantizedWeight(GOOD.values, jnp.ones(4, jnp.bfloat16)),
            "scales must be float32, got bfloat16",
        ),
        (
            jnp.zeros((2, 64)),
            QuantizedWeight(GOOD.values.astype(jnp.int16), jnp.ones(4)),
            "must be int8, uint8 or float8_e4m3fn, got int16",
        ),
        (
            jnp.zeros((2, 64)),
            QuantizedWeight(GOOD_INT4.values, jnp.ones((4, 2))),
            r"scales must have shape \[D / group_size, 4\], got \(4, 2\)",
        ),
        (
            jnp.zeros((2, 64)),
            QuantizedWeight(GOOD_INT4.values, jnp.ones((4, 4))),
            "group_size must be one of 128, 64, 32, got 16",
        ),
    ],
)
def test_arguments_that_do_not_fit(x: jax.Array, weight: QuantizedWeight, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantized_matmul(x, weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "int3"}, "kind must be one of int8, int4, fp8, got 'int3'"),
        ({"kind": "int4", "group_size": 48}, "group_size must be one of 128, 64, 32, got 48"),
        ({"kind": "int4", "group_size": 128}, "group_size 128 does not divide the weight's 192 columns"),
    ],
)
def test_weights_that_cannot_be_quantised(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(jnp.zeros((2, 192)), **options)
