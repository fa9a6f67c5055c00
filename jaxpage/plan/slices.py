"""Chips that a model is planned for: their names, their devices to compile for, and devices that stand in for them.

It must not know models.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Any

from jaxpage.errors import ParameterError, shown
from pallas_kernels.targets import TARGETS, Target, find_target
from pallas_kernels.targets.chips import CHIPS, Chip

TPU_SLICES = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
"""Topologies of the chips that lie in a plane (v5e, v6e), by number of chips."""
MOST_GPUS = 8
CPU = "cpu"
CPU_TARGET = Target(CPU, CPU)


@dataclasses.dataclass(frozen=True)
class Slice:
    """Chips of one kind.

    Attributes:
        name: as it was asked for.
        num_devices: devices that JAX shows them as. Those of "cpu" are virtual: as many as are wanted.
        topology: what the compilers call their arrangement.
        chip: limits of a device; None for "cpu", whose are measured or not known.
    """

    name: str
    target: Target
    num_devices: int
    topology: str
    chip: Chip | None

    @property
    def is_cpu(self) -> bool:
        return self.target.platform == CPU

    def stand_ins(self, num_devices: int, bytes_in_use: int = 0, share: float = 1.0) -> list[StandIn]:
        """Devices to lay arrays over, where nothing is compiled; ``share`` of their memory is JAX's."""
        memory = 0 if self.chip is None else int(self.chip.memory_bytes * share)
        return [StandIn(index, self.target.name, memory, bytes_in_use) for index in range(num_devices)]

    def devices(self, num_devices: int) -> Sequence[Any]:
        """Devices to compile for. The process must have the compilers' environment, for a CPU the devices too."""
        import jax
        from jax.experimental import topologies

        if self.is_cpu:
            return jax.local_devices()[:num_devices]
        if self.target.platform == "tpu":
            options = {"chip_config_name": self.target.chip_config} if self.target.chip_config else {}
            found = topologies.get_topology_desc(platform="tpu", topology_name=self.topology, **options)
        else:
            found = topologies.get_topology_desc(
                platform="cuda", topology_name="", target_config=self.target.config, topology=self.topology
            )
        return found.devices[:num_devices]


@dataclasses.dataclass(frozen=True)
class StandIn:
    """Takes the place of a device that is not here: it has a number, a name and a size, and can run nothing.

    Attributes:
        platform: the name of the chip, so that nobody looks for how it is wired; "cpu" has its usual meaning.
        memory_bytes: of the device, what JAX may use.
        bytes_in_use: of them, what is taken already.
    """

    id: int
    platform: str
    memory_bytes: int = 0
    bytes_in_use: int = 0
    process_index: int = 0

    @property
    def device_kind(self) -> str:
        return self.platform

    def memory_stats(self) -> dict[str, int]:
        """As real devices tell it."""
        return {"bytes_limit": self.memory_bytes, "bytes_in_use": self.bytes_in_use}

    def __str__(self) -> str:
        return f"{self.platform}:{self.id}"


def find_slice(name: str) -> Slice:
    """The chips that ``name`` stands for, as "v6e-8", "h200x8" or "cpu".

    Raises:
        ParameterError: saying what there is.
    """
    if name.lower() == CPU:
        return Slice(CPU, CPU_TARGET, os.cpu_count() or 1, "", None)
    match = re.fullmatch(r"(v\d+[a-z]?)-(\d+)|([a-z]+\d+)x(\d+)", name.lower())
    try:
        target = find_target(match[1] or match[3]) if match else None
    except ValueError:
        target = None
    if match is None or target is None:
        raise ParameterError(
            "target", f"must be such as v6e-8 or h200x8 of {', '.join(TARGETS)}, or cpu, got {shown(name)}"
        )
    count = int(match[2] or match[4])
    num_devices, topology = _gpus(target, count, name) if target.platform == "gpu" else _tpus(target, count, name)
    return Slice(name.lower(), target, num_devices, topology, CHIPS[target.name].device)


def _gpus(target: Target, count: int, name: str) -> tuple[int, str]:
    if "-" in name or not 1 <= count <= MOST_GPUS:
        raise ParameterError("target", f"must have 1 to {MOST_GPUS} GPUs, as in {target.name}x8, got {shown(name)}")
    return count, f"1x1x{count}"


def _tpus(target: Target, count: int, name: str) -> tuple[int, str]:
    kind = target.topology.split(":")[0]
    if target.name in ("v5e", "v6e"):
        if count not in TPU_SLICES:
            raise ParameterError(
                "target", f"{target.name} comes in {', '.join(map(str, TPU_SLICES))}, got {shown(name)}"
            )
        return count, f"{kind}:{TPU_SLICES[count]}"
    # Two TensorCores a chip: one device on v4 and v5p, which are named by cores, and two on v7x.
    chips = count // 2
    if count % 8 or not count:
        raise ParameterError("target", f"{target.name} comes in multiples of 8 cores, got {shown(name)}")
    return count if target.name == "v7x" else chips, f"{kind}:2x2x{chips // 4}"


def larger_slices(where: Slice) -> list[Slice]:
    """What has more chips of the same kind, the next first: at most two of them."""
    if where.is_cpu:
        return []
    joint = "x" if where.target.platform == "gpu" else "-"
    found = []
    for count in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        try:
            larger = find_slice(f"{where.target.name}{joint}{count}")
        except ParameterError:
            continue
        if larger.num_devices > where.num_devices:
            found.append(larger)
    return found[:2]
