"""Whether this process is one of several of an engine, by options and by what a launcher says. Needs no jax."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from jaxpage.errors import ParameterError

TPU_HOSTS = "TPU_WORKER_HOSTNAMES"
"""The hosts of a TPU pod, with commas between them."""


class Launch(NamedTuple):
    """What has started this process.

    Attributes:
        launcher: its name, for people.
        num_processes: of the same program.
        process_id: which of them this is.
        is_alone_on_host: the others are on other hosts.
    """

    launcher: str
    num_processes: int
    process_id: int
    is_alone_on_host: bool


@dataclasses.dataclass(frozen=True)
class _Variables:
    """Where a launcher says how many processes there are, which one this is, and how many of them are on a host."""

    launcher: str
    count: str
    rank: str
    local_count: str


OPEN_MPI = _Variables("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
OTHER_MPI = _Variables("MPI", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS")
# Of the step, not of the job: that is in the environment of batch scripts and shells too, which srun has not started
# in that number, and of shells that have outlived their job.
SLURM = _Variables("SLURM", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "")
SLURM_NODES = "SLURM_STEP_NUM_NODES"
COUNTS = (OPEN_MPI.count, OTHER_MPI.count, SLURM.count)
"""Without these nobody has started several processes."""


class _Options(Protocol):
    """What of ``EngineArgs`` decides."""

    coordinator: str | None
    num_processes: int | None
    data_parallel_backend: str

    @property
    def num_devices(self) -> int: ...


def find_launch(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """The launcher that is next to this process, as MPI may run in a SLURM job; None without any."""
    open_mpi, mpi, slurm = (_read(each, environment) for each in (OPEN_MPI, OTHER_MPI, SLURM))
    if mpi is not None and slurm is not None and mpi[1:3] == slurm[1:3]:  # srun speaks MPI's language too
        mpi = None
    return open_mpi or mpi or slurm


def joins_others(args: _Options, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is one of several that are one engine.

    That is so if ``coordinator`` is given, in a TPU pod, and where SLURM or MPI has started several processes that can
    share the devices of an engine. An engine of one device is alone, as each of several tasks that have nothing to do
    with each other is; ``num_processes`` 1 is alone always. Who has Ray place engines is none of their processes.

    Raises:
        ParameterError: processes were started that cannot share the devices evenly.
    """
    if args.num_processes == 1 or args.data_parallel_backend == "ray":
        return False
    if args.coordinator is not None or "," in environment.get(TPU_HOSTS, ""):
        return True
    launch = find_launch(environment)
    if launch is None or launch.num_processes == 1 or args.num_devices == 1:
        return False
    if args.num_devices % launch.num_processes:
        raise ParameterError(
            "num_processes",
            f"{launch.launcher} has started {launch.num_processes} processes, which do not share {args.num_devices} "
            "devices (tensor_parallel_size * pipeline_parallel_size) evenly; 1 makes each an engine of its own",
        )
    return True


def _read(variables: _Variables, environment: Mapping[str, str]) -> Launch | None:
    count, rank = (_number(environment.get(name)) for name in (variables.count, variables.rank))
    if not count or rank is None:
        return None
    if variables is SLURM:
        is_alone = _number(environment.get(SLURM_NODES)) == count
    else:
        is_alone = environment.get(variables.local_count) == "1"
    return Launch(variables.launcher, count, rank, is_alone or count == 1)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
