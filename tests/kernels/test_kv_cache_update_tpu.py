"""Writing into the cache and moving blocks on TPU, in the TPU interpreter: races and stray reads are errors there."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis_profiles import is_nightly
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the only place that tells of races found
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import copy_blocks, gather_blocks, scatter_blocks, write_kv
from pallas_kernels.kv_cache_update import mosaic_tpu
from pallas_kernels.kv_cache_update.quantization import is_quantized, stored_rows


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch of tokens by their slots; block 0 is padding."""

    dtype: str
    slots: tuple[int, ...]
    num_kv_heads: int = 2
    head_dim: int = 8
    block_size: int = 8
    dynamic: bool = False
    num_blocks: int = 6


DECODES = (40, 17, 0, 33, 18, 0)
"""Two of the tokens share a tile, and lie apart in the batch."""
PROMPTS = (*range(20, 37), *range(11, 16), *range(40, 42), 0, 0)
"""Partial and full tiles, the last first."""
MANY = tuple(int(slot) for slot in np.random.default_rng(0).permutation(np.arange(8, 200))[:60])
"""Scattered over more tiles than there are buffers."""

QUICK_CASES = {
    "decodes bf16": Case("bfloat16", DECODES),
    "prompts f32": Case("float32", PROMPTS, num_kv_heads=1),
    "one e5m2": Case("float8_e5m2", (12,)),
}
DYNAMIC_CASE = Case("int8", (*range(60, 73), 35, 0), block_size=32, dynamic=True)
MORE_CASES = {
    "decodes f16": Case("float16", DECODES, num_kv_heads=3),
    "decodes f32": Case("float32", DECODES),
    "decodes e4m3": Case("float8_e4m3fn", DECODES, block_size=16, num_blocks=4),
    "decodes e5m2 dynamic": Case("float8_e5m2", DECODES, dynamic=True),
    "prompts bf16": Case("bfloat16", PROMPTS, block_size=16),
    "prompts int8 dynamic": Case("int8", PROMPTS, num_kv_heads=5, dynamic=True),
    "prompt int8 block 64": Case("int8", tuple(range(64, 140)), block_size=64, num_blocks=4, num_kv_heads=1),
    "many bf16": Case("bfloat16", MANY, num_blocks=26),
    "many int8 dynamic": Case("int8", MANY, num_blocks=26, dynamic=True),
    "many e4m3 block 32": Case("float8_e4m3fn", MANY, block_size=32, num_blocks=8),
    "padding only": Case("bfloat16", (0, 3, 0)),
    "9/3x64 bf16": Case("bfloat16", PROMPTS, num_kv_heads=3, head_dim=64),
}


def interpreted(function: Any, num_cores: int = 1) -> Any:
    params = pltpu.InterpretParams(
        detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan", num_cores_or_threads=num_cores
    )

    def run(*arguments: Any) -> Any:
        with pltpu.force_tpu_interpret_mode(params):
            return function(*arguments)

    return jax.jit(run)


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    pltpu.reset_tpu_interpret_mode_state()
    yield
    races = interpret_pallas_call.races
    assert races is None or not races.races_found, "the interpreter saw a race"


def bits(array: Any) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def check_write(case: Case, num_cores: int = 1) -> None:
    """Every slot holds what the batch stores there; every bit of all others is as it was, whatever it stands for."""
    random, size = np.random.default_rng(1), case.block_size
    dtype = np.dtype(getattr(ml_dtypes, case.dtype, case.dtype))
    shape = (case.num_blocks, case.num_kv_heads, size, 2 * case.head_dim)
    cache = random.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8).view(dtype)
    k, v = random.standard_normal((2, len(case.slots), case.num_kv_heads, case.head_dim)).astype(np.float32)
    scales = np.full((case.num_blocks, 2, case.num_kv_heads, size), np.nan, np.float32) if case.dynamic else None
    rows, new_scales = stored_rows(jnp.asarray(k), jnp.asarray(v), dtype, dynamic=case.dynamic)
    write = interpreted(mosaic_tpu.write_kv, num_cores)
    arrays = (None if x is None else jnp.asarray(x) for x in (cache, k, v, np.asarray(case.slots, np.int32), scales))
    written = write(*arrays)
    blocks, offsets = np.divmod(case.slots, size)
    expected = cache.copy()
    expected[blocks, :, offsets] = rows
    np.testing.assert_array_equal(bits(written[0] if case.dynamic else written)[1:], bits(expected)[1:])
    if scales is not None:
        scales[blocks, :, :, offsets] = new_scales
        np.testing.assert_array_equal(written[1][1:], scales[1:])


@pytest.mark.parametrize("name", QUICK_CASES)
def test_write(name: str) -> None:
    check_write(QUICK_CASES[name])


@pytest.mark.slow
def test_write_dynamic() -> None:
    check_write(DYNAMIC_CASE)


@pytest.mark.slow
def test_two_cores_share_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_tpu, "_num_cores", lambda: 2)
    check_write(dataclasses.replace(QUICK_CASES["decodes bf16"], slots=(*PROMPTS, 9)), num_cores=2)


if is_nightly:

    @pytest.mark.parametrize("name", MORE_CASES)
    def test_write_of_more_cases(name: str) -> None:
        check_write(MORE_CASES[name])

    @pytest.mark.parametrize("name", ["many bf16", "many int8 dynamic", "padding only"])
    def test_two_cores_of_more_cases(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mosaic_tpu, "_num_cores", lambda: 2)
        check_write(MORE_CASES[name], num_cores=2)


def test_blocks_are_read_before_they_are_written() -> None:
    cache = np.random.default_rng(0).standard_normal((24, 1, 8, 128)).astype(np.float32)
    sources, destinations = np.arange(1, 22), np.arange(2, 23)
    sources[-2:] = destinations[-2:] = 0
    copied = interpreted(mosaic_tpu.copy_blocks)(*map(jnp.asarray, (cache, sources, destinations)))
    expected = cache.copy()
    expected[destinations] = cache[sources]
    np.testing.assert_array_equal(copied, expected)


@pytest.mark.parametrize(
    ("dtype", "block_size"), [("float32", 8), ("bfloat16", 16), ("int8", 16), ("float8_e4m3fn", 32)]
)
def test_write_lowers_for_tpu(dtype: str, block_size: int) -> None:
    shape = jax.ShapeDtypeStruct
    cache, token = shape((8, 3, block_size, 128), jnp.dtype(dtype)), shape((32, 3, 64), jnp.bfloat16)
    scales = shape((8, 2, 3, block_size), jnp.float32) if is_quantized(dtype) else None

    def write(cache: Any, scales: Any, k: Any, v: Any, slots: Any) -> Any:
        return write_kv(cache, k, v, slots, kv_scales=scales, platform="tpu")

    traced = jax.jit(write).trace(cache, scales, token, token, shape((32,), jnp.int32))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == (1 if scales is None else 2)


def test_moving_blocks_lowers_for_tpu() -> None:
    shape = jax.ShapeDtypeStruct
    cache, blocks, some = shape((8, 3, 16, 128), jnp.int8), shape((4, 3, 16, 128), jnp.int8), shape((4,), jnp.int32)
    for function, arguments, calls in (
        (copy_blocks, (some, some), 2),
        (gather_blocks, (some,), 1),
        (scatter_blocks, (blocks, some), 1),
    ):
        traced = jax.jit(functools.partial(function, platform="tpu")).trace(cache, *arguments)
        assert traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == calls
        # Rows that do not fill the lanes are left to XLA.
        small = [shape((*x.shape[:-1], 96), x.dtype) if x.ndim > 1 else x for x in (cache, *arguments)]
        traced = jax.jit(functools.partial(function, platform="tpu")).trace(*small)
        assert "tpu_custom_call" not in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_what_the_kernel_does_not_take() -> None:
    k = jnp.zeros((2, 2, 8))
    for cache in (jnp.zeros((3, 2, 4, 16)), jnp.zeros((3, 2, 40, 16), jnp.int8)):
        with pytest.raises(NotImplementedError, match="block_size"):
            write_kv(cache, k, k, jnp.asarray([50, 51]), implementation="mosaic_tpu")
    many = jax.ShapeDtypeStruct((40_000, 2, 8), jnp.float32)
    with pytest.raises(NotImplementedError, match="tokens are more"):
        jax.eval_shape(
            functools.partial(write_kv, implementation="mosaic_tpu"),
            jax.ShapeDtypeStruct((9000, 2, 8, 16), jnp.float32),
            many,
            many,
            jax.ShapeDtypeStruct((40_000,), jnp.int32),
        )
