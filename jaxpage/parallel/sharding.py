"""Which mesh axis splits each logical axis of an array: the one table, and the kernels that run on the local parts.

Must not know what the arrays mean; they name their logical axes themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MODEL_AXIS = "model"
TENSOR_PARALLEL: Mapping[str, str | None] = {
    "kv_heads": MODEL_AXIS,
    "heads": MODEL_AXIS,
    "ffn": MODEL_AXIS,
    "vocab": MODEL_AXIS,
    "hidden": None,
    "experts": None,
    "blocks": None,
    "slots": None,
}
"""Tensor parallelism (Shoeybi et al., 2019): q, k, v, gate and up are split by output, o and down by input, so that a
layer sums over devices twice; each device keeps the KV heads it computes."""


def tensor_parallel_mesh(devices: Sequence[Any]) -> Mesh:
    """All ``devices`` in a row along the model axis."""
    return jax.make_mesh((len(devices),), (MODEL_AXIS,), (AxisType.Auto,), devices=devices)


def partition_spec(axes: Sequence[str | None], table: Mapping[str, str | None] = TENSOR_PARALLEL) -> PartitionSpec:
    """The mesh axis of each dimension of an array with these logical axes; None is never split.

    Raises:
        KeyError: for a logical axis that the table does not have.
    """
    return PartitionSpec(*(None if axis is None else table[axis] for axis in axes))


def sharded(mesh: Mesh, struct: jax.ShapeDtypeStruct, axes: Sequence[str | None]) -> jax.ShapeDtypeStruct:
    """``struct`` laid over the mesh by its logical axes.

    Raises:
        ValueError: for a dimension that does not divide over its mesh axis, with the numbers.
    """
    spec = partition_spec(axes)
    for size, axis, mesh_axis in zip(struct.shape, axes, spec, strict=True):
        if mesh_axis is not None and size % mesh.shape[mesh_axis]:
            raise ValueError(
                f"{axis} of {size} does not divide over the {mesh.shape[mesh_axis]} devices of {mesh_axis}"
            )
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=NamedSharding(mesh, spec))


def on_local_parts(function: Callable[..., Any], in_axes: Sequence[Any], out_axes: Any, *arguments: Any) -> Any:
    """``function(*arguments)``, run by each device on its part of the arrays if a mesh with several devices is set.

    For kernels, which the compiler cannot split. Whatever ``function`` does must be independent along split axes.

    Args:
        in_axes: for each argument, a pytree like it whose leaves are tuples of logical axes.
        out_axes: the same for the result.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function(*arguments)

    def specs(axes: Any) -> Any:
        return jax.tree.map(partition_spec, axes, is_leaf=_is_axes)

    # Kernels say nothing of how their results vary over the mesh, so that this cannot be checked.
    return jax.shard_map(
        function, mesh=mesh, in_specs=tuple(map(specs, in_axes)), out_specs=specs(out_axes), check_vma=False
    )(*arguments)


def _is_axes(node: Any) -> bool:
    return type(node) is tuple and all(axis is None or isinstance(axis, str) for axis in node)
