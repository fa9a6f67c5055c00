"""``python -m jaxpage.benchmarks.broadcast``: what it costs a leading host to tell the others about each step.

The others are processes on this machine that unpack each command and answer with a digest, as followers do, and compute
nothing. Measured are packing and sending, which the engine's thread does before it starts its own step, and the time
until the last answer, which a step hides as long as it takes longer.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import time
import zlib

import numpy as np

from jaxpage.benchmarks import report
from jaxpage.kv.block_ops import BlockOp, BlockOpKind
from jaxpage.parallel.hosts import Line
from jaxpage.runner.commands import Command
from jaxpage.runner.group import ANSWER, GOODBYE
from jaxpage.runner.packing import Packing
from jaxpage.runner.wire import pack_command, unpack_command

FOLLOWER = "--follow"


def command_of(num_tokens: int, num_rows: int, max_blocks: int, call: int) -> Command:
    """A step with every row in use, and some blocks to copy."""
    packed, _ = Packing(num_tokens, num_rows, max_blocks).allocate()
    packed[:] = np.arange(packed.size)
    ops = [BlockOp(BlockOpKind.COPY, index, index + 1) for index in range(4)]
    return Command(call, ops, [], {}, num_tokens, packed)


def measure(num_followers: int, num_tokens: int, num_rows: int, max_blocks: int, num_steps: int) -> dict[str, float]:
    """Of a step: kilobytes, milliseconds to pack and send them, and milliseconds until all have answered."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"{listener.getsockname()[1]}"
        processes = [
            subprocess.Popen([sys.executable, "-m", __spec__.name, FOLLOWER, address]) for _ in range(num_followers)
        ]
        listener.settimeout(60)  # a follower that does not start
        lines = [Line(listener.accept()[0]) for _ in processes]
    send_s, answer_s, data = [], [], b""
    for call in range(num_steps):
        command = command_of(num_tokens, num_rows, max_blocks, call)
        started = time.perf_counter()
        data = pack_command(command)
        for line in lines:
            line.send(data)
        send_s.append(time.perf_counter() - started)
        for line in lines:
            answered, digest, _, _ = ANSWER.unpack(line.receive())
            assert (answered, digest) == (call, zlib.crc32(data)), "a follower heard something else"
        answer_s.append(time.perf_counter() - started)
        time.sleep(0.002)  # as a step would take
    for line in lines:
        line.send(GOODBYE)
    for process in processes:
        process.wait()
    for line in lines:
        line.close()
    return {
        "kB": len(data) / 1e3,
        "send_ms": statistics.median(send_s) * 1e3,
        "send_p99_ms": statistics.quantiles(send_s, n=100)[98] * 1e3,
        "answered_ms": statistics.median(answer_s) * 1e3,
        "answered_p99_ms": statistics.quantiles(answer_s, n=100)[98] * 1e3,
    }


def follow(port: int) -> None:
    """Answers until the end."""
    line = Line(socket.create_connection(("127.0.0.1", port)))
    while (data := line.receive()) != GOODBYE:
        command = unpack_command(data)
        line.send(ANSWER.pack(command.call, zlib.crc32(data), 0, 0))
    line.close()


def main(argv: list[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m jaxpage.benchmarks.broadcast", description=__doc__)
    parser.add_argument("--followers", type=int, nargs="+", default=[1, 3, 7], metavar="N")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="of a step (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=256, metavar="N", help="requests of a step (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=128, metavar="N", help="of a request (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="file for the result")
    parser.add_argument(FOLLOWER, type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.follow is not None:
        follow(options.follow)
        return
    for name in ("tokens", "rows", "blocks", "steps"):
        if getattr(options, name) < (2 if name == "steps" else 1):
            parser.error(f"--{name} must be at least {2 if name == 'steps' else 1}, got {getattr(options, name)}")
    if min(options.followers) < 1:
        parser.error(f"--followers must be at least 1, got {min(options.followers)}")
    rows = []
    for count in options.followers:
        found = measure(count, options.tokens, options.rows, options.blocks, options.steps)
        rows.append({"followers": count} | found)
    print(report.table(rows))
    sizes = {"num_tokens": options.tokens, "num_rows": options.rows, "max_blocks": options.blocks}
    report.write(options.json, "broadcast", rows, **sizes, num_steps=options.steps)


if __name__ == "__main__":
    main()
