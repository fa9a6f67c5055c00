"""From tokens to what a user reads: text, logprobs and the outputs of samples and beams.

It must not know queues, steps or devices.
"""

from __future__ import annotations

import dataclasses

from jaxpage.engine.core import TokenScores
from jaxpage.engine.meter import SampleLife
from jaxpage.params import BeamSearchParams, SamplingParams
from jaxpage.request import CompletionOutput, FinishReason, Logprob, LogprobDict, Request
from jaxpage.scheduler.beam import Beam
from jaxpage.tokenizer import IncrementalDetokenizer, Tokenizer


@dataclasses.dataclass(slots=True, eq=False)
class Sample:
    """One sample of a prompt while it is generated."""

    index: int
    request: Request
    detokenizer: IncrementalDetokenizer | None
    logprobs: list[LogprobDict]
    cumulative_logprob: float = 0.0
    life: SampleLife = dataclasses.field(default_factory=SampleLife)
    num_sent_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Renderer:
    """Makes outputs with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def detokenizer(
        self, prompt_token_ids: list[int], params: SamplingParams | BeamSearchParams
    ) -> IncrementalDetokenizer | None:
        """What makes text of a sample's tokens; None if it wants none."""
        if not params.detokenize:
            return None
        options = {}
        if isinstance(params, SamplingParams):
            options = {
                "stop": list(params.stop or ()),
                "min_tokens": params.min_tokens,
                "spaces_between_special_tokens": params.spaces_between_special_tokens,
            }
        return IncrementalDetokenizer(
            self._tokenizer,
            prompt_token_ids,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            **options,
        )

    def logprobs(self, scores: TokenScores) -> LogprobDict:
        """A token's scores as users see them."""
        token_id, logprob, rank, alternatives = scores
        name = self._tokenizer.token_string
        listed = {other: Logprob(value, place + 1, name(other)) for place, (other, value) in enumerate(alternatives)}
        listed.setdefault(token_id, Logprob(logprob, rank, name(token_id)))
        return listed

    def beam(self, prompt_token_ids: list[int], params: BeamSearchParams, index: int, beam: Beam) -> CompletionOutput:
        """A beam of a search that is over."""
        text, offsets = "", []
        detokenizer = self.detokenizer(prompt_token_ids, params)
        if detokenizer is not None:
            hide = beam.finish_reason is FinishReason.STOP and not params.include_stop_str_in_output
            detokenizer.append(beam.token_ids, suppress_last_text=hide)
            detokenizer.finish()
            text, offsets = detokenizer.text, list(detokenizer.token_offsets)
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=list(beam.token_ids),
            cumulative_logprob=beam.cumulative_logprob,
            logprobs=None if params.logprobs is None else [self.logprobs(scores) for scores in beam.scores],
            finish_reason=None if beam.finish_reason is None else beam.finish_reason.value,
            stop_reason=beam.stop_reason,
            text_offsets=offsets,
            score=beam.score,
        )


def completion(sample: Sample, is_delta: bool) -> CompletionOutput:
    """The sample so far, or what is new of it since the last call."""
    request, detokenizer = sample.request, sample.detokenizer
    token_ids = request.token_ids[len(request.prompt_token_ids) :]
    first = sample.num_sent_tokens if is_delta else 0
    sample.num_sent_tokens = len(token_ids)
    wants_logprobs = request.params.logprobs is not None
    text, offsets = "", []
    if detokenizer is not None:
        text = detokenizer.take_delta() if is_delta else detokenizer.text
        offsets = detokenizer.token_offsets[first:]
    return CompletionOutput(
        index=sample.index,
        text=text,
        token_ids=token_ids[first:],
        cumulative_logprob=sample.cumulative_logprob if wants_logprobs else None,
        logprobs=sample.logprobs[first:] if wants_logprobs else None,
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
        text_offsets=list(offsets),
    )
