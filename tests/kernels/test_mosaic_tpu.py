"""The TPU kernel in the TPU interpreter: races, reads out of bounds and uninitialised memory are errors there."""

from __future__ import annotations

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

from pallas_kernels.ragged_paged_attention import mosaic_tpu

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


def test_two_cores_share_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_tpu, "_num_cores", lambda: 2)
    monkeypatch.setattr(mosaic_tpu, "_tile_tokens", lambda q, group: 8)
    # A partial of its own, for the contract keeps what it compiled for a function.
    contract.check_error(functools.partial(attend_in_interpreter, num_cores=2), contract.CASES["mixed"])


def test_several_chunks_and_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_tpu, "_requests_per_launch", lambda max_blocks, num_tiles: 3)
    monkeypatch.setattr(mosaic_tpu, "_chunk_blocks", lambda plan, least, most: 1)
    monkeypatch.setattr(mosaic_tpu, "_tile_tokens", lambda q, group: 8)
    contract.check_error(functools.partial(attend_in_interpreter), contract.CASES["sinks window soft cap"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_lowers_for_a_tpu_where_the_chip_is_not_known(dtype: str) -> None:
    def shape(shape: tuple[int, ...], dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    attend = jax.jit(functools.partial(mosaic_tpu.ragged_paged_attention, scale=0.125, sliding_window=40))
    arrays = shape((24, 9, 64), dtype), shape((64, 2, 3, 16, 64), dtype), shape((4, 8)), shape((4,)), shape((5,))
    exported = jax.export.export(attend, platforms=["tpu"])(*arrays)
    assert exported.mlir_module().count("tpu_custom_call") == 2, "one call for decode rows, one for the others"


def item_ranges(items: np.ndarray) -> list[tuple[int, int, int, int]]:
    """(tile, request, first token, end token) of the active items."""
    item = mosaic_tpu._Item
    wanted = [item.TILE, item.TABLE, item.FIRST_TOKEN, item.END_TOKEN]
    return [tuple(column) for column in items[wanted][:, items[item.NUM_CHUNKS] > 0].T.tolist()]


def plan(lanes: int, tile_tokens: int, sliding_window: int | None = None) -> mosaic_tpu._Plan:
    return mosaic_tpu._Plan(
        num_kv_heads=1,
        rows=tile_tokens,
        tile_tokens=tile_tokens,
        head_dim=64,
        block_size=16,
        chunk_blocks=2,
        max_blocks=8,
        scale=1.0,
        v_scale=1.0,
        sliding_window=sliding_window,
        soft_cap=None,
        has_scales=False,
        has_sinks=False,
        kv_dtype=jnp.dtype("float32"),
        q_dtype=jnp.dtype("float32"),
        lanes=lanes,
    )


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_prefill_items_cover_each_token_once_and_keep_a_tile_on_one_lane(lanes: int) -> None:
    num_tiles = 9 * 14 // 8 + 1
    make_items = jax.jit(functools.partial(mosaic_tpu._prefill_items, plan(lanes, 8), num_tiles))
    for seed in range(20):
        lens = np.random.default_rng(seed).integers(0, 14, 9)
        starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        items = np.asarray(make_items(lens > 1, lens.astype(np.int32), starts))
        seen = [
            (request, tile * 8 + token)
            for tile, request, first, end in item_ranges(items)
            for token in range(first, end)
        ]
        wanted = [(row, token) for row in range(9) if lens[row] > 1 for token in range(starts[row], starts[row + 1])]
        assert sorted(seen) == wanted
        tiles = items[mosaic_tpu._Item.TILE].reshape(lanes, -1)
        for lane, column in enumerate(tiles):
            assert (column % lanes == lane).all()
            assert (np.diff(column) >= 0).all(), "a tile must not come back after another"


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("num_decodes", [0, 1, 2, 4, 5])
def test_decode_items(lanes: int, num_decodes: int) -> None:
    order = np.array([3, 0, 4, 1, 2])
    lens = np.array([1, 40, 0, 128, 33], np.int32)
    items = np.asarray(mosaic_tpu._decode_items(plan(lanes, 1), order, jnp.int32(num_decodes), lens, None))
    expected = [(tile, order[tile], 0, 1) for tile in range(num_decodes)]
    assert sorted(item_ranges(items)) == expected
    for lane, tiles in enumerate(items[mosaic_tpu._Item.TILE].reshape(lanes, -1)):
        assert (tiles % lanes == lane).all()
        assert (np.diff(tiles) >= 0).all()


def test_only_blocks_with_visible_keys_are_copied() -> None:
    lens = np.array([128, 100], np.int32)
    items = np.asarray(mosaic_tpu._decode_items(plan(1, 1, 20), np.array([0, 1]), jnp.int32(2), lens, None))
    item = mosaic_tpu._Item
    assert items[item.FIRST_BLOCK].tolist() == [108 // 16, 80 // 16]
    assert items[item.NUM_BLOCKS].tolist() == [2, 2]
    assert items[item.NUM_CHUNKS].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"q": jnp.zeros((2, 4, 64), jnp.float16)}, "queries of float16"),
        ({"kv_cache": jnp.zeros((3, 2, 2, 16, 64), jnp.int32)}, "a cache of int32"),
        ({"kv_cache": jnp.zeros((3, 2, 2, 4, 64))}, "block_size 4"),
        ({"q": jnp.zeros((2, 4, 60)), "kv_cache": jnp.zeros((3, 2, 2, 16, 60))}, "head_dim 60"),
        ({"scale": jnp.ones(())}, "that are arrays"),
        ({"block_tables": jnp.zeros((1, 300_000), jnp.int32)}, "300000 entries"),
    ],
)
def test_refuses_what_it_cannot_do(change: dict[str, Any], reason: str) -> None:
    arguments = {
        "q": jnp.zeros((2, 4, 64)),
        "kv_cache": jnp.zeros((3, 2, 2, 16, 64)),
        "block_tables": jnp.zeros((1, 2), jnp.int32),
        "seq_lens": jnp.array([2]),
        "cu_seqlens_q": jnp.array([0, 2]),
        "scale": 0.125,
    } | change
    with pytest.raises(NotImplementedError, match=reason):
        mosaic_tpu.ragged_paged_attention(**arguments)
