"""Tests for the TPU kernel of ``quantized_matmul`` in the TPU interpreter, and lowered."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
import quantized_matmul_contract as contract
from hypothesis_profiles import is_nightly
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the only place that tells of races found
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantized_matmul import mosaic_tpu, quantize

CONTRACT_CASES = ("int8", "int4 groups of 64")
ERROR_CASES = ("fp8", "int4 many tokens", "int8 one token", "int4 f32")
"""The rest differ from these in sizes, or combine them; they are for the night."""


def multiply(*arrays: jax.Array) -> jax.Array:
    params = pltpu.InterpretParams(detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan")
    with pltpu.force_tpu_interpret_mode(params):
        return mosaic_tpu.quantized_matmul(*arrays)


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    pltpu.reset_tpu_interpret_mode_state()
    yield
    races = interpret_pallas_call.races
    assert races is None or not races.races_found, "the interpreter saw a race"


@pytest.mark.parametrize("name", CONTRACT_CASES)
def test_contract(name: str) -> None:
    contract.check_contract(multiply, contract.CASES[name])


@pytest.mark.parametrize("name", ERROR_CASES)
def test_error(name: str) -> None:
    contract.check_error(multiply, contract.CASES[name])


if is_nightly:

    @pytest.mark.parametrize("name", sorted(set(contract.CASES) - set(CONTRACT_CASES)))
    def test_contract_of_the_rest(name: str) -> None:
        contract.check_contract(multiply, contract.CASES[name])


@pytest.mark.parametrize(
    "case",
    [
        contract.Case("int8", 40, 200, 512),
        contract.Case("int4", 4, 130, 1024),
        contract.Case("int4", 72, 130, 1024, group_size=64),
    ],
)
def test_several_tiles_of_columns_and_tokens(case: contract.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_tpu, "MAX_COLUMNS", 256)
    monkeypatch.setattr(mosaic_tpu, "MAX_TOKENS", 16)
    monkeypatch.setattr(mosaic_tpu, "SPARE_ROWS", 32)
    contract.check_error(functools.partial(multiply), case)


def test_tiles() -> None:
    bfloat16 = jnp.dtype("bfloat16")
    assert mosaic_tpu._tile(8, 6144, 4096, 1, bfloat16) == (256, 8, 4096)
    assert mosaic_tpu._tile(2048, 4096, 14336, 1, bfloat16) == (256, 512, 3584)
    assert mosaic_tpu._tile(8, 960, 576, 1, bfloat16) == (512, 8, 576)
    assert mosaic_tpu._tile(8, 4096, 7168, 2, bfloat16) == (512, 8, 1792), "bytes of int4"
    assert mosaic_tpu._tile(2048, 4096, 11008, 1, bfloat16) == (128, 128, 11008), "86 * 128: all of a row"
    with pytest.raises(NotImplementedError, match="66688 columns"):
        mosaic_tpu._tile(8, 64, 521 * 128, 1, bfloat16)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("num_tokens", [1, 256])
def test_lowers_for_a_tpu(kind: str, num_tokens: int) -> None:
    weight = jax.eval_shape(lambda: quantize(jnp.zeros((960, 576)), kind, 64))
    x = jax.ShapeDtypeStruct((num_tokens, 576), jnp.bfloat16)
    exported = jax.export.export(jax.jit(mosaic_tpu.quantized_matmul), platforms=["tpu"])(
        x, weight.values, weight.scales
    )
    assert exported.mlir_module().count("tpu_custom_call") == 1
