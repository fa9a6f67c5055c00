"""Owns which devices each engine of several gets, in this process or, through variables, in one of its own.

It must not know what runs on them.

A process takes all accelerators that it sees as soon as jax touches one, so each of several has to be kept from seeing
those of the others before it starts. Every platform has its own variables for that; the ones of platforms that are not
there have no effect. CPU devices need none: each process has its own.

- NVIDIA, AMD: ``CUDA_VISIBLE_DEVICES``, ``HIP_VISIBLE_DEVICES``: the devices by number (or UUID).
- TPU: ``TPU_VISIBLE_CHIPS`` names the chips of this host; the bounds tell libtpu that these are the whole machine; a
  port of its own and leave to be loaded more than once let it run beside others. Chips, not devices: where a chip is
  two devices (v2, v3, v7x), an engine that needs an odd number of devices leaves one unused.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpage.errors import StartupError

GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
CHIP_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""How that many chips of a host lie together."""


def split_devices(devices: Sequence[Any], num_engines: int, num_each: int) -> list[Sequence[Any]]:
    """The devices of each engine in this process.

    Raises:
        StartupError: with the numbers, if there are too few.
    """
    needed = num_engines * num_each
    if needed > len(devices):
        kind = devices[0].platform
        advice = f"; XLA_FLAGS=--xla_force_host_platform_device_count={needed} makes more" if kind == "cpu" else ""
        raise StartupError(
            f"data_parallel_size {num_engines} needs {needed} devices, {num_each} for each engine; "
            f"this process has {len(devices)} ({kind}){advice}"
        )
    return [devices[first : first + num_each] for first in range(0, needed, num_each)]


def visibility(index: int, num_each: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that make engine ``index`` of several, each with ``num_each`` devices, see its own ones only.

    Raises:
        StartupError: if ``environment`` limits this process to fewer devices.
    """
    mine = range(index * num_each, (index + 1) * num_each)
    variables = {name: _picked(name, mine, environment) for name in GPU_VARIABLES}
    variables["TPU_VISIBLE_CHIPS"] = _picked("TPU_VISIBLE_CHIPS", mine, environment)
    if num_each in CHIP_BOUNDS:
        port = str(_free_port())
        variables |= {
            "TPU_CHIPS_PER_PROCESS_BOUNDS": CHIP_BOUNDS[num_each],
            "TPU_PROCESS_BOUNDS": "1,1,1",
            "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
            "TPU_PROCESS_PORT": port,
            "CLOUD_TPU_TASK_ID": "0",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
    return variables


def _picked(name: str, places: range, environment: Mapping[str, str]) -> str:
    """Those at ``places`` of what this process may see, which may be less than is there."""
    if name not in environment:
        return ",".join(map(str, places))
    seen = [each.strip() for each in environment[name].split(",") if each.strip()]
    if not seen or seen == ["-1"]:  # none at all: another platform is used
        return environment[name]
    if places.stop > len(seen):
        raise StartupError(
            f"engines 0 to {places.start // len(places)} need {places.stop} devices, {len(places)} each; "
            f"{name} names {len(seen)}"
        )
    return ",".join(seen[place] for place in places)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
