"""Assessments as text and tables on a terminal. Computes nothing but units."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console, RenderableType
from rich.table import Table

from jaxpage.layers.kv_cache import QUANTIZED_DTYPES
from jaxpage.plan.assess import Assessment, Rate
from jaxpage.plan.compiled import StepReport
from jaxpage.plan.memory import share_of_gpu
from jaxpage.plan.suggestions import Suggestion
from jaxpage.runner.gpu_pool import UNASKED_SHARE, VARIABLE
from jaxpage.runner.memory import gib

MOST_SUGGESTIONS = 10


def show_report(
    console: Console,
    assessment: Assessment,
    rates: Sequence[Rate],
    prefill: Rate | None,
    compute_bound_from: int | None,
    suggestions: Sequence[Suggestion],
) -> None:
    """All of it. ``rates`` are of decode steps."""
    console.print(headline(assessment), highlight=False, soft_wrap=True)
    console.print(memory_table([assessment]))
    for line in cache_lines(assessment):
        console.print(line, highlight=False, soft_wrap=True)
    if assessment.steps is not None:
        for step in assessment.steps:
            console.print(step_line(step), highlight=False, soft_wrap=True, markup=False)
        if any(step.collectives for step in assessment.steps):
            console.print(collectives_table(assessment.steps))
    else:
        console.print("Not compiled: temporaries and collectives are estimates.", highlight=False)
    if prefill is not None:
        console.print(rates_table(assessment, rates, prefill))
        console.print(turning_point(assessment, compute_bound_from), highlight=False, soft_wrap=True)
    for problem in assessment.problems:
        console.print(f"[bold red]Does not work:[/] {problem}", highlight=False, soft_wrap=True)
    if suggestions:
        console.print(suggestions_table(assessment, suggestions[:MOST_SUGGESTIONS]))


def headline(assessment: Assessment) -> str:
    """What is planned, in a line or two."""
    scenario, chip = assessment.scenario, assessment.chip
    devices = f"{scenario.num_devices} of {scenario.where.num_devices} devices of {scenario.where.name}"
    lines = [
        f"[bold]{scenario.name}[/], {scenario.num_params / 1e9:.2f} billion parameters in "
        f"{scenario.model.num_layers} layers, {scenario.type_name}; {scenario.sharding_name} on {devices}; "
        f"max_model_len {scenario.config.max_model_len:,}, max_num_seqs {scenario.config.max_num_seqs}"
    ]
    if chip is not None:
        lines.append(
            f"A device: {gib(chip.memory_bytes)}, {chip.bytes_per_s / 1e9:,.0f} GB/s, "
            f"{chip.flops_per_s[scenario.config.dtype] / 1e12:,.1f} TFLOP/s in {scenario.config.dtype}, "
            f"{chip.interconnect_bytes_per_s / 1e9:,.0f} GB/s to others ({chip.source})"
        )
    return "\n".join(lines)


def memory_table(assessments: Sequence[Assessment]) -> Table:
    """Bytes of each stage of each, a column each."""
    table = Table(title="Memory of a device", title_justify="left")
    table.add_column("")
    columns = []
    for assessment in assessments:
        for stage in assessment.memory.stages:
            words = [assessment.scenario.sharding_name] if len(assessments) > 1 else []
            words += [stage.name] if len(assessment.memory.stages) > 1 or not words else []
            table.add_column(", ".join(words), justify="right")
            columns.append(stage)
    mark = " (estimate)"
    rows: list[tuple[str, list[str]]] = [
        ("layers", [str(stage.num_layers) for stage in columns]),
        ("weights", [gib(stage.weight_bytes) for stage in columns]),
        ("sampling state", [gib(stage.state_bytes) for stage in columns]),
        ("temporaries", [gib(stage.temp_bytes) + (mark if stage.is_estimate else "") for stage in columns]),
        ("KV cache", [gib(stage.kv_bytes) if stage.kv_bytes else "none" for stage in columns]),
        ("left over", [_signed(stage.free_bytes) for stage in columns]),
        ("usable", ["" if stage.usable_bytes is None else gib(stage.usable_bytes) for stage in columns]),
    ]
    for name, values in rows:
        table.add_row(name, *values)
    return table


def _signed(num_bytes: int | None) -> str:
    if num_bytes is None:
        return ""
    return gib(num_bytes) if num_bytes >= 0 else f"[red]{gib(-num_bytes)} missing[/]"


def cache_lines(assessment: Assessment) -> list[str]:
    """The KV cache: bytes of a token, and what fits."""
    scenario, memory = assessment.scenario, assessment.memory
    model, config = scenario.model, scenario.config
    dtype = np.dtype(config.kv_cache_dtype)
    per_device = max(stage.bytes_per_block for stage in memory.stages) / config.block_size
    scales = " + 4 of scales" if config.kv_cache_dtype in QUANTIZED_DTYPES else ""
    per_token = kv_token_bytes(assessment)
    lines = [
        f"KV cache of a token: 2 x {model.num_layers} layers x {model_kv_heads(assessment)} KV heads x "
        f"({model.head_dim} x {dtype.itemsize}{scales}) bytes = {per_token / 1024:,.1f} KiB, "
        f"{gib(per_token * config.max_model_len)} at {config.max_model_len:,} tokens; "
        f"{per_device / 1024:,.1f} KiB on each device"
    ]
    if memory.most is not None and memory.cache is not None:
        replicas = f" in each of {scenario.num_replicas} engines" if scenario.num_replicas > 1 else ""
        lines.append(
            f"Room for {memory.most.num_blocks - 1:,} blocks of {config.block_size} tokens = {memory.num_tokens:,} "
            f"tokens = {memory.full_requests:,.1f} requests of {config.max_model_len:,} tokens{replicas}; "
            f"the engine makes {memory.cache.num_blocks - 1:,} blocks"
        )
    share = share_of_gpu(scenario)
    if share is not None:
        lines.append(
            f"jaxpage lets JAX set {100 * share:.0f} % of a GPU's memory aside for that. A program that uses JAX "
            f"before has {100 * UNASKED_SHARE:.0f} %, unless it is started with {VARIABLE}={share}"
        )
    return lines


def model_kv_heads(assessment: Assessment) -> int:
    """KV heads of the model itself: devices may hold copies of them."""
    return assessment.scenario.model.num_kv_heads // assessment.scenario.kv_repeats


def kv_token_bytes(assessment: Assessment) -> int:
    """Bytes of a token's keys, values and scales, whatever they are split over."""
    scenario = assessment.scenario
    return sum(part.programs.kv_bytes_per_token for part in scenario.parts) // scenario.kv_repeats


def step_line(step: StepReport) -> str:
    """What the compiler says of a step."""
    name = f"{step.name} step of {step.num_tokens:,} tokens, {step.num_rows} rows, stage {step.stage}"
    if step.problem:
        return f"{name}: does not compile: {step.problem}"
    kernels = ", ".join(f"{count} {name}" for name, count in sorted(step.kernels.items())) or "none"
    in_place = "all in place" if step.is_cache_aliased else "NOT all in place"
    return (
        f"{name}: compiled in {step.seconds:.0f} s; temporaries {gib(step.step_bytes)}; cache and state {in_place}; "
        f"kernels: {kernels}"
    )


def collectives_table(steps: Sequence[StepReport]) -> Table:
    """Exchanges between devices."""
    table = Table(title="Collectives of a step, on each device", title_justify="left")
    for name in ("step", "part", "operation"):
        table.add_column(name)
    for name in ("number", "in a layer", "bytes", "sent at least"):
        table.add_column(name, justify="right")
    for step in steps:
        for item in step.collectives:
            name = step.name if len({step.stage for step in steps}) == 1 else f"{step.name} {step.stage}"
            per_layer = str(item.layer_count) if item.layer_count else ""
            sizes = [gib(item.num_bytes), gib(item.wire_bytes)]
            table.add_row(name, item.where, item.operation, str(item.count), per_layer, *sizes)
    return table


def rates_table(assessment: Assessment, rates: Sequence[Rate], prefill: Rate) -> Table:
    """The roofline: times of each resource, and what follows for tokens a second."""
    title = f"Roofline: decode at {assessment.context:,} tokens of context, and prefill; lower bounds of times"
    table = Table(title=title, title_justify="left")
    for name in ("step", "at once", "GFLOP", "HBM", "sent", "compute", "memory", "interconnect", "tok/s at most"):
        table.add_column(name, justify="left" if name == "step" else "right")
    for name, rate in [*(("decode", rate) for rate in rates), ("prefill", prefill)]:
        cells: list[RenderableType] = [name, f"{rate.size:,}", f"{rate.work.flops / 1e9:,.1f}"]
        cells += [gib(rate.work.memory_bytes), gib(rate.work.wire_bytes)]
        for resource, seconds in rate.times.items():
            text = f"{seconds * 1e3:,.2f} ms"
            cells.append(f"[bold]{text}[/]" if resource == rate.bound else text)
        cells.append(f"{rate.tokens_per_s:,.0f}" + ("" if rate.fits else " [red]does not fit[/]"))
        table.add_row(*cells)
    return table


def turning_point(assessment: Assessment, compute_bound_from: int | None) -> str:
    """Where decode turns from one resource to the other."""
    at = f"at {assessment.context:,} tokens of context"
    if compute_bound_from is None:
        return f"Decode is bound by memory for any number of requests {at}: reading keys and values takes longest."
    fits = assessment.decode(compute_bound_from).fits
    held = "" if fits else ", which the cache does not hold"
    return f"Decode {at} turns from memory-bound to compute-bound at {compute_bound_from:,} requests at once{held}."


def suggestions_table(assessment: Assessment, suggestions: Sequence[Suggestion]) -> Table:
    """What would help, the most helpful first."""
    title = "What would make it fit" if not assessment.memory.fits else "What would give more"
    table = Table(title=f"{title}, each planned like the above", title_justify="left")
    for name in ("change", "gives", "price"):
        table.add_column(name, overflow="fold")
    for item in suggestions:
        table.add_row(item.flags, item.told(assessment), item.price)
    return table


def compare_table(assessments: Sequence[Assessment], num_requests: int) -> Table:
    """Several ways to use the same chips, side by side."""
    table = Table(
        title=f"With {num_requests} requests at once, {assessments[0].context:,} tokens each", title_justify="left"
    )
    table.add_column("")
    for assessment in assessments:
        table.add_column(assessment.scenario.sharding_name, justify="right")
    rows: dict[str, list[str]] = {"tokens of KV cache": [], "full-length requests": []}
    for assessment in assessments:
        replicas = assessment.scenario.num_replicas
        rows["tokens of KV cache"].append(f"{assessment.memory.num_tokens * replicas:,}")
        rows["full-length requests"].append(f"{assessment.memory.full_requests * replicas:,.1f}")
        if assessment.chip is None:
            continue
        rate, prefill = assessment.decode(num_requests), assessment.prefill()
        values = {
            "sent in a decode step": gib(rate.work.wire_bytes),
            "decode bound by": rate.bound,
            "time between tokens": f"{rate.seconds * 1e3:,.2f} ms",
            "decode tok/s at most": f"{rate.tokens_per_s:,.0f}" + ("" if rate.fits else " [red]does not fit[/]"),
            "prefill tok/s at most": f"{prefill.tokens_per_s:,.0f}",
            "compute-bound from": f"{assessment.compute_bound_from() or 'never'}",
        }
        for name, value in values.items():
            rows.setdefault(name, []).append(value)
    for assessment in assessments:
        rows.setdefault("works", []).append("yes" if assessment.fits else "[red]no[/]")
    for name, values in rows.items():
        table.add_row(name, *values)
    return table
