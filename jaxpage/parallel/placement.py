"""Where the arrays of a model, or of one stage of it, are. Must not know what they mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from jaxpage.parallel.sharding import Layout

Axes = Sequence[str | None]


@dataclasses.dataclass(frozen=True)
class Placement:
    """Laid over a mesh, or on one device; with neither, where jax puts them.

    Attributes:
        device: a ``jax.Device``.
    """

    layout: Layout | None = None
    device: Any = None

    @property
    def first_device(self) -> Any:
        """One of this process's, which stands for all: they are alike."""
        if self.layout is not None:
            devices = self.layout.mesh.devices.flat
            return next((device for device in devices if device.process_index == jax.process_index()), devices[0])
        return self.device if self.device is not None else jax.local_devices()[0]

    @property
    def is_here(self) -> bool:
        """This process has one of the devices."""
        return self.first_device.process_index == jax.process_index()

    @property
    def process_ids(self) -> list[int]:
        """The processes that have one of the devices."""
        devices = [self.first_device] if self.layout is None else self.layout.mesh.devices.flat
        return sorted({device.process_index for device in devices})

    def sharding(self, axes: Axes) -> Sharding | None:
        """Of an array with these logical axes."""
        if self.layout is not None:
            return self.layout.sharding(axes)
        return None if self.device is None else SingleDeviceSharding(self.device)

    def ways(self, axis: str | None) -> int:
        """Into how many parts a logical axis is split."""
        return 1 if axis is None or self.layout is None else self.layout.ways(axis)

    def laid_out(self, struct: Any, axes: Axes, path: str = "") -> jax.ShapeDtypeStruct:
        """``struct`` with its sharding; ValueError with ``path`` for a dimension that does not divide."""
        if self.layout is not None:
            return self.layout.laid_out(struct, axes, path)
        return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=self.sharding(axes))


ON_ONE_DEVICE = Placement()
