"""Owns ``python -m jaxpage.checkpoint``: writes, describes and verifies checkpoints that load straight onto a mesh.

It must not know what their files hold; ``jaxpage.weights`` does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from jaxpage.checks import check_int
from jaxpage.config import DTYPES, QUANTIZATIONS
from jaxpage.console import fail, flag_error
from jaxpage.errors import ParameterError, StartupError
from jaxpage.weights.orbax_checkpoint import MANIFEST_FILE, Manifest, OrbaxCheckpoint, find_damage
from jaxpage.weights.source import Checkpoint, open_checkpoint, resolve_model


def build_parser(prog: str = "python -m jaxpage.checkpoint") -> argparse.ArgumentParser:
    """The command line: convert, inspect, verify."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Sharded Orbax checkpoints, which --model loads straight onto the devices, each process its part.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    convert = commands.add_parser("convert", help="write a model as such a checkpoint")
    convert.add_argument(
        "source", metavar="SRC", help="built-in name, Hugging Face directory, .gguf file, hub id, or such a checkpoint"
    )
    convert.add_argument("target", metavar="DST", help="directory to be made; it appears when it is complete")
    convert.add_argument("--revision", help="branch, tag or commit of a hub id")
    convert.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="type of what is not quantised; auto: one that loses nothing"
    )
    convert.add_argument(
        "--quantization", choices=QUANTIZATIONS, help="type of the weights of the layers' matrix products"
    )
    convert.add_argument(
        "--tensor-parallel-size",
        type=int,
        help="devices that share a layer: files are cut for them, others can read them too; default: 8",
    )
    convert.add_argument(
        "--sharding", help="how the devices will share it: YAML file, or name of one in configs/sharding"
    )
    convert.add_argument("--overwrite", action="store_true", help="replace the checkpoint that DST is")
    inspect = commands.add_parser("inspect", help="say what a checkpoint holds")
    inspect.add_argument("directory", metavar="DIR")
    inspect.add_argument("--json", action="store_true", help="for programs")
    verify = commands.add_parser("verify", help="read every file and compare it with its SHA-256")
    verify.add_argument("directory", metavar="DIR")
    return parser


def main(argv: Sequence[str] | None = None, prog: str = "python -m jaxpage.checkpoint") -> int:
    """Runs one of the commands.

    Returns:
        The exit code: 1 if it cannot be done, or for ``verify`` if there is damage; 130 after Ctrl-C; usage errors
        exit with 2.
    """
    options = build_parser(prog).parse_args(argv)
    run = {"convert": _convert, "inspect": _inspect, "verify": _verify}[options.command]
    try:
        return run(options)
    except ParameterError as error:
        # What is read is an argument here, and no flag.
        return fail(f"SRC: {error.reason}" if error.parameter == "model" else flag_error(error))
    except (ValueError, OSError, StartupError, MemoryError) as error:
        return fail(str(error) or type(error).__name__)
    except KeyboardInterrupt:
        return 130


def _convert(options: argparse.Namespace) -> int:
    if options.tensor_parallel_size is not None:
        check_int("tensor_parallel_size", options.tensor_parallel_size, 1)
    checkpoint = open_checkpoint(resolve_model(options.source, options.revision))
    with _noticed_interrupts() as raise_if_interrupted:
        manifest = _write(checkpoint, options, raise_if_interrupted)
    print(f"{options.target}: {_summary(manifest)}")
    return 0


def _write(
    checkpoint: Checkpoint | OrbaxCheckpoint, options: argparse.Namespace, raise_if_interrupted: Callable[[], None]
) -> Manifest:
    # Imported late, so that --help and a wrong SRC need no jax.
    import jax

    from jaxpage.engine.build import StartupProgress
    from jaxpage.weights.orbax_writer import WriteOptions, convert

    wanted = WriteOptions(
        dtype=options.dtype,
        quantization=options.quantization,
        tensor_parallel_size=options.tensor_parallel_size,
        sharding=options.sharding,
        overwrite=options.overwrite,
    )
    jax.config.update("jax_platforms", "cpu")
    with contextlib.suppress(RuntimeError):  # jax is in use already: then there have to be enough
        jax.config.update("jax_num_cpu_devices", wanted.num_devices)
    source = Path(options.source)
    name = source.resolve().name if source.exists() else options.source
    target = Path(os.path.abspath(os.path.expanduser(options.target)))
    with StartupProgress() as show:

        def progress(stage: str, done: int, total: int) -> None:
            raise_if_interrupted()
            show(stage, done, total)

        return convert(checkpoint, name, target, wanted, progress)


@contextlib.contextmanager
def _noticed_interrupts() -> Iterator[Callable[[], None]]:
    """Gives a function that raises KeyboardInterrupt once Ctrl-C was pressed; nothing else does, until the second time.

    An exception that a signal handler raises is lost if it comes up inside a callback, such as that of jax for garbage
    collections: the work would just go on. Or it cuts short the removal of what was written so far.
    """
    pressed = False

    def notice(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            signal.default_int_handler(number, frame)
        pressed = True

    def raise_if_pressed() -> None:
        if pressed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, notice)
    try:
        yield raise_if_pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _inspect(options: argparse.Namespace) -> int:
    checkpoint = OrbaxCheckpoint(_written_here(options.directory))
    manifest = checkpoint.manifest
    rows = _array_rows(checkpoint)
    if options.json:
        content = manifest.to_json() | {"num_param_bytes": manifest.num_param_bytes, "config": checkpoint.config}
        print(json.dumps(content, indent=1))
        return 0
    print(f"{options.directory}: {checkpoint.config.get('model_type', 'model')} from {manifest.source}")
    print(_summary(manifest))
    lines = [("array", "count", "type", "shape", "cut into"), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return 0


def _verify(options: argparse.Namespace) -> int:
    directory = _written_here(options.directory)
    faults = list(find_damage(directory))
    for fault in faults:
        fail(fault)
    if faults:
        return 1
    manifest = OrbaxCheckpoint(directory).manifest
    num_bytes = sum(file.num_bytes for file in manifest.files.values())
    print(f"{options.directory}: {len(manifest.files)} files, {num_bytes:,} bytes, all as they were written")
    return 0


def _written_here(directory: str) -> Path:
    """The path of a checkpoint; StartupError if it is none that jaxpage wrote."""
    path = Path(os.path.expanduser(directory))
    if not os.path.isdir(path):
        what = "is no directory" if os.path.exists(path) else "no such directory"
        raise StartupError(f"{directory}: {what}")
    if not (path / MANIFEST_FILE).is_file():
        raise StartupError(f"{directory}: is no checkpoint that jaxpage wrote: it has no {MANIFEST_FILE}")
    return path


def _summary(manifest: Manifest) -> str:
    types = manifest.dtype if manifest.quantization is None else f"{manifest.quantization} and {manifest.dtype}"
    return f"{types}, {manifest.num_param_bytes:,} bytes of parameters in {len(manifest.files)} files"


def _array_rows(checkpoint: OrbaxCheckpoint) -> list[tuple[str, ...]]:
    """A row for each kind of array; those of the layers that are alike share one."""
    rows: Counter[tuple[str, ...]] = Counter()
    for name, array in checkpoint.manifest.arrays.items():
        chunk = checkpoint.chunk_shape(name)
        num_files = " x ".join(str(size // part) for size, part in zip(array.shape, chunk, strict=True))
        kind = re.sub(r"^params/(layers)\.\d+/|^params/\w+/", lambda found: f"{found[1]}.*/" if found[1] else "", name)
        rows[(kind, array.dtype.name, " x ".join(map(str, array.shape)), num_files)] += 1
    return [(kind, str(count), *rest) for (kind, *rest), count in rows.items()]


if __name__ == "__main__":
    sys.exit(main())
