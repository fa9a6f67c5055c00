"""Writing keys and values into the paged cache, as they are and quantised."""

from __future__ import annotations

import functools
from typing import Any

import attention_contract as contract
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import write_kv
from pallas_kernels.ragged_paged_attention import reference

NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM = 6, 2, 4, 8
SLOTS = [23, 4, 11, 17, 9]
QUANTIZED = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


@functools.cache
def donating(**options: Any) -> Any:
    return jax.jit(functools.partial(write_kv, **options), donate_argnums=0)


@functools.cache
def donating_with_scales() -> Any:
    def write(cache: Any, scales: Any, k: Any, v: Any, slots: Any) -> Any:
        return write_kv(cache, k, v, slots, kv_scales=scales)

    return jax.jit(write, donate_argnums=(0, 1))


@functools.cache
def attending(scale: float) -> Any:
    return jax.jit(functools.partial(reference.ragged_paged_attention, scale=scale))


def random_values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def random_tokens(num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    k, v = (random_values(num_tokens, NUM_KV_HEADS, HEAD_DIM, seed=seed) for seed in (1, 2))
    return k, v


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def poisoned(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """A cache and its scales in which whatever is read shows."""
    shape = (NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_DIM)
    cache = np.full(shape, 77 if dtype == "int8" else np.nan, np.float32).astype(dtype_of(dtype))
    return cache, np.full((NUM_BLOCKS, 2, NUM_KV_HEADS, BLOCK_SIZE), np.nan, np.float32)


def expected_cache(cache: np.ndarray, k: np.ndarray, v: np.ndarray, slots: list[int]) -> np.ndarray:
    cache = cache.copy()
    for token, slot in enumerate(slots):
        block, offset = divmod(slot, BLOCK_SIZE)
        cache[block, :, offset] = np.concatenate([k[token], v[token]], axis=-1)
    return cache


def bits(array: Any) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def write_dynamic(dtype: str, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Stored elements [T, 2, K, H] and scales [T, 2, K] of tokens written into SLOTS; all else is as it was."""
    cache, scales = poisoned(dtype)
    written = donating_with_scales()(*map(jnp.asarray, (cache, scales, k, v)), jnp.asarray(SLOTS))
    new_cache, new_scales = map(np.asarray, written)
    assert new_cache.dtype == cache.dtype
    blocks, offsets = np.divmod(SLOTS, BLOCK_SIZE)
    others = np.ones((NUM_BLOCKS, BLOCK_SIZE), bool)
    others[blocks, offsets] = others[0] = False
    for old, new, axis in ((cache, new_cache, 2), (scales, new_scales, 3)):
        np.testing.assert_array_equal(bits(np.moveaxis(old, axis, 1)[others]), bits(np.moveaxis(new, axis, 1)[others]))
    stored = new_cache[blocks, :, offsets].astype(np.float32).reshape(len(SLOTS), NUM_KV_HEADS, 2, HEAD_DIM)
    return stored.swapaxes(1, 2), new_scales[blocks, :, :, offsets]


@pytest.mark.parametrize("slots", [[9], [4, 5, 6, 7, 8], [23, 4, 11, 17], [12, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_token_lies_in_its_slot_and_nothing_else_changes(slots: list[int], dtype: str) -> None:
    cache = random_values(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_DIM).astype(dtype_of(dtype))
    cache[3, 1, 2] = np.nan
    k, v = random_tokens(len(slots))
    written = donating()(jnp.asarray(cache), jnp.asarray(k), jnp.asarray(v), jnp.asarray(slots, jnp.int32))
    assert written.dtype == dtype
    # Block 0 is the scratch block: what padding leaves there does not matter.
    np.testing.assert_array_equal(bits(written)[1:], bits(expected_cache(cache, k, v, slots))[1:])


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_donated_cache_is_updated_in_place(num_tokens: int) -> None:
    cache = jnp.zeros((NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_DIM))
    slots = jnp.arange(4, 4 + num_tokens)
    address = cache.unsafe_buffer_pointer()
    written = donating()(cache, *map(jnp.asarray, random_tokens(num_tokens)), slots)
    assert cache.is_deleted()
    assert written.unsafe_buffer_pointer() == address


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_donated_cache_and_its_scales_are_updated_in_place(num_tokens: int) -> None:
    cache, scales = map(jnp.asarray, poisoned("int8"))
    arguments = (cache, scales, *map(jnp.asarray, random_tokens(num_tokens)), jnp.arange(4, 4 + num_tokens))
    addresses = [array.unsafe_buffer_pointer() for array in (cache, scales)]
    written = donating_with_scales()(*arguments)
    assert cache.is_deleted()
    assert scales.is_deleted()
    assert [array.unsafe_buffer_pointer() for array in written] == addresses


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_program_does_not_copy_the_cache(num_tokens: int, dtype: str) -> None:
    shape = jax.ShapeDtypeStruct
    cache = shape((64, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_DIM), jnp.dtype(dtype))
    scales = shape((64, 2, NUM_KV_HEADS, BLOCK_SIZE), jnp.float32)
    token, slots = shape((num_tokens, NUM_KV_HEADS, HEAD_DIM), jnp.float32), shape((num_tokens,), jnp.int32)
    if dtype == "int8":
        program = donating_with_scales().lower(cache, scales, token, token, slots).compile()
    else:
        program = donating().lower(cache, token, token, slots).compile()
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 64 * NUM_KV_HEADS * BLOCK_SIZE * 2 * 4


def test_without_donation_the_old_cache_stays() -> None:
    cache = jnp.zeros((NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_DIM))
    one = jnp.ones((2, NUM_KV_HEADS, HEAD_DIM))
    written = write_kv(cache, one, one, jnp.asarray([4, 9]))
    assert float(cache.sum()) == 0
    assert float(written.sum()) == 2 * 2 * NUM_KV_HEADS * HEAD_DIM


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_dynamic_quantisation_is_within_its_bound(dtype: str) -> None:
    k, v = random_tokens(len(SLOTS))
    k[1] *= 1e4
    v[2] *= 1e-4
    real = np.stack([k, v], axis=1)
    stored, scales = write_dynamic(dtype, k, v)
    largest = np.abs(real).max(axis=-1, keepdims=True)
    np.testing.assert_allclose(scales, largest[..., 0] / QUANTIZED[dtype], rtol=1e-6)
    assert np.abs(stored).max() == QUANTIZED[dtype]
    relative = {"int8": 0.0, "float8_e4m3fn": 1 / 16, "float8_e5m2": 1 / 8}[dtype]
    absolute = 1 / 254 if dtype == "int8" else 1 / 400_000
    error = np.abs(stored * scales[..., None] - real)
    assert (error <= np.maximum(relative * np.abs(real), absolute * largest) * (1 + 1e-5)).all()


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_dynamic_scales_of_odd_vectors(dtype: str) -> None:
    k, v = random_tokens(len(SLOTS))
    k[0], k[1], v[2] = 0.0, 1e-38, 3e38
    v[0, 0, 3], v[1, 1, 0] = np.nan, np.inf
    stored, scales = write_dynamic(dtype, k, v)
    with np.errstate(invalid="ignore"):
        real = stored * scales[..., None]
    assert not real[0, 0].any()
    assert not stored[0, 0].any()
    assert (np.abs(real[1, 0]) <= 1e-38).all()
    np.testing.assert_allclose(real[2, 1], 3e38, rtol=1e-6)
    # What is not finite is found in its own vector, and in no other.
    is_bad = np.zeros(scales.shape, bool)
    is_bad[0, 1, 0] = is_bad[1, 1, 1] = True
    assert np.isnan(real[is_bad]).any(axis=-1).all()
    assert np.isfinite(real[~is_bad]).all()


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_static_quantisation_rounds_and_clips(dtype: str) -> None:
    largest, (cache, _) = QUANTIZED[dtype], poisoned(dtype)
    vector = np.asarray([0.0, 1.0, 3.0, -5.0, 9.0, 1e30, -1e30, largest], np.float32)
    k = np.tile(vector, (len(SLOTS), NUM_KV_HEADS, 1))
    written = donating(k_scale=2.0, v_scale=4.0)(*map(jnp.asarray, (cache, k, k)), jnp.asarray(SLOTS))
    blocks, offsets = np.divmod(SLOTS, BLOCK_SIZE)
    stored = np.asarray(written)[blocks, :, offsets].astype(np.float32)
    halves = {
        "int8": [0.0, 0.0, 2.0, -2.0, 4.0, largest, -largest, 64.0],  # ties go to the even one
        "float8_e4m3fn": [0.0, 0.5, 1.5, -2.5, 4.5, largest, -largest, 224.0],
        "float8_e5m2": [0.0, 0.5, 1.5, -2.5, 4.0, largest, -largest, 28672.0],
    }[dtype]
    np.testing.assert_array_equal(stored[..., :HEAD_DIM], np.broadcast_to(halves, k.shape))
    np.testing.assert_array_equal(
        stored[..., HEAD_DIM:],
        np.clip(np.rint(k / 4) if dtype == "int8" else k / 4, -largest, largest).astype(cache.dtype).astype(np.float32),
    )


def test_a_quantised_cache_without_scales_stores_what_is_given() -> None:
    cache, _ = poisoned("float8_e5m2")
    k, v = random_tokens(len(SLOTS))
    written = donating()(*map(jnp.asarray, (cache, k, v)), jnp.asarray(SLOTS))
    np.testing.assert_array_equal(
        bits(written)[1:], bits(expected_cache(cache, k.astype(cache.dtype), v.astype(cache.dtype), SLOTS))[1:]
    )


@pytest.mark.parametrize("scales", ["dynamic", "static"])
@pytest.mark.parametrize(("dtype", "bound"), [("int8", 0.04), ("float8_e4m3fn", 0.1), ("float8_e5m2", 0.2)])
def test_attention_over_what_was_written(dtype: str, bound: float, scales: str) -> None:
    """Exactly attention over what the stored elements stand for, and near attention over the real values."""
    num_tokens, head_dim, size = 13, 16, 8
    q, k, v = (jnp.asarray(random_values(num_tokens, heads, head_dim, seed=heads)) for heads in (4, 2, 2))
    v = v[::-1]
    metadata = (jnp.asarray([[3, 1]]), jnp.asarray([num_tokens]), jnp.asarray([0, num_tokens]))
    slots = jnp.asarray([(3, 1)[p // size] * size + p % size for p in range(num_tokens)])
    attend = attending(head_dim**-0.5)
    plain = jnp.full((4, 2, size, 2 * head_dim), jnp.nan)
    cache = jnp.zeros(plain.shape, jnp.dtype(dtype))
    if scales == "dynamic":
        cache, kv_scales = write_kv(cache, k, v, slots, kv_scales=jnp.full((4, 2, 2, size), jnp.nan))
    else:
        k_scale, v_scale = 4.0 / QUANTIZED[dtype], 3.5 / QUANTIZED[dtype]
        cache = write_kv(cache, k, v, slots, k_scale=k_scale, v_scale=v_scale)
        kv_scales = jnp.broadcast_to(jnp.asarray([k_scale, v_scale])[:, None, None], (4, 2, 2, size))
    attended = attend(q, cache, *metadata, kv_scales=kv_scales)
    blocks, offsets = slots // size, slots % size
    stored = cache[blocks, :, offsets].astype(jnp.float32).reshape(num_tokens, 2, 2, head_dim)
    stands_for = stored * kv_scales[blocks, :, :, offsets].swapaxes(1, 2)[..., None]
    same = attend(q, write_kv(plain, stands_for[:, :, 0], stands_for[:, :, 1], slots), *metadata)
    assert contract.relative_error(np.asarray(attended), np.asarray(same)) < 1e-5
    exact = attend(q, write_kv(plain, k, v, slots), *metadata)
    assert contract.relative_error(np.asarray(attended), np.asarray(exact)) < bound


def test_arguments_that_do_not_fit_are_refused() -> None:
    k, v = map(jnp.asarray, random_tokens(2))
    slots = jnp.asarray([4, 5])
    quantised, scales = map(jnp.asarray, poisoned("int8"))
    plain, _ = map(jnp.asarray, poisoned("float32"))
    with pytest.raises(ValueError, match="k and v must have shape"):
        write_kv(plain, k[:, :1], v, slots)
    with pytest.raises(ValueError, match="scales are for quantised caches"):
        write_kv(plain, k, v, slots, k_scale=2.0)
    with pytest.raises(ValueError, match="kv_scales must be float32"):
        write_kv(quantised, k, v, slots, kv_scales=scales[:-1])
    arguments: Any = {"kv_scales": scales, "v_scale": 1.0}
    with pytest.raises(ValueError, match="kv_scales exclude"):
        write_kv(quantised, k, v, slots, **arguments)
    with pytest.raises(ValueError, match="implementation must be"):
        write_kv(plain, k, v, slots, implementation="fastest")
