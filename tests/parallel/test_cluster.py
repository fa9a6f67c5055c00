"""Which processes are one engine: by options, and by what SLURM, MPI and TPU pods put into the environment."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import jax
import pytest

from jaxpage.config import EngineArgs
from jaxpage.errors import ParameterError
from jaxpage.parallel import hosts
from jaxpage.parallel.cluster import Launch, find_launch, joins_others

JOB = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NNODES": "4", "SLURM_JOB_NODELIST": "node[1-4]"}
"""What every process of a job sees, and a shell that has outlived it."""
BATCH = JOB | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
"""A batch script: SLURM gives it a rank, but runs it once."""
STEP = JOB | {"SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "node[1-4]"}
STEP |= {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "4"}
"""One of four tasks that srun has started, each on a host of its own."""
ALONE_IN_JOB = STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}
"""A shell of salloc: a step of one task, which sees the number of the job's."""
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
PMI = {"PMI_SIZE": "4", "PMI_RANK": "2"}


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, None),
        (JOB, None),
        (BATCH, None),
        (STEP, Launch("SLURM", 4, 2, True)),
        (STEP | {"SLURM_STEP_NUM_NODES": "2"}, Launch("SLURM", 4, 2, False)),
        (ALONE_IN_JOB, Launch("SLURM", 1, 0, True)),
        (OPEN_MPI, Launch("Open MPI", 2, 1, False)),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, Launch("Open MPI", 2, 1, True)),
        (STEP | OPEN_MPI, Launch("Open MPI", 2, 1, False)),
        (PMI, Launch("MPI", 4, 2, False)),
        (STEP | PMI, Launch("SLURM", 4, 2, True)),
        (STEP | {"PMI_SIZE": "8", "PMI_RANK": "7"}, Launch("MPI", 8, 7, False)),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, None),
        ({"PMI_SIZE": "", "PMI_RANK": "0"}, None),
    ],
)
def test_what_launchers_say(environment: dict[str, str], launch: Launch | None) -> None:
    assert find_launch(environment) == launch


@pytest.mark.parametrize(
    ("options", "environment", "joins"),
    [
        ({}, {}, False),
        ({}, STEP, False),
        ({"data_parallel_size": 4}, STEP, False),
        ({"tensor_parallel_size": 4}, STEP, True),
        ({"tensor_parallel_size": 4}, JOB, False),
        ({"tensor_parallel_size": 4}, BATCH, False),
        ({"tensor_parallel_size": 4}, ALONE_IN_JOB, False),
        ({"tensor_parallel_size": 4, "num_processes": 1}, STEP, False),
        ({"pipeline_parallel_size": 2}, OPEN_MPI, True),
        ({"pipeline_parallel_size": 2}, OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, False),
        ({}, {"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ({"num_processes": 1}, {"TPU_WORKER_HOSTNAMES": "a,b"}, False),
        ({}, {"TPU_WORKER_HOSTNAMES": "a"}, False),
        ({"tensor_parallel_size": 2, "coordinator": "a:1", "num_processes": 2, "process_id": 1}, {}, True),
        ({"coordinator": "a:1", "num_processes": 1, "process_id": 0}, {}, False),
    ],
)
def test_who_is_alone(options: dict[str, Any], environment: dict[str, str], joins: bool) -> None:
    assert joins_others(EngineArgs(**options), environment) is joins


def test_processes_that_cannot_share_the_devices_are_refused_at_once() -> None:
    message = r"num_processes: SLURM has started 4 processes, which do not share 6 devices .*; 1 makes each an engine"
    with pytest.raises(ParameterError, match=message):
        joins_others(EngineArgs(tensor_parallel_size=6), STEP)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_processes": 2, "tensor_parallel_size": 2}, "coordinator: must be given too"),
        (
            {"coordinator": "::1:80", "num_processes": 1, "process_id": 0},
            "must have an IPv6 address in brackets, got '",
        ),
    ],
)
def test_options_that_do_not_belong_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        EngineArgs(**options)
    assert EngineArgs(coordinator="[::1]:80", num_processes=1, process_id=0).coordinator == "[::1]:80"


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What jax was asked to join: coordinator, processes, this one, devices."""
    asked: list[tuple[Any, ...]] = []

    def initialize(*arguments: Any, local_device_ids: Any, **_: Any) -> None:
        asked.append((*arguments, local_device_ids))

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(hosts, "meet", lambda *_: None)
    monkeypatch.setattr(hosts, "agree_on", lambda name, value: value)
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    return asked


def test_a_process_alone_on_its_host_has_all_devices_there(joined: list[tuple[Any, ...]]) -> None:
    several = STEP | {"SLURM_STEP_NUM_NODES": "2"}
    own = {"JAX_LOCAL_DEVICE_IDS": "1"}
    for environment in (STEP, several, STEP | own, ALONE_IN_JOB):
        hosts.join(None, None, None, (), environment)
        hosts.join("node1:80", 4, 2, (), environment)
    by_slurm, by_options = joined[::2], joined[1::2]
    assert [asked[:3] for asked in by_slurm] == [(None, 4, 2)] * 3 + [(None, 1, 0)]
    assert [asked[:3] for asked in by_options] == [("node1:80", 4, 2)] * 4
    # None is jax's choice: one for each process, or those that its variable names.
    assert [asked[3] for asked in by_slurm] == [asked[3] for asked in by_options] == [[], None, None, []]


def test_who_cannot_join_learns_how_to_say_where_the_others_are() -> None:
    """In a process of its own: jax joins nothing once it has computed something, and says that instead."""
    # jax knows Open MPI up to version 4, and nothing of other MPIs.
    program = f"from jaxpage.parallel import hosts; hosts.join(None, None, None, (), {PMI})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    message = r"StartupError: cannot join the 4 processes that MPI has started: coordinator.*; coordinator, num_pr"
    assert re.search(message, done.stderr), done.stderr
