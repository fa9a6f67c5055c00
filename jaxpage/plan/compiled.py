"""Steps compiled for chips that need not be here, in a process of their own: what the compilers say of them.

The programs are those that an engine on such chips runs. It must not know what fits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpage.plan.hlo import Collective, count_kernels, find_collectives
from jaxpage.plan.scenario import Scenario, StagePart, make_scenario
from jaxpage.plan.slices import Slice, find_slice
from jaxpage.runner.programs import device_bytes
from pallas_kernels.aot import compiler

FEW_BLOCKS = 2
"""Blocks of the cache in a program that is compiled: nothing that is asked of it depends on their number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepReport:
    """What the compiler made of a stage's part of a step. Bytes are those of one device.

    Attributes:
        name: "decode" or "prefill": the steps of most requests and of most tokens.
        argument_bytes: parameters, cache, state and the packed batch.
        aliased_bytes: of the arguments, what is updated in place.
        step_bytes: temporaries, and for each step in flight those outputs that take the place of no argument and what
            the stage was given by the one before.
        cache_bytes, state_bytes: what should be updated in place.
        kernels: names of the Pallas kernels, and how often each is called.
        problem: why it does not compile; numbers are then 0.
    """

    name: str
    stage: int
    num_tokens: int
    num_rows: int
    num_blocks: int
    seconds: float = 0.0
    argument_bytes: int = 0
    aliased_bytes: int = 0
    step_bytes: int = 0
    cache_bytes: int = 0
    state_bytes: int = 0
    collectives: Sequence[Collective] = ()
    kernels: Mapping[str, int] = dataclasses.field(default_factory=dict)
    problem: str | None = None

    @property
    def is_cache_aliased(self) -> bool:
        """Whether cache and state are updated in place. The compiler may pad them, but not leave out one."""
        return self.aliased_bytes >= self.cache_bytes + self.state_bytes


@dataclasses.dataclass(frozen=True)
class Job:
    """A scenario to compile.

    Attributes:
        steps: names of ``StepReport``.
        num_blocks: of the cache.
    """

    scenario: Scenario
    steps: Sequence[str] = ("decode", "prefill")
    num_blocks: int = FEW_BLOCKS

    def as_json(self) -> str:
        """For the process that compiles."""
        scenario = self.scenario
        plain = dataclasses.asdict(scenario.args) | {"steps": list(self.steps), "num_blocks": self.num_blocks}
        return json.dumps({"name": scenario.name, "values": scenario.values, "options": plain})


def missing(where: Slice) -> str | None:
    """What has to be installed to compile for these chips, in one line; None if nothing."""
    return None if where.is_cpu else compiler.missing(where.target)


def compile_jobs(where: Slice, jobs: Sequence[Job]) -> Iterator[list[StepReport]]:
    """The reports of each job, in their order and as they come.

    Raises:
        RuntimeError: the process that compiles came to an end, with its last words.
    """
    devices = max(job.scenario.args.num_devices for job in jobs)
    # Compilers read the environment when they are loaded, and may end their process.
    with tempfile.TemporaryDirectory(prefix="plan-") as dump, tempfile.TemporaryFile("w+") as said:
        command = [sys.executable, "-m", "jaxpage.plan.compiled", where.name, str(devices)]
        process = subprocess.Popen(
            command, env=_environment(where, devices, Path(dump)), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=said, text=True,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        try:
            with contextlib.suppress(BrokenPipeError):
                for job in jobs:
                    process.stdin.write(job.as_json() + "\n")
                process.stdin.close()
            for _ in jobs:
                # Compilers print too.
                line = next((line for line in process.stdout if line.startswith(MARK)), None)
                if line is None:
                    process.wait()
                    said.seek(0)
                    last = "; ".join(said.read().strip().splitlines()[-3:])
                    raise RuntimeError(f"the compiler for {where.name} ended with {process.returncode}: {last[-1000:]}")
                yield [_report_of(values) for values in json.loads(line.removeprefix(MARK))]
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


MARK = "jaxpage.plan: "


def _environment(where: Slice, num_devices: int, dump: Path) -> dict[str, str]:
    environment = compiler.environment(where.target, dump)
    for name in [name for name in environment if name.startswith("MOSAIC_GPU_DUMP")]:
        del environment[name]  # it prints what kernels use, which is for ``pallas_kernels.aot``
    if where.is_cpu:
        flag = "xla_force_host_platform_device_count"
        given = [word for word in environment.get("XLA_FLAGS", "").split() if flag not in word and "dump" not in word]
        environment["XLA_FLAGS"] = " ".join([*given, f"--{flag}={num_devices}"])
    return environment


def _report_of(values: dict[str, Any]) -> StepReport:
    collectives = [Collective(**item) for item in values.pop("collectives")]
    return StepReport(collectives=collectives, **values)


def compile_step(part: StagePart, name: str, num_blocks: int) -> StepReport:
    """Compiles a stage's part of a step. The process must have the compilers' environment."""
    import jax
    from jax.sharding import Mesh

    programs, config = part.programs, part.programs.config
    num_tokens = config.max_num_seqs if name == "decode" else config.max_num_batched_tokens
    report = StepReport(
        name=name,
        stage=part.stage.index,
        num_tokens=num_tokens,
        num_rows=programs.packing(num_tokens).num_rows,
        num_blocks=num_blocks,
    )
    started = time.perf_counter()
    device, layout = programs.placement.first_device, programs.placement.layout
    mesh = Mesh([device], ("chip",)) if layout is None else layout.mesh
    try:
        # A kernel that asks for the chip's memory or capability learns the target's from the mesh.
        with (
            jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
            if device.platform != "cpu"
            else jax.default_device(device)
        ):
            compiled = programs.lower(num_tokens, part.params, num_blocks).compile()
    except Exception as error:  # a compiler's reason is the answer
        problem = f"{type(error).__name__}: {str(error)[:2000]}"
        return dataclasses.replace(report, seconds=time.perf_counter() - started, problem=problem)
    memory, text, needed = compiled.memory_analysis(), compiled.as_text(), programs.step_bytes(num_tokens, compiled)
    assert memory is not None and text is not None and needed is not None, "these compilers tell all of it"
    return dataclasses.replace(
        report,
        seconds=time.perf_counter() - started,
        argument_bytes=memory.argument_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        step_bytes=needed - programs.state_bytes,
        cache_bytes=device_bytes(programs.cache_shapes(num_blocks)),
        state_bytes=programs.state_bytes,
        collectives=find_collectives(text),
        kernels=count_kernels(text),
    )


def main(name: str, num_devices: str) -> None:
    """The process that compiles: takes jobs on stdin, a line each, and prints their reports."""
    from jaxpage.engine.build import configure_jax

    configure_jax()
    where = find_slice(name)
    devices = where.devices(int(num_devices))
    for line in sys.stdin:
        values = json.loads(line)
        steps, num_blocks = values["options"].pop("steps"), values["options"].pop("num_blocks")
        engine_devices = values["options"]["tensor_parallel_size"] * values["options"]["pipeline_parallel_size"]
        scenario = make_scenario(values["name"], values["values"], where, values["options"], devices[:engine_devices])
        reports = [compile_step(part, step, num_blocks) for step in steps for part in scenario.parts]
        print(MARK + json.dumps([dataclasses.asdict(report) for report in reports]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
