"""From options to a running core: resolves and reads the model, sizes everything, compiles."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import rich.progress

from jaxpage.batch import Device
from jaxpage.config import EngineArgs, EngineConfig, resolve
from jaxpage.engine.core import EngineCore
from jaxpage.errors import StartupError
from jaxpage.kv.manager import KVCacheManager
from jaxpage.models.config import ModelConfig
from jaxpage.models.registry import build_config
from jaxpage.runner.memory import gib
from jaxpage.runner.runner import Runner
from jaxpage.scheduler.preemption import PreemptionPolicy
from jaxpage.scheduler.scheduler import Scheduler
from jaxpage.tokenizer import Tokenizer
from jaxpage.weights.builtin import cache_directory
from jaxpage.weights.loader import dummy_params, load_params
from jaxpage.weights.source import open_checkpoint, resolve_model
from pallas_kernels import QuantizedWeight

logger = logging.getLogger("jaxpage")


@dataclasses.dataclass(frozen=True)
class LoadedEngine:
    """A core and what its front needs to talk about the model."""

    core: EngineCore
    model: ModelConfig
    config: EngineConfig
    tokenizer: Tokenizer
    generation_config: dict[str, Any]


def build(args: EngineArgs) -> LoadedEngine:
    """Loads, compiles and warms up. Takes seconds, and shows what it does.

    Raises:
        ValueError, StartupError: in one line, for anything that keeps the engine from starting.
    """
    try:
        return _build(args)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise StartupError(f"not enough memory: {str(error).splitlines()[0] if str(error) else error!r}") from error
        raise


def _build(args: EngineArgs) -> LoadedEngine:
    configure_jax()
    started = time.monotonic()
    device = jax.local_devices()[0]
    is_dummy = args.load_format == "dummy"
    checkpoint = open_checkpoint(resolve_model(args.model, args.revision), needs_weights=not is_dummy)
    model, specs = build_config(checkpoint.config, checkpoint.generation_config)
    config = resolve(args, model_max_len=model.max_position, vocab_size=model.vocab_size, platform=_platform(device))
    tokenizer_source = checkpoint if args.tokenizer is None else open_tokenizer_source(args.tokenizer)
    tokenizer = tokenizer_source.load_tokenizer()
    with StartupProgress() as progress:
        if is_dummy:
            params = dummy_params(model, specs, config.dtype, device, args.seed, config.quantization)
        else:
            params = load_params(checkpoint, model, specs, config.dtype, device, progress, config.quantization)
        weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        logger.info(
            "Loaded %s (%s, %d layers, %s of %s weights) on %s in %.1f s",
            args.model, model.model_type, model.num_layers, gib(weight_bytes),
            " and ".join(filter(None, (config.dtype, config.quantization))), device.device_kind,
            time.monotonic() - started,
        )  # fmt: skip
        runner = Runner(args, model, config, params, device, progress)
    kv = KVCacheManager(
        runner.plan.num_blocks,
        config.block_size,
        config.enable_prefix_caching,
        num_host_blocks=runner.num_host_blocks,
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
        preemption=preemption_policy(config.preemption_mode, params, runner.plan.bytes_per_block, _platform(device)),
    )
    logger.info("Ready in %.1f s", time.monotonic() - started)
    return LoadedEngine(EngineCore(scheduler, runner), model, config, tokenizer, checkpoint.generation_config)


RATES = {"cpu": (1e11, 4e9), "gpu": (2e14, 2e10), "tpu": (2e14, 1e10)}
"""Orders of magnitude by platform: operations a second in a prefill, bytes a second between device and host."""


def preemption_policy(mode: str, params: Any, bytes_per_block: int, platform: str) -> PreemptionPolicy:
    """Two operations a parameter to compute a token again, against the bytes of a block over the bus."""
    operations_per_s, bytes_per_s = RATES.get(platform, RATES["gpu"])
    # A quantised weight's size is that of what it stands for.
    leaves = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, QuantizedWeight))
    num_params = sum(leaf.size for leaf in leaves)
    return PreemptionPolicy(mode, 2 * num_params / operations_per_s, bytes_per_block / bytes_per_s)


def open_tokenizer_source(path: str) -> Any:
    """A tokenizer that lives apart from the weights: a directory or a GGUF file."""
    try:
        source = resolve_model(path)
    except ValueError as error:
        raise StartupError(f"tokenizer: {error}") from error
    if source.is_dir():
        return _TokenizerDirectory(source)
    return open_checkpoint(source)


@dataclasses.dataclass(frozen=True)
class _TokenizerDirectory:
    path: Path

    def load_tokenizer(self) -> Tokenizer:
        return Tokenizer.from_directory(self.path)


def configure_jax() -> None:
    """Process-wide settings: full float32 products, and compiled programs kept on disk for the next start."""
    jax.config.update("jax_default_matmul_precision", "highest")
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
