"""``jaxpage bench serve``: options to samples, a run, its result. Each part has a file of its own."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import math
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpage.benchmarks.report import check_result_file
from jaxpage.benchmarks.serving.arrivals import arrival_times
from jaxpage.benchmarks.serving.client import Target
from jaxpage.benchmarks.serving.datasets import Sample, as_text, check_dataset, make_samples
from jaxpage.benchmarks.serving.load import Run, run_load
from jaxpage.benchmarks.serving.measures import details, finite, summarize
from jaxpage.benchmarks.serving.options import BACKENDS, SAMPLING_FLAGS, build_parser
from jaxpage.benchmarks.serving.plot import check_plot, draw
from jaxpage.benchmarks.serving.summary import summary
from jaxpage.benchmarks.serving.tokens import LocalTokens, ServerTokens, TokenSource
from jaxpage.client import HttpClient, ServerError, run
from jaxpage.client.http import authorization, check_url
from jaxpage.config_file import expand_config
from jaxpage.console import fail
from jaxpage.errors import ParameterError

ARRIVAL_SEED = 1
WARMUP_SEED = 2
"""Mixed into --seed: arrivals do not depend on how prompts are drawn, and warm-ups fill no cache for the run."""


def main(argv: Sequence[str] | None = None, prog: str = "python -m jaxpage.benchmarks.serving") -> int:
    """Runs the benchmark.

    Returns:
        0 if any request was answered; 1 if none was or the run could not begin; 130 after Ctrl-C.
    """
    parser = build_parser(prog)
    options = parser.parse_args(expand_config(parser, argv))
    try:
        if options.plot:
            check_plot(options.plot)
        check_result_files(options)
        check_dataset(options)
        result = run(benchmark(options))
    except (ValueError, OSError, ServerError) as error:
        return fail(error, options)
    except KeyboardInterrupt:
        return 130
    print(summary(result, options.percentile_metrics, options.metric_percentiles))
    store(options, result)
    return 0 if result["completed"] else 1


async def benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """Prepares everything, runs, and gives the result (see ``measures.summarize``), plot drawn.

    Raises:
        ParameterError: for options that do not fit the data or the server.
        ServerError: the server does not answer.
    """
    url = f"http://{options.host}:{options.port}" if options.base_url is None else options.base_url
    check_url("host" if options.base_url is None else "base_url", url)
    headers = authorization(options.api_key) | dict(options.header)
    async with HttpClient(url, headers, insecure=options.insecure) as client:
        model = await served_model(client, options)
        target = make_target(client, model, options)
        with contextlib.closing(token_source(options, url, headers)) as tokens:
            samples = _samples(options, tokens, options.num_prompts, options.seed)
            warmups = _samples(options, tokens, options.num_warmups, options.seed + WARMUP_SEED)
        await _warm_up(target, warmups)
        async with _profile(client, options.profile):
            done = await run_load(
                target,
                samples,
                send_times(options, samples),
                max_concurrency=options.max_concurrency,
                id_prefix=options.request_id_prefix,
                shows_progress=not options.disable_tqdm,
            )
    if options.plot:
        draw(options.plot, f"{model}, {options.dataset_name}, {options.request_rate:g} requests a second", done.records)
    return _settings(options, model, tokens.name) | _result(options, done)


async def served_model(client: HttpClient, options: argparse.Namespace) -> str:
    """The model to ask for; waits for the server if that is wanted.

    Raises:
        ServerError: the server is not there in time, or names no model.
    """
    deadline = time.monotonic() + options.ready_check_timeout_sec
    while True:
        try:
            listed = (await client.get("/v1/models")).json().get("data") or []
            break
        except ServerError as error:
            if time.monotonic() < deadline and (error.status is None or error.status >= 500):
                await asyncio.sleep(0.5)
                continue
            if options.model and error.status is not None:  # a server without the list still has the model
                return options.model
            raise
    if options.model:
        return options.model
    if not listed:
        raise ServerError("the server names no model; give --model")
    return listed[0]["id"]


def token_source(options: argparse.Namespace, url: str, headers: dict[str, str]) -> TokenSource:
    """The tokenizer on this machine if one is named, else the server's."""
    if options.tokenizer:
        try:
            return LocalTokens.load(options.tokenizer)
        except (ValueError, OSError) as error:
            raise ParameterError("tokenizer", str(error).removeprefix("model: ")) from None
    return ServerTokens(url, headers, options.insecure)


def make_target(client: HttpClient, model: str, options: argparse.Namespace) -> Target:
    """Where requests go and what all of them carry."""
    fields: dict[str, Any] = {"model": model}
    fields |= {name: value for name in SAMPLING_FLAGS if (value := getattr(options, name)) is not None}
    is_chat = options.backend == "openai-chat"
    if options.logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": options.logprobs} if is_chat else {"logprobs": options.logprobs}
    if options.ignore_eos:
        fields["ignore_eos"] = True
    fields |= options.extra_body or {}
    path = options.endpoint or BACKENDS[options.backend]
    return Target(client, path, is_chat, fields, options.request_timeout, keep_text=options.save_detailed)


def send_times(options: argparse.Namespace, samples: Sequence[Sample]) -> list[float]:
    """The trace's own times if it has some and they are wanted, else drawn."""
    recorded = [sample.arrival_s for sample in samples]
    if options.self_timed and None not in recorded:
        if not math.isinf(options.request_rate):
            raise ParameterError("request_rate", "a trace has its own times; --no-self-timed ignores them")
        return [time_s for time_s in recorded if time_s is not None]
    generator = np.random.default_rng([options.seed, ARRIVAL_SEED])
    return arrival_times(len(samples), options.request_rate, options.burstiness, generator).tolist()


def _samples(options: argparse.Namespace, tokens: TokenSource, count: int, seed: int) -> list[Sample]:
    samples = make_samples(options, tokens, count, seed) if count else []
    return as_text(samples, tokens) if options.backend == "openai-chat" else samples


async def _warm_up(target: Target, samples: Sequence[Sample]) -> None:
    """Raises ServerError for the first request that fails: so would the run's."""
    done = await run_load(target, samples, [0.0] * len(samples), id_prefix="warmup-", shows_progress=False)
    for record in done.records:
        if record.error is not None:
            raise ServerError(f"a warm-up request failed: {record.error}")


@contextlib.asynccontextmanager
async def _profile(client: HttpClient, is_wanted: bool) -> AsyncGenerator[None]:
    if not is_wanted:
        yield
        return
    (await client.post("/start_profile", {})).raise_for_status()
    try:
        yield
    finally:
        (await client.post("/stop_profile", {})).raise_for_status()


def _settings(options: argparse.Namespace, model: str, tokenizer: str) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": options.backend,
        "label": options.label,
        "model_id": model,
        "tokenizer_id": tokenizer,
        "dataset_name": options.dataset_name,
        "num_prompts": options.num_prompts,
        "seed": options.seed,
        "request_rate": finite(options.request_rate),
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        **dict(options.metadata),
    }


def _result(options: argparse.Namespace, done: Run) -> dict[str, Any]:
    result = summarize(done.records, done.duration_s, options.metric_percentiles, options.goodput)
    result["client_cpu_s"] = done.client_cpu_s
    return result | (details(done.records) if options.save_detailed else {})


def result_files(options: argparse.Namespace, date: str = "", model: str = "") -> list[Path]:
    """Where the result is to be stored."""
    files = [Path(options.json)] if options.json else []
    if options.save_result:
        rate = "inf" if math.isinf(options.request_rate) else f"{options.request_rate:g}"
        name = f"{options.label or options.backend}-{rate}qps-{model.rpartition('/')[2]}-{date}.json"
        files.append(Path(options.result_dir or ".") / (options.result_filename or name))
    return files


def check_result_files(options: argparse.Namespace) -> None:
    """Raises ParameterError if there is no directory for a result: better before the run than after it."""
    for flag in ("result_dir", "result_filename"):
        if getattr(options, flag) is not None and not options.save_result:
            raise ParameterError(flag, "needs --save-result")
    if options.save_detailed and not (options.json or options.save_result):
        raise ParameterError("save_detailed", "needs --json or --save-result")
    names = ["json", "result_dir"] if options.json else ["result_dir"]
    for name, file in zip(names, result_files(options), strict=False):
        check_result_file(name, file)


def store(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Writes the result as JSON wherever that is asked for."""
    for file in result_files(options, result["date"], result["model_id"]):
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"stored in {file}")
