"""Restores the parameters of a checkpoint that jaxpage wrote, each device's part straight onto it.

It must not know why a parameter lies where it does, and changes none but for its float type and repeated KV heads.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath  # Orbax's paths
from jax.sharding import Sharding, SingleDeviceSharding

from jaxpage.layers.linear import StoredWeight, quantized_axes
from jaxpage.models.weight_map import ParamSpec, with_kv_heads_repeated
from jaxpage.parallel.placement import Placement
from jaxpage.weights.checkpoint import WeightsError
from jaxpage.weights.orbax_checkpoint import SCALES, VALUES, OrbaxCheckpoint, param_name
from pallas_kernels.quantized_matmul import QuantizedWeight


@dataclasses.dataclass(frozen=True)
class _Array:
    """One array to be restored.

    Attributes:
        name: its directory in the checkpoint.
        shape, dtype, sharding: as Orbax restores it.
        repeats: how many copies of each KV head, along ``kv_axis``, it then gets.
        final: the sharding that it then gets; the same without repeats.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding
    final: Sharding
    repeats: int = 1
    kv_axis: int = 0


def restored_params(
    checkpoint: OrbaxCheckpoint,
    specs: Sequence[ParamSpec],
    dtypes: Sequence[str | None],
    placement: Placement,
    all_specs: Sequence[ParamSpec],
) -> Iterator[StoredWeight]:
    """The parameters of ``specs`` in their order, read a layer at a time.

    Every file that this process needs is compared with its checksum before Orbax reads it; no other is read.

    Args:
        specs: of the model or of a stage, with KV heads repeated or not.
        dtypes: for each, the float type that it is cast to unless it is quantised; None: as stored.
        all_specs: of the whole model, under whose paths parameters are stored.

    Raises:
        WeightsError: naming a file that is missing or damaged, or a parameter that is missing or misshaped.
        ParameterError: an array does not divide over its devices.
    """
    # A stage counts its layers from 0. The tensors that a parameter was once made of do not change with that.
    stored_path = {tuple(spec.sources): spec.path for spec in all_specs}
    planner = _Planner(checkpoint, placement)
    plans = [
        planner.param(spec, param_name(stored_path[tuple(spec.sources)]), dtype)
        for spec, dtype in zip(specs, dtypes, strict=True)
    ]
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    try:
        for item, group in itertools.groupby(plans, key=lambda plan: plan[0].name.rpartition("/")[0]):
            yield from _restore_item(checkpoint, handler, item, list(group))
    finally:
        handler.close()


@dataclasses.dataclass(frozen=True)
class _Planner:
    checkpoint: OrbaxCheckpoint
    placement: Placement

    def param(self, spec: ParamSpec, name: str, dtype: str | None) -> list[_Array]:
        """What is to be read for one parameter: one array, or values and scales."""
        kind = self.checkpoint.kind(name)
        if kind is None:
            return [self._array(name, spec, spec.shape, spec.axes, dtype)]
        if not spec.is_linear:
            raise WeightsError(f"{self.checkpoint.path.name}: {name} is {kind}, but no weight that can be")
        axes, (*rows, columns) = quantized_axes(spec.axes, kind), spec.shape
        values, scales = (columns,), ()
        if kind == "int4":
            values, scales = (columns // 2,), self.checkpoint.manifest.arrays[f"{name}.{SCALES}"].shape[:1]
        return [
            self._array(f"{name}.{VALUES}", spec, (*rows, *values), axes.values),
            self._array(f"{name}.{SCALES}", spec, (*scales, *rows), axes.scales),
        ]

    def _array(
        self,
        name: str,
        spec: ParamSpec,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        dtype: str | None = None,
    ) -> _Array:
        """One array, given shape and logical axes that it has on the devices."""
        stored = self.checkpoint.manifest.arrays[name]
        wanted = stored.dtype if dtype is None else jnp.dtype(dtype)
        path = ".".join((*map(str, spec.path[:-1]), name.rpartition("/")[2]))
        final = self._sharding(path, shape, axes)
        if stored.shape == shape:
            return _Array(name, shape, wanted, final, final)
        kv_axis = axes.index("kv_heads") if "kv_heads" in axes else None
        if kv_axis is None or len(stored.shape) != len(shape) or 0 in stored.shape:
            raise self._misshaped(name, stored.shape, shape)
        repeats = shape[kv_axis] // stored.shape[kv_axis]
        repeated = list(stored.shape)
        repeated[kv_axis] *= repeats
        repeated[kv_axis + 1] = (stored.shape[kv_axis + 1] - 2) // max(1, repeats) + 2
        if tuple(repeated) != shape:
            raise self._misshaped(name, stored.shape, shape)
        # Whole on each device at first, which then keeps the heads that it needs.
        whole = tuple(None if axis == "kv_heads" else axis for axis in axes)
        sharding = self._sharding(path, stored.shape, whole)
        return _Array(name, stored.shape, wanted, sharding, final, repeats, kv_axis)

    def _sharding(self, path: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Sharding:
        found = self.placement.laid_out(jax.ShapeDtypeStruct(shape, jnp.float32), axes, path).sharding
        return SingleDeviceSharding(self.placement.first_device) if found is None else found

    def _misshaped(self, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> WeightsError:
        return WeightsError(
            f"{self.checkpoint.path.name}: {name} has shape {list(found)}, config.json says {list(expected)}"
        )


def _restore_item(
    checkpoint: OrbaxCheckpoint, handler: ocp.PyTreeCheckpointHandler, item: str, plans: list[list[_Array]]
) -> Iterator[StoredWeight]:
    """The parameters of one of the Orbax checkpoints that a checkpoint of ours consists of."""
    arrays = [array for plan in plans for array in plan]
    checkpoint.check_files(_files(checkpoint, item, arrays))
    structs = [[_struct(array) for array in plan] for plan in plans]
    tree = {
        _key(plan): found[0] if len(found) == 1 else {VALUES: found[0], SCALES: found[1]}
        for plan, found in zip(plans, structs, strict=True)
    }
    arguments = ocp.args.PyTreeRestore(tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree))
    try:
        # Not through a Checkpointer, which would wait for all processes: those of another stage read something else.
        restored = handler.restore(epath.Path(checkpoint.path.resolve() / item), args=arguments)
    except Exception as error:  # whatever Orbax and TensorStore raise; the cause, if there is one, says more
        raise WeightsError(f"{item}: cannot be restored: {str(error.__cause__ or error)[:500]}") from error
    for plan in plans:
        found = restored.pop(_key(plan))
        leaves = [found] if len(plan) == 1 else [found[VALUES], found[SCALES]]
        leaves = [_repeated(array, leaf) for array, leaf in zip(plan, leaves, strict=True)]
        yield leaves[0] if len(leaves) == 1 else QuantizedWeight(*leaves)


def _key(plan: list[_Array]) -> str:
    """Of a parameter in its Orbax checkpoint."""
    return plan[0].name.rpartition("/")[2].partition(".")[0]


def _struct(array: _Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _files(checkpoint: OrbaxCheckpoint, item: str, arrays: Sequence[_Array]) -> list[str]:
    """What this process will read of an item: Orbax's own files, and those of its parts of the arrays."""
    manifest = checkpoint.manifest
    names = [
        name
        for name in manifest.files
        if name.startswith(f"{item}/") and name.rpartition("/")[0] not in manifest.arrays
    ]
    for array in arrays:
        chunk = checkpoint.chunk_shape(array.name)
        parts = set()
        for index in array.sharding.addressable_devices_indices_map(array.shape).values():
            assert index is not None, "every device has a part"
            bounds = [part.indices(size)[:2] for part, size in zip(index, array.shape, strict=True)]
            ranges = [
                range(start // size, math.ceil(stop / size)) for (start, stop), size in zip(bounds, chunk, strict=True)
            ]
            parts.update(itertools.product(*ranges))
        names += [f"{array.name}/{'.'.join(map(str, part))}" for part in sorted(parts)]
    return names


def _repeated(array: _Array, leaf: jax.Array) -> jax.Array:
    if array.repeats == 1:
        return leaf
    repeat = partial(with_kv_heads_repeated, repeats=array.repeats, axis=array.kv_axis)
    return jax.jit(repeat, out_shardings=array.final)(leaf)
