"""Tests for the Triton kernel of ``quantized_matmul``, in the interpreter and lowered for CUDA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
import quantized_matmul_contract as contract
from hypothesis_profiles import is_nightly
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.quantized_matmul import quantize, triton

multiply = functools.partial(triton.quantized_matmul, interpret=True)
CONTRACT_CASES = ("int8", "fp8", "int4 groups of 64")
ERROR_CASES = ("int8 f32", "int8 one token", "int8 many tokens", "int4 f32", "int4 many tokens", "int4 groups of 32")


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


@pytest.mark.parametrize("case", [contract.Case("int8", 3, 40, 2112), contract.Case("int4", 2, 70, 4096)])
def test_splits_of_the_columns(case: contract.Case) -> None:
    """The first has steps that do not divide among the splits."""
    x, weight = contract.arguments(case)
    assert triton._tile(x, weight.values, weight.scales).splits == 4
    contract.check_contract(multiply, case)


def test_steps_that_do_not_divide_the_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = triton._tile
    monkeypatch.setattr(triton, "_tile", lambda *arrays: tile(*arrays)._replace(columns=128))
    contract.check_error(functools.partial(multiply), contract.CASES["int8"])


def test_float8_converted_by_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's default is to decode it."""
    monkeypatch.setattr(triton, "FP8_CAPABILITY", 0.0)
    contract.check_error(functools.partial(multiply), contract.CASES["fp8"])


def test_splits_fill_a_gpu() -> None:
    def splits(num_tokens: int, num_rows: int, num_columns: int) -> int:
        shape = jax.ShapeDtypeStruct
        arrays = shape((num_tokens, num_columns), jnp.bfloat16), shape((num_rows, num_columns), jnp.int8)
        return triton._tile(*arrays, shape((num_rows,), jnp.float32)).splits

    assert splits(8, 28672, 4096) == 1
    assert splits(8, 6144, 4096) == 2
    assert splits(8, 4096, 14336) == 4
    assert splits(1, 576, 576) == 1, "no split is shorter than MIN_SPLIT_BYTES"
    assert splits(64, 1024, 4096) == 2, "partial sums cost no more than PARTIALS_SHARE"


def test_refuses_what_it_cannot_address() -> None:
    shape = jax.ShapeDtypeStruct
    arrays = shape((8, 65536), jnp.bfloat16), shape((32768, 65536), jnp.int8), shape((32768,), jnp.float32)
    with pytest.raises(NotImplementedError, match="offsets are 32-bit"):
        jax.eval_shape(triton.quantized_matmul, *arrays)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_lowers_for_cuda(kind: str) -> None:
    """Without a GPU; JAX from 0.11 on wants to be told which one is meant."""
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("NVIDIA H100", None, "gpu"))
    check = export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
    weight = jax.eval_shape(lambda: quantize(jnp.zeros((960, 576)), kind, 64))
    x = jax.ShapeDtypeStruct((8, 576), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(mesh):
        exported = export.export(jax.jit(triton.quantized_matmul), platforms=["cuda"], disabled_checks=[check])(
            x, weight.values, weight.scales
        )
    assert "quantized_matmul" in exported.mlir_module()
