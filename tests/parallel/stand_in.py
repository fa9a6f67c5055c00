"""Stands in for devices where only their places on a mesh matter."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Device:
    """As much of a ``jax.Device`` as a mesh looks at."""

    id: int
    platform: str = "cpu"
    device_kind: str = "cpu"
    process_index: int = 0


def devices(count: int) -> list[Device]:
    return [Device(index) for index in range(count)]
