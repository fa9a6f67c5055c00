"""The packed array of a step: what the host writes into a field is what the device reads from it, bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.runner.packing import Packing


@pytest.mark.parametrize(("num_tokens", "num_rows", "max_blocks"), [(1, 1, 1), (16, 4, 3), (5, 8, 1)])
def test_round_trip(num_tokens: int, num_rows: int, max_blocks: int) -> None:
    packing = Packing(num_tokens, num_rows, max_blocks)
    packed, views = packing.allocate()
    assert packed.shape == (packing.size,) and not packed.any()
    packed[:] = np.random.default_rng(0).integers(-(2**31), 2**31, packing.size)
    fields = jax.jit(packing.split)(jnp.asarray(packed))
    assert fields.keys() == views.keys() == {field.name for field in packing.fields}
    for field in packing.fields:
        host, device = views[field.name], np.asarray(fields[field.name])
        assert host.dtype == device.dtype == field.dtype
        assert host.shape == device.shape == field.shape
        assert host.tobytes() == device.tobytes(), field.name
    assert sum(view.size for view in views.values()) == packing.size


def test_special_bit_patterns_pass() -> None:
    packing = Packing(4, 4, 2)
    packed, views = packing.allocate()
    views["temperature"][:] = [np.nan, -0.0, np.float32(1e-45), -np.inf]
    views["seeds"][:] = 2**32 - 1
    views["token_ids"][:] = [-1, 0, 2**31 - 1, -(2**31)]
    fields = jax.jit(packing.split)(jnp.asarray(packed))
    for name in ("temperature", "seeds", "token_ids"):
        assert np.asarray(fields[name]).tobytes() == views[name].tobytes()
    assert fields["seeds"].dtype == jnp.uint32


def test_views_do_not_overlap() -> None:
    packing = Packing(3, 2, 2)
    packed, views = packing.allocate()
    for index, view in enumerate(views.values()):
        view.view(np.int32)[...] = index + 1
    assert packed.all()
    for index, view in enumerate(views.values()):
        assert (view.view(np.int32) == index + 1).all()
