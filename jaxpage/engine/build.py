"""From options to a running core: resolves and reads the model, sizes everything, compiles."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import rich.progress

from jaxpage.batch import Device
from jaxpage.config import EngineArgs, EngineConfig, resolve
from jaxpage.engine.core import EngineCore
from jaxpage.engine.preemption_cost import preemption_policy
from jaxpage.engine.tokenizer_source import open_tokenizer_source
from jaxpage.errors import ParameterError, StartupError
from jaxpage.kv.manager import KVCacheManager
from jaxpage.models.config import ModelConfig
from jaxpage.models.decoder import Params
from jaxpage.models.registry import build_config
from jaxpage.models.weight_map import ParamSpec, repeat_kv_heads
from jaxpage.parallel.cluster import joins_others
from jaxpage.parallel.hosts import join, refuse
from jaxpage.parallel.pipeline import Stage, split_layers, stage_specs
from jaxpage.parallel.placement import Placement
from jaxpage.parallel.sharding import choose_layout, kv_repeats, naming_what_was_given, without_effect
from jaxpage.runner.gpu_pool import ask_for_pool, tell_of_pool
from jaxpage.runner.group import Follower, Leader, LeadingWorker
from jaxpage.runner.memory import gib
from jaxpage.runner.programs import StagePrograms
from jaxpage.runner.runner import Runner
from jaxpage.runner.stage import StageWorker
from jaxpage.runner.worker import Worker
from jaxpage.scheduler.scheduler import Scheduler
from jaxpage.tokenizer import Tokenizer
from jaxpage.weights.builtin import cache_directory
from jaxpage.weights.loader import dummy_params, load_params
from jaxpage.weights.source import Checkpoint, OrbaxCheckpoint, open_checkpoint, resolve_model
from pallas_kernels import native
from pallas_kernels.matmul import BlockWeight, multiplies_blocks

logger = logging.getLogger("jaxpage")


@dataclasses.dataclass(frozen=True)
class LoadedEngine:
    """A core and what its front needs to talk about the model."""

    core: EngineCore
    model: ModelConfig
    config: EngineConfig
    tokenizer: Tokenizer
    generation_config: dict[str, Any]


def build(args: EngineArgs, devices: Sequence[Device] | None = None) -> LoadedEngine:
    """Loads, compiles and warms up one engine. Takes seconds, and shows what it does.

    Args:
        devices: where; None: as many of this process's as the options ask for.

    Raises:
        ValueError, StartupError: in one line, for anything that keeps the engine from starting.
    """
    started = time.monotonic()
    if not join_hosts(args):
        problem = (
            f"process {jax.process_index()} of {jax.process_count()} follows: run python -m jaxpage.serve there, with "
            "the options of process 0"
        )
        refuse(problem)
        raise StartupError(problem)
    # One of its own comes first: nobody should load a model for a minute to learn that its tokenizer is not there.
    own_tokenizer = None if args.tokenizer is None else open_tokenizer_source(args.tokenizer).load_tokenizer()
    leader = Leader() if jax.process_count() > 1 else None
    try:
        half = build_device_half(args, devices, leader)
    except BaseException:
        if leader is not None:
            leader.give_up()
        raise
    worker, model, config = half.worker, half.model, half.config
    tokenizer = own_tokenizer or half.checkpoint.load_tokenizer()
    kv = KVCacheManager(
        worker.plan.num_blocks,
        config.block_size,
        config.enable_prefix_caching,
        num_host_blocks=worker.num_host_blocks,
        model=args.model,
    )
    scheduler = Scheduler(
        kv,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        enable_chunked_prefill=config.enable_chunked_prefill,
        policy=config.scheduling_policy,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        preemption=preemption_policy(
            config.preemption_mode,
            half.num_params,
            [stage.programs for stage in worker.stages],
            _platform(worker.stages[0].programs.placement.first_device),
        ),
        num_stages=len(worker.stages),
    )
    logger.info("Ready in %.1f s", time.monotonic() - started)
    core = EngineCore(scheduler, Runner(worker, model, config))
    return LoadedEngine(core, model, config, tokenizer, half.checkpoint.generation_config)


def join_hosts(args: EngineArgs) -> bool:
    """Joins the other processes of the engine, if it has several; True if this one leads, or is alone.

    Raises:
        StartupError: if the others are not there, or were started with other options.
    """
    is_one_of_several = jax.distributed.is_initialized() or joins_others(args)
    if is_one_of_several and args.data_parallel_size > 1:
        raise ParameterError(
            "data_parallel_size", "engines that span several hosts are placed by data_parallel_backend ray"
        )
    shared = [
        f"{field.name} {getattr(args, field.name)}"
        for field in dataclasses.fields(args)
        if field.name not in OWN_OPTIONS
    ]
    num_processes = join(args.coordinator, args.num_processes, args.process_id, shared) if is_one_of_several else 1
    configure_jax(args, num_processes)
    return num_processes == 1 or jax.process_index() == 0


def lead_or_follow(args: EngineArgs) -> bool:
    """True if the engine is to be built here. In a process that follows: False, when the engine has ended.

    Raises:
        ValueError, StartupError: in one line, for anything that keeps the engine from starting.
    """
    if join_hosts(args):
        return True
    follow_leader(args)
    return False


OWN_OPTIONS = {
    "coordinator",
    "process_id",
    "model",
    "tokenizer",
    "served_model_name",
    "disable_log_stats",
    "enable_log_requests",
}
"""Options in which hosts may differ: where files are, and what only the leader does."""


def follow_leader(args: EngineArgs) -> None:
    """Loads, and does what the leading process says until that ends. ``join_hosts`` comes first.

    Raises:
        ValueError, StartupError: in one line, for anything that keeps the engine from starting.
    """
    follower = Follower()
    try:
        worker = build_device_half(args).worker
    except BaseException:
        follower.give_up()
        raise
    logger.info("Following the leading host as process %d of %d", jax.process_index(), jax.process_count())
    follower.follow(worker)


@dataclasses.dataclass(frozen=True)
class DeviceHalf:
    """What every process of an engine has.

    Attributes:
        num_params: of the whole model, on whichever devices they are.
    """

    worker: Worker
    model: ModelConfig
    config: EngineConfig
    checkpoint: Checkpoint | OrbaxCheckpoint
    num_params: int


def build_device_half(
    args: EngineArgs, devices: Sequence[Device] | None = None, leader: Leader | None = None
) -> DeviceHalf:
    """Reads the weights onto ``devices``, compiles and warms up; see ``build``. ``leader``: whom others follow."""
    try:
        with naming_what_was_given(args):
            return _build_device_half(args, devices, leader)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise StartupError(f"not enough memory: {str(error).splitlines()[0] if str(error) else error!r}") from error
        raise


def _build_device_half(args: EngineArgs, devices: Sequence[Device] | None, leader: Leader | None) -> DeviceHalf:
    started = time.monotonic()
    devices = take_devices(args) if devices is None else devices
    checkpoint = open_checkpoint(resolve_model(args.model, args.revision), needs_weights=args.load_format != "dummy")
    model, specs = build_config(checkpoint.config, checkpoint.generation_config)
    num_params = sum(math.prod(spec.shape) for spec in specs)
    platform = _platform(devices[0])
    if platform == "gpu":
        tell_of_pool(args.gpu_memory_utilization)
    if platform == "cpu":
        tell_of_native_kernels()
    config = resolve(args, model_max_len=model.max_position, vocab_size=model.vocab_size, platform=platform)
    config = dataclasses.replace(config, quantization=config.quantization or checkpoint.quantization)
    model, specs, placements = place(args, model, specs, devices)
    check_first_stage([placement for _, placement in placements])
    layout = placements[0][1].layout  # those of other stages differ by their devices only
    for line in [] if layout is None else without_effect(layout, model, (spec.axes for spec in specs)):
        logger.warning(line)
    with StartupProgress() as progress:
        stages = []
        for stage, placement in placements:
            programs = StagePrograms(model, config, placement, stage)
            is_here = placement.is_here
            params = _load_stage(args, checkpoint, programs, specs, stage, progress) if is_here else {}
            stages.append(StageWorker(programs, params))
        weights = [stage.params for stage in stages]
        logger.info(
            "Loaded %s (%s, %d layers, %s of %s weights) on %s in %.1f s",
            args.model, model.model_type, model.num_layers,
            gib(sum(leaf.nbytes for leaf in jax.tree.leaves(weights))),
            _shown_weights(config, weights), _shown_devices(devices),
            time.monotonic() - started,
        )  # fmt: skip
        parts = (args, config, stages, progress)
        worker = Worker(*parts) if leader is None else LeadingWorker(leader, *parts)
    return DeviceHalf(worker, model, config, checkpoint, num_params)


def take_devices(args: EngineArgs) -> list[Device]:
    """The devices of one engine: the first of this process, or as many of each process.

    Raises:
        ParameterError: with the numbers, if there are fewer.
    """
    each = args.num_devices // jax.process_count()
    by_process: dict[int, list[Device]] = {}
    for device in jax.devices() if jax.process_count() > 1 else jax.local_devices():
        by_process.setdefault(device.process_index, []).append(device)
    for process_id, here in by_process.items():
        if each > len(here) or each * len(by_process) != args.num_devices:
            where = f"process {process_id} of {len(by_process)} has" if len(by_process) > 1 else "here are"
            hint = "; jax was in use before, else it would have as many" if here[0].platform == "cpu" else ""
            raise ParameterError(
                "tensor_parallel_size",
                f"{args.tensor_parallel_size} and pipeline_parallel_size {args.pipeline_parallel_size} need "
                f"{args.num_devices} devices, {where} {_shown_devices(here)}{hint}",
            )
    return [device for here in by_process.values() for device in here[:each]]


def place(
    args: EngineArgs, model: ModelConfig, specs: Sequence[ParamSpec], devices: Sequence[Device]
) -> tuple[ModelConfig, list[ParamSpec], list[tuple[Stage, Placement]]]:
    """The stages of a model and where each is; and the model as its devices see it.

    Raises:
        ParameterError: the model cannot be split like that; with the numbers.
    """
    layout = choose_layout(args, model, devices)
    model, specs = repeat_kv_heads(model, specs, kv_repeats(layout, model))
    stages = split_layers(model.num_layers, args.pipeline_parallel_size, args.num_stage_layers)
    placements = []
    for stage in stages:
        part = layout.stage(stage.index)
        alone = part.mesh.size == 1
        placements.append((stage, Placement(device=part.mesh.devices.flat[0]) if alone else Placement(layout=part)))
    return model, list(specs), placements


def check_first_stage(placements: Sequence[Placement]) -> None:
    """The leading process must have a device of the first stage, where steps begin and their tokens come back to.

    Raises:
        StartupError: it has none: whoever has laid out the mesh has put other processes' devices first.
    """
    first, *others = (placement.process_ids for placement in placements)
    if 0 not in first:
        where = next((index for index, ids in enumerate(others, start=1) if 0 in ids), None)
        own = "of none" if where is None else f"of stage {where}"
        raise StartupError(
            f"the devices of the first stage are those of process {' and '.join(map(str, first))}, and those of "
            f"process 0, which leads, are {own}: another pipeline_parallel_size or tensor_parallel_size lays them out "
            "in another way"
        )


def _load_stage(
    args: EngineArgs,
    checkpoint: Checkpoint | OrbaxCheckpoint,
    programs: StagePrograms,
    specs: Sequence[ParamSpec],
    stage: Stage,
    progress: Callable[[str, int, int], None],
) -> Params:
    config, model, placement = programs.config, programs.model, programs.placement
    own = stage_specs(specs, stage, model.tied_embeddings)
    if args.load_format == "dummy":
        return dummy_params(model, own, config.dtype, placement, args.seed, config.quantization)
    # They stand for the same float32 numbers, in a third of the bytes.
    is_plain_cpu = _platform(placement.first_device) == "cpu" and placement.layout is None
    keeps_blocks = config.dtype == "float32" and is_plain_cpu and multiplies_blocks("cpu")
    return load_params(
        checkpoint, model, own, config.dtype, placement, progress, config.quantization,
        all_specs=specs, keeps_blocks=keeps_blocks,
    )  # fmt: skip


def tell_of_native_kernels() -> None:
    """Says so where there are none: nothing else would, and all takes longer."""
    try:
        native.require()
    except NotImplementedError as error:
        logger.info("No C++ kernels (%s): XLA does their work, which takes longer", error)


def _shown_weights(config: EngineConfig, weights: Any) -> str:
    leaves = jax.tree.leaves(weights, is_leaf=lambda leaf: isinstance(leaf, BlockWeight))
    blocks = "8-bit blocks" if any(isinstance(leaf, BlockWeight) for leaf in leaves) else None
    return " and ".join(filter(None, (config.dtype, config.quantization, blocks)))


def _shown_devices(devices: Sequence[Device]) -> str:
    kind = devices[0].device_kind
    return kind if len(devices) == 1 else f"{len(devices)} x {kind}"


def configure_jax(args: EngineArgs | None = None, num_processes: int = 1) -> None:
    """Process-wide settings: full float32 products, and compiled programs kept on disk for the next start.

    A CPU stands for as many devices as ``args`` asks for, and a GPU's memory is set aside, unless jax has begun to use
    it.

    Args:
        num_processes: that share the devices of the engine.
    """
    jax.config.update("jax_default_matmul_precision", "highest")
    if args is not None:
        ask_for_pool(args.gpu_memory_utilization)
    if args is not None and (args.num_devices > 1 or args.data_parallel_size > 1):
        needed = -(-args.num_devices * args.data_parallel_size // num_processes)
        with contextlib.suppress(RuntimeError):
            present = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
            jax.config.update("jax_num_cpu_devices", max(needed, present))
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        try:
            directory = cache_directory() / "xla"
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            logger.warning("compiled programs are not kept: %s", error)
            return
        jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _platform(device: Device) -> str:
    return "gpu" if device.platform in ("cuda", "rocm") else device.platform


class StartupProgress:
    """Progress bars on a terminal, nothing elsewhere: the log has a line for each stage's end."""

    def __init__(self) -> None:
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeElapsedColumn(),
            console=rich.console.Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._tasks: dict[str, rich.progress.TaskID] = {}

    def __enter__(self) -> Callable[[str, int, int], None]:
        self._bar.start()
        return self._show

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def _show(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage, total=total)
        self._bar.update(self._tasks[stage], completed=done)
