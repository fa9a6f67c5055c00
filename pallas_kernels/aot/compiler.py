"""Compiles a case for one target and reads from the compilers' dumps what its kernels use.

It owns the topology, the flags of the compilers and the forms of their output; it must not know any operation, nor
which cases there are. One process compiles for one target.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.aot.report import FAILED, OK, REFUSED, Row
from pallas_kernels.case import Case
from pallas_kernels.targets import Target

INSTALL = "pip install 'jaxpage[plan]'"


def missing(target: Target) -> str | None:
    """What has to be installed to compile for a target, in one line; None if nothing."""
    absent = []
    if target.platform == "tpu":
        if importlib.util.find_spec("libtpu") is None:
            absent.append("libtpu")
    else:
        plugins = importlib.util.find_spec("jax_plugins")
        folders = list(plugins.submodule_search_locations or ()) if plugins else []
        if not any(Path(folder, name).is_dir() for folder in folders for name in ("xla_cuda12", "xla_cuda13")):
            absent.append("jax-cuda12-plugin")
        if ptxas() is None:
            absent.append("nvidia-cuda-nvcc-cu12 (ptxas)")
    if not absent:
        return None
    return f"compiling for {target.name} needs {' and '.join(absent)}, which is not installed here: {INSTALL}"


@functools.cache
def ptxas() -> str | None:
    """Path of the assembler: that of the package that JAX's plugin comes with, else the one on the path."""
    packages = importlib.util.find_spec("nvidia")
    for folder in packages.submodule_search_locations or () if packages else ():
        for program in sorted(Path(folder).glob("*/bin/ptxas")):
            return str(program)
    return shutil.which("ptxas")


def environment(target: Target, dump: Path) -> dict[str, str]:
    """The environment of a process that compiles for ``target`` and leaves what compilers dump in ``dump``."""
    variables = dict(os.environ)
    # Neither a GPU nor a TPU of this machine is started, and nothing is taken from a cache of compiled programs.
    variables |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "-1", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    if target.platform == "tpu":
        # libtpu would look for the machine's own TPU, and let only one process of a machine load it.
        variables |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4"}
        variables |= {"TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        return variables
    # Tiles are not measured, which would need the chip. Of the many dumps, PTX and launches are wanted.
    flags = f"--xla_gpu_autotune_level=0 --xla_dump_to={dump} --xla_dump_hlo_as_text=false --xla_dump_emitter_re=ptx"
    variables["XLA_FLAGS"] = f"{variables.get('XLA_FLAGS', '')} {flags}".strip()
    variables |= {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_RESOURCES": "1"}
    program = ptxas()
    if program is not None:
        variables["PATH"] = os.pathsep.join([str(Path(program).parent), variables.get("PATH", "")])
    return variables


class Compiler:
    """Compiles cases for a target; the process must have been started in its ``environment``."""

    def __init__(self, target: Target, dump: Path) -> None:
        self.target = target
        self.dump = dump
        self.stdout = dump / "stdout"
        # Mosaic GPU prints what the others dump.
        with self.stdout.open("ab") as file:
            os.dup2(file.fileno(), 1)
        if target.platform == "tpu":
            options = {"chip_config_name": target.chip_config} if target.chip_config else {}
            topology = topologies.get_topology_desc(platform="tpu", topology_name=target.topology, **options)
        else:
            topology = topologies.get_topology_desc(
                platform="cuda", topology_name="", target_config=target.config, topology="1x1x1"
            )
        self.mesh = Mesh(np.array(topology.devices[:1]), ("chip",))

    def compile(self, case: Case, implementation: str) -> Row:
        """Traces, lowers and compiles a case; whatever goes wrong is in the row."""
        row = Row(
            target=self.target.name,
            operation=case.operation,
            implementation=implementation,
            model=case.model,
            size=case.size,
            shape=case.shape,
            dtype=case.dtype,
            minimum_bytes=case.minimum_bytes,
        )
        started = time.perf_counter()
        try:
            traced, compiled = self._compile(case, implementation)
        except NotImplementedError as error:
            row.status, row.reason = REFUSED, str(error) or "not implemented"
        except Exception as error:
            row.status, row.reason = FAILED, f"{type(error).__name__}: {error}"
        else:
            row.status = OK
            row.moved_bytes = case.moved_bytes.get(implementation)
            memory = compiled.memory_analysis()
            row.temp_bytes = None if memory is None else memory.temp_size_in_bytes
            row.seconds = time.perf_counter() - started
            row.kernels = self._kernels(traced, compiled)
            return row
        row.seconds = time.perf_counter() - started
        return row

    def _compile(self, case: Case, implementation: str) -> tuple[Any, Any]:
        options = dict(case.options)
        if case.implementations:
            options["implementation"] = implementation
        sharding = NamedSharding(self.mesh, PartitionSpec())
        arguments = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), dict(case.arguments)
        )
        for file in self.dump.iterdir():
            if file != self.stdout:
                file.unlink() if file.is_file() else shutil.rmtree(file)
        os.truncate(self.stdout, 0)
        # Under the mesh a kernel that asks for the chip's memory or capability learns the target's.
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            jitted = jax.jit(functools.partial(case.function, **options), donate_argnames=case.donated or None)
            traced = jitted.trace(**arguments)
            return traced, traced.lower().compile()

    def _kernels(self, traced: Any, compiled: Any) -> list[dict[str, Any]]:
        if self.target.platform == "tpu":
            return tpu_kernels(compiled.as_text(), smem_bytes(traced.jaxpr.jaxpr))
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)  # what the compilers printed may lie in the buffer of C's stdout
        return [*self._triton_kernels(compiled.as_text()), *mosaic_gpu_kernels(self.stdout.read_text(errors="replace"))]

    def _triton_kernels(self, hlo: str) -> list[dict[str, Any]]:
        names = triton_names(hlo)
        launches = "".join(file.read_text() for file in self.dump.glob("*thunk_sequence*.txt"))
        shared = dict(re.findall(r" (\w+) grid: .* shared_memory: (\d+)", launches))
        kernels = []
        for file in sorted(self.dump.glob("*.ptx")):
            ptx = file.read_text(errors="replace")
            if not names & set(re.findall(r"\.entry (\w+)", ptx)):
                continue
            arch = re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE)
            command = [ptxas() or "ptxas", "-v", f"-arch={arch[1] if arch else 'sm_80'}", str(file), "-o", os.devnull]
            said = subprocess.run(command, capture_output=True, text=True, check=False)
            for kernel in ptxas_kernels(said.stderr):
                if kernel["name"] in shared:
                    kernel["shared_bytes"] = int(shared[kernel["name"]])
                kernels.append(kernel)
        return kernels


def triton_names(hlo: str) -> set[str]:
    """Names of the Triton kernels in a compiled program."""
    calls = (line for line in hlo.splitlines() if 'custom_call_target="__gpu$xla.gpu.triton"' in line)
    return {match[1] for line in calls if (match := re.search(r'[{, ]name = "(\w+)"', line))}


def ptxas_kernels(said: str) -> list[dict[str, Any]]:
    """What ``ptxas -v`` says of each kernel."""
    pattern = (
        r"Function properties for (\S+)\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads\n.*?Used (\d+) registers"
    )
    return [
        {"name": name, "registers": int(registers), "spill_bytes": int(stores) + int(loads)}
        for name, stores, loads, registers in re.findall(pattern, said)
    ]


def mosaic_gpu_kernels(printed: str) -> list[dict[str, Any]]:
    """What Mosaic GPU prints of its kernels: those of ptxas, and the memory of each in an order of its own."""
    kernels = ptxas_kernels(printed)
    for kernel in kernels:
        kernel["name"] = kernel["name"].removesuffix("_mosaic_gpu_kernel")
    shared = [int(size) for size in re.findall(r"Resources\(smem_scratch_bytes=(\d+)", printed)]
    if kernels and shared:
        kernels[0]["shared_bytes"] = max(shared)
    return kernels


def tpu_kernels(hlo: str, smem: dict[str, int]) -> list[dict[str, Any]]:
    """The Mosaic kernels in a compiled program; ``smem`` is what each takes of SMEM by name."""
    kernels = {}
    for line in hlo.splitlines():
        if 'custom_call_target="tpu_custom_call"' not in line:
            continue
        name = re.sub(r"(\.\d+)+$", "", line.split(" = ")[0].strip().removeprefix("ROOT ").removeprefix("%"))
        kernel = kernels.setdefault(name, {"name": name})
        used = re.search(r'"used_scoped_memory_configs":\[(.*?)\]', line)
        vmem = [
            int(size)
            for size in re.findall(r'"memory_space":"1","offset":"\d+","size":"(\d+)"', used[1] if used else "")
        ]
        if vmem:
            kernel["vmem_bytes"] = max(*vmem, kernel.get("vmem_bytes", 0))
        if name in smem:
            kernel["smem_bytes"] = smem[name]
    return list(kernels.values())


def smem_bytes(jaxpr: Any) -> dict[str, int]:
    """What the Pallas kernels in a program ask for of a TPU's SMEM, by name: prefetched scalars and scratch."""
    found: dict[str, int] = {}
    for equation in equations(jaxpr):
        if equation.primitive.name != "pallas_call":
            continue
        refs = [variable.aval for variable in equation.params["jaxpr"].invars]
        sizes = [tiled_bytes(ref.shape, ref.dtype) for ref in refs if str(getattr(ref, "memory_space", "")) == "smem"]
        name = equation.params.get("name") or "kernel"
        found[name] = max(found.get(name, 0), sum(sizes))
    return found


def tiled_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Bytes of an array of words in SMEM: rows are whole 128 words, and their number a power of two up to 8."""
    *lead, columns = shape or (1,)
    size = -(-columns // 128) * 128
    if lead:
        *lead, rows = lead
        tile = min(8, 1 << (rows - 1).bit_length())
        size *= -(-rows // tile) * tile
    return int(np.prod(lead, dtype=np.int64)) * size * max(4, np.dtype(dtype).itemsize)


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a program, those of its inner programs included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)
