"""The process that compiles for one target: takes a selection, writes what comes of each entry as lines of JSON.

A compiler may end this process at any point; the parent (``supervisor``) starts another one behind the entry that did.
It must not know how results are shown.

A line is an object with one of the keys "note" (a remark), "start" (the row of an entry before it is compiled, with
its "index"), "end" (that row afterwards) and "finished" (the number of entries: the last line).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from pallas_kernels.aot.compiler import Compiler
from pallas_kernels.aot.matrix import Selection, plan
from pallas_kernels.aot.report import REFUSED, Row
from pallas_kernels.targets import find_target


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.aot.child", description="Used by pallas_kernels.aot."
    )
    parser.add_argument("target")
    parser.add_argument("--selection", required=True, help="the fields of a Selection, as JSON")
    parser.add_argument(
        "--dump", type=Path, required=True, help="folder for what compilers dump; its files are removed"
    )
    parser.add_argument("--first", type=int, default=0, help="entry to start with")
    args = parser.parse_args()
    fields = json.loads(args.selection)
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    selection = Selection(**values)
    # Compilers print, too: the lines go to a copy of stdout that only this process knows.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as lines:
        run(lines, args.target, selection, args.dump, args.first)


def run(lines: TextIO, target_name: str, selection: Selection, dump: Path, first: int) -> None:
    def say(**message: Any) -> None:
        print(json.dumps(message), file=lines, flush=True)

    target = find_target(target_name)
    entries, notes = plan(selection, target)
    if first == 0:
        for note in notes:
            say(note=note)
    compiler = Compiler(target, dump)
    statuses: list[str] = []  # of the implementations of the case at hand
    for index, (case, implementation, is_fallback) in enumerate(entries):
        if index and entries[index - 1].case is not case:
            statuses.clear()
        # Behind an entry that ended the process before, nothing is known of it, and it did not refuse.
        if index < first or (is_fallback and (not statuses or any(status != REFUSED for status in statuses))):
            continue
        row = Row(target.name, case.operation, implementation, case.model, case.size, case.shape, case.dtype)
        say(start=dataclasses.asdict(row), index=index)
        row = compiler.compile(case, implementation)
        statuses.append(row.status)
        say(end=dataclasses.asdict(row), index=index)
    say(finished=len(entries))


if __name__ == "__main__":
    sys.exit(main())
