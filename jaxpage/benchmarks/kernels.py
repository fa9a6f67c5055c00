"""``python -m jaxpage.benchmarks.kernels``: the attention kernels against what the device can do, and against others.

Decode is held against the bandwidth of a copy, prefill against the rate of a matrix product, both measured here. Beside
each implementation that this device has run JAX's dense attention and, on GPUs, its paged one on the same data; with
``--peer-python`` torch's SDPA and vLLM's CPU kernel on data of the same shape. Whatever does not give the result of the
XLA implementation is not timed. Targets on an H200: decode of 32 requests x 8k at 0.85 of a copy, prefill of 8k at 0.6
of a product.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from jaxpage.benchmarks import device_rates, report
from jaxpage.benchmarks.attention_peers import Peer
from jaxpage.benchmarks.attention_rivals import rivals
from pallas_kernels import dispatch
from pallas_kernels.case import block_size_on
from pallas_kernels.geometries import Geometry, find_geometry
from pallas_kernels.ragged_paged_attention import IMPLEMENTATIONS, traffic
from pallas_kernels.workload import Stopwatch, attention_case, positive, relative_error

MODELS = ("SmolLM2-135M", "Llama-3.1-8B")
GPU_MODELS = (*MODELS, "Llama-3.3-70B/TP8", "Gemma-3-270m")
TOLERANCE = {"float32": 1e-4}
OTHER_TOLERANCE = 2e-2
RIVAL_TOLERANCE = 5e-2
"""Others may round as they like; this finds calls that compute something else."""


PEER_REST_S = 0.3
"""After its turn a peer's threads wait for more work, awake, for up to 0.2 s (OpenMP), on cores that ours need."""


class Shape(NamedTuple):
    """What is attended: ``queries`` of each of ``requests``, the last of ``context`` tokens."""

    geometry: Geometry
    dtype: str
    requests: int
    queries: int
    context: int
    block_size: int

    @property
    def is_decode(self) -> bool:
        return self.queries == 1

    @property
    def minimum_bytes(self) -> int:
        return traffic.minimum_bytes(
            num_kv_heads=self.geometry.num_kv_heads,
            head_dim=self.geometry.head_dim,
            kv_itemsize=jax.numpy.dtype(self.dtype).itemsize,
            seq_lens=[self.context] * self.requests,
        )

    @property
    def operations(self) -> int:
        """Of both products, without what the causal mask hides."""
        pairs = self.queries * (self.context - self.queries) + self.queries * (self.queries + 1) // 2
        return 4 * self.requests * self.geometry.num_heads * self.geometry.head_dim * pairs

    def moved_bytes(self, implementation: str) -> int:
        """Of a decode step of one of our implementations."""
        itemsize = jax.numpy.dtype(self.dtype).itemsize
        return traffic.decode_bytes(
            implementation,
            num_heads=self.geometry.num_heads,
            num_kv_heads=self.geometry.num_kv_heads,
            head_dim=self.geometry.head_dim,
            block_size=self.block_size,
            kv_itemsize=itemsize,
            q_itemsize=itemsize,
            seq_lens=[self.context] * self.requests,
            max_blocks=-(-self.context // self.block_size),
        )

    def for_peer(self) -> dict[str, Any]:
        sizes = {name: getattr(self.geometry, name) for name in ("num_heads", "num_kv_heads", "head_dim")}
        names = ("requests", "queries", "context", "block_size", "dtype")
        return sizes | {name: getattr(self, name) for name in names}


def main(argv: list[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help=f"geometry, repeatable; default {', '.join(MODELS)}, ...")
    parser.add_argument(
        "--dtype",
        action="append",
        choices=("float32", "bfloat16"),
        help="of everything, repeatable; default float32 on CPU, else bfloat16",
    )
    parser.add_argument("--case", action="append", choices=("decode", "prefill"), help="repeatable; default both")
    parser.add_argument("--requests", type=positive, default=32, help="of a decode step")
    parser.add_argument(
        "--context", type=positive, help="tokens of each request in decode; default 2000 on CPU, else 8192"
    )
    parser.add_argument("--prefill", type=positive, help="tokens of a prompt; default 2048 on CPU, else 8192")
    parser.add_argument("--block-size", type=positive, help="default as in the engine on this platform")
    parser.add_argument(
        "--implementation", action="append", choices=IMPLEMENTATIONS, help="repeatable; default all of this platform"
    )
    parser.add_argument("--rounds", type=positive, default=20, help="timings of each, in turns; the median is shown")
    parser.add_argument("--peer-python", help="interpreter of an environment with torch, and vLLM where it runs on CPU")
    parser.add_argument("--threads", type=positive, help="CPU threads of both sides; default all cores")
    parser.add_argument("--json", help="file for the result")
    options = parser.parse_args(argv)
    threads = _limit_threads(options.threads)
    platform = dispatch.default_platform()
    try:
        geometries = [find_geometry(name) for name in options.model or (GPU_MODELS if platform == "gpu" else MODELS)]
    except ValueError as error:
        parser.error(str(error))
    facts = device_rates.device_facts()
    rates: dict[str, float] = {"copy": device_rates.copy_bandwidth()}
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        try:
            peer = stack.enter_context(Peer(options.peer_python, threads)) if options.peer_python else None
        except OSError as error:
            parser.error(f"--peer-python cannot be started: {error}")
        peer_facts = peer.facts() if peer else {}
        for shape in _shapes(options, platform, geometries):
            if shape.dtype not in rates:
                rates[shape.dtype] = device_rates.matmul_rate(shape.dtype)
            found = measure(shape, platform, options.implementation, peer, options.rounds, rates)
            print(report.table(found) + "\n", flush=True)
            rows += found
    shown = {
        f"{name} rate": f"{value / 1e9:.0f} {'GB' if name == 'copy' else 'GFLOP'}/s" for name, value in rates.items()
    }
    everything = {**facts, **shown, **{f"peer {name}": value for name, value in peer_facts.items()}, **report.machine()}
    for name, value in everything.items():
        print(f"{name}: {value}")
    report.write(options.json, "kernels", rows, device=facts, rates=rates, peer=peer_facts, threads=threads)


def measure(
    shape: Shape,
    platform: str,
    wanted: list[str] | None,
    peer: Peer | None,
    rounds: int,
    rates: Mapping[str, float],
) -> list[dict[str, Any]]:
    """A row for everything that could attend this shape; a row without a time says why."""
    case, arguments = attention_case(
        shape.geometry,
        num_requests=shape.requests,
        num_queries=shape.queries,
        context=shape.context,
        block_size=shape.block_size,
        dtype=shape.dtype,
    )
    names = [name for name in dispatch.ORDER.get(platform, dispatch.ORDER["cpu"]) if name in case.implementations]
    names = [name for name in names if not wanted or name in wanted]

    def compiled(implementation: str) -> Callable[[], Any]:
        function = functools.partial(case.function, implementation=implementation, **case.options)
        return functools.partial(jax.jit(function).lower(**arguments).compile(), **arguments)

    try:
        expected = jax.block_until_ready(compiled("xla")())
    except Exception as error:  # without it nothing can be trusted
        return [_row(shape, "xla", None, None, _reason(error), rates, is_ours=True)]
    others = rivals(platform, **arguments, context=shape.context, scale=case.options["scale"])
    preparations = {name: functools.partial(compiled, name) for name in names} | others
    runs: dict[str, Callable[[], Any]] = {}
    notes: dict[str, str] = {}
    errors: dict[str, float] = {}
    for name, prepare in preparations.items():
        tolerance = TOLERANCE.get(shape.dtype, OTHER_TOLERANCE) if name in names else RIVAL_TOLERANCE
        try:
            run = prepare()
            errors[name] = relative_error(run(), expected)
        except Exception as error:  # a kernel that refuses, a library that is missing, memory that does not suffice
            notes[name] = _reason(error)
            continue
        if errors[name] <= tolerance:
            runs[name] = run
        else:
            notes[name] = "wrong result, not timed"
    times = _times(runs, peer, shape, rounds, notes)
    return [
        _row(shape, name, times.get(name), errors.get(name), notes.get(name), rates, is_ours=name in names)
        for name in dict.fromkeys([*preparations, *times, *notes])
    ]


def _times(
    runs: Mapping[str, Callable[[], Any]], peer: Peer | None, shape: Shape, rounds: int, notes: dict[str, str]
) -> dict[str, list[float]]:
    """Seconds of everything, ours and the peer's in turns; adds to ``notes`` why a peer's way has none."""
    ways: list[str] = []
    if peer is not None:
        for name, reason in peer.prepare(shape.for_peer()).items():
            if reason is None:
                ways.append(name)
            else:
                notes[name] = reason
    stopwatch = Stopwatch(runs)
    times: dict[str, list[float]] = {name: [] for name in [*runs, *ways]}
    for _ in range(rounds):
        for name, seconds in stopwatch.round().items():
            times[name].append(seconds)
        for name in ways:
            assert peer is not None
            times[name].append(peer.measure(name))
        time.sleep(PEER_REST_S if ways else 0)
    return times


def _row(
    shape: Shape,
    name: str,
    times: list[float] | None,
    error: float | None,
    note: str | None,
    rates: Mapping[str, float],
    *,
    is_ours: bool,
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model": shape.geometry.name,
        "heads": shape.geometry.heads,
        "case": f"decode {shape.requests} x {shape.context}" if shape.is_decode else f"prefill {shape.queries}",
        "dtype": shape.dtype,
        "by": name,
        "ms": None,
        "least ms": None,
    }
    work = shape.minimum_bytes if shape.is_decode else shape.operations
    if times:
        row |= {"ms": 1e3 * statistics.median(times), "least ms": 1e3 * min(times)}
    rate = work / statistics.median(times) if times else None
    if shape.is_decode:
        row["GB/s"] = None if rate is None else rate / 1e9
        row["of copy"] = None if rate is None else rate / rates["copy"]
        row["bytes / least"] = shape.moved_bytes(name) / work if is_ours else None
    else:
        row["TFLOP/s"] = None if rate is None else rate / 1e12
        row["of matmul"] = None if rate is None else rate / rates[shape.dtype]
    row["error"] = None if error is None else f"{error:.1e}"
    row["note"] = note or ""
    return row


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _shapes(options: argparse.Namespace, platform: str, geometries: list[Geometry]) -> Iterator[Shape]:
    on_cpu = platform == "cpu"
    context, prefill = options.context or (2000 if on_cpu else 8192), options.prefill or (2048 if on_cpu else 8192)
    for dtype in options.dtype or ["float32" if on_cpu else "bfloat16"]:
        block_size = options.block_size or block_size_on(platform, dtype)
        for geometry in geometries:
            if not options.case or "decode" in options.case:
                yield Shape(geometry, dtype, options.requests, 1, context, block_size)
            if not options.case or "prefill" in options.case:
                yield Shape(geometry, dtype, 1, prefill, prefill, block_size)


def _limit_threads(threads: int | None) -> int:
    """Keeps this process, before JAX makes its threads, and what it starts to some cores; returns how many."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    if threads is None or threads >= len(cores):
        return len(cores)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores[:threads])
    return threads


if __name__ == "__main__":
    main()
