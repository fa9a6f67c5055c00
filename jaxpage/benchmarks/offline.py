"""Data sets of requests through an engine in this process: all at once, or a few at a time.

The requests are those of ``jaxpage bench serve``, so that its figures less these are what HTTP costs.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from jaxpage.benchmarks import report
from jaxpage.benchmarks.serving.client import RequestRecord
from jaxpage.benchmarks.serving.datasets import Sample, check_dataset, make_samples
from jaxpage.benchmarks.serving.measures import summarize
from jaxpage.benchmarks.serving.options import METRICS
from jaxpage.benchmarks.serving.summary import summary
from jaxpage.benchmarks.serving.tokens import LocalTokens
from jaxpage.config import EngineArgs
from jaxpage.engine.front import Engine
from jaxpage.engine.intake import Prompt
from jaxpage.params import RequestOutputKind, SamplingParams, TextPrompt, TokensPrompt
from jaxpage.request import RequestOutput

PERCENTILES = (50.0, 90.0, 99.0)
WARMUP_TOKENS = 4


def measure_dataset(options: argparse.Namespace, batch_size: int | None) -> None:
    """Runs the data set that ``options`` name, ``batch_size`` requests at a time (None: all), and prints the figures.

    Raises:
        ValueError, StartupError: options that do not fit the model, or an engine that does not start.
    """
    check_dataset(options)
    args = EngineArgs.from_cli_args(options)
    engine = Engine(args)
    samples = fitting_samples(options, engine)
    result = run_in_batches(engine, samples, batch_size or len(samples))
    print(summary(result, METRICS[:4], PERCENTILES))
    if missing := options.num_prompts - len(samples):
        print(f"note: {missing} requests are missing: too long for max_model_len, or not in the file")
    for name, value in report.machine().items():
        print(f"{name}: {value}")
    settings = {"model": args.model, "dataset": options.dataset_name, "batch_size": batch_size}
    report.write(options.json, "dataset", [result], **settings)


def fitting_samples(options: argparse.Namespace, engine: Engine) -> list[Sample]:
    """The data set that ``options`` name, without what is longer than the model takes.

    Raises:
        ValueError: as ``make_samples``, or nothing fits.
    """
    tokens = LocalTokens(engine.tokenizer, engine.args.model)
    samples = make_samples(options, tokens, options.num_prompts, abs(options.seed))
    limit = engine.config.max_model_len
    fitting = [sample for sample in samples if sample.num_prompt_tokens + sample.num_output_tokens < limit]
    if not fitting:
        raise ValueError(f"no request of the data set fits into max_model_len {limit}")
    return fitting


def run_in_batches(engine: Engine, samples: list[Sample], batch_size: int) -> dict[str, Any]:
    """Sends ``batch_size`` requests at once, the next when all are answered; measures as ``bench serve`` does."""
    _run(engine, [Sample(samples[0].prompt, samples[0].num_prompt_tokens, WARMUP_TOKENS)])
    engine.core.scheduler.kv.reset_prefix_cache()
    records: list[RequestRecord] = []
    started = time.perf_counter()
    for first in range(0, len(samples), batch_size):
        records += _run(engine, samples[first : first + batch_size])
    return summarize(records, time.perf_counter() - started, PERCENTILES)


def _run(engine: Engine, samples: list[Sample]) -> list[RequestRecord]:
    """Answers all of ``samples`` together, with exactly as many tokens each as it says."""
    records: dict[str, RequestRecord] = {}
    for index, sample in enumerate(samples):
        params = SamplingParams(
            temperature=0,
            max_tokens=sample.num_output_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        now = time.perf_counter()
        record = RequestRecord(sample.num_prompt_tokens, due_s=now, sent_s=now, is_counted=True)
        records[str(index)] = record
        text, token_ids = engine.tokenize(_prompt(sample))
        record.num_prompt_tokens = len(token_ids)
        engine.add(str(index), token_ids, params, prompt=text)
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            assert isinstance(output, RequestOutput), "only generation was asked for"
            record = records[output.request_id]
            record.chunk_times.append(now)
            record.num_output_tokens += len(output.outputs[0].token_ids)
            record.end_s = now
    return list(records.values())


def _prompt(sample: Sample) -> Prompt:
    if isinstance(sample.prompt, str):
        return TextPrompt(prompt=sample.prompt)
    return TokensPrompt(prompt_token_ids=sample.prompt)
