"""``grouped_matmul`` in Pallas-Triton, in the interpreter and lowered for CUDA."""

from __future__ import annotations

import functools

import grouped_matmul_contract as contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis_profiles import is_nightly
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.grouped_matmul import triton

multiply = functools.partial(triton.grouped_matmul, interpret=True)
QUICK = ("borders", "int8 f32", "e4m3", "many groups", "adapters up from 8")


@pytest.mark.parametrize("name", contract.CASES if is_nightly else QUICK)
def test_contract(name: str) -> None:
    contract.check_contract(multiply, contract.CASES[name])


def test_tiles_cover_every_row_once() -> None:
    generator = np.random.default_rng(0)
    tiles_of = jax.jit(triton._row_tiles, static_argnums=(1, 2))
    for num_rows, num_groups, tile_rows in ((1, 5, 16), (24, 1, 16), (90, 3, 32), (90, 64, 16)):
        for total in sorted({0, 1, num_rows // 2, num_rows}):
            group_of_row = np.sort(generator.integers(0, num_groups, total))
            sizes = np.bincount(group_of_row, minlength=num_groups).astype(np.int32)
            found = np.full(num_rows, -1)
            for group, first, end in zip(*map(np.asarray, tiles_of(sizes, num_rows, tile_rows)), strict=True):
                rows = slice(int(first), min(int(first) + tile_rows, int(end)))
                assert (found[rows] == -1).all()
                found[rows] = group
            # Padding is a group of its own, behind all others.
            expected = [*group_of_row.tolist(), *[num_groups] * (num_rows - total)]
            assert found.tolist() == expected


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_all_types_lower_for_cuda() -> None:
    """Without a GPU; JAX from 0.11 on wants to be told which one is meant."""
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("NVIDIA H100", None, "gpu"))
    checks = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    for name in ("borders", "borders f32", "int8", "e4m3", "x bf16, weights f32", "adapters down to 8"):
        given = contract.arguments(contract.CASES[name])
        structs = {
            key: None if array is None else jax.ShapeDtypeStruct(array.shape, array.dtype)
            for key, array in given.items()
        }
        exported = jax.export.export(jax.jit(triton.grouped_matmul), platforms=["cuda"], disabled_checks=checks)
        with jax.sharding.use_abstract_mesh(mesh):
            assert "triton" in exported(**structs).mlir_module()


def test_weights_beyond_the_addressed_range_are_refused() -> None:
    structs = [
        jax.ShapeDtypeStruct(*shape)
        for shape in (((4, 2**17), jnp.bfloat16), ((2, 2**14, 2**17), jnp.int8), ((2,), jnp.int32))
    ]
    with pytest.raises(NotImplementedError, match=r"between 2\^31 and 2\^32"):
        jax.eval_shape(triton.grouped_matmul, *structs)
