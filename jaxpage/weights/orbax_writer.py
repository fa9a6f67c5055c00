"""Writes a model as a checkpoint that loads straight onto a mesh: a layer at a time, and all of it or nothing.

It must not know the formats that it reads, nor how a model runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpage.config import EngineArgs
from jaxpage.errors import StartupError
from jaxpage.layers.linear import StoredWeight, quantized_axes
from jaxpage.models.config import ModelConfig
from jaxpage.models.decoder import Params
from jaxpage.models.registry import build_config
from jaxpage.models.weight_map import ParamSpec
from jaxpage.parallel.placement import Placement
from jaxpage.parallel.sharding import Layout, choose_layout
from jaxpage.weights.checkpoint import TOKENIZER_FILES, Checkpoint
from jaxpage.weights.loader import load_params
from jaxpage.weights.new_directory import new_directory
from jaxpage.weights.orbax_checkpoint import (
    MANIFEST_FILE,
    SCALES,
    TEMPORARY_NAME,
    VALUES,
    Manifest,
    OrbaxCheckpoint,
    StoredArray,
    StoredFile,
    param_name,
    write_json,
)
from pallas_kernels.quantized_matmul import QuantizedWeight

DEFAULT_WAYS = 8
"""Devices that files are cut for if no number is given: as many as most hosts have."""
MIN_FILE_BYTES = 2**16
"""An array whose parts would be smaller is one file."""
Progress = Callable[[str, int, int], None]
Axes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class WriteOptions:
    """How a checkpoint is to be written.

    Attributes:
        dtype: of what is not quantised; "auto": bfloat16 if all of the source is, else float32, which loses nothing.
        quantization: how the layers' linear weights are stored, a kind of ``QuantizedWeight``; None: as in the source.
        tensor_parallel_size, sharding: the devices, and the table, that files are cut for. Any others can load them
            too, but read some files on several devices. None: DEFAULT_WAYS devices, and Megatron's table.
        overwrite: whether a checkpoint that is there is replaced.
    """

    dtype: str = "auto"
    quantization: str | None = None
    tensor_parallel_size: int | None = None
    sharding: str | None = None
    overwrite: bool = False

    @property
    def num_devices(self) -> int:
        """CPU devices that it takes to cut the arrays."""
        return self.tensor_parallel_size or DEFAULT_WAYS


@dataclasses.dataclass(frozen=True)
class _OnHost(Placement):
    """On one device, with such groups of int4 that the devices of ``cut`` could split them."""

    cut: Layout | None = None

    def ways(self, axis: str | None) -> int:
        return 1 if axis is None or self.cut is None else self.cut.ways(axis)


def convert(
    checkpoint: Checkpoint | OrbaxCheckpoint,
    source: str,
    target: Path,
    options: WriteOptions,
    progress: Progress = lambda stage, done, total: None,
) -> Manifest:
    """Writes a model to the directory ``target``.

    The host holds one layer of it at a time, about three times: as it was read, assembled, and cut.

    Args:
        source: what ``checkpoint`` is called, for people.
        target: absolute.
        progress: is called after each parameter that was read and each layer that was written; what it raises ends the
            conversion.

    Raises:
        StartupError, ValueError, OSError: in one line; there is nothing new at ``target`` then.
    """
    _check_target(target, options.overwrite)
    model, specs = build_config(checkpoint.config, checkpoint.generation_config)
    dtype = _float_type(checkpoint, specs) if options.dtype == "auto" else options.dtype
    layout = _layout(options, model)
    placement = _OnHost(cut=layout if options.tensor_parallel_size else None)
    items = [list(group) for _, group in itertools.groupby(specs, key=lambda spec: _item(spec))]
    arrays, files = {}, {}
    with new_directory(target, overwrite=options.overwrite) as work:
        _write_model_files(checkpoint, work)
        files |= _stored_files(work, work)
        for done, own in enumerate(items):

            def still_here(*_: object, done: int = done) -> None:
                progress("writing parameters", done, len(items))

            params = load_params(
                checkpoint, model, own, dtype, placement, still_here, options.quantization, all_specs=specs
            )
            tree, written = _cut(own, params, layout)
            _save(work / _item(own[0]), tree)
            arrays |= written
            files |= _stored_files(work / _item(own[0]), work)
            progress("writing parameters", done + 1, len(items))
        manifest = Manifest(source, dtype, options.quantization or checkpoint.quantization, arrays, files)
        write_json(work / MANIFEST_FILE, manifest.to_json())
    return manifest


def _check_target(target: Path, overwrite: bool) -> None:
    if TEMPORARY_NAME.fullmatch(target.name):
        raise StartupError(f"{target}: such a name is for conversions under way")
    if not target.exists():
        return
    if not overwrite:
        raise StartupError(f"{target} exists; --overwrite would replace it")
    if not target.is_dir() or (any(target.iterdir()) and not (target / MANIFEST_FILE).is_file()):
        raise StartupError(f"{target} is not a checkpoint that jaxpage wrote, and is not replaced")


def _float_type(checkpoint: Checkpoint | OrbaxCheckpoint, specs: Sequence[ParamSpec]) -> str:
    if isinstance(checkpoint, OrbaxCheckpoint):
        return checkpoint.manifest.dtype
    present = set(checkpoint.names())
    found = {checkpoint.dtype(name) for spec in specs for name in spec.sources if name in present}
    return "bfloat16" if found == {np.dtype(ml_dtypes.bfloat16)} else "float32"


def _layout(options: WriteOptions, model: ModelConfig) -> Layout:
    devices = jax.devices("cpu")
    if len(devices) < options.num_devices:
        raise StartupError(
            f"cutting for {options.num_devices} devices takes as many CPU devices (jax_num_cpu_devices), "
            f"here are {len(devices)}"
        )
    args = EngineArgs(tensor_parallel_size=options.num_devices, sharding=options.sharding)
    return choose_layout(args, model, devices[: options.num_devices])


def _write_model_files(checkpoint: Checkpoint | OrbaxCheckpoint, work: Path) -> None:
    write_json(work / "config.json", checkpoint.config)
    write_json(work / "generation_config.json", checkpoint.generation_config)
    if not checkpoint.path.is_dir():
        checkpoint.load_tokenizer().save_directory(work)
        return
    for pattern in TOKENIZER_FILES:
        for file in checkpoint.path.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, work / file.name)


def _item(spec: ParamSpec) -> str:
    """The Orbax checkpoint that a parameter is in."""
    return param_name(spec.path).rpartition("/")[0]


def _cut(specs: Sequence[ParamSpec], params: Params, layout: Layout) -> tuple[dict[str, Any], dict[str, StoredArray]]:
    """The parameters of an item as Orbax is to save them, and what they are for the manifest."""
    tree: dict[str, Any] = {}
    arrays = {}
    for spec in specs:
        leaf: Any = params
        for part in spec.path:
            leaf = leaf[part]
        name = str(spec.path[-1])
        parts = _parts(leaf, spec.axes, layout)
        tree[name] = parts if isinstance(leaf, QuantizedWeight) else parts[""]
        for suffix, array in parts.items():
            stored = StoredArray(array.shape, np.dtype(array.dtype))
            arrays[f"{param_name(spec.path)}.{suffix}".removesuffix(".")] = stored
    return tree, arrays


def _parts(leaf: StoredWeight, axes: Axes, layout: Layout) -> dict[str, jax.Array]:
    """The arrays of a parameter by their names, each laid over CPU devices by the parts that become files."""
    if not isinstance(leaf, QuantizedWeight):
        return {"": _divided(leaf, axes, layout)}
    of = quantized_axes(axes, leaf.kind)
    # The bytes of int4 can only be cut between groups.
    units = leaf.scales.shape[0] if leaf.kind == "int4" else leaf.values.shape[-1]
    return {
        VALUES: _divided(leaf.values, of.values, layout, units),
        SCALES: _divided(leaf.scales, of.scales, layout),
    }


def _divided(array: jax.Array, axes: Axes, layout: Layout, last_units: int | None = None) -> jax.Array:
    """As many parts along each axis as the layout has, or as a common divisor allows.

    Args:
        last_units: what there are of, along the last axis, that must not be cut; None: numbers.
    """
    sizes = [*array.shape[:-1], last_units or array.shape[-1]]
    parts = [1 if axis is None else math.gcd(size, layout.ways(axis)) for size, axis in zip(sizes, axes, strict=True)]
    if array.nbytes < MIN_FILE_BYTES * math.prod(parts):
        parts = [1] * len(parts)
    devices = layout.mesh.devices.flatten()[: math.prod(parts)].reshape(parts)
    names = [f"dimension{index}" for index in range(len(parts))]
    return jax.device_put(array, NamedSharding(Mesh(devices, names), PartitionSpec(*names)))


def _save(directory: Path, tree: dict[str, Any]) -> None:
    # Not in OCDBT, whose files mix the parts of many arrays: a file for each part can be checked, and left alone.
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
    with _quiet(logging.getLogger("absl")), ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(directory, args=ocp.args.PyTreeSave(tree))


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Leaves out warnings: Orbax warns that there is nothing of OCDBT's to merge."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _stored_files(directory: Path, work: Path) -> dict[str, StoredFile]:
    return {
        file.relative_to(work).as_posix(): StoredFile.of(file)
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }
