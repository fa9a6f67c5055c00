"""The engine's loop: the only place that sees both the scheduler and the device. Speaks token ids, never text."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from jaxpage.request import FinishReason, Request
from jaxpage.runner.batch_builder import scored_range
from jaxpage.runner.runner import Runner, StepInFlight, StepResult, logprob_rows
from jaxpage.scheduler.beam import BeamSearch
from jaxpage.scheduler.group import RequestGroup
from jaxpage.scheduler.schedule import ScheduledRequest
from jaxpage.scheduler.scheduler import Scheduler

TokenScores = tuple[int, float, int, list[tuple[int, float]]]
"""A token's id, logprob and rank, and the most likely (id, logprob) beside it."""


@dataclasses.dataclass(slots=True)
class TokenOutput:
    """What one step gave one request.

    Attributes:
        token_ids: new tokens: one, or none if only prompt scores are new or the request ended without a token.
        scores: of the new tokens, if the request asked for logprobs.
        prompt_scores: of the next prompt tokens in order, if it asked for these.
    """

    request: Request
    token_ids: list[int]
    scores: list[TokenScores]
    prompt_scores: list[TokenScores]


@dataclasses.dataclass(slots=True)
class SearchOutput:
    """A beam search that is over; its results are in ``group.search.ended``."""

    group: RequestGroup


class EngineCore:
    """Schedules a step while the one before it still runs, so that the device never waits for the host."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._in_flight: StepInFlight | None = None
        self._next_check_s = 0.0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_requests or self._in_flight is not None

    def add(self, *requests: Request, priority: int = 0, search: BeamSearch | None = None) -> RequestGroup:
        """Queues a validated prompt: its samples, or the request a beam search begins with."""
        return self.scheduler.add(*requests, priority=priority, search=search)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a request from outside: an abort, or a stop string found in its text. A beam ends with its search."""
        self.scheduler.finish(request, reason, stop_reason)

    def step(self) -> list[TokenOutput | SearchOutput]:
        """Dispatches the next step, then takes in the results of the one before."""
        finished, self._in_flight = self._in_flight, None
        schedule = self.scheduler.schedule()
        if not schedule.is_empty:
            self._in_flight = self.runner.dispatch(schedule)
        outputs: list[TokenOutput | SearchOutput] = []
        outputs += [TokenOutput(request, [], [], []) for request in self.scheduler.take_ended()]
        if finished is not None:
            outputs += self._take_in(finished, finished.collect())
        outputs += map(SearchOutput, self.scheduler.take_ended_searches())
        if not self.has_work:
            self._check_integrity()
        return outputs

    def _check_integrity(self) -> None:
        """Checks the books of the idle engine; a large pool takes a while, so at most 1 % of the time goes here."""
        started = time.monotonic()
        if started >= self._next_check_s:
            self.scheduler.check_integrity()
            ended = time.monotonic()
            self._next_check_s = ended + 100 * (ended - started)

    def _take_in(self, step: StepInFlight, result: StepResult) -> list[TokenOutput]:
        outputs: dict[Request, TokenOutput] = {}
        position = 0
        for item in step.schedule.requests:
            if result.prompt is not None and not item.request.is_finished:
                scores = _prompt_scores(item, result, position)
                if scores:
                    outputs[item.request] = TokenOutput(item.request, [], [], scores)
            position += item.num_tokens
        rows = {item.request: row for row, item in enumerate(step.schedule.requests)}
        for request in self.scheduler.update(step.schedule, result.token_ids, self._candidates(step, result)):
            output = outputs.setdefault(request, TokenOutput(request, [], [], []))
            if request.max_tokens == 0:
                continue
            row = rows[request]
            token_id = result.token_ids[row]
            output.token_ids.append(token_id)
            if request.params.logprobs is not None and result.sampled is not None:
                output.scores.append(_scores(result.sampled, row, token_id, request.params.logprobs))
        return list(outputs.values())

    def _candidates(self, step: StepInFlight, result: StepResult) -> dict[int, Sequence[tuple[int, float]]]:
        """The most likely tokens of every beam in the step, by row."""
        candidates: dict[int, Sequence[tuple[int, float]]] = {}
        for row, item in enumerate(step.schedule.requests):
            group = self.scheduler.group_of(item.request) if item.request.is_beam else None
            if group is not None and group.search is not None and result.sampled is not None:
                candidates[row] = logprob_rows(result.sampled, row, group.search.num_candidates)
        return candidates


def _prompt_scores(item: ScheduledRequest, result: StepResult, position: int) -> list[TokenScores]:
    """Scores of the prompt tokens that this item's logits predict; ``position`` is its first token in the batch."""
    request = item.request
    if request.params.prompt_logprobs is None or result.prompt is None:
        return []
    first, last = scored_range(item)
    request.num_scored_tokens = max(request.num_scored_tokens, last)
    return [
        _scores(
            result.prompt,
            position + index - 1 - item.start,
            request.prompt_token_ids[index],
            request.params.prompt_logprobs,
        )
        for index in range(first, last)
    ]


def _scores(scores, row: int, token_id: int, count: int) -> TokenScores:
    count = scores.top_ids.shape[1] if count == -1 else count
    return token_id, float(scores.logprob[row]), int(scores.rank[row]), list(logprob_rows(scores, row, count))
