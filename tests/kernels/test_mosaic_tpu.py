"""The TPU kernel in the TPU interpreter: races, reads out of bounds and uninitialised memory are errors there."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import attention_contract as contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis_profiles import is_nightly
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the only place that tells of races found
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention import mosaic_tpu, traffic

CONTRACT_CASE = "mixed 9/3x64 bf16"
ERROR_CASE = "int8 dynamic all"
ERROR_CASES = (
    "decodes 4/1x256 bf16",
    "mixed 14/2x64 bf16 block 32",
    "mixed 8/8x80 block 8",
    "sinks window soft cap",
    "long prompts bf16",
    "e4m3 static",
)
"""Tracing and compiling for the interpreter take seconds a case: the whole contract in all cases is for the night."""


def attend_in_interpreter(*arrays: jax.Array, num_cores: int = 1, **options: Any) -> jax.Array:
    params = pltpu.InterpretParams(
        detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan", num_cores_or_threads=num_cores
    )
    with pltpu.force_tpu_interpret_mode(params):
        return mosaic_tpu.ragged_paged_attention(*arrays, **options)


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    pltpu.reset_tpu_interpret_mode_state()
    yield
    races = interpret_pallas_call.races
    assert races is None or not races.races_found, "the interpreter saw a race"


def test_contract() -> None:
    contract.check_contract(attend_in_interpreter, contract.CASES[CONTRACT_CASE])


def test_error() -> None:
    contract.check_error(attend_in_interpreter, contract.CASES[ERROR_CASE])


@pytest.mark.slow
@pytest.mark.parametrize("name", ERROR_CASES)
def test_error_of_more_cases(name: str) -> None:
    contract.check_error(attend_in_interpreter, contract.CASES[name])


if is_nightly:

    @pytest.mark.parametrize("name", sorted(set(contract.CASES) - {CONTRACT_CASE}))
    def test_contract_of_the_other_cases(name: str) -> None:
        contract.check_contract(attend_in_interpreter, contract.CASES[name])


def small_tiles(plan: mosaic_tpu._Plan, is_decode: bool) -> mosaic_tpu._Tiles:
    return mosaic_tpu._Tiles(1 if is_decode else 16, plan.scale_blocks)


def test_two_cores_share_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_tpu, "_chip", lambda: (2, 2**26))
    monkeypatch.setattr(mosaic_tpu, "_tiles", small_tiles)
    # A partial of its own, for the contract keeps what it compiled for a function.
    contract.check_error(functools.partial(attend_in_interpreter, num_cores=2), contract.CASES["mixed"])


def test_several_chunks_and_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_tpu, "_requests_per_launch", lambda max_blocks, num_tiles: 3)
    monkeypatch.setattr(mosaic_tpu, "_tiles", small_tiles)
    contract.check_error(functools.partial(attend_in_interpreter), contract.CASES["sinks window soft cap"])


PARTS = contract.Case(
    requests=((1, 200), (3, 130), (1, 100), (2, 70), (25, 150)), num_tokens=32, num_rows=6, block_size=64
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        dataclasses.replace(PARTS, sliding_window=40),
        dataclasses.replace(PARTS, sliding_window=20, kv_dtype="int8", scales="dynamic", num_heads=2, num_kv_heads=1),
    ],
)
def test_parts_of_blocks(case: contract.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that start and end within blocks, or lie within one, and chunks of one and two blocks."""
    monkeypatch.setattr(mosaic_tpu, "_tiles", small_tiles)
    contract.check_error(functools.partial(attend_in_interpreter), case)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_lowers_for_a_tpu_where_the_chip_is_not_known(dtype: str) -> None:
    def shape(shape: tuple[int, ...], dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    attend = jax.jit(functools.partial(mosaic_tpu.ragged_paged_attention, scale=0.125, sliding_window=40))
    arrays = shape((24, 9, 64), dtype), shape((64, 3, 16, 128), dtype), shape((4, 8)), shape((4,)), shape((5,))
    exported = jax.export.export(attend, platforms=["tpu"])(*arrays)
    assert exported.mlir_module().count("tpu_custom_call") == 2, "one call for decode rows, one for the others"


def item_ranges(items: np.ndarray) -> list[tuple[int, int, int, int]]:
    """(tile, request, first token, end token) of the active items."""
    item = mosaic_tpu._Item
    wanted = [item.TILE, item.TABLE, item.FIRST_TOKEN, item.END_TOKEN]
    return [tuple(column) for column in items[wanted][:, items[item.NUM_CHUNKS] > 0].T.tolist()]


def plan(**fields: Any) -> mosaic_tpu._Plan:
    defaults = {
        "num_kv_heads": 1,
        "group": 1,
        "head_dim": 64,
        "block_size": 16,
        "max_blocks": 8,
        "scale": 1.0,
        "v_scale": 1.0,
        "sliding_window": None,
        "soft_cap": None,
        "has_scales": False,
        "has_sinks": False,
        "kv_dtype": jnp.dtype("float32"),
        "q_dtype": jnp.dtype("float32"),
        "num_cores": 1,
        "vmem_bytes": 2**26,
        "chunk_blocks": 2,
    }
    return mosaic_tpu._Plan(**(defaults | fields))


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_prefill_items_cover_each_token_once_and_keep_a_tile_on_one_lane(lanes: int) -> None:
    num_tiles = 9 * 14 // 8 + 1
    make_items = jax.jit(functools.partial(mosaic_tpu._prefill_items, plan(lanes=lanes, tile_tokens=8), num_tiles))
    for seed in range(20):
        lens = np.random.default_rng(seed).integers(0, 14, 9)
        starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        fields, steps = make_items(lens > 1, lens.astype(np.int32), starts)
        items = np.asarray(fields)
        seen = [
            (request, tile * 8 + token)
            for tile, request, first, end in item_ranges(items)
            for token in range(first, end)
        ]
        wanted = [(row, token) for row in range(9) if lens[row] > 1 for token in range(starts[row], starts[row + 1])]
        assert sorted(seen) == wanted
        tiles, chunks = (
            items[field].reshape(lanes, -1) for field in (mosaic_tpu._Item.TILE, mosaic_tpu._Item.NUM_CHUNKS)
        )
        assert steps == (chunks > 0).sum(axis=1).max()
        assert not chunks[:, int(steps) :].any()
        for lane, column in enumerate(tiles):
            assert (column % lanes == lane).all()
            assert (np.diff(column) >= 0).all(), "a tile must not come back after another"


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("num_decodes", [0, 1, 2, 4, 5])
def test_decode_items(lanes: int, num_decodes: int) -> None:
    order = jnp.array([3, 0, 4, 1, 2])
    lens = jnp.array([1, 40, 0, 128, 33], jnp.int32)
    fields, steps = mosaic_tpu._decode_items(plan(lanes=lanes), order, jnp.int32(num_decodes), lens)
    items = np.asarray(fields)
    assert steps == -(-num_decodes // lanes)
    expected = [(tile, int(order[tile]), 0, 1) for tile in range(num_decodes)]
    assert sorted(item_ranges(items)) == expected
    for lane, tiles in enumerate(items[mosaic_tpu._Item.TILE].reshape(lanes, -1)):
        assert (tiles % lanes == lane).all()
        assert (np.diff(tiles) >= 0).all()


def test_only_blocks_with_visible_keys_are_copied() -> None:
    lens = jnp.array([128, 100], jnp.int32)
    fields, _ = mosaic_tpu._decode_items(plan(sliding_window=20), jnp.arange(2), jnp.int32(2), lens)
    items = np.asarray(fields)
    item = mosaic_tpu._Item
    assert items[item.FIRST_BLOCK].tolist() == [108 // 16, 80 // 16]
    assert items[item.NUM_BLOCKS].tolist() == [2, 2]
    assert items[item.NUM_CHUNKS].tolist() == [1, 1]


def test_of_a_long_last_block_only_what_is_needed_is_copied() -> None:
    lens = jnp.array([1, 32, 33, 127, 128, 129], jnp.int32)
    for block_size, expected in ((128, [32, 32, 64, 128, 128, 32]), (32, [32] * 6), (48, [48] * 6)):
        fields, _ = mosaic_tpu._decode_items(plan(block_size=block_size), jnp.arange(6), jnp.int32(6), lens)
        assert np.asarray(fields)[mosaic_tpu._Item.LAST_TOKENS].tolist() == expected


SHAPES: dict[str, dict[str, Any]] = {
    "9/3x64 bf16": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "block_size": 16, "kv_dtype": "bfloat16"},
    "8/1x128 bf16": {"num_heads": 8, "num_kv_heads": 1, "head_dim": 128, "block_size": 128, "kv_dtype": "bfloat16"},
    "4/1x256 int8": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 256, "block_size": 128, "kv_dtype": "int8"},
    "8/2x128 window": {
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 128,
        "block_size": 64,
        "kv_dtype": "bfloat16",
        "sliding_window": 600,
    },
}


@pytest.mark.parametrize(
    "name", ["9/3x64 bf16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("8/1x128 bf16", "4/1x256 int8"))]
)
def test_bytes_of_decode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts what is copied and compares it with the formula, and that with the floor."""
    check_bytes(SHAPES[name], [700, 0, 329, 1000, 512], monkeypatch)


@pytest.mark.slow
def test_bytes_of_decode_with_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    check_bytes(SHAPES["8/2x128 window"], [700, 300, 1000], monkeypatch)


def check_bytes(shape: dict[str, Any], lens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    copied: dict[str, int] = {}
    execute_read = interpret_pallas_call.DMA.execute_read

    def count(dma: Any) -> None:
        is_new = dma.data is None
        execute_read(dma)
        if is_new:
            copied[str(dma.data.dtype)] = copied.get(str(dma.data.dtype), 0) + dma.data.nbytes

    monkeypatch.setattr(interpret_pallas_call.DMA, "execute_read", count)
    num_heads, num_kv_heads, head_dim = shape["num_heads"], shape["num_kv_heads"], shape["head_dim"]
    block_size, window, kv_dtype = shape["block_size"], shape.get("sliding_window"), jnp.dtype(shape["kv_dtype"])
    has_scales = kv_dtype == jnp.int8
    max_blocks = -(-max(lens) // block_size)
    num_blocks = len(lens) * max_blocks
    arrays = {
        "q": jnp.ones((len(lens), num_heads, head_dim), jnp.bfloat16),
        "kv_cache": jnp.ones((num_blocks, num_kv_heads, block_size, 2 * head_dim), kv_dtype),
        "block_tables": jnp.arange(num_blocks, dtype=jnp.int32).reshape(len(lens), max_blocks),
        "seq_lens": jnp.array(lens, jnp.int32),
        "cu_seqlens_q": jnp.array(np.cumsum([0] + [length > 0 for length in lens]), jnp.int32),
        "kv_scales": jnp.ones((num_blocks, 2, num_kv_heads, block_size)) if has_scales else None,
    }
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        attend = jax.jit(functools.partial(mosaic_tpu.ragged_paged_attention, scale=0.1, sliding_window=window))
        out = np.asarray(attend(**arrays), np.float32)
    np.testing.assert_array_equal(out[: np.count_nonzero(lens)], 1.0)

    cache = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "kv_itemsize": kv_dtype.itemsize, "seq_lens": lens}
    cache["sliding_window"] = window
    expected = {str(kv_dtype): traffic.mosaic_tpu_cache_bytes(block_size=block_size, **cache)}
    if has_scales:
        expected["float32"] = 2 * 4 * num_kv_heads * block_size * sum(-(-length // block_size) for length in lens)
    assert copied == expected
    floor = 2 * num_kv_heads * head_dim * kv_dtype.itemsize * sum(min(length, window or length) for length in lens)
    assert floor <= copied[str(kv_dtype)] <= 1.1 * floor
    everything = traffic.decode_bytes(
        "mosaic_tpu",
        num_heads=num_heads,
        block_size=block_size,
        q_itemsize=2,
        has_scales=has_scales,
        max_blocks=max_blocks,
        **cache,
    )
    assert sum(copied.values()) < everything <= 1.1 * traffic.minimum_bytes(has_scales=has_scales, **cache)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"q": jnp.zeros((2, 4, 64), jnp.float16)}, "queries of float16"),
        ({"kv_cache": jnp.zeros((3, 2, 16, 128), jnp.int32)}, "a cache of int32"),
        ({"kv_cache": jnp.zeros((3, 2, 4, 128))}, "block_size 4"),
        ({"q": jnp.zeros((2, 4, 60)), "kv_cache": jnp.zeros((3, 2, 16, 120))}, "head_dim 60"),
        ({"scale": jnp.ones(())}, "that are arrays"),
        ({"block_tables": jnp.zeros((1, 300_000), jnp.int32)}, "300000 entries"),
        ({"q": jnp.zeros((2, 1024, 256)), "kv_cache": jnp.zeros((3, 512, 256, 512), jnp.int8)}, "does not fit a VMEM"),
    ],
)
def test_refuses_what_it_cannot_do(change: dict[str, Any], reason: str) -> None:
    arguments = {
        "q": jnp.zeros((2, 4, 64)),
        "kv_cache": jnp.zeros((3, 2, 16, 128)),
        "block_tables": jnp.zeros((1, 2), jnp.int32),
        "seq_lens": jnp.array([2]),
        "cu_seqlens_q": jnp.array([0, 2]),
        "scale": 0.125,
    } | change
    with pytest.raises(NotImplementedError, match=reason):
        mosaic_tpu.ragged_paged_attention(**arguments)
