"""An engine without a model: it says what a script tells it to, so that tests can state whole answers.

It has the methods of ``AsyncLLMEngine`` that the server uses, and keeps score of what was started and aborted.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence

import numpy as np

from jaxpage.errors import EngineDeadError, ParameterError
from jaxpage.kv.manager import KVCacheManager
from jaxpage.metrics import CacheInfo, EngineMetrics
from jaxpage.params import BeamSearchParams, PoolingParams, SamplingParams, TextPrompt, TokensPrompt
from jaxpage.request import CompletionOutput, EmbeddingOutput, Logprob, LogprobDict, RequestOutput
from jaxpage.scheduler.scheduler import Scheduler
from jaxpage.scheduler.snapshot import EngineSnapshot, take_snapshot
from jaxpage.tokenizer import IncrementalDetokenizer, Tokenizer

Params = SamplingParams | BeamSearchParams
Script = Callable[[Sequence[int], int], Sequence[int]]
END_ID = 257
HIDDEN_SIZE = 4


class FakeEngine:
    """Forced ids per (prompt ids, number of the sample or beam), then the end id; a token takes ``step_s`` seconds.

    Attributes:
        alternatives: logprob of ids beside the forced one, by output position; the forced id has -0.5.
        running, aborted: ids of requests that run, or whose generator was closed before its end.
        fail_after: raise RuntimeError after this many steps.
        seen, pooled, priorities: what the requests that were started brought along.
        num_resets: of the prefix cache. num_snapshots: taken, of an empty pool.
    """

    model_name = "fake"
    vocab_size = 294

    def __init__(self, tokenizer: Tokenizer, forced: Script | Sequence[int] = (), max_model_len: int = 64) -> None:
        self.tokenizer = tokenizer
        self.script: Script = forced if callable(forced) else lambda prompt, sample: forced
        self.max_model_len = max_model_len
        self.max_logprobs = 20
        self.max_num_seqs = 512
        self.scheduling_policy = "fcfs"
        self.generation_config: dict[str, object] = {}
        self.alternatives: dict[int, dict[int, float]] = {}
        self.step_s = 0.0
        self.fail_after: int | None = None
        self.cached_tokens = 0
        self.is_dead = False
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.seen: list[tuple[list[int], Params, str | None]] = []
        self.pooled: list[tuple[list[int], PoolingParams, str | None]] = []
        self.priorities: list[int] = []
        self.metrics = EngineMetrics(CacheInfo(max_model_len=max_model_len))
        self.num_resets = 0
        self.num_snapshots = 0
        self.was_shut_down = False
        self.aliases: list[str] = []

    @property
    def model_names(self) -> list[str]:
        return [self.model_name, *self.aliases]

    @property
    def all_metrics(self) -> list[EngineMetrics]:
        return [self.metrics]

    @property
    def num_unfinished_requests(self) -> int:
        return len(self.running)

    def check(self, prompt_token_ids: Sequence[int], params: Params | PoolingParams, priority: int = 0) -> None:
        if priority and self.scheduling_policy != "priority":
            raise ParameterError("priority", f'needs scheduling_policy "priority", got {priority}')
        if isinstance(params, BeamSearchParams) and params.beam_width > self.max_num_seqs:
            raise ParameterError("beam_width", f"{params.beam_width} is above max_num_seqs {self.max_num_seqs}")
        if isinstance(params, PoolingParams):
            if params.dimensions is not None and params.dimensions > HIDDEN_SIZE:
                raise ParameterError("dimensions", f"{params.dimensions} is above the model's {HIDDEN_SIZE}")
            return
        params.validate_for(self.vocab_size, self.max_model_len, self.max_logprobs)
        if not 1 <= len(prompt_token_ids) < self.max_model_len:
            raise ParameterError("prompt", f"has {len(prompt_token_ids)} tokens, max_model_len is {self.max_model_len}")

    async def reset_prefix_cache(self) -> None:
        if self.is_dead:
            raise EngineDeadError
        self.num_resets += 1
        self.cached_tokens = 0

    async def snapshot(self) -> EngineSnapshot:
        if self.is_dead:
            raise EngineDeadError
        self.num_snapshots += 1
        idle = Scheduler(
            KVCacheManager(16, 4, True),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=16,
            max_model_len=self.max_model_len,
            enable_chunked_prefill=True,
        )
        return dataclasses.replace(take_snapshot(idle), num_running=len(self.running))

    def shutdown(self, drain_timeout_s: float | None = None) -> None:
        self.was_shut_down = self.is_dead = True

    async def embed(
        self,
        prompt: TokensPrompt,
        params: PoolingParams,
        request_id: str,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> EmbeddingOutput:
        """The state of a token is its id and then ones."""
        ids = prompt["prompt_token_ids"]
        self.pooled.append((ids, params, cache_salt))
        self.running.add(request_id)
        try:
            await asyncio.sleep(self.step_s)
            if self.is_dead:
                raise EngineDeadError
        except asyncio.CancelledError:
            self.aborted.append(request_id)
            raise
        finally:
            self.running.discard(request_id)
        states = np.ones((len(ids), HIDDEN_SIZE), np.float32)
        states[:, 0] = ids
        vector = (states[-1] if params.pooling == "last" else states.mean(axis=0))[: params.dimensions]
        if params.normalize:
            vector = vector / np.linalg.norm(vector)
        return EmbeddingOutput(request_id, ids, vector, self.cached_tokens)

    async def generate(
        self,
        prompt: TextPrompt | TokensPrompt,
        params: Params,
        request_id: str,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput]:
        ids = prompt.get("prompt_token_ids") or self.tokenizer.encode(prompt.get("prompt", ""))
        self.check(ids, params, priority)
        assert request_id not in self.running
        self.seen.append((ids, params, cache_salt))
        self.priorities.append(priority)
        self.running.add(request_id)
        finished = False
        try:
            if isinstance(params, BeamSearchParams):
                await asyncio.sleep(self.step_s)
                finished = True
                beams = [_beam(self, ids, params, index) for index in range(params.beam_width)]
                yield RequestOutput(request_id, None, ids, beams, True, None, self.cached_tokens)
                return
            samples = [_Sample(self, ids, params, index) for index in range(params.n)]
            for step in range(self.max_model_len):
                await asyncio.sleep(self.step_s)
                if self.is_dead:
                    raise EngineDeadError
                if step == self.fail_after:
                    raise RuntimeError("secret path /etc/passwd")
                outputs = [sample.step() for sample in samples if sample.finish_reason is None]
                finished = all(sample.finish_reason is not None for sample in samples)
                scores = None if step else _prompt_scores(ids, params)
                yield RequestOutput(request_id, None, ids, outputs, finished, scores, self.cached_tokens)
                if finished:
                    return
        finally:
            self.running.discard(request_id)
            if not finished:
                self.aborted.append(request_id)


def _beam(engine: FakeEngine, ids: Sequence[int], params: BeamSearchParams, index: int) -> CompletionOutput:
    """Forced like a sample, but in one piece."""
    as_sampling = SamplingParams(
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        stop_token_ids=params.stop_token_ids,
        logprobs=params.logprobs,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
    )
    sample = _Sample(engine, ids, as_sampling, index)
    whole = sample.step()
    while sample.finish_reason is None:
        piece = sample.step()
        whole.text += piece.text
        whole.token_ids += piece.token_ids
        whole.text_offsets += piece.text_offsets
        if whole.logprobs is not None:
            whole.logprobs += piece.logprobs or []
        whole.finish_reason, whole.stop_reason = piece.finish_reason, piece.stop_reason
    return whole


class _Sample:
    def __init__(self, engine: FakeEngine, prompt: Sequence[int], params: SamplingParams, index: int) -> None:
        self.engine, self.params, self.index = engine, params, index
        self.forced = list(engine.script(prompt, index))
        room = engine.max_model_len - len(prompt)
        self.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self.text = IncrementalDetokenizer(
            engine.tokenizer,
            prompt,
            stop=params.stop or (),
            min_tokens=params.min_tokens,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )
        self.num_tokens = 0
        self.finish_reason: str | None = None

    def step(self) -> CompletionOutput:
        if self.max_tokens == 0:
            self.finish_reason = "length"
            return CompletionOutput(self.index, "", [], logprobs=[], finish_reason="length")
        position = self.num_tokens
        token_id = self.forced[position] if position < len(self.forced) else END_ID
        self.num_tokens += 1
        is_stop_id = token_id in (self.params.stop_token_ids or ())
        ends = self.num_tokens > self.params.min_tokens and (
            is_stop_id or (token_id == END_ID and not self.params.ignore_eos)
        )
        hide = ends and not self.params.include_stop_str_in_output
        stop_reason: str | int | None = self.text.append([token_id], suppress_last_text=hide)
        if stop_reason is not None:
            self.finish_reason = "stop"
        elif ends:
            self.finish_reason, stop_reason = "stop", token_id if is_stop_id else None
        elif self.num_tokens == self.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason:
            self.text.finish()
        entry = {token_id: -0.5} | self.engine.alternatives.get(position, {1: -1.0, 2: -2.0, 3: -float("inf")})
        scored = self.params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=self.text.take_delta(),
            token_ids=[token_id],
            logprobs=[_entry(entry, token_id, self.params.logprobs)] if scored else None,
            finish_reason=self.finish_reason,
            stop_reason=stop_reason,
            text_offsets=self.text.token_offsets[-1:],
        )


def _entry(values: dict[int, float], chosen: int, count: int | None) -> LogprobDict:
    ranked = sorted(values, key=lambda token_id: -values[token_id])
    kept = ranked if count == -1 else ranked[:count]
    return {token_id: Logprob(values[token_id], ranked.index(token_id) + 1) for token_id in {*kept, chosen}}


def _prompt_scores(ids: Sequence[int], params: SamplingParams) -> list[LogprobDict | None] | None:
    if params.prompt_logprobs is None:
        return None
    return [
        _entry({token_id: -1.5, 0: -0.25}, token_id, params.prompt_logprobs) if position else None
        for position, token_id in enumerate(ids)
    ]
