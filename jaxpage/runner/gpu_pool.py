"""How much of a GPU's memory jax sets aside for arrays: asked for before jax begins, as it is three quarters otherwise.

Must not know what lies there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, MutableMapping

import jax

from jaxpage.errors import StartupError

logger = logging.getLogger("jaxpage")

VARIABLE = "XLA_CLIENT_MEM_FRACTION"
VARIABLES = (VARIABLE, "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Where users say it; the second is jax's old name of the first, and it refuses both at once."""
UNASKED_SHARE = 0.75
HOLES = 0.03
"""Share of the memory that the pool has beyond what the engine takes: what is freed leaves holes between what stays."""
GPU_PLATFORMS = ("gpu", "cuda", "rocm")


def wanted_share(utilization: float) -> float:
    """Of a GPU's memory, for an engine that may use ``utilization`` of it."""
    return min(1.0, round(utilization + HOLES, 4))


def usable_share(utilization: float, pool_share: float) -> float:
    """Of jax's pool, what an engine may use."""
    return max(0.0, min(utilization, pool_share - HOLES)) / pool_share


def pool_share(environment: Mapping[str, str] = os.environ) -> float:
    """What jax has, or will have, of a GPU's memory.

    Raises:
        StartupError: the variable that says so holds no such number.
    """
    for name in VARIABLES:
        if text := environment.get(name):
            try:
                share = float(text)
            except ValueError:
                share = 0.0
            if not 0 < share < float("inf"):
                raise StartupError(f"{name} must be a share of the GPU's memory such as 0.9, got {text[:200]!r}")
            return share
    return UNASKED_SHARE


def ask_for_pool(utilization: float, environment: MutableMapping[str, str] = os.environ) -> None:
    """Lets jax set aside what ``utilization`` needs, unless the user has decided or jax has begun. Of no effect but
    on GPUs."""
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    has_none = platforms and not any(name in GPU_PLATFORMS for name in platforms.split(","))
    if not has_none and not any(environment.get(name) for name in VARIABLES) and not _jax_has_begun():
        environment[VARIABLE] = str(wanted_share(utilization))


def tell_of_pool(utilization: float, environment: Mapping[str, str] = os.environ) -> None:
    """Says in the log what jax has, and what to do if that is less than the engine may use."""
    share = pool_share(environment)
    if share < utilization:
        logger.warning(
            "jax has %.0f %% of the GPU's memory, less than gpu_memory_utilization %s: set %s=%s before jax is used",
            100 * share, utilization, VARIABLE, wanted_share(utilization),
        )  # fmt: skip
    else:
        logger.info("jax sets %.0f %% of the GPU's memory aside (%s)", 100 * share, VARIABLE)


def _jax_has_begun() -> bool:
    from jax._src import xla_bridge  # jax has no public name for this question that does not begin it

    return xla_bridge.backends_are_initialized()
