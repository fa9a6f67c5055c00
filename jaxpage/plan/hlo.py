"""What a compiled program says of itself in its text: collectives with their bytes, and kernels.

It must not know models or chips.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Sequence

OPERATIONS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
WHERE = ("layers", "embedding", "logits", "sampling", "on request", "elsewhere")
"""Parts of a step that exchange data; "on request" is what only some settings need, such as logprobs or top-k."""
DTYPE_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "f8": 1, "bf16": 2}
SHAPE = re.compile(r"\b(pred|bf16|[suf]\d+)(?:e\w+)?\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """Exchanges of one kind in one part of a step.

    Attributes:
        count: how many the program runs; in a loop, how many in one round.
        num_bytes: size of what they reduce or gather, all of them together, on a device.
        wire_bytes: what a device at least sends for that, and receives.
        layer_count: in "layers", the most in any one layer.
    """

    where: str
    operation: str
    count: int
    num_bytes: float
    wire_bytes: float
    layer_count: int = 0


def wire_bytes(operation: str, num_bytes: float, group: int) -> float:
    """The least that a device of a group sends: for a reduction once to combine and once to distribute.

    Args:
        num_bytes: of the whole result.
    """
    if group < 2:
        return 0.0
    if operation == "collective-permute":
        return num_bytes
    share = (group - 1) / group * num_bytes
    return 2 * share if operation == "all-reduce" else share


def find_collectives(hlo: str) -> list[Collective]:
    """Those of a compiled program by part of the step, in the order of ``WHERE``."""
    sums: dict[tuple[str, str], list[float]] = collections.defaultdict(lambda: [0, 0.0, 0.0])
    in_layers: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    in_branches = branch_lines(hlo)
    for number, line in enumerate(hlo.splitlines()):
        # Some are split into a start and a done; the start counts.
        found = re.search(rf" = (.*?) ({'|'.join(OPERATIONS)})(-start)?\(", line)
        if found is None:
            continue
        operation, group = found[2], group_size(line)
        sizes = shape_bytes(found[1])
        # Other starts give their operand too, which is no larger than what is gathered.
        size = sum(sizes) if operation == "all-reduce" or not found[3] else max(sizes)
        size *= group if operation == "reduce-scatter" else 1
        name = re.search(r'op_name="([^"]*)"', line)
        where, layer = _part(name[1] if name else "")
        if where == "elsewhere" and number in in_branches:
            where = "on request"  # what a pass of the compiler made of sorting logits has no name
        in_layers[operation].update([layer] if layer else [])
        total = sums[where, operation]
        total[0], total[1], total[2] = total[0] + 1, total[1] + size, total[2] + wire_bytes(operation, size, group)
    return [
        Collective(
            where, operation, int(count), size, wire, max(in_layers[operation].values()) if where == "layers" else 0
        )
        for (where, operation), (count, size, wire) in sorted(sums.items(), key=lambda item: WHERE.index(item[0][0]))
    ]


def branch_lines(hlo: str) -> set[int]:
    """Numbers of the lines that run in a branch of a conditional only, from 0."""
    lines: dict[str, list[int]] = collections.defaultdict(list)
    calls: dict[str, set[str]] = collections.defaultdict(set)
    branches: set[str] = set()
    computation = ""
    for number, line in enumerate(hlo.splitlines()):
        header = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        computation = header[1] if header else computation
        lines[computation].append(number)
        for key, names in re.findall(
            r"\b(\w*(?:computations?|calls|to_apply|body|condition))=\{?((?:%[\w.\-]+(?:, )?)+)", line
        ):
            called = set(re.findall(r"%([\w.\-]+)", names))
            calls[computation] |= called
            branches |= called if key.endswith(("computation", "computations")) else set()
    reached, found = set(), branches
    while found:
        reached |= found
        found = set().union(*(calls[name] for name in found)) - reached
    return {number for name in reached for number in lines[name]}


def _part(op_name: str) -> tuple[str, str | None]:
    """Which of ``WHERE`` an operation belongs to, and the number of its layer."""
    layer = re.search(r"\blayer_(\d+)\b", op_name)
    if layer:
        return "layers", layer[1]
    scoped = re.search(r"/(embedding|logits|sample|pool)/(.*)", op_name)
    if scoped is None:
        return "elsewhere", None
    # Greedy sampling is the first branch of each choice; all others are asked for.
    is_asked_for = "cond/" in scoped[2].replace("cond/branch_0_fun/", "")
    return {
        "sample": "on request" if is_asked_for else "sampling",
        "pool": "on request",
    }.get(scoped[1], scoped[1]), None


def shape_bytes(text: str) -> list[float]:
    """Bytes of each array in the type of an instruction."""
    sizes = []
    for dtype, dimensions in SHAPE.findall(text):
        width = DTYPE_BYTES.get(dtype) or int(re.sub(r"\D", "", dtype)) / 8
        sizes.append(width * math.prod(int(size) for size in dimensions.split(",") if size))
    return sizes or [0.0]


def group_size(line: str) -> int:
    """Devices that take part in a collective, of the three ways to write groups; 1 if there are none."""
    axes = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line)
    if axes:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", axes[2]))
    shape = re.search(r"replica_groups=\[(?:\d+,)*(\d+)\]<=", line)
    if shape:
        return int(shape[1])
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", line)
    return len(listed[1].split(",")) if listed else 1


def count_kernels(hlo: str) -> dict[str, int]:
    """Calls of Pallas kernels in a compiled program, by name."""
    calls = (line for line in hlo.splitlines() if " custom-call(" in line)
    names = (re.search(r'op_name="[^"]*/(\w+)/(?:pallas_call|mpmd_map)"', line) for line in calls)
    return dict(collections.Counter(name[1] for name in names if name))


def total_wire_bytes(collectives: Sequence[Collective]) -> float:
    """What a device sends in a step of requests that want nothing special."""
    return sum(item.wire_bytes for item in collectives if item.where != "on request")
