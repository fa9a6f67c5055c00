"""Owns outputs, errors and metrics as rows of plain values, small and quick to pack: there is one for every token.

It must not know how rows travel. What the reader of an output knows already, the prompt above all, is left out.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxpage.errors import EngineDeadError, ParameterError, StartupError
from jaxpage.metrics import EngineCounts, Numbers
from jaxpage.metrics.engine_metrics import Histograms
from jaxpage.request import CompletionOutput, EmbeddingOutput, Logprob, LogprobDict, RequestMetrics, RequestOutput

Row = list[Any]
ERRORS: dict[str, type[Exception]] = {
    "StartupError": StartupError,
    "EngineDeadError": EngineDeadError,
    "ValueError": ValueError,
    "OSError": OSError,
}
"""Errors that stay what they are; others become RuntimeError."""
_METRICS = [field.name for field in dataclasses.fields(RequestMetrics)]


def output_row(output: RequestOutput | EmbeddingOutput) -> Row:
    """The row of an output; see ``output_of``."""
    if isinstance(output, EmbeddingOutput):
        return [output.embedding, output.num_cached_tokens, output.finish_reason]
    scores, metrics = output.prompt_logprobs, output.metrics
    return [
        [_sample_row(sample) for sample in output.outputs],
        output.finished,
        output.num_cached_tokens,
        None if scores is None else [_score_row(entry) for entry in scores],
        metrics and [getattr(metrics, name) for name in _METRICS],
    ]


def output_of(row: Row, request_id: str, prompt: str | None, prompt_token_ids: list[int]) -> Any:
    """The output that ``output_row`` made ``row`` of."""
    if len(row) == 3:
        return EmbeddingOutput(request_id, prompt_token_ids, *row)
    samples, finished, num_cached_tokens, scores, metrics = row
    return RequestOutput(
        request_id,
        prompt,
        prompt_token_ids,
        [_sample_of(sample) for sample in samples],
        finished,
        None if scores is None else [_score_of(entry) for entry in scores],
        num_cached_tokens,
        metrics and RequestMetrics(*metrics),
    )


def _sample_row(sample: CompletionOutput) -> Row:
    logprobs = sample.logprobs
    return [
        sample.index,
        sample.text,
        sample.token_ids,
        sample.cumulative_logprob,
        None if logprobs is None else [_score_row(entry) for entry in logprobs],
        sample.finish_reason,
        sample.stop_reason,
        sample.text_offsets,
        sample.score,
    ]


def _sample_of(row: Row) -> CompletionOutput:
    if row[4] is not None:
        row[4] = [_score_of(entry) for entry in row[4]]
    return CompletionOutput(*row)


def _score_row(entry: LogprobDict | None) -> list[Any] | None:
    if entry is None:
        return None
    return [[token_id, each.logprob, each.rank, each.decoded_token] for token_id, each in entry.items()]


def _score_of(row: list[Any] | None) -> LogprobDict | None:
    return None if row is None else {token_id: Logprob(*rest) for token_id, *rest in row}


def error_row(error: BaseException) -> Row:
    """The row of an error; its first field tells it from an output."""
    if isinstance(error, ParameterError):
        return ["ParameterError", error.parameter, error.reason]
    kind = next((name for name, each in ERRORS.items() if isinstance(error, each)), "RuntimeError")
    return [kind, str(error) if isinstance(error, tuple(ERRORS.values())) else f"{type(error).__name__}: {error}"]


def is_error(row: Row) -> bool:
    """Whether a row is that of an error and not of an output."""
    return isinstance(row[0], str)


def error_of(row: Row) -> BaseException:
    """The error that ``error_row`` made ``row`` of."""
    kind, *words = row
    return ParameterError(*words) if kind == "ParameterError" else ERRORS.get(kind, RuntimeError)(*words)


def numbers_row(numbers: Numbers) -> Row:
    """The row of an engine's numbers; see ``numbers_of``."""
    histograms = [getattr(numbers.histograms, field.name) for field in dataclasses.fields(Histograms)]
    return [
        [[each.counts, each.total] for each in histograms],
        list(numbers.counts),
        numbers.num_accepted,
        numbers.num_ended,
        numbers.num_generation_tokens,
    ]


def numbers_of(row: Row, max_model_len: int) -> Numbers:
    """The numbers that ``numbers_row`` made ``row`` of, in an engine with this ``max_model_len``."""
    histograms = Histograms.empty(max_model_len)
    for field, (counts, total) in zip(dataclasses.fields(Histograms), row[0], strict=True):
        histogram = getattr(histograms, field.name)
        histogram.counts, histogram.total = counts, total
    return Numbers(histograms, EngineCounts(*row[1]), *row[2:])
