"""``grouped_matmul`` for TPU in the TPU interpreter: races, reads out of bounds and uninitialised memory are errors."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import grouped_matmul_contract as contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis_profiles import is_nightly
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the only place that tells of races found
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul import mosaic_tpu

QUICK = ("borders", "int8 f32", "adapters down to 8")


def multiply(num_cores: int = 1, **given: Any) -> jax.Array:
    params = pltpu.InterpretParams(
        detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan", num_cores_or_threads=num_cores
    )
    with pltpu.force_tpu_interpret_mode(params):
        return mosaic_tpu.grouped_matmul(**given)


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    pltpu.reset_tpu_interpret_mode_state()
    yield
    races = interpret_pallas_call.races
    assert races is None or not races.races_found, "the interpreter saw a race"


@pytest.mark.parametrize("name", QUICK)
def test_contract_with_several_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_tpu, "_tiles", lambda shape: mosaic_tpu._Tiles(16, min(128, shape.out_features)))
    contract.check_contract(functools.partial(multiply), contract.CASES[name])


if is_nightly:

    @pytest.mark.parametrize("name", contract.CASES)
    def test_contract(name: str) -> None:
        contract.check_contract(multiply, contract.CASES[name])


def test_two_cores_share_the_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_tpu, "_tiles", lambda shape: mosaic_tpu._Tiles(16, 128))
    case = contract.CASES["e4m3"]._replace(out_features=384)
    contract.check_error(functools.partial(multiply, num_cores=2), case)


def test_items_cover_every_row_once() -> None:
    generator = np.random.default_rng(0)
    item, items_of = mosaic_tpu._Item, jax.jit(mosaic_tpu._items, static_argnums=(1, 2))
    for num_rows, num_groups, tile_rows in ((1, 5, 8), (24, 1, 8), (40, 3, 16), (40, 64, 8)):
        for total in sorted({0, 1, num_rows // 2, num_rows}):
            group_of_row = np.sort(generator.integers(0, num_groups, total))
            sizes = np.bincount(group_of_row, minlength=num_groups).astype(np.int32)
            items = np.asarray(items_of(sizes, num_rows, tile_rows))
            found = np.full(num_rows, -1)
            for tile, group, first, end in items.T:
                rows = slice(tile * tile_rows + first, tile * tile_rows + end)
                assert (found[rows] == -1).all() and 0 <= group < num_groups
                found[rows] = group
            assert found[:total].tolist() == group_of_row.tolist() and (found[total:] == -1).all()
            # Tiles come in order, each in one stretch, all of them.
            tiles = items[item.TILE]
            assert (np.diff(tiles) >= 0).all() and set(tiles) == set(range(-(-num_rows // tile_rows)))
            # Nothing but weights of groups with rows is copied.
            assert total == 0 or (sizes[items[item.GROUP]] > 0).all()


def test_tiles_fit_in_vmem_or_are_refused() -> None:
    bf16, int8 = jnp.dtype("bfloat16"), jnp.dtype("int8")
    for num_rows in (1, 64, 16384):
        for num_groups, out_features, in_features in ((8, 3584, 4096), (8, 4096, 14336), (128, 1536, 2048), (9, 8, 24)):
            for dtype in (bf16, int8):
                shape = mosaic_tpu._Shape(num_rows, num_groups, out_features, in_features, bf16, dtype)
                assert shape.fits(mosaic_tpu._tiles(shape))
    shape = mosaic_tpu._Shape(1, 1, 128, 2**20, bf16, bf16)
    with pytest.raises(NotImplementedError, match="1048576 input features do not fit VMEM"):
        mosaic_tpu._tiles(shape)
