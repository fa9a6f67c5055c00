"""What came of a case, and how it is shown: rows, the table, the JSON.

It must not know how anything is compiled.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

OK, REFUSED, FAILED = "ok", "refused", "failed"
MAX_REASON = 100
CODES = r"^(?:(?:[A-Za-z.]*(?:Error|Exception)|INTERNAL|INVALID_ARGUMENT|RESOURCE_EXHAUSTED|NOT_FOUND):\s*)+"
MAX_REASON_IN_JSON = 4000


@dataclasses.dataclass
class Row:
    """One case compiled by one implementation for one target.

    Attributes:
        status: OK; REFUSED, if the implementation says that it does not take the case (another one then does); FAILED.
        reason: why not OK, as the compiler or the kernel puts it.
        kernels: what each Pallas kernel in the program uses: "name" and, for a GPU, "registers" (a thread),
            "spill_bytes" (stores and loads, a thread) and "shared_bytes" (a block); for a TPU, "vmem_bytes" and
            "smem_bytes", without arguments that XLA puts there itself. What is not known is left out.
        temp_bytes: what the program takes beside arguments and results.
        minimum_bytes: what has to move to and from memory.
        moved_bytes: what does move, where the implementation states it.
        seconds: of tracing, lowering and compiling.
    """

    target: str
    operation: str
    implementation: str
    model: str
    size: str
    shape: str
    dtype: str
    status: str = FAILED
    reason: str = ""
    kernels: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    temp_bytes: int | None = None
    minimum_bytes: int | None = None
    moved_bytes: int | None = None
    seconds: float = 0.0

    def most(self, key: str) -> int | None:
        """The largest that any kernel has of ``key``."""
        return max((kernel[key] for kernel in self.kernels if key in kernel), default=None)


def condensed(message: str) -> str:
    """A compiler's message in a few words: its first line that says something, without codes and paths."""
    lines = [re.sub(CODES, "", line.strip()) for line in message.splitlines()]
    says = (line for line in lines if re.search(r"[a-zA-Z]{3}", line) and not re.match(r"Traceback|File ", line))
    text = re.sub(r"(?<![\w.])/[^\s:]+/", "", next(says, "no reason given"))
    return text if len(text) <= MAX_REASON else text[: MAX_REASON - 3] + "..."


def as_json(rows: Sequence[Row], notes: Sequence[str] = ()) -> str:
    """All rows, with everything that is known of them."""
    content = {
        "rows": [dataclasses.asdict(row) | {"reason": row.reason[:MAX_REASON_IN_JSON]} for row in rows],
        "notes": list(notes),
    }
    return json.dumps(content, indent=1)


def summary(rows: Sequence[Row]) -> str:
    """One line: how many rows there are of each status."""
    counts = collections.Counter(row.status for row in rows)
    return ", ".join(f"{counts[status]} {status}" for status in (OK, REFUSED, FAILED) if counts[status]) or "no cases"


def table(rows: Sequence[Row], is_gpu: bool) -> str:
    """The rows of one target, aligned; columns that no row fills are left out."""
    columns = COLUMNS + (GPU_COLUMNS if is_gpu else TPU_COLUMNS) + LAST_COLUMNS
    cells = [[column(row) for _, column in columns] for row in rows]
    used = [index for index in range(len(columns)) if any(line[index] for line in cells)]
    heads = [columns[index][0] for index in used]
    lines = [[line[index] or "-" for index in used] for line in cells]
    widths = [max(len(line[place]) for line in [heads, *lines]) for place in range(len(used))]
    is_text = [columns[index] in COLUMNS or columns[index][0] == "result" for index in used]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(line, widths, is_text, strict=True)
        ).rstrip()
        for line in [heads, *lines]
    )


def _result(row: Row) -> str:
    return row.status if row.status == OK else f"{row.status}: {condensed(row.reason)}"


def _bytes(value: int | None) -> str:
    if value is None:
        return ""
    for unit, size in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return str(value)


def _most(key: str, show: Callable[[int | None], str] = _bytes) -> Callable[[Row], str]:
    return lambda row: show(row.most(key))


def _count(value: int | None) -> str:
    return "" if value is None else str(value)


def _spills(row: Row) -> str:
    """0, or the bytes of each kernel that spills."""
    known = [kernel for kernel in row.kernels if "spill_bytes" in kernel]
    spilling = [f"{_short(kernel['name'], row)}:{kernel['spill_bytes']}" for kernel in known if kernel["spill_bytes"]]
    return ",".join(spilling) if spilling else "0" if known else ""


def _short(kernel: str, row: Row) -> str:
    return kernel.removeprefix(row.operation).removesuffix("_kernel").strip("_") or kernel


def _ratio(row: Row) -> str:
    if row.moved_bytes is None or not row.minimum_bytes:
        return ""
    return f"{row.moved_bytes / row.minimum_bytes:.2f}"


_Column = tuple[str, Callable[[Row], str]]
COLUMNS: list[_Column] = [
    ("operation", lambda row: row.operation),
    ("implementation", lambda row: row.implementation),
    ("model", lambda row: row.model),
    ("size", lambda row: row.size),
    ("shape", lambda row: row.shape),
    ("dtype", lambda row: row.dtype),
]
GPU_COLUMNS: list[_Column] = [
    ("registers", _most("registers", _count)),
    ("spills", _spills),
    ("shared", _most("shared_bytes")),
]
TPU_COLUMNS: list[_Column] = [("VMEM", _most("vmem_bytes")), ("SMEM", _most("smem_bytes"))]
LAST_COLUMNS: list[_Column] = [
    ("temp", lambda row: _bytes(row.temp_bytes)),
    ("minimum", lambda row: _bytes(row.minimum_bytes)),
    ("moved", lambda row: _bytes(row.moved_bytes)),
    ("ratio", _ratio),
    ("s", lambda row: f"{row.seconds:.1f}"),
    ("result", _result),
]
