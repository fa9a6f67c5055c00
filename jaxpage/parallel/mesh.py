"""Devices in the order of the four mesh axes. Must not know what is laid over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

MESH_AXES = ("data", "stage", "model", "expert")
"""Replicas of the engine, stages of the pipeline, and the two axes that split arrays; in order of rising traffic."""


def make_mesh(devices: Sequence[Any], **sizes: int) -> Mesh:
    """A mesh of all ``devices`` with the four axes, which are of size 1 unless ``sizes`` says otherwise.

    Raises:
        ValueError: for an unknown axis, or sizes that do not multiply to the number of devices.
    """
    unknown = sorted(set(sizes) - set(MESH_AXES))
    if unknown:
        raise ValueError(f"mesh axes are {', '.join(MESH_AXES)}, got {', '.join(unknown)}")
    shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    if min(shape) < 1 or math.prod(shape) != len(devices):
        raise ValueError(f"a mesh of {shown_sizes(sizes)} has {math.prod(shape)} devices, got {len(devices)}")
    return _over(_placed(shape, devices))


def submesh(mesh: Mesh, axis: str, index: int) -> Mesh:
    """The devices at one index of an axis, as a mesh in which that axis has size 1.

    Raises:
        ValueError: for an index that the axis does not have.
    """
    if not 0 <= index < mesh.shape[axis]:
        raise ValueError(f"{axis} {index} is not in a mesh with {mesh.shape[axis]} of them")
    return _over(np.take(mesh.devices, [index], MESH_AXES.index(axis)))


def shown_sizes(sizes: dict[str, int]) -> str:
    """Axes and their sizes in words, such as "model 4, expert 2"; axes of size 1 are left out."""
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size != 1) or "one device"


def _placed(shape: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray:
    try:
        # Knows how the chips of a TPU slice are wired.
        return jax.make_mesh(shape, MESH_AXES, (AxisType.Auto,) * len(shape), devices=devices).devices
    except (NotImplementedError, AssertionError):
        # The axes do not fit the wires, or the chips are not a box of them: any order will do.
        placed = np.empty(len(devices), object)
        placed[:] = devices
        return placed.reshape(shape)


def _over(devices: np.ndarray) -> Mesh:
    # Auto: the compiler works out the layout of what no table names.
    return Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * devices.ndim)
