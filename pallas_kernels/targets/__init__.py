"""The chips that kernels are compiled for: their names here, what the compilers call them, what they can do.

It must not know any operation, nor how a program is compiled.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

import jax

FOLDER = Path(__file__).parent


class Target(NamedTuple):
    """A kind of chip.

    Attributes:
        name: as the user says it.
        platform: "tpu" or "gpu".
        topology: libtpu's name for the smallest slice of such TPUs; "" for a GPU.
        chip_config: libtpu's name for how the TensorCores of a chip appear; "" for its default.
    """

    name: str
    platform: str
    topology: str = ""
    chip_config: str = ""

    @property
    def config(self) -> str:
        """XLA's description of a GPU, a GpuTargetConfigProto as text."""
        return (FOLDER / f"{self.name}.txtpb").read_text(encoding="utf-8")

    @property
    def device_kind(self) -> str:
        """JAX's name for such a GPU."""
        return re.search(r'device_description_str: "([^"]*)"', self.config)[1]  # type: ignore[index]

    @property
    def compute_capability(self) -> float:
        """Of a GPU."""
        major, minor = re.search(r"cuda_compute_capability \{ major: (\d+) minor: (\d+) \}", self.config).groups()  # type: ignore[union-attr]
        return float(f"{major}.{minor}")


TARGETS = {
    target.name: target
    for target in (
        Target("a100", "gpu"),
        Target("l4", "gpu"),
        Target("h100", "gpu"),
        Target("h200", "gpu"),
        Target("b200", "gpu"),
        # By default libtpu shows a v4 chip as two devices; JAX on such a machine uses both as one, a megacore.
        Target("v4", "tpu", "v4:2x2x1", "megacore"),
        Target("v5e", "tpu", "v5e:2x2"),
        Target("v5p", "tpu", "v5p:2x2x1"),
        Target("v6e", "tpu", "v6e:2x2"),
        Target("v7x", "tpu", "tpu7x:2x2x1"),
    )
}


def find_target(name: str) -> Target:
    """The target of that name in any case; raises ValueError, listing the names, if there is none."""
    if name.lower() not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {name!r:.200}")
    return TARGETS[name.lower()]


def compute_capability() -> float | None:
    """Of the NVIDIA GPU that is traced for; None if that is not known, or no such GPU.

    It is the one of the abstract mesh around the call, if that is one of ``TARGETS`` (compiling ahead of time for
    another chip), else the lowest of the GPUs here.
    """
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract is not None and abstract.device_kind in _capabilities():
        return _capabilities()[abstract.device_kind]
    try:
        return min(float(device.compute_capability) for device in jax.local_devices(backend="gpu"))
    except (RuntimeError, ValueError, AttributeError):  # no GPU, or another vendor's
        return None


@functools.cache
def _capabilities() -> dict[str, float]:
    gpus = [target for target in TARGETS.values() if target.platform == "gpu"]
    return {target.device_kind: target.compute_capability for target in gpus}
