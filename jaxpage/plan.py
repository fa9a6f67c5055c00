"""Owns ``python -m jaxpage.plan``: compiles a model's steps for chips that need not be here, and says what they take.

The programs are those that an engine on such chips runs (``runner.programs``), split over all of them by tensor
parallelism; weights and cache are shapes only. It must not know how a step computes.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxpage.config import EngineArgs, EngineConfig, resolve
from jaxpage.errors import ParameterError, shown
from jaxpage.models.config import ModelConfig, UnsupportedModelError
from jaxpage.models.presets import PRESETS
from jaxpage.models.registry import build_config
from jaxpage.models.weight_map import ParamSpec
from jaxpage.runner.memory import gib
from pallas_kernels.aot import compiler
from pallas_kernels.targets import TARGETS, Target, find_target

CHILD = "JAXPAGE_PLAN_CHILD"
TPU_SLICES = {4: "2x2", 8: "2x4", 16: "4x4"}
"""Topologies of the chips that lie in a plane (v5e, v6e), by number of chips."""
COLLECTIVES = "all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute"


class Slice(NamedTuple):
    """Chips that a model is split over."""

    target: Target
    num_devices: int
    topology: str


@dataclasses.dataclass(kw_only=True)
class StepReport:
    """What the compiler made of a step. Bytes are those of one device.

    Attributes:
        aliased_bytes: of the arguments, what is updated in place.
        cache_bytes, state_bytes: of the KV cache and of the sampling state: what should be.
        layer_collectives: number of each collective in a layer, the same in all of them or else the most.
        other_collectives: number of each in the embedding, the logits and the sampler.
        kernels: names of the Pallas kernels, and how often each is called.
    """

    name: str
    num_tokens: int
    num_rows: int
    seconds: float
    argument_bytes: int
    aliased_bytes: int
    temp_bytes: int
    cache_bytes: int
    state_bytes: int
    layer_collectives: Mapping[str, int]
    other_collectives: Mapping[str, int]
    kernels: Mapping[str, int]

    @property
    def is_cache_aliased(self) -> bool:
        """Whether cache and state are updated in place. The compiler may pad them, but not leave out one."""
        return self.aliased_bytes >= self.cache_bytes + self.state_bytes


def find_slice(name: str) -> Slice:
    """The chips that ``name`` stands for, as "v6e-8" or "h200x8".

    Raises:
        ParameterError: saying what there is.
    """
    match = re.fullmatch(r"(v\d+[a-z]?)-(\d+)|([a-z]+\d+)x(\d+)", name.lower())
    try:
        target = find_target(match[1] or match[3]) if match else None
    except ValueError:
        target = None
    if match is None or target is None:
        raise ParameterError("target", f"must be such as v6e-8 or h200x8 of {', '.join(TARGETS)}, got {shown(name)}")
    count = int(match[2] or match[4])
    if target.platform == "gpu":
        if match[1] or not 1 <= count <= 8:
            raise ParameterError("target", f"must have 1 to 8 GPUs, as in {target.name}x8, got {shown(name)}")
        return Slice(target, count, f"1x1x{count}")
    kind = target.topology.split(":")[0]
    if target.name in ("v5e", "v6e"):
        if count not in TPU_SLICES:
            raise ParameterError(
                "target", f"{target.name} comes in {', '.join(map(str, TPU_SLICES))}, got {shown(name)}"
            )
        return Slice(target, count, f"{kind}:{TPU_SLICES[count]}")
    # Two TensorCores a chip: one device on v4 and v5p, which are named by cores, and two on v7x.
    chips = count // 2
    if count % 8:
        raise ParameterError("target", f"{target.name} comes in multiples of 8 cores, got {shown(name)}")
    return Slice(target, count if target.name == "v7x" else chips, f"{kind}:2x2x{chips // 4}")


def find_model(name: str) -> tuple[ModelConfig, list[ParamSpec]]:
    """A preset, or the config.json that ``name`` is or that lies in the directory ``name``.

    Raises:
        ParameterError: if there is none, or it cannot be served.
    """
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if name.lower() in PRESETS:
        values = PRESETS[name.lower()]
    elif path.is_file():
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ParameterError("model", f"{shown(str(path))} is not JSON: {error}") from error
    else:
        raise ParameterError(
            "model", f"must be a config.json, its directory or {', '.join(PRESETS)}, got {shown(name)}"
        )
    try:
        return build_config(values)
    except UnsupportedModelError as error:
        raise ParameterError("model", str(error)) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles and reports.

    Returns:
        The exit code: 0 if all compiles, 1 if something does not or cannot be had; usage errors exit with 2.
    """
    options = _parser().parse_args(argv)
    try:
        where = find_slice(options.target)
        model, specs = find_model(options.model)
        config = _engine_config(options, model, where)
        if options.num_blocks < 2:
            raise ParameterError("num_blocks", f"must be at least 2, got {options.num_blocks}")
    except ParameterError as error:
        print(f"jaxpage: error: --{error.parameter.replace('_', '-')}: {error.reason}", file=sys.stderr)
        return 1
    absent = compiler.missing(where.target)
    if absent:
        print(f"jaxpage: error: {absent}", file=sys.stderr)
        return 1
    if os.environ.get(CHILD):
        return _report(options, where, model, specs, config)
    # Compilers read the environment when they are loaded, and may end their process.
    with tempfile.TemporaryDirectory(prefix="plan-") as dump:
        environment = compiler.environment(where.target, Path(dump)) | {CHILD: "1"}
        for name in [name for name in environment if name.startswith("MOSAIC_GPU_DUMP")]:
            del environment[name]  # it prints what kernels use, which is for ``pallas_kernels.aot``
        command = [sys.executable, "-m", "jaxpage.plan", *(sys.argv[1:] if argv is None else argv)]
        return subprocess.run(command, env=environment, check=False).returncode


def _report(
    options: argparse.Namespace, where: Slice, model: ModelConfig, specs: Sequence[ParamSpec], config: EngineConfig
) -> int:
    print(
        f"{options.model}, {model.num_layers} layers, on {where.num_devices} x {where.target.name} by tensor "
        f"parallelism; KV cache: {options.num_blocks:,} blocks of {config.block_size} tokens in {config.kv_cache_dtype}"
    )
    reports = []
    for name, num_tokens in (("decode", config.max_num_seqs), ("prefill", config.max_num_batched_tokens)):
        try:
            reports.append(compile_step(where, model, specs, config, name, num_tokens, options.num_blocks))
        except Exception as error:  # a compiler's reason is the answer
            print(f"{name}: does not compile: {type(error).__name__}: {str(error)[:2000]}", file=sys.stderr)
            return 1
        print(_shown(reports[-1]), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps([dataclasses.asdict(report) for report in reports], indent=1) + "\n")
    return 0


def compile_step(
    where: Slice,
    model: ModelConfig,
    specs: Sequence[ParamSpec],
    config: EngineConfig,
    name: str,
    num_tokens: int,
    num_blocks: int,
) -> StepReport:
    """Compiles the step for ``num_tokens`` tokens on the slice. The process must have the compilers' environment."""
    import jax

    from jaxpage.parallel.sharding import tensor_parallel_mesh
    from jaxpage.runner.programs import StepPrograms

    mesh = tensor_parallel_mesh(_devices(where))
    programs = StepPrograms(model, config, mesh)
    started = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = programs.lower(num_tokens, programs.param_shapes(specs), num_blocks)
        compiled = lowered.compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None, "the compilers of GPUs and TPUs tell both"
    layers, others = count_collectives(text)

    def local_bytes(shapes: Any) -> int:
        sizes = ((shape.sharding.shard_shape(shape.shape), shape.dtype) for shape in jax.tree.leaves(shapes))
        return sum(int(jax.numpy.prod(jax.numpy.array(size))) * dtype.itemsize for size, dtype in sizes)

    return StepReport(
        name=name,
        num_tokens=num_tokens,
        num_rows=programs.packing(num_tokens).num_rows,
        seconds=time.perf_counter() - started,
        argument_bytes=memory.argument_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        cache_bytes=local_bytes(programs.cache_shapes(num_blocks)),
        state_bytes=local_bytes(programs.state_shapes()),
        layer_collectives=layers,
        other_collectives=others,
        kernels=count_kernels(text),
    )


def _devices(where: Slice) -> Sequence[Any]:
    from jax.experimental import topologies

    if where.target.platform == "tpu":
        options = {"chip_config_name": where.target.chip_config} if where.target.chip_config else {}
        return topologies.get_topology_desc(platform="tpu", topology_name=where.topology, **options).devices
    return topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=where.target.config, topology=where.topology
    ).devices


def count_collectives(hlo: str) -> tuple[dict[str, int], dict[str, int]]:
    """The most of each collective in a layer, and those outside layers, of a compiled program."""
    layers: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    others: collections.Counter[str] = collections.Counter()
    for line in hlo.splitlines():
        # Some are split into a start and a done; the start counts.
        found = re.search(rf" = .*? ({COLLECTIVES})(-start)?\(", line)
        if found is None:
            continue
        layer = re.search(r'op_name="[^"]*\blayer_(\d+)\b', line)
        if layer is None:
            others[found[1]] += 1
        else:
            layers[found[1]][layer[1]] += 1
    return {name: max(counts.values()) for name, counts in layers.items()}, dict(others)


def count_kernels(hlo: str) -> dict[str, int]:
    """Calls of Pallas kernels in a compiled program, by name."""
    calls = (line for line in hlo.splitlines() if " custom-call(" in line)
    names = (re.search(r'op_name="[^"]*/(\w+)/(?:pallas_call|mpmd_map)"', line) for line in calls)
    return dict(collections.Counter(name[1] for name in names if name))


def _shown(report: StepReport) -> str:
    def counts(of: Mapping[str, int]) -> str:
        return ", ".join(f"{number} {name}" for name, number in sorted(of.items())) or "none"

    return (
        f"{report.name}: {report.num_tokens:,} tokens, {report.num_rows} rows, compiled in {report.seconds:.0f} s\n"
        f"  arguments {gib(report.argument_bytes)} a device, of them KV cache {gib(report.cache_bytes)}\n"
        f"  updated in place {gib(report.aliased_bytes)}"
        f" (cache and state: {'all' if report.is_cache_aliased else 'NOT all'}); temporaries {gib(report.temp_bytes)}\n"
        f"  collectives: {counts(report.layer_collectives)} a layer; {counts(report.other_collectives)} elsewhere\n"
        f"  kernels: {counts(report.kernels)}"
    )


def _engine_config(options: argparse.Namespace, model: ModelConfig, where: Slice) -> EngineConfig:
    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_dtype", "dtype")
    chosen = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    args = EngineArgs(**chosen, attention_implementation=options.attention_implementation)
    config = resolve(
        args, model_max_len=model.max_position, vocab_size=model.vocab_size, platform=where.target.platform
    )
    for axis, size in (("num_kv_heads", model.num_kv_heads), ("vocab_size", model.vocab_size)):
        if size % where.num_devices:
            raise ParameterError("target", f"{axis} {size} does not divide over {where.num_devices} devices")
    return config


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxpage.plan",
        description="Compile a model's decode and prefill steps for chips that need not be here, and show their "
        "memory, collectives and kernels.",
    )
    parser.add_argument("--model", required=True, help=f"config.json, its directory, or {', '.join(PRESETS)}")
    parser.add_argument("--target", required=True, help="such as v6e-8 or h200x8")
    parser.add_argument("--max-model-len", type=int, default=8192, metavar="N", help="default: %(default)s")
    for flag in ("--max-num-seqs", "--max-num-batched-tokens", "--block-size"):
        parser.add_argument(flag, type=int, metavar="N", help="as for the engine")
    parser.add_argument("--kv-cache-dtype", help="as for the engine")
    parser.add_argument("--dtype", help="as for the engine")
    parser.add_argument("--attention-implementation", default="auto", help="as for the engine")
    parser.add_argument("--num-blocks", type=int, default=4096, metavar="N", help="of the cache; default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="also write the numbers")
    return parser


if __name__ == "__main__":
    sys.exit(main())
