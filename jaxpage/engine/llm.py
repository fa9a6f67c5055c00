"""``LLM``: offline generation, all prompts at once, with vLLM's names and meaning."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import rich.progress

from jaxpage.config import EngineArgs
from jaxpage.engine.async_engine import AsyncLLMEngine
from jaxpage.engine.front import Engine, Output
from jaxpage.engine.intake import Prompt, salt_of
from jaxpage.engine.offline import AsyncDriver, Driver, OfflineJob, SteppedDriver
from jaxpage.errors import ParameterError, shown
from jaxpage.kv.manager import KVCacheStats
from jaxpage.params import BeamSearchParams, PoolingParams, RequestOutputKind, SamplingParams, TokensPrompt
from jaxpage.request import EmbeddingOutput, LogprobDict, RequestOutput
from jaxpage.tokenizer import Tokenizer

Params = SamplingParams | BeamSearchParams


@dataclasses.dataclass(slots=True)
class BeamSearchSequence:
    """One beam; ``tokens`` and ``text`` begin with the prompt, as in vLLM.

    Attributes:
        cum_logprob: sum of the generated tokens' logprobs.
        score: cum_logprob / length**length_penalty, by which the beams are sorted.
        logprobs: one entry a generated token, if asked for.
    """

    tokens: list[int]
    text: str
    cum_logprob: float
    score: float
    logprobs: list[LogprobDict]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclasses.dataclass(slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


class LLM:
    """A model for offline use.

    Example:
        >>> llm = LLM(model="smollm2-135m-instruct")
        >>> llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text
    """

    def __init__(self, model: str = EngineArgs.model, **options: Any) -> None:
        """``options`` are the fields of ``EngineArgs``."""
        args = EngineArgs(model=model, **options)
        self._ids = itertools.count()
        if args.data_parallel_size == 1 and args.data_parallel_backend == "thread":
            self.engine: Engine | AsyncLLMEngine = Engine(args)
            self._driver: Driver = SteppedDriver(self.engine)
        else:
            self.engine = AsyncLLMEngine.from_engine_args(args)
            self._driver = AsyncDriver(self.engine)
            weakref.finalize(self, self.engine.shutdown)
        self._intake = self._driver.intake

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._intake.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint recommends."""
        return self._intake.default_sampling_params()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes every prompt; the results are in the order of the prompts.

        Args:
            prompts: texts, or dicts with ``prompt`` or ``prompt_token_ids``; one or a list.
            sampling_params: one for all or one each; None takes the checkpoint's recommendation. BeamSearchParams
                search for the most likely continuations; ``outputs`` then holds the beams, best first.
            use_tqdm: show a progress bar on a terminal.
            priority: one for each prompt, the smaller the sooner served; needs ``scheduling_policy="priority"``.

        Raises:
            ParameterError: for a bad prompt or parameter, before anything is generated.
        """
        items = _as_list(prompts)
        tokenized = [_naming(index, items, self._intake.tokenize, prompt) for index, prompt in enumerate(items)]
        if priority is None:
            priority = [0] * len(items)
        if not isinstance(priority, Sequence) or isinstance(priority, str):
            raise ParameterError("priority", f"must be a list with one number for each prompt, got {shown(priority)}")
        if len(priority) != len(items):
            raise ParameterError("priority", f"has {len(priority)} entries for {len(items)} prompts")
        jobs = [
            OfflineJob(str(next(self._ids)), text, ids, each, place, salt_of(prompt))
            for prompt, (text, ids), each, place in zip(
                items, tokenized, self._params_for(sampling_params, len(items)), priority, strict=True
            )
        ]
        return self._run(jobs, use_tqdm)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = True
    ) -> list[BeamSearchOutput]:
        """The most likely continuations of each prompt; like ``generate`` with the result in vLLM's form."""
        if not isinstance(params, BeamSearchParams):
            raise ParameterError("params", f"must be BeamSearchParams, got {shown(params)}")
        return [
            BeamSearchOutput(
                [
                    BeamSearchSequence(
                        tokens=output.prompt_token_ids + beam.token_ids,
                        text=(output.prompt or "") + beam.text,
                        cum_logprob=beam.cumulative_logprob or 0.0,
                        score=beam.score or 0.0,
                        logprobs=beam.logprobs or [],
                        finish_reason=beam.finish_reason,
                        stop_reason=beam.stop_reason,
                    )
                    for beam in output.outputs
                ]
            )
            for output in self.generate(prompts, params, use_tqdm)
        ]

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them, through the model's chat template."""
        if not messages:
            raise ParameterError("messages", "must not be empty")
        conversations: Any = [messages] if isinstance(messages[0], dict) else messages
        prompts: list[Prompt] = [
            TokensPrompt(
                prompt_token_ids=self._intake.tokenizer.encode_chat(
                    list(conversation),
                    tools=tools,
                    chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    chat_template_kwargs=chat_template_kwargs,
                )
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingOutput]:
        """Every prompt as a vector made of the model's last hidden states; the results are in the order of the prompts.

        Raises:
            ParameterError: for a bad prompt or parameter, before anything is computed.
        """
        params = PoolingParams() if pooling_params is None else pooling_params
        if not isinstance(params, PoolingParams):
            raise ParameterError("pooling_params", f"must be PoolingParams, got {shown(pooling_params)}")
        items = _as_list(prompts)
        tokenized = [_naming(index, items, self._intake.tokenize, prompt) for index, prompt in enumerate(items)]
        jobs = [
            OfflineJob(str(next(self._ids)), text, ids, params, 0, salt_of(prompt))
            for prompt, (text, ids) in zip(items, tokenized, strict=True)
        ]
        return cast(list[EmbeddingOutput], self._run(jobs, use_tqdm))

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes."""
        self._driver.reset_prefix_cache()

    def kv_cache_stats(self) -> KVCacheStats:
        """What the KV cache holds now, and what has happened in it since the start."""
        return self._driver.kv_cache_stats()

    def _params_for(self, given: Params | Sequence[Params] | None, count: int) -> list[Params]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, Params):
            return [given] * count
        if not isinstance(given, Sequence) or not all(isinstance(each, Params) for each in given):
            raise ParameterError(
                "sampling_params", f"must be SamplingParams, BeamSearchParams or a list of them, got {shown(given)}"
            )
        if len(given) != count:
            raise ParameterError("sampling_params", f"has {len(given)} entries for {count} prompts")
        return list(given)

    def _run(self, jobs: list[OfflineJob], use_tqdm: bool) -> list[Any]:
        for index, job in enumerate(jobs):
            _naming(index, jobs, self._intake.check, job.token_ids, job.params, job.priority, job.cache_salt)
        done: dict[str, Output] = {}
        final = [dataclasses.replace(job, params=_final_only(job.params)) for job in jobs]
        # On a terminal only: elsewhere the bar would leave stray lines.
        with rich.progress.Progress(transient=True, disable=not (use_tqdm and sys.stdout.isatty())) as bar:
            task = bar.add_task("generating", total=len(jobs))

            def take(output: Output) -> None:
                done[output.request_id] = output
                bar.advance(task)

            self._driver.run(final, take)
        return [done[job.request_id] for job in jobs]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise ParameterError("prompts", f"must be a prompt or a list of prompts, got {shown(prompts)}")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [cast(list[int], list(prompts))]
    return list(cast(Sequence[Prompt], prompts))


def _naming(index: int, prompts: Sequence[Any], function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls ``function``; where there are several prompts, an error says which one it is about."""
    try:
        return function(*arguments)
    except ParameterError as error:
        if len(prompts) == 1:
            raise
        raise ParameterError(f"prompts[{index}]", str(error)) from error


def _final_only(params: Params | PoolingParams) -> Params | PoolingParams:
    params = copy.copy(params)
    if isinstance(params, SamplingParams):
        params.output_kind = RequestOutputKind.FINAL_ONLY
    return params
