"""Arrays from the devices of one stage to those of another, which may be another process's."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

SOURCE, TARGET = 0, 1


class HandOver:
    """Copies arrays that are whole on each device of ``source`` to those of ``target``, without waiting.

    Within a process jax copies. Between processes the two sets of devices run a small program that passes the array on,
    for jax cannot copy there on every platform; all processes that have any of these devices must then call together,
    and in one order.
    """

    def __init__(self, source: Sharding, target: Sharding) -> None:
        """Both shardings leave arrays whole, and have equally many devices."""
        ends = [_devices(sharding) for sharding in (source, target)]
        self._target = target
        self.is_local = source.is_fully_addressable and target.is_fully_addressable
        here = jax.process_index()
        self._own = [[device for device in end if device.process_index == here] for end in ends]
        mesh = Mesh(np.array(ends), ("end", "device"), axis_types=(AxisType.Auto,) * 2)
        self._both = NamedSharding(mesh, PartitionSpec("end"))
        shift = partial(lax.ppermute, axis_name="end", perm=[(SOURCE, TARGET)])
        specs = PartitionSpec("end")
        self._shift = jax.jit(jax.shard_map(shift, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False))

    @property
    def concerns_this_process(self) -> bool:
        """It has devices of one of both ends."""
        return any(self._own)

    def __call__(self, x: jax.Array | None, shape: Any) -> jax.Array | None:
        """The array on the target's devices.

        Args:
            x: None where none of the source's devices are.
            shape: its shape and type.

        Returns:
            None where none of the target's devices are.
        """
        if self.is_local:
            return jax.device_put(x, self._target)
        if not self.concerns_this_process:
            return None
        parts = {} if x is None else {part.device: part.data for part in x.addressable_shards}
        mine = [parts[device][None] for device in self._own[SOURCE]]
        mine += [jnp.zeros((1, *shape.shape), shape.dtype, device=device) for device in self._own[TARGET]]
        stacked = jax.make_array_from_single_device_arrays((2, *shape.shape), self._both, mine)
        arrived = {part.device: part.data[0] for part in self._shift(stacked).addressable_shards}
        if not self._own[TARGET]:
            return None
        pieces = [arrived[device] for device in self._own[TARGET]]
        return jax.make_array_from_single_device_arrays(shape.shape, self._target, pieces)


def _devices(sharding: Sharding) -> list[Any]:
    """In an order of their own that both ends share."""
    if isinstance(sharding, NamedSharding):
        return list(sharding.mesh.devices.flat)  # pyright: ignore[reportOptionalMemberAccess]
    return sorted(sharding.device_set, key=lambda device: device.id)
