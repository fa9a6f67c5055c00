"""Whether a launcher has started this process as one of several. Needs no jax."""

from __future__ import annotations

import os
from collections.abc import Mapping

COUNTS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables in which SLURM, Open MPI and other MPIs say how many processes there are."""
TPU_HOSTS = "TPU_WORKER_HOSTNAMES"
"""The hosts of a TPU pod, with commas between them."""


def has_several_processes(environment: Mapping[str, str] = os.environ) -> bool:
    """True in a job of several processes, which jax then finds by itself."""
    counted = any(environment.get(name, "1") not in ("", "1") for name in COUNTS)
    return counted or "," in environment.get(TPU_HOSTS, "")
