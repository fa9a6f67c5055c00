"""``grouped_matmul``: its arguments, the implementation in XLA, and what is chosen."""

from __future__ import annotations

import contextlib
from typing import Any

import grouped_matmul_contract as contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import grouped_matmul
from pallas_kernels.grouped_matmul import explain, reference, xla


@pytest.mark.parametrize("name", contract.CASES)
def test_contract(name: str) -> None:
    contract.check_contract(xla.grouped_matmul, contract.CASES[name])


def test_the_reference_multiplies_each_row_by_the_weights_of_its_group() -> None:
    case = contract.CASES["borders f32"]
    given = contract.arguments(case, poisoned=False)
    x, weights = np.asarray(given["x"]), np.asarray(given["weights"])
    group_of_row = np.repeat(np.arange(len(case.group_sizes)), case.group_sizes)
    expected = np.zeros((case.num_rows, case.out_features))
    for row, group in enumerate(group_of_row):
        expected[row] = weights[group].astype(np.float64) @ x[row]
    np.testing.assert_allclose(reference.grouped_matmul(**given), expected, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(grouped_matmul(**given), expected, rtol=1e-5, atol=1e-4)


def test_channels_in_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla, "CPU_PART_BYTES", 1)
    for case in (
        contract.Case((5, 0, 9), 16, 200, 24, has_scales=True, weight_dtype="int8"),
        contract.Case((70, 1), 80, 130, 16, dtype="float32", weight_dtype="float32"),
    ):
        contract.check_contract(lambda **given: xla.grouped_matmul(**given), case)


def test_xla_on_other_platforms() -> None:
    """The path that CPUs do not take, called itself; and that all platforms can be lowered for."""
    case = contract.CASES["int8 f32"]
    given = contract.arguments(case)
    out = xla._multiply(
        jnp.dtype("float32"), 16, 64, given["x"], given["weights"], given["group_sizes"], given["scales"]
    )
    exact = reference.grouped_matmul(**contract.arguments(case, poisoned=False))
    np.testing.assert_allclose(out[: sum(case.group_sizes)], exact[: sum(case.group_sizes)], rtol=1e-4, atol=1e-4)
    exported = jax.export.export(jax.jit(xla.grouped_matmul), platforms=["cpu", "cuda", "tpu"])
    exported(**{name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in given.items()})


def test_weights_are_not_converted_or_copied_whole() -> None:
    """A token that goes to 2 of 64 groups should cost that much, also with weights that are stored in a narrow type."""
    for dtype in ("bfloat16", "int8", "float8_e4m3fn", "float32"):
        shape = (64, 48, 32)
        structs = [
            jax.ShapeDtypeStruct(size, kind)
            for size, kind in (((2, 32), jnp.bfloat16), (shape, jnp.dtype(dtype)), ((64,), jnp.int32))
        ]
        analysis = jax.jit(xla.grouped_matmul).lower(*structs).compile().memory_analysis()
        assert analysis.temp_size_in_bytes < 64 * 48 * 32


GIVEN: dict[str, Any] = {
    "x": jax.ShapeDtypeStruct((4, 8), jnp.float32),
    "weights": jax.ShapeDtypeStruct((3, 16, 8), jnp.float32),
    "group_sizes": jax.ShapeDtypeStruct((3,), jnp.int32),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": jax.ShapeDtypeStruct((4, 9), jnp.float32)}, "x has 9 features, weights take 8"),
        ({"x": jax.ShapeDtypeStruct((4, 8, 1), jnp.float32)}, r"x must be \[T, D\]"),
        ({"x": jax.ShapeDtypeStruct((4, 8), jnp.float16)}, "x must be of one of float32, bfloat16, got float16"),
        ({"weights": jax.ShapeDtypeStruct((3, 16, 8), jnp.int32)}, "weights must be of one of .*, got int32"),
        ({"group_sizes": jax.ShapeDtypeStruct((4,), jnp.int32)}, r"group_sizes must be 3 integers, got int32 \[4\]"),
        ({"group_sizes": jax.ShapeDtypeStruct((3,), jnp.float32)}, "group_sizes must be 3 integers, got float32"),
        ({"scales": jax.ShapeDtypeStruct((3, 8), jnp.float32)}, r"scales must have shape \(3, 16\), got \(3, 8\)"),
        ({"implementation": "cuda"}, "implementation must be auto or one of"),
        ({"platform": "cuda"}, "platform must be one of"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explain(**GIVEN | changes)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("platform", "name"), [("cpu", "xla"), ("gpu", "triton"), ("tpu", "mosaic_tpu")])
def test_choice(platform: str, name: str) -> None:
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("NVIDIA H100", None, "gpu"))
    with jax.sharding.use_abstract_mesh(mesh) if platform == "gpu" else contextlib.nullcontext():
        choice = explain(**GIVEN, platform=platform)
    assert choice.implementation == name, str(choice)
