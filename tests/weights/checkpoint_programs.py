"""Programs for ``test_sharded_checkpoints``, which need processes of their own: devices, distributed jax, SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpage.config import EngineArgs
from jaxpage.models.registry import build_config
from jaxpage.models.weight_map import repeat_kv_heads
from jaxpage.parallel.pipeline import split_layers, stage_model, stage_specs
from jaxpage.parallel.placement import Placement
from jaxpage.parallel.sharding import choose_layout, kv_repeats
from jaxpage.weights import WeightsError, open_checkpoint
from jaxpage.weights.loader import load_params
from jaxpage.weights.orbax_checkpoint import OrbaxCheckpoint, find_damage
from jaxpage.weights.orbax_writer import WriteOptions, convert


def differences(found: Any, expected: Any) -> list[str]:
    """Leaves of which this process has other numbers, or has them elsewhere."""
    wrong = []
    for (path, leaf), (_, wanted) in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves_with_path(expected), strict=True
    ):
        same = leaf.shape == wanted.shape and leaf.dtype == wanted.dtype
        same &= leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
        for part, other in zip(leaf.addressable_shards, wanted.addressable_shards, strict=True):
            same &= part.device == other.device and np.array_equal(np.asarray(part.data), np.asarray(other.data))
        if not same:
            wrong.append(jax.tree_util.keystr(path))
    return wrong


def restore_on_meshes(source: str, *cases: str) -> None:
    """Compares with a load from the source, on meshes of 8 devices.

    A case is a checkpoint, the quantization to load it with, a size, and a sharding or a number of stages, by commas.
    """
    jax.config.update("jax_num_cpu_devices", 8)
    results = []
    for case in cases:
        written, quantization, size, more = case.split(",")
        num_stages = int(more) if more.isdigit() else 1
        args = EngineArgs(
            tensor_parallel_size=int(size),
            pipeline_parallel_size=num_stages,
            sharding=more if more and num_stages == 1 else None,
        )
        checkpoints = open_checkpoint(Path(written)), open_checkpoint(Path(source))
        model, specs = build_config(checkpoints[0].config)
        layout = choose_layout(args, model, jax.devices()[: args.num_devices])
        repeats = kv_repeats(layout, model)
        model, specs = repeat_kv_heads(model, specs, repeats)
        wrong = []
        for stage in split_layers(model.num_layers, num_stages):
            own = stage_specs(specs, stage, model.tied_embeddings)
            arguments = stage_model(model, stage), own, "float32", Placement(layout=layout.stage(stage.index))
            found, expected = (
                load_params(checkpoint, *arguments, quantization=quantization or None, all_specs=specs)
                for checkpoint in checkpoints
            )
            wrong += differences(found, expected)
        results.append({"repeats": repeats, "wrong": wrong})
    print(json.dumps(results))


def restore_as_process(written: str, source: str, index: str, port: str) -> None:
    """One of two processes, each with one device; says what it read."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(index))
    checked = []
    check = OrbaxCheckpoint.check_files

    def recorded(self: OrbaxCheckpoint, names: Any) -> None:
        names = list(names)
        checked.extend(names)
        check(self, names)

    checkpoint, original = open_checkpoint(Path(written)), open_checkpoint(Path(source))
    assert isinstance(checkpoint, OrbaxCheckpoint)
    model, specs = build_config(checkpoint.config)
    layout = choose_layout(EngineArgs(tensor_parallel_size=2), model, jax.devices())
    OrbaxCheckpoint.check_files = recorded  # type: ignore[method-assign]
    before = read_bytes()
    found = jax.block_until_ready(load_params(checkpoint, model, specs, "float32", Placement(layout=layout)))
    num_read = read_bytes() - before
    checked_parts = sorted(name for name in checked if name.rpartition("/")[2][0].isdigit())
    wrong = differences(found, load_params(original, model, specs, "float32", Placement(layout=layout)))
    # Then a stage each: they read different things, so that nobody may wait for the other.
    stage = split_layers(model.num_layers, 2)[int(index)]
    arguments = stage_model(model, stage), stage_specs(specs, stage, False), "float32"
    placement = Placement(device=jax.local_devices()[0])
    before = read_bytes()
    found_stage = load_params(checkpoint, *arguments, placement, all_specs=specs)
    num_read_stage = read_bytes() - before
    wrong += differences(found_stage, load_params(original, *arguments, placement, all_specs=specs))
    result = {
        "wrong": wrong,
        "read": num_read,
        "own": sum(part.data.nbytes for leaf in jax.tree.leaves(found) for part in leaf.addressable_shards),
        "checked": checked_parts,
        "read for a stage": num_read_stage,
        "stage": sum(leaf.nbytes for leaf in jax.tree.leaves(found_stage)),
    }
    print(json.dumps(result))
    jax.distributed.shutdown()


def read_bytes() -> int:
    """What this process has asked the system to read so far; mapped files, as checksums use, are not counted."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split("\n", 1)[0])


def kill_conversions(source: str, target: str, count: str) -> None:
    """Kills conversions at times spread over how long one takes, and looks at what each leaves."""
    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
    directory = Path(target)
    started = time.monotonic()
    whole = Path(f"{target}-whole")
    assert wait(fork(source, whole)) == 0 and not list(find_damage(whole))
    took_s = time.monotonic() - started
    outcomes, left = [], []
    for number in range(int(count)):
        child = fork(source, directory)
        time.sleep(took_s * (number + 1) / int(count))
        os.kill(child, signal.SIGKILL)
        wait(child)
        outcomes.append(state_of(directory))
        if outcomes[-1] == "complete":
            directory.rename(f"{target}-{number}")
        left += [state_of(entry) for entry in directory.parent.iterdir() if ".converting-" in entry.name]
    assert wait(fork(source, directory)) == 0
    remain = sorted(entry.name for entry in directory.parent.iterdir() if entry.name.startswith("."))
    print(json.dumps({"outcomes": outcomes, "left": left, "remain": remain}))


def fork(source: str, target: Path) -> int:
    """A child that converts, as jaxpage is imported already; jax has not begun to use devices."""
    child = os.fork()
    if not child:
        convert(open_checkpoint(Path(source)), "source", target, WriteOptions(tensor_parallel_size=1))
        os._exit(0)
    return child


def wait(child: int) -> int:
    return os.waitpid(child, 0)[1]


def state_of(directory: Path) -> str:
    """Whether a conversion has left a checkpoint there that would be loaded, and a good one."""
    try:
        open_checkpoint(directory)
    except WeightsError:
        return "refused"
    return "damaged" if list(find_damage(directory)) else "complete"


if __name__ == "__main__":
    {"meshes": restore_on_meshes, "process": restore_as_process, "kill": kill_conversions}[sys.argv[1]](*sys.argv[2:])
