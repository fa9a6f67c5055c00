"""Text in, text out: turns prompts into requests for the core, and its tokens into ``RequestOutput``s.

Runs in one thread. Programs use it through ``LLM`` (which calls ``step`` itself) or ``AsyncLLMEngine``.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxpage.batch import Device
from jaxpage.config import RECOMMENDED_VALUES, EngineArgs
from jaxpage.engine.build import build
from jaxpage.engine.core import SearchOutput, TokenOutput
from jaxpage.engine.facts import EngineFacts
from jaxpage.engine.intake import Intake, Params, Prompt
from jaxpage.engine.meter import Meter, PromptLife
from jaxpage.engine.rendering import Renderer, Sample, completion
from jaxpage.errors import ParameterError, shown
from jaxpage.grammar import ConstraintBuilder
from jaxpage.params import BeamSearchParams, PoolingParams, RequestOutputKind, SamplingParams
from jaxpage.request import CompletionOutput, EmbeddingOutput, FinishReason, LogprobDict, Request, RequestOutput
from jaxpage.scheduler.beam import BeamSearch
from jaxpage.scheduler.group import RequestGroup
from jaxpage.tokenizer import Tokenizer

logger = logging.getLogger("jaxpage")

_NO_SAMPLING = SamplingParams(temperature=0, max_tokens=0)
_BEAM_SAMPLING = SamplingParams(temperature=0)
"""What the step does for a beam's row beside listing its most likely tokens."""
Output = RequestOutput | EmbeddingOutput


@dataclasses.dataclass(slots=True, eq=False)
class PromptState:
    """One prompt and its samples."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    samples: list[Sample]
    prompt_logprobs: list[LogprobDict | None] | None
    life: PromptLife
    sent_prompt_logprobs: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class SearchState:
    """One prompt whose beams are searched. Beams come and go in the core; text is made when the search is over."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: BeamSearchParams
    search: BeamSearch
    group: RequestGroup
    first: Request
    life: PromptLife


@dataclasses.dataclass(slots=True, eq=False)
class PoolingState:
    """One prompt whose vector is computed."""

    request_id: str
    params: PoolingParams
    request: Request
    life: PromptLife


class Engine:
    """A loaded model with its queue."""

    def __init__(
        self, args: EngineArgs, devices: Sequence[Device] | None = None, constraints: ConstraintBuilder | None = None
    ) -> None:
        """Loads and warms up on ``devices`` (see ``build``); ``constraints`` are those of an engine with this model."""
        loaded = build(args, devices)
        self.args = args
        self.core = loaded.core
        self.model = loaded.model
        self.config = loaded.config
        self.tokenizer: Tokenizer = loaded.tokenizer
        recommended = _usable(loaded.generation_config, args.generation_config == "auto")
        self.facts = EngineFacts(
            vocab_size=self.model.vocab_size,
            hidden_size=self.model.hidden_size,
            end_token_ids=tuple(self.model.end_token_ids),
            config=self.config,
            max_logprobs=args.max_logprobs,
            num_usable_blocks=self.core.scheduler.kv.pool.num_usable,
            generation_config=recommended | dict(args.override_generation_config or {}),
        )
        self._prompts: dict[str, PromptState] = {}
        self._samples: dict[Request, tuple[PromptState, Sample]] = {}
        self._searches: dict[str, SearchState] = {}
        self._poolings: dict[str, PoolingState] = {}
        self.intake = Intake(self.tokenizer, self.facts, constraints)
        self._renderer = Renderer(self.tokenizer)
        self._seeds = random.Random(args.seed)
        self._meter = Meter(self.core, self.config)
        self.metrics = self._meter.metrics

    @property
    def has_work(self) -> bool:
        return self.core.has_work

    @property
    def generation_config(self) -> dict[str, Any]:
        """Recommended sampling values, the options' over the checkpoint's."""
        return self.facts.generation_config

    @property
    def num_unfinished(self) -> int:
        """Prompts that have not ended."""
        return len(self._prompts) + len(self._searches) + len(self._poolings)

    def default_sampling_params(self) -> SamplingParams:
        """See ``Intake.default_sampling_params``."""
        return self.intake.default_sampling_params()

    def tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """See ``Intake.tokenize``."""
        return self.intake.tokenize(prompt)

    def check(
        self, prompt_token_ids: Sequence[int], params: Params, priority: int = 0, cache_salt: str | None = None
    ) -> None:
        """See ``Intake.check``."""
        self.intake.check(prompt_token_ids, params, priority, cache_salt)

    def add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: Params,
        *,
        prompt: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        arrival_s: float | None = None,
    ) -> None:
        """Queues one prompt with all its samples, or its search, or to be pooled.

        ``arrival_s`` is when its call came, on the monotonic clock; None: now.

        Raises:
            ParameterError: if ``check`` does, or the id is in use.
        """
        if request_id in self._prompts or request_id in self._searches or request_id in self._poolings:
            raise ParameterError("request_id", f"{shown(request_id)} is in use")
        self.check(prompt_token_ids, params, priority, cache_salt)
        if isinstance(params, PoolingParams):
            request = Request(
                request_id, prompt_token_ids, _NO_SAMPLING, 0, cache_salt=cache_salt, pooling=params.pooling
            )
            life = self._meter.arrived(self.core.add(request, priority=priority), 1, 0, arrival_s)
            self._poolings[request_id] = PoolingState(request_id, copy.copy(params), request, life)
            return
        room = self.config.max_model_len - len(prompt_token_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if isinstance(params, BeamSearchParams):
            search = BeamSearch(params, max_tokens, self.intake.end_ids(params), self.model.vocab_size)
            request = Request(request_id, prompt_token_ids, _BEAM_SAMPLING, max_tokens, cache_salt=cache_salt)
            group = self.core.add(request, priority=priority, search=search)
            life = self._meter.arrived(group, params.beam_width, max_tokens, arrival_s)
            self._searches[request_id] = SearchState(
                request_id, prompt, prompt_token_ids, copy.copy(params), search, group, request, life
            )
            return
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        constraint = self.intake.constraints.build(params)
        samples: list[Sample] = []
        for index in range(params.n):
            request = Request(
                request_id=f"{request_id}/{index}",
                prompt_token_ids=prompt_token_ids,
                params=params if index == 0 else _without_prompt_logprobs(params),
                max_tokens=max_tokens,
                seed=seed,
                sample_index=index,
                end_token_ids=self.intake.end_ids(params),
                cache_salt=cache_salt,
                constraint=None if constraint is None else constraint.fork(),
            )
            samples.append(Sample(index, request, self._renderer.detokenizer(prompt_token_ids, params), []))
        group = self.core.add(*(sample.request for sample in samples), priority=priority)
        state = PromptState(
            request_id,
            prompt,
            prompt_token_ids,
            copy.copy(params),
            samples=samples,
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
            life=self._meter.arrived(group, params.n, max_tokens, arrival_s),
        )
        self._prompts[request_id] = state
        self._samples |= {sample.request: (state, sample) for sample in samples}

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a prompt's samples now; returns its last output, or None if the id is unknown."""
        if request_id in self._searches:
            return self._abort_search(self._searches[request_id])
        if request_id in self._poolings:
            pooling = self._poolings.pop(request_id)
            self.core.finish(pooling.request, FinishReason.ABORT)
            self._meter.over(pooling.life, [], FinishReason.ABORT)
            self._meter.aborted([])
            return None
        state = self._prompts.get(request_id)
        if state is None:
            return None
        running = [sample for sample in state.samples if sample.finish_reason is None]
        for sample in running:
            self.core.finish(sample.request, FinishReason.ABORT)
            self._end(sample, FinishReason.ABORT, None)
        self._meter.aborted([(state.life, running)])
        return self._output(state, state.samples)

    def step(self) -> list[Output]:
        """Runs one step of the core; returns what is new, by the output kind each prompt asked for."""
        changed: dict[PromptState, dict[Sample, None]] = {}
        outputs: list[Output] = []
        for output in self.core.step():
            if isinstance(output, SearchOutput):
                outputs += [self._searched(state) for state in self._searches_of(output.group)]
                continue
            if output.request.pooling is not None:
                outputs += self._pooled(output.request)
                continue
            if output.request not in self._samples:
                continue  # aborted while its step was in flight
            state, sample = self._samples[output.request]
            try:
                self._accept(state, sample, output)
            except Exception:
                # Turning tokens into text concerns this request alone; the others go on.
                logger.exception("request %s failed", state.request_id)
                self.core.finish(output.request, FinishReason.ERROR)
                sample.detokenizer = None
                self._end(sample, FinishReason.ERROR, None)
            if output.token_ids or sample.finish_reason is not None:
                changed.setdefault(state, {})[sample] = None
        self._meter.stepped((state.life, list(samples)) for state, samples in changed.items())
        for state, samples in changed.items():
            if state.params.output_kind is not RequestOutputKind.FINAL_ONLY or self._is_over(state):
                outputs.append(self._output(state, list(samples)))
        return outputs

    def _accept(self, state: PromptState, sample: Sample, output: TokenOutput) -> None:
        request = output.request
        if output.prompt_scores and state.prompt_logprobs is not None:
            state.prompt_logprobs += [self._renderer.logprobs(scores) for scores in output.prompt_scores]
        for scores in output.scores:
            sample.logprobs.append(self._renderer.logprobs(scores))
            sample.cumulative_logprob += scores[1]
        if output.token_ids and sample.detokenizer is not None:
            ended_by_id = request.finish_reason is FinishReason.STOP
            # The ending token is text only if asked for: a stop id with include_stop_str_in_output.
            hide = ended_by_id and not state.params.include_stop_str_in_output
            stop = sample.detokenizer.append(output.token_ids, suppress_last_text=hide)
            if stop is not None:
                self.core.finish(request, FinishReason.STOP, stop)
                self._end(sample, FinishReason.STOP, stop)
        if sample.finish_reason is None and request.finish_reason is not None:
            self._end(sample, request.finish_reason, request.stop_reason)

    def _end(self, sample: Sample, reason: FinishReason, stop_reason: int | str | None) -> None:
        sample.finish_reason = reason.value
        sample.stop_reason = stop_reason
        if sample.detokenizer is not None:
            sample.detokenizer.finish()
        self._samples.pop(sample.request, None)

    def _is_over(self, state: PromptState) -> bool:
        return all(sample.finish_reason is not None for sample in state.samples)

    def _output(self, state: PromptState, changed: list[Sample]) -> RequestOutput:
        is_delta = state.params.output_kind is RequestOutputKind.DELTA
        is_over = self._is_over(state)
        if is_over:
            self._prompts.pop(state.request_id, None)
        prompt_logprobs = None
        # Another sample may have tokens before the first one, which scores the prompt, is through with it.
        is_scored = state.prompt_logprobs is not None and len(state.prompt_logprobs) == len(state.prompt_token_ids)
        if state.prompt_logprobs is not None and is_scored and not (is_delta and state.sent_prompt_logprobs):
            prompt_logprobs = list(state.prompt_logprobs)
            state.sent_prompt_logprobs = True
        return RequestOutput(
            request_id=state.request_id,
            prompt=state.prompt,
            prompt_token_ids=state.prompt_token_ids,
            outputs=[completion(sample, is_delta) for sample in (changed if is_delta else state.samples)],
            finished=is_over,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=max(0, state.samples[0].request.num_cached_tokens),
            metrics=state.life.metrics,
        )

    def _pooled(self, request: Request) -> list[EmbeddingOutput]:
        """The vector of a pooled prompt that is over; nothing if it was aborted."""
        state = self._poolings.get(request.request_id)
        if state is None or not request.is_finished:
            return []
        del self._poolings[request.request_id]
        cached, has_failed = max(0, request.num_cached_tokens), request.finish_reason is FinishReason.ERROR
        reason = FinishReason.ERROR if has_failed else FinishReason.STOP
        self._meter.over(state.life, [], reason)
        if has_failed:
            nothing = np.zeros(0, np.float32)
            return [EmbeddingOutput(request.request_id, request.prompt_token_ids, nothing, cached, reason.value)]
        assert request.pooled is not None, "a computed prompt has been pooled"
        vector = request.pooled / request.num_prompt_tokens if state.params.pooling == "mean" else request.pooled
        vector = vector[: state.params.dimensions]
        if state.params.normalize:
            vector = vector / max(float(np.linalg.norm(vector)), np.finfo(np.float32).tiny)
        return [EmbeddingOutput(request.request_id, request.prompt_token_ids, vector.astype(np.float32), cached)]

    def _searches_of(self, group: RequestGroup) -> list[SearchState]:
        return [state for state in self._searches.values() if state.group is group]

    def _abort_search(self, state: SearchState) -> RequestOutput:
        self.core.finish(state.group.requests[0], FinishReason.ABORT)
        state.search.cut()
        for beam in state.search.ended:
            if beam.finish_reason is FinishReason.LENGTH:
                beam.finish_reason = FinishReason.ABORT
        output = self._searched(state, FinishReason.ABORT)
        self._meter.aborted([])
        return output

    def _searched(self, state: SearchState, reason: FinishReason | None = None) -> RequestOutput:
        """The output of a search that is over; ``reason`` None: why its best beam ended."""
        del self._searches[state.request_id]
        try:
            outputs = [
                self._renderer.beam(state.prompt_token_ids, state.params, index, beam)
                for index, beam in enumerate(state.search.ended)
            ]
        except Exception:
            # Turning tokens into text concerns this request alone; the others go on.
            logger.exception("request %s failed", state.request_id)
            outputs = [CompletionOutput(0, "", [], finish_reason=FinishReason.ERROR.value)]
        if reason is None:
            reason = FinishReason(outputs[0].finish_reason or FinishReason.LENGTH) if outputs else FinishReason.LENGTH
        self._meter.over(state.life, [len(beam.token_ids) for beam in state.search.ended], reason)
        return RequestOutput(
            request_id=state.request_id,
            prompt=state.prompt,
            prompt_token_ids=state.prompt_token_ids,
            outputs=outputs,
            finished=True,
            num_cached_tokens=max(0, state.first.num_cached_tokens),
            metrics=state.life.metrics,
        )


def _usable(generation_config: Mapping[str, Any], keep_sampling: bool) -> dict[str, Any]:
    """Without the sampling values no request could have: they are the checkpoint's fault, not a client's."""
    kept = dict(generation_config)
    for name in RECOMMENDED_VALUES:
        value = kept.get(name)
        try:
            if value is not None and keep_sampling:
                SamplingParams(**{name: value})
                continue
        except ParameterError as error:
            logger.warning("generation_config.json: the value is ignored: %s", error)
        kept.pop(name, None)
    return kept


def _without_prompt_logprobs(params: SamplingParams) -> SamplingParams:
    """The prompt is scored once, by the first sample."""
    if params.prompt_logprobs is None:
        return params
    changed = copy.copy(params)
    changed.prompt_logprobs = None
    return changed
