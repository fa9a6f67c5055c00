"""Tests for the Mosaic GPU implementation of ragged paged attention, in JAX's GPU simulator with its race detector."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import attention_contract as contract
import jax
import jax.numpy as jnp
import pytest
from hypothesis_profiles import is_nightly
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh

if jax.__version_info__ < (0, 12, 0):
    pytest.skip("the Mosaic GPU kernels need JAX 0.12", allow_module_level=True)

from pallas_kernels.ragged_paged_attention import mosaic_gpu

# The simulator multiplies what nobody owns as the kernel does, before it is masked.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")

attend = functools.partial(mosaic_gpu.ragged_paged_attention, interpret=True)

MIXED = {**contract.MIXED, **contract.BF16}
CASES = {name: case for name, case in contract.CASES.items() if case.q_dtype == case.kv_dtype == "bfloat16"} | {
    # What the other implementations are shown with float32.
    "mixed 8/8x80 block 8": contract.Case(**MIXED, num_heads=8, num_kv_heads=8, head_dim=80, block_size=8),
    "mixed block 256": contract.Case(
        requests=((1, 300), (3, 257), (2, 2)), num_tokens=8, num_rows=4, block_size=256, **contract.BF16
    ),
    "nothing": contract.Case(requests=(), num_tokens=4, num_rows=2, **contract.BF16),
    "window 1": contract.Case(**MIXED, sliding_window=1),
    "window 18": contract.Case(**MIXED, sliding_window=18),
    "soft cap": contract.Case(**MIXED, soft_cap=3.0, scale=1.0),
    "negative scale": contract.Case(**MIXED, scale=-0.4),
    "sinks window soft cap": contract.Case(**MIXED, sinks=True, sliding_window=18, soft_cap=2.0, scale=0.5),
    "two tiles of queries": contract.Case(requests=((270, 300), (1, 9)), num_tokens=271, num_rows=2, **contract.BF16),
}
SMALL = contract.Case(
    requests=((1, 70), (3, 200), (0, 9)),
    num_tokens=6,
    num_rows=4,
    num_heads=2,
    num_kv_heads=1,
    q_dtype="bfloat16",
    kv_dtype="bfloat16",
)
"""One decode row in two chunks; a tile of queries of which a warpgroup has no real one; a request without queries."""


def attend_on_blackwell(*args: Any, **options: Any) -> jax.Array:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mosaic_gpu, "_is_blackwell", lambda: True)
        return attend(*args, **options)


both = pytest.mark.parametrize("attend", [attend, attend_on_blackwell], ids=["hopper", "blackwell"])


@both
def test_contract(attend: contract.Attend) -> None:
    contract.check_contract(attend, SMALL)


@both
def test_window_cap_and_sinks(attend: contract.Attend) -> None:
    contract.check_error(
        attend, dataclasses.replace(SMALL, sinks=True, sliding_window=20, soft_cap=2.0, scale=0.5, num_rows=3)
    )


if is_nightly:

    @both
    @pytest.mark.parametrize("name", CASES)
    def test_contract_of_the_rest(name: str, attend: contract.Attend) -> None:
        contract.check_contract(attend, CASES[name])


def test_splits_and_tiles_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several splits, some without keys; a group in two tiles of heads."""
    monkeypatch.setattr(mosaic_gpu, "MIN_SPLIT_TOKENS", 64)
    case = contract.Case(
        requests=((1, 300), (1, 40)),
        num_tokens=3,
        num_rows=3,
        num_heads=72,
        num_kv_heads=1,
        head_dim=16,
        block_size=64,
        sinks=True,
        **contract.BF16,
    )
    splits = []
    num_splits = mosaic_gpu._num_splits
    monkeypatch.setattr(mosaic_gpu, "_num_splits", lambda *args: splits.append(num_splits(*args)) or splits[-1])

    def split(*args: Any, **options: Any) -> jax.Array:
        return attend(*args, **options)

    contract.check_error(split, case)
    assert splits == [3]


def abstract_arguments(
    head_dim: int = 64, q_dtype: str = "bfloat16", kv_dtype: str = "bfloat16", block_size: int = 16
) -> tuple[jax.ShapeDtypeStruct, ...]:
    shape = jax.ShapeDtypeStruct
    return (
        shape((64, 9, head_dim), jnp.dtype(q_dtype)),
        shape((64, 3, block_size, 2 * head_dim), jnp.dtype(kv_dtype)),
        shape((8, 32), jnp.dtype("int32")),
        shape((8,), jnp.dtype("int32")),
        shape((9,), jnp.dtype("int32")),
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"head_dim": 72}, "head_dim 72"),
        ({"head_dim": 320}, "head_dim 320"),
        ({"block_size": 12}, "block_size 12"),
        ({"q_dtype": "float32"}, "queries of dtype float32"),
        ({"kv_dtype": "float16"}, "KV cache of dtype float16"),
    ],
)
def test_refusals_come_when_traced(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(functools.partial(mosaic_gpu.ragged_paged_attention, scale=1.0), *abstract_arguments(**options))


@pytest.mark.parametrize("chip", ["NVIDIA H100", "NVIDIA B200"])
def test_lowers_for_cuda(chip: str) -> None:
    """Without a GPU; JAX wants to be told which one is meant."""
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(chip, None, "gpu"))
    check = export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    function = jax.jit(
        functools.partial(mosaic_gpu.ragged_paged_attention, scale=0.125, soft_cap=20.0, sliding_window=40)
    )
    with jax.sharding.use_abstract_mesh(mesh):
        exported = export.export(function, platforms=["cuda"], disabled_checks=[check])(*abstract_arguments())
    for kernel in ("tile", "split"):
        assert f"{kernel}_kernel" in exported.mlir_module()
