"""Tests for the Pallas-Triton implementation of ragged paged attention, in the interpreter and lowered for CUDA."""

from __future__ import annotations

import functools
from typing import Any

import attention_contract as contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis_profiles import is_nightly
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import tiles
from pallas_kernels.ragged_paged_attention import traffic, triton

attend = functools.partial(triton.ragged_paged_attention, interpret=True)

STATIC = triton._Static(
    group=4,
    num_kv_heads=8,
    block_size=16,
    head_dim=128,
    score_factor=1.0,
    value_factor=1.0,
    sliding_window=None,
    soft_cap=None,
    product_dtype=jnp.dtype("bfloat16"),
    kv_dtype=jnp.dtype("bfloat16"),
    capability=9.0,
    interpret=True,
)

FULLY_CHECKED = (
    "decodes 9/3x64 bf16",
    "mixed 8/8x80 block 8",
    "long prompts bf16",
    "nothing",
    "sinks window soft cap",
    "int8 dynamic all",
)
ERROR_CHECKED = (
    "decodes 4/1x256 bf16",
    "mixed 14/2x64 bf16 block 32",
    "mixed block 256",
    "prompt of 40",
    "q bf16, kv f32",
    "e4m3 static",
)
"""The rest of the cases differ from these in sizes only, or combine them; they are for the night."""


@pytest.mark.parametrize("name", FULLY_CHECKED)
def test_contract(name: str) -> None:
    contract.check_contract(attend, contract.CASES[name])


@pytest.mark.parametrize("name", ERROR_CHECKED)
def test_error(name: str) -> None:
    contract.check_error(attend, contract.CASES[name])


if is_nightly:

    @pytest.mark.parametrize("name", [name for name in contract.CASES if name not in FULLY_CHECKED])
    def test_contract_of_the_rest(name: str) -> None:
        contract.check_contract(attend, contract.CASES[name])


def test_splits_and_tiles_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several splits, of which short rows fill one and the window leaves some out; a group in two tiles of heads."""
    monkeypatch.setattr(triton, "_min_split_tokens", lambda static: 128)
    case = contract.Case(
        requests=((1, 600), (1, 40), (1, 385), (2, 129)),
        num_tokens=8,
        num_rows=5,
        num_heads=72,
        num_kv_heads=1,
        head_dim=16,
        block_size=64,
        sinks=True,
    )
    splits = []
    num_splits = triton._num_splits
    monkeypatch.setattr(triton, "_num_splits", lambda *args: splits.append(num_splits(*args)) or splits[-1])

    def split(*args: Any, **options: Any) -> jax.Array:
        return attend(*args, **options)

    contract.check_error(split, case)
    contract.check_neighbours(split, case)
    assert splits == [4]


def test_more_splits_for_fewer_requests() -> None:
    def count(num_requests: int, max_blocks: int, window: int | None = None) -> int:
        static = STATIC._replace(sliding_window=window)
        return triton._num_splits(static, triton._short_tile(static), 8, (num_requests, max_blocks))

    assert count(1, 2048) == 64
    assert count(32, 512) == 4
    assert count(256, 512) == 2, "no split is longer than MAX_SPLIT_TOKENS"
    assert count(256, 64) == 1
    assert count(256, 8192) == 8, "the partials take no more than MAX_PARTIALS_BYTES"
    assert count(1, 8) == 1, "no split is shorter than MIN_SPLIT_TOKENS"
    assert count(1, 2048, window=512) == 2


@pytest.mark.parametrize(("group", "head_dim"), [(1, 128), (3, 64), (4, 128), (4, 256), (7, 64), (8, 128), (16, 64)])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float32"])
@pytest.mark.parametrize("window", [None, 1500])
def test_bytes_of_decode(group: int, head_dim: int, kv_dtype: str, window: int | None) -> None:
    """Whatever the length of a row, the kernels divide it into no more splits than the formula counts; 10% at most."""
    products = "float32" if kv_dtype == "float32" else "bfloat16"
    static = STATIC._replace(group=group, head_dim=head_dim, sliding_window=window)
    static = static._replace(kv_dtype=jnp.dtype(kv_dtype), product_dtype=jnp.dtype(products))
    tile, least = triton._short_tile(static), 32 * group
    lengths = [*range(least, least + 5), *range(1020, 1030), *range(2040, 2056), 4097, 8191, 30_000]
    zero = jnp.zeros((), jnp.int32)

    def splits(length: jax.Array) -> jax.Array:
        batch = {"starts": jnp.arange(2), "seq_lens": length[None]}
        return triton._short_request(static, tile, 64, batch, zero, zero, jnp.zeros(1, jnp.int32)).splits

    for length, used in zip(lengths, np.asarray(jax.jit(jax.vmap(splits))(jnp.asarray(lengths))), strict=True):
        visible = length if window is None else min(length, window)
        cache = {"num_kv_heads": 2, "head_dim": head_dim, "kv_itemsize": static.kv_dtype.itemsize}
        cache |= {"seq_lens": [length], "sliding_window": window}
        batch = {"num_heads": 2 * group, "block_size": 16, "q_itemsize": static.product_dtype.itemsize}
        counted = traffic.decode_bytes("triton", max_blocks=2048, **batch, **cache)
        least = traffic.minimum_bytes(**cache)
        assert least == 4 * head_dim * static.kv_dtype.itemsize * visible
        partials = 8 * 2 * group * head_dim * used if used > 1 else 0
        assert partials <= least / 16
        assert least + partials < counted <= 1.1 * least


def test_tiles_from_a_table_fit_or_are_passed_over() -> None:
    heuristic = triton._Sizes(rows=16, chunk=64, num_warps=4, num_stages=3)
    key = tiles.Key("ragged_paged_attention", "triton", "short G4 H128 bs16 bfloat16 bfloat16")
    for values, chunk in (({"chunk": 128}, 128), ({"chunk": 96}, 64), ({"num_warps": 3}, 64)):
        with tiles.trial({key: values}) as trial:
            assert triton._short_tile(STATIC).chunk == chunk
        assert trial.asked == {key: heuristic._asdict()}


def test_decoded_float8_is_exact() -> None:
    """For GPUs before sm89 kernels convert float8_e4m3fn by bit operations: all 256 values."""
    stored = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), jnp.float8_e4m3fn)
    converted = triton._convert(STATIC._replace(kv_dtype=stored.dtype, capability=8.0), stored)
    np.testing.assert_array_equal(np.asarray(converted, np.float32), np.asarray(stored).astype(np.float32))


def test_float8_converted_by_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's default is to decode it."""
    monkeypatch.setattr(triton, "FP8_CAPABILITY", 0.0)

    def convert(*args: Any, **options: Any) -> jax.Array:
        return attend(*args, **options)

    contract.check_error(convert, contract.CASES["e4m3 dynamic q bf16"])


def abstract_arguments(
    head_dim: int = 64, q_dtype: str = "bfloat16", kv_dtype: str = "bfloat16", num_blocks: int = 64
) -> tuple[jax.ShapeDtypeStruct, ...]:
    shape = jax.ShapeDtypeStruct
    return (
        shape((64, 9, head_dim), jnp.dtype(q_dtype)),
        shape((num_blocks, 3, 16, 2 * head_dim), jnp.dtype(kv_dtype)),
        shape((8, 128), jnp.dtype("int32")),
        shape((8,), jnp.dtype("int32")),
        shape((9,), jnp.dtype("int32")),
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"head_dim": 320}, "head_dim 320"),
        ({"q_dtype": "float8_e5m2"}, "queries of dtype float8_e5m2"),
        ({"kv_dtype": "float16"}, "KV cache of dtype float16"),
        ({"kv_dtype": "int8", "num_blocks": 400_000}, "between 2\\^31 and 2\\^32"),
    ],
)
def test_refusals_come_when_traced(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(functools.partial(triton.ragged_paged_attention, scale=1.0), *abstract_arguments(**options))


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("kv_dtype", "options", "has_merge"),
    [
        ("bfloat16", {}, True),
        ("bfloat16", {"soft_cap": 20.0, "sliding_window": 40}, False),
        ("int8", {"k_scale": 0.1, "v_scale": 0.2}, True),
        ("float8_e4m3fn", {}, True),
        ("float8_e5m2", {}, True),
    ],
)
def test_lowers_for_cuda(kv_dtype: str, options: dict[str, Any], has_merge: bool) -> None:
    """Without a GPU; JAX from 0.11 on wants to be told which one is meant. A short window leaves nothing to merge."""
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("NVIDIA H100", None, "gpu"))
    check = export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
    function = jax.jit(functools.partial(triton.ragged_paged_attention, scale=0.125, **options))
    with jax.sharding.use_abstract_mesh(mesh):
        exported = export.export(function, platforms=["cuda"], disabled_checks=[check])(
            *abstract_arguments(kv_dtype=kv_dtype)
        )
    module = exported.mlir_module()
    kernels = [kernel for kernel in ("tile", "split", "merge") if f"{kernel}_kernel" in module]
    assert kernels == ["tile", "split", *["merge"] * has_merge]
