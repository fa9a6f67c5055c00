"""``python -m pallas_kernels.autotune``: measures tiles on the device at hand, writes those that beat the heuristics.

A case is run with the tiles of the heuristic; then, for every key that its kernel asked ``tiles`` for, one size at a
time is doubled or halved as long as that helps. Tiles that do not compile, that the kernel refuses or that give another
result are passed over. What wins by at least ``LEAST_GAIN`` is written to ``configs/kernels/<chip>.json`` at once, for
the process may not survive the next case: compilers abort on some tiles.

It must not know any kernel: sizes and their meaning are the kernel's.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import dispatch, tiles
from pallas_kernels.case import KV_DTYPES, Case, block_size_on
from pallas_kernels.geometries import Geometry, find_geometry
from pallas_kernels.workload import attention_case, filled, positive, relative_error, seconds

OPERATIONS = ("ragged_paged_attention", "quantized_matmul", "grouped_matmul")
MODELS = ("SmolLM2-135M", "Llama-3.1-8B")
KINDS = ("decode", "prefill", "short", "long")
"""Words of keys and of the shapes of cases: a case tells nothing about a key of another kind."""
LEAST_GAIN = 0.03
TOLERANCE = {"float32": 1e-4}
OTHER_TOLERANCE = 2e-2

Values = dict[str, int]
Measure = Callable[[Values], float | None]


def main(argv: list[str] | None = None) -> None:
    """Measures, prints a line a key and writes the table."""
    platform = dispatch.default_platform()
    on_cpu = platform == "cpu"
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.autotune", description=__doc__)
    parser.add_argument("--op", action="append", choices=OPERATIONS, help="repeatable; default all")
    parser.add_argument("--model", action="append", help=f"geometry, repeatable; default {', '.join(MODELS)}")
    parser.add_argument("--implementation", action="append", help="repeatable; default what this platform has")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32" if on_cpu else "bfloat16", help="of queries"
    )
    parser.add_argument(
        "--kv-dtype", action="append", choices=KV_DTYPES, help="of the cache, repeatable; default that of queries"
    )
    parser.add_argument("--block-size", type=positive, help="default as in the engine on this platform")
    parser.add_argument("--requests", type=positive, default=32, help="of a decode step")
    parser.add_argument(
        "--context", type=positive, default=1024 if on_cpu else 8192, help="tokens of a request in decode"
    )
    parser.add_argument("--prefill", type=positive, default=1024 if on_cpu else 8192, help="tokens of a long prompt")
    parser.add_argument("--budget", type=positive, default=30, help="tiles tried for a key")
    parser.add_argument("--rounds", type=positive, default=5, help="timings of each; the least counts")
    parser.add_argument("--quick", action="store_true", help="one small model, short contexts, few tiles")
    parser.add_argument("--output", help="default configs/kernels/<chip>.json")
    options = parser.parse_args(argv)
    if options.quick:
        options.model = options.model or MODELS[:1]
        options.requests, options.context, options.prefill = 16, min(options.context, 512), min(options.prefill, 256)
        options.budget, options.rounds = min(options.budget, 6), min(options.rounds, 3)
    chip = tiles.target_chip()
    if chip is None:
        parser.error(f"the device {jax.local_devices()[0].device_kind!r} has no name to file tiles under")
    try:
        geometries = [find_geometry(name) for name in options.model or MODELS]
    except ValueError as error:
        parser.error(str(error))
    output = Path(options.output or (tiles.config_folder() or Path("configs/kernels")) / f"{chip}.json")
    print(f"{jax.local_devices()[0].device_kind}, JAX {jax.__version__}: tiles that win go to {output}", flush=True)
    num_won = 0
    for case, arguments in _cases(options, geometries, platform):
        for implementation in _implementations(case, platform, options.implementation):
            for entry in tune(case, arguments(), implementation, options.budget, options.rounds):
                num_won += _won(entry)
                print(_line(entry), flush=True)
                if _won(entry):
                    save(output, chip, entry)
    print(f"{num_won} tiles beat the heuristics" + (f", see {output}" if num_won else ""))


def tune(
    case: Case, arguments: Mapping[str, Any], implementation: str, budget: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """An entry for every key that the implementation asks for in this case, as in a table plus what was measured.

    An entry without "tiles" says in "error" why there are none.
    """
    operation = case.operation
    common = {"operation": operation, "implementation": implementation, "case": f"{case.model} {case.shape}"}
    try:
        lowered, trial = _lower(case, arguments, implementation, {})
        kinds = set(case.shape.split()) & set(KINDS)
        keys = {
            key: values
            for key, values in trial.asked.items()
            if key.implementation == implementation and set(key.key.split()) & set(KINDS) <= kinds
        }
        if not keys:
            yield {**common, "error": "has no tiles to choose"}
            return
        run = functools.partial(lowered.compile(), **arguments)
        expected = jax.block_until_ready(run())
    except Exception as error:  # a case that the kernel does not take is no reason to leave out the others
        yield {**common, "error": f"{type(error).__name__}: {error!s:.300}"}
        return
    for key, heuristic in keys.items():
        runs = {tuple(heuristic.items()): run}

        def measure(values: Values, key: tiles.Key = key, runs: dict[Any, Any] = runs) -> float | None:
            built = _checked(case, arguments, implementation, {key: values}, expected)
            if built is None:
                return None
            runs[tuple(values.items())] = built
            return min(seconds({"": built}, rounds)[""])

        best = search(heuristic, measure, budget)
        # The winner of many is partly the luckiest: it has to win again, in turns with the heuristic.
        names = {"heuristic": runs[tuple(heuristic.items())], "best": runs.get(tuple(best.items()), run)}
        again = {name: min(times) for name, times in seconds(names, 2 * rounds).items()}
        if again["best"] > (1 - LEAST_GAIN) * again["heuristic"]:
            best = heuristic
        yield {
            "operation": key.operation,
            "implementation": key.implementation,
            "key": key.key,
            "tiles": best,
            "heuristic": heuristic,
            "us": round(1e6 * again["best" if best != heuristic else "heuristic"], 2),
            "heuristic_us": round(1e6 * again["heuristic"], 2),
            "case": common["case"],
            "device": jax.local_devices()[0].device_kind,
            "jax": jax.__version__,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        }


def search(start: Values, measure: Measure, budget: int) -> Values:
    """Hill climbing from ``start``: one size at a time is doubled or halved, on and on in a direction that helps.

    Args:
        measure: seconds with some sizes; None if they cannot be used.
        budget: sizes to measure at most.
    """
    best, best_seconds = start, measure(start)
    tried = {tuple(start.items())}
    is_better = True
    while is_better:
        is_better = False
        for name in start:
            for is_up in (True, False):
                while len(tried) <= budget:
                    values = {**best, name: best[name] * 2 if is_up else best[name] // 2}
                    if values[name] < 1 or tuple(values.items()) in tried:
                        break
                    tried.add(tuple(values.items()))
                    found = measure(values)
                    if found is None or (best_seconds is not None and found >= (1 - LEAST_GAIN / 2) * best_seconds):
                        break
                    best, best_seconds, is_better = values, found, True
    return best


def save(path: Path, chip: str, entry: dict[str, Any]) -> None:
    """Adds an entry to a table, in place of one for the same key.

    Raises:
        ValueError: if there is a file that is no table.
    """
    entries: list[dict[str, Any]] = []
    if path.exists():
        tiles.read_table(path)  # raises for what would be lost
        entries = json.loads(path.read_text(encoding="utf-8"))["entries"]
    identity = [entry[name] for name in tiles.Key._fields]
    entries = [old for old in entries if [old[name] for name in tiles.Key._fields] != identity] + [entry]
    entries.sort(key=lambda each: [each[name] for name in tiles.Key._fields])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"chip": chip, "entries": entries}, indent=1) + "\n", encoding="utf-8")


def _won(entry: Mapping[str, Any]) -> bool:
    return "tiles" in entry and entry["tiles"] != entry["heuristic"]


def _line(entry: Mapping[str, Any]) -> str:
    if "error" in entry:
        return f"{entry['operation']} {entry['implementation']} {entry['case']}: {entry['error']}"
    what = f"{entry['operation']} {entry['implementation']} {entry['key']} ({entry['case']})"
    if not _won(entry):
        return f"{what}: the heuristic {_sizes(entry['heuristic'])} stands, {entry['heuristic_us']:.1f} us"
    sizes = f"{_sizes(entry['heuristic'])} -> {_sizes(entry['tiles'])}"
    return f"{what}: {sizes}, {entry['heuristic_us']:.1f} -> {entry['us']:.1f} us"


def _sizes(values: Mapping[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def _cases(
    options: argparse.Namespace, geometries: list[Geometry], platform: str
) -> Iterator[tuple[Case, Callable[[], Mapping[str, Any]]]]:
    """Cases and what makes their arguments, which are large."""
    for operation in options.op or OPERATIONS:
        for geometry in geometries:
            if operation != "ragged_paged_attention":
                module = importlib.import_module(f"pallas_kernels.{operation}.arg_specs")
                for case in module.cases(geometry):
                    yield case, functools.partial(filled, case.arguments)
                continue
            shapes = (
                (options.requests, 1, options.context, "decode"),
                (8, min(64, options.prefill), options.context, "short prefill"),
                (1, options.prefill, options.prefill, "long prefill"),
            )
            for kv_dtype in options.kv_dtype or [options.dtype]:
                for num_requests, num_queries, context, kind in shapes:
                    case, arguments = attention_case(
                        geometry,
                        num_requests=num_requests,
                        num_queries=num_queries,
                        context=max(context, num_queries),
                        block_size=options.block_size or block_size_on(platform, kv_dtype),
                        dtype=options.dtype,
                        kv_dtype=kv_dtype,
                    )
                    # The table says what was measured; the key, what it holds for.
                    shape = f"{kind} {num_requests} x {num_queries} at {context}"
                    yield case._replace(shape=shape), functools.partial(dict, arguments)


def _implementations(case: Case, platform: str, wanted: list[str] | None) -> list[str]:
    """Those of the platform; by default without what is taken only where all kernels refuse."""
    names = [name for name in dispatch.ORDER.get(platform, dispatch.PORTABLE) if name in case.implementations]
    kernels = [name for name in names if name not in (*dispatch.PORTABLE, *dispatch.COMPILED)]
    return [name for name in names if name in wanted] if wanted else kernels or ["xla"]


def _lower(
    case: Case, arguments: Mapping[str, Any], implementation: str, chosen: Mapping[tiles.Key, Values]
) -> tuple[Any, tiles.Trial]:
    """The case traced and lowered with some tiles."""
    function = functools.partial(case.function, implementation=implementation, **case.options)
    jax.clear_caches()  # an inner jit of a kernel would keep what it traced with other tiles
    with tiles.trial(chosen) as trial:
        return jax.jit(function).lower(**arguments), trial


def _checked(
    case: Case, arguments: Mapping[str, Any], implementation: str, chosen: Mapping[tiles.Key, Values], expected: Any
) -> Callable[[], Any] | None:
    """The case compiled with some tiles, if the kernel takes them and computes the same."""
    try:
        lowered, trial = _lower(case, arguments, implementation, chosen)
        if trial.refused:
            return None
        run = functools.partial(lowered.compile(), **arguments)
        error = relative_error(run(), expected)
    except Exception as error:  # compilers refuse tiles in many ways
        print(f"  {_sizes(next(iter(chosen.values())))}: {type(error).__name__}: {error!s:.150}", file=sys.stderr)
        return None
    if not error <= TOLERANCE.get(str(expected.dtype), OTHER_TOLERANCE):
        print(f"  {_sizes(next(iter(chosen.values())))}: WRONG RESULT, error {error:.3g}", file=sys.stderr)
        return None
    return run


if __name__ == "__main__":
    main()
