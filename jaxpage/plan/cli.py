"""The command: its options, and the order in which things are asked and shown.

It must not compute anything itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxpage.config import EngineArgs
from jaxpage.errors import ParameterError, StartupError
from jaxpage.models.presets import PRESETS
from jaxpage.parallel.table import presets
from jaxpage.plan import compiled, readme_table, show
from jaxpage.plan.assess import Assessment, Rate, assess
from jaxpage.plan.holdings import plot_holdings, show_holdings
from jaxpage.plan.models import find_values, read_model
from jaxpage.plan.plots import check_plots, draw_plots
from jaxpage.plan.scenario import Scenario
from jaxpage.plan.slices import Slice, find_slice
from jaxpage.plan.splits import choose_scenario
from jaxpage.plan.suggestions import find_suggestions

ENGINE_OPTIONS = (
    "tensor_parallel_size", "pipeline_parallel_size", "pipeline_layers", "data_parallel_size",
    "enable_expert_parallel", "sharding", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size",
    "dtype", "quantization", "kv_cache_dtype", "gpu_memory_utilization", "kv_cache_memory_bytes",
    "num_gpu_blocks_override", "max_logprobs", "attention_implementation",
)  # fmt: skip
"""Those that decide what a device holds or runs. All but their defaults are the engine's."""
BATCH_SIZES = (1, 8, 32, 64, 128, 256)
DEFAULT_MAX_MODEL_LEN = 8192
DEFAULT_CONTEXT = 1024


def main(argv: Sequence[str] | None = None) -> int:
    """Plans and shows.

    Returns:
        The exit code: 0 if all works, 1 if something does not fit, does not compile or cannot be had; usage errors
        exit with 2.
    """
    options = make_parser().parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        if options.plots:
            check_plots(options.plots)
        if options.json and not Path(options.json).absolute().parent.is_dir():
            raise ParameterError("json", f"no such directory: {Path(options.json).parent}")
        if options.table:
            print(readme_table.make_table(sys.stderr))
            return 0
        return _plan(options, console)
    except ParameterError as error:
        print(f"jaxpage: error: --{error.parameter.replace('_', '-')}: {error.reason}", file=sys.stderr)
    except (StartupError, RuntimeError) as error:
        print(f"jaxpage: error: {error}", file=sys.stderr)
    return 1


def _plan(options: argparse.Namespace, console: Console) -> int:
    for name in ("model", "target"):
        if getattr(options, name) is None:
            raise ParameterError(name, "is needed, unless --table is given")
    where, values = find_slice(options.target), find_values(options.model)
    engine = {name: getattr(options, name) for name in ENGINE_OPTIONS}
    if engine["max_model_len"] is None:
        engine["max_model_len"] = min(DEFAULT_MAX_MODEL_LEN, read_model(values)[0].max_position)
    if options.context is not None and options.context > engine["max_model_len"]:
        raise ParameterError(
            "context", f"{options.context:,} is above max_model_len {engine['max_model_len']:,}, which can be raised"
        )
    scenarios = _scenarios(options, engine, values, where)
    for note in dict.fromkeys(note for scenario in scenarios for note in scenario.notes):
        print(f"jaxpage: {note}", file=sys.stderr)
    if options.show_sharding:
        for index, scenario in enumerate(scenarios):
            for text in show_holdings(scenario):
                print(text, end="\n\n")
            if options.plots:
                name = f"sharding_{index}" if len(scenarios) > 1 else "sharding"
                for file in plot_holdings(scenario, options.plots, name):
                    print(f"wrote {file}")
        return 0
    assessments = _assessments(options, where, scenarios, console)
    if len(assessments) > 1:
        console.print(show.headline(assessments[0]), highlight=False, soft_wrap=True)
        console.print(show.memory_table(assessments))
        console.print(show.compare_table(assessments, options.batch_sizes[-1]))
        for item in assessments:
            for problem in item.problems:
                console.print(f"[bold red]{item.scenario.sharding_name}:[/] {problem}", highlight=False, soft_wrap=True)
        found: Any = [_numbers(item, options.batch_sizes, []) for item in assessments]
    else:
        found = _show_one(assessments[0], options.batch_sizes, console)
    if options.json:
        _write_json(options.json, found)
    if options.plots:
        for file in draw_plots(options.plots, assessments):
            console.print(f"wrote {file}", highlight=False)
    return 0 if all(item.fits for item in assessments) else 1


def _assessments(
    options: argparse.Namespace, where: Slice, scenarios: Sequence[Scenario], console: Console
) -> list[Assessment]:
    reports: Sequence[Sequence[compiled.StepReport] | None] = [None] * len(scenarios)
    if not options.no_compile:
        absent = compiled.missing(where)
        if absent:
            raise StartupError(f"{absent}; or plan by arithmetic with --no-compile")
        jobs = [compiled.Job(scenario) for scenario in scenarios]
        with console.status(f"compiling for {where.name}"):
            reports = list(compiled.compile_jobs(where, jobs))
    found = []
    for scenario, steps in zip(scenarios, reports, strict=True):
        chip = None
        if where.is_cpu:
            from jaxpage.plan.host import cpu_chip

            chip = cpu_chip(scenario.num_devices)
        context = min(options.context or DEFAULT_CONTEXT, scenario.config.max_model_len)
        found.append(assess(scenario, context, steps, chip))
    return found


def _show_one(assessment: Assessment, batch_sizes: Sequence[int], console: Console) -> dict[str, Any]:
    rates: list[Rate] = []
    prefill = turning = None
    if assessment.chip is not None:
        rates = [assessment.decode(size) for size in batch_sizes]
        prefill, turning = assessment.prefill(), assessment.compute_bound_from()
    suggestions = find_suggestions(assessment)
    show.show_report(console, assessment, rates, prefill, turning, suggestions)
    return _numbers(assessment, batch_sizes, [dataclasses.asdict(item) for item in suggestions])


def _numbers(assessment: Assessment, batch_sizes: Sequence[int], suggestions: Sequence[Any]) -> dict[str, Any]:
    """All that is shown, as plain data."""
    scenario, memory = assessment.scenario, assessment.memory
    rates: dict[str, Any] = {}
    if assessment.chip is not None:
        rates["decode"] = [_rate(assessment.decode(size)) for size in batch_sizes]
        rates["prefill"] = _rate(assessment.prefill())
        rates["compute_bound_from"] = assessment.compute_bound_from()
    return {
        "model": scenario.name,
        "target": scenario.where.name,
        "sharding": scenario.sharding_name,
        "options": dataclasses.asdict(scenario.args),
        "config": dataclasses.asdict(scenario.config),
        "chip": None if assessment.chip is None else assessment.chip._asdict(),
        "works": assessment.fits,
        "problems": assessment.problems,
        "stages": [{**dataclasses.asdict(stage), "free_bytes": stage.free_bytes} for stage in memory.stages],
        "kv_bytes_per_token": show.kv_token_bytes(assessment),
        "kv_bytes_per_token_and_device": max(stage.bytes_per_block for stage in memory.stages)
        / scenario.config.block_size,
        "num_blocks_that_fit": 0 if memory.most is None else memory.most.num_blocks,
        "num_blocks": 0 if memory.cache is None else memory.cache.num_blocks,
        "num_tokens_that_fit": memory.num_tokens,
        "full_requests_that_fit": memory.full_requests,
        "num_engines": scenario.num_replicas,
        "steps": None if assessment.steps is None else [dataclasses.asdict(step) for step in assessment.steps],
        "context": assessment.context,
        **rates,
        "suggestions": suggestions,
    }


def _rate(rate: Rate) -> dict[str, Any]:
    return {**dataclasses.asdict(rate), "bound": rate.bound}


def _write_json(path: str, found: Any) -> None:
    try:
        # What has no end, a gain over nothing, is null.
        Path(path).write_text(json.dumps(_finite(found), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ParameterError("json", f"{path}: {error.strerror or error}") from error


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and value in (float("inf"), float("-inf")) else value


def _scenarios(
    options: argparse.Namespace, engine: Mapping[str, Any], values: Mapping[str, Any], where: Slice
) -> list[Scenario]:
    """What --compare names; the given options alone without it."""
    found = []
    for text in options.compare or [""]:
        changes = parse_variant(text) if text else {}
        try:
            found.append(choose_scenario(options.model, values, where, {**engine, **changes}))
        except ParameterError as error:
            if error.parameter not in changes:
                raise
            raise ParameterError("compare", f"{text}: {error.reason}") from None
    return found


SIZES = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size"}


def parse_variant(text: str) -> dict[str, Any]:
    """Options of one of --compare, such as "tp=4,dp=2", "two_dimensional" or "ep,tp=8".

    Raises:
        ParameterError: for anything else.
    """
    found: dict[str, Any] = {}
    for word in text.split(","):
        name, _, value = word.partition("=")
        if name in SIZES and value.isdigit():
            found[SIZES[name]] = int(value)
        elif word == "ep":
            found["enable_expert_parallel"] = True
        elif word in presets() or Path(word).is_file():
            found["sharding"] = word
        else:
            raise ParameterError(
                "compare",
                f"must be such as tp=4,dp=2 or ep, or {', '.join(presets())} or a YAML file; got {text!r:.200}",
            )
    return found


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxpage.plan",
        description="What a model takes on chips that need not be here, what fits, and how fast it can be at most. "
        "Compiles the engine's own decode and prefill steps for them.",
    )
    parser.add_argument("--model", help=f"config.json, its directory, .gguf file, or {', '.join(PRESETS)}")
    parser.add_argument("--target", help="such as v6e-8, h200x8 or cpu")
    parser.add_argument(
        "--compare", nargs="+", metavar="SHARDING",
        help="ways to use the chips, shown side by side: tp=4,dp=2 or ep, a preset or YAML file of --sharding",
    )  # fmt: skip
    parser.add_argument(
        "--show-sharding", action="store_true", help="only show which device holds what; with --plots, draw it"
    )
    parser.add_argument("--no-compile", action="store_true", help="arithmetic only: temporaries are estimates")
    parser.add_argument(
        "--context", type=_positive, metavar="N",
        help=f"tokens of each request, where rates depend on it; default: {DEFAULT_CONTEXT:,}",
    )  # fmt: skip
    parser.add_argument(
        "--batch-sizes", type=_positive, nargs="+", default=BATCH_SIZES, metavar="N",
        help="requests at once that rates are shown for; default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="also write the numbers")
    parser.add_argument("--plots", metavar="DIR", help="also draw memory.png and roofline.png")
    parser.add_argument("--table", action="store_true", help="print the table of models and chips in the README")
    group = parser.add_argument_group("engine, as for serving")
    hints, fields = typing.get_type_hints(EngineArgs), {field.name: field for field in dataclasses.fields(EngineArgs)}
    for name in ENGINE_OPTIONS:
        field, kind = fields[name], next(iter(typing.get_args(hints[name])), hints[name])
        keywords: dict[str, Any] = {"help": field.metadata["help"], "default": None}
        if kind is bool:
            keywords["action"] = "store_true"
        else:
            keywords |= {"type": kind, "choices": field.metadata["choices"]}
            keywords["metavar"] = None if keywords["choices"] else kind.__name__.upper()
        group.add_argument("--" + name.replace("_", "-"), **keywords)
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text[:200]!r}")
    return int(text)
