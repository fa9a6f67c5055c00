"""The command: reads its arguments, runs the targets, prints what came of them."""

from __future__ import annotations

import argparse
import concurrent.futures
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pallas_kernels.aot import compiler, report
from pallas_kernels.aot.matrix import OPERATIONS, Selection
from pallas_kernels.aot.report import FAILED, Row
from pallas_kernels.aot.supervisor import TargetError, child_command, supervise
from pallas_kernels.case import KV_DTYPES
from pallas_kernels.geometries import GEOMETRIES
from pallas_kernels.targets import TARGETS, Target, find_target

EPILOG = f"""models: {", ".join(geometry.name for geometry in GEOMETRIES)}
operations: {", ".join(OPERATIONS)}, or a function of theirs
KV dtypes: {", ".join(KV_DTYPES)}

"minimum" is what has to move to and from memory, "moved" what does by the kernel's own account. Exit status: 0 if all
cases compile, or are refused by a kernel in favour of another implementation; 1 if one failed; 2 if nothing could be
done for a target.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(arguments)
    selection = Selection(
        tuple(args.op or ()),
        tuple(args.model or ()),
        tuple(args.kv_dtype or ()),
        tuple(args.implementation or ()),
        args.short,
    )
    try:
        names = list(TARGETS) if "all" in args.target else args.target
        targets = [find_target(name) for name in dict.fromkeys(names)]
        selection.check()
        if args.jobs < 1:
            raise ValueError(f"jobs must be at least 1, got {args.jobs}")
    except ValueError as error:
        parser.error(str(error))
    absent = [text for text in map(compiler.missing, targets) if text]
    if absent:
        print("\n".join(absent), file=sys.stderr)
        return 2

    rows: list[Row] = []
    notes: list[str] = []
    status = 0
    started = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        running = [pool.submit(_run, target, selection, not args.quiet) for target in targets]
        for target, future in zip(targets, running, strict=True):
            try:
                found, remarks = future.result()
            except TargetError as error:
                print(f"{target.name}: nothing could be compiled: {error}", file=sys.stderr)
                status = 2
                continue
            rows += found
            notes += [f"{target.name}: {remark}" for remark in remarks]
            print(f"\n{target.name}: {report.summary(found)}")
            print(
                "\n".join([*(f"({remark})" for remark in remarks), report.table(found, target.platform == "gpu")]),
                flush=True,
            )
    if args.json:
        Path(args.json).write_text(report.as_json(rows, notes) + "\n", encoding="utf-8")
    print(f"\n{report.summary(rows)} in {time.perf_counter() - started:.0f} s")
    if not rows:
        return status or 2
    return status or int(any(row.status == FAILED for row in rows))


def _run(target: Target, selection: Selection, shows_progress: bool) -> tuple[list[Row], list[str]]:
    def progress(row: Row) -> None:
        if shows_progress:
            what = (row.target, row.operation, row.implementation, row.model, row.size, row.shape, row.dtype)
            print(f"{' '.join(what)}: {row.status} ({row.seconds:.1f} s)", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="aot-") as folder:
        dump = Path(folder)
        command = child_command(target.name, selection._asdict(), dump)
        return supervise(command, compiler.environment(target, dump), progress)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.aot",
        description="Compile the kernels for a TPU or NVIDIA GPU that need not be here, and show what they use.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    several: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    parser.add_argument("--target", required=True, help=f"{', '.join(TARGETS)} or all", **several)
    parser.add_argument("--model", help="only these models' sizes; the beginning of a name will do", **several)
    parser.add_argument("--op", help="only these operations", **several)
    parser.add_argument("--kv-dtype", help="only these dtypes of the KV cache", **several)
    parser.add_argument(
        "--implementation", help="only these, xla among them; else each kernel the chip can have", **several
    )
    parser.add_argument("--short", action="store_true", help="only a few representative cases")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="targets to compile for at once")
    parser.add_argument("--json", metavar="FILE", help="also write all there is to know about each case")
    parser.add_argument("--quiet", action="store_true", help="do not show each case as it is done")
    return parser


if __name__ == "__main__":
    sys.exit(main())
