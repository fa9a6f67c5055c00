"""Drives an engine step by step: requests that arrive when the test says, preemptions and poison between steps."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage import LLM, BeamSearchParams, RequestOutput, RequestOutputKind, SamplingParams
from jaxpage.engine.front import Engine
from jaxpage.layers.kv_cache import KVCache
from jaxpage.request import LogprobDict

_ids = itertools.count()


@dataclasses.dataclass
class Ask:
    """A prompt with its parameters; it arrives before step ``arrives_at``."""

    prompt: list[int]
    params: SamplingParams | BeamSearchParams
    arrives_at: int = 0
    priority: int = 0


def ask(prompt: list[int], arrives_at: int = 0, **params: Any) -> Ask:
    """A request that is greedy and ignores end ids unless ``params`` say otherwise."""
    return Ask(prompt, SamplingParams(**({"temperature": 0, "ignore_eos": True} | params)), arrives_at)


def run(
    llm: LLM, asks: Sequence[Ask], before_step: Callable[[Engine], None] | abort_after | None = None
) -> list[RequestOutput]:
    """The last output of every request, or all of them joined for one that asked for DELTA."""
    engine = llm.engine
    names = [f"ask-{next(_ids)}" for _ in asks]
    waiting = sorted(zip(asks, names, strict=True), key=lambda pair: pair[0].arrives_at)
    outputs: dict[str, list[RequestOutput]] = {}
    step = 0
    with _in_schedule(engine, before_step) as before:
        while waiting or engine.has_work:
            while waiting and waiting[0][0].arrives_at <= step:
                each, name = waiting.pop(0)
                engine.add(name, each.prompt, each.params, priority=each.priority)
            if isinstance(before, abort_after):
                for place in before.due(step):
                    last = engine.abort(names[place])
                    if last is not None:
                        outputs.setdefault(names[place], []).append(last)
            elif before is not None:
                before(engine)
            for output in engine.step():
                outputs.setdefault(output.request_id, []).append(output)
            step += 1
            assert step < 5000, "the engine does not come to an end"
    engine.core.scheduler.check_integrity()
    return [
        _joined(outputs[name]) if _is_delta(each.params) else outputs[name][-1]
        for each, name in zip(asks, names, strict=True)
    ]


@contextlib.contextmanager
def _in_schedule(engine: Engine, hook: Any) -> Iterator[Any]:
    """Calls a hook that preempts where a step is scheduled: before, beams are on their way. Gives other hooks back."""
    if not hasattr(hook, "left"):
        yield hook
        return
    scheduler, schedule = engine.core.scheduler, engine.core.scheduler.schedule
    scheduler.schedule = lambda: (hook(engine), schedule())[1]
    try:
        yield None
    finally:
        del scheduler.schedule


class abort_after:
    """Aborts requests, by their place in the list given to ``run``, before the steps with these numbers."""

    def __init__(self, steps: dict[int, int]) -> None:
        self.steps = steps

    def due(self, step: int) -> list[int]:
        return [place for place, at in self.steps.items() if at == step]


def _is_delta(params: SamplingParams | BeamSearchParams) -> bool:
    return isinstance(params, SamplingParams) and params.output_kind is RequestOutputKind.DELTA


def _joined(deltas: list[RequestOutput]) -> RequestOutput:
    last = deltas[-1]
    assert last.finished and not any(output.finished for output in deltas[:-1])
    samples: dict[int, Any] = {}
    for piece in (piece for output in deltas for piece in output.outputs):
        whole = samples.setdefault(piece.index, dataclasses.replace(piece, text="", token_ids=[], logprobs=None))
        whole.text += piece.text
        whole.token_ids = whole.token_ids + piece.token_ids
        if piece.logprobs is not None:
            whole.logprobs = (whole.logprobs or []) + piece.logprobs
        whole.finish_reason, whole.stop_reason = piece.finish_reason, piece.stop_reason
        whole.cumulative_logprob = piece.cumulative_logprob
    prompt_logprobs = [output.prompt_logprobs for output in deltas if output.prompt_logprobs is not None]
    assert len(prompt_logprobs) <= 1
    return dataclasses.replace(
        last,
        outputs=[samples[index] for index in sorted(samples)],
        prompt_logprobs=prompt_logprobs[0] if prompt_logprobs else None,
    )


def ids_of(output: RequestOutput) -> list[list[int]]:
    """Token ids of every sample."""
    return [sample.token_ids for sample in output.outputs]


def preempt_at(*counts: int, num_prompt_tokens: int | None = None) -> Callable[[Engine], None]:
    """Preempts the oldest running request each time it has computed ``counts`` tokens or more, once per count.

    With ``num_prompt_tokens`` only a request whose prompt has this length.
    """
    left = sorted(counts)

    def hook(engine: Engine) -> None:
        scheduler = engine.core.scheduler
        for request in scheduler.running:
            if num_prompt_tokens in (None, request.num_prompt_tokens):
                group = scheduler.group_of(request)
                assert group is not None
                if left and request.num_computed_tokens >= left[0] and group.can_be_preempted:
                    left.pop(0)
                    scheduler.preemption.preempt(group, group.running)
                    scheduler.kv.reset_prefix_cache()  # else the prefix cache would spare it the recomputation
                break

    hook.left = left  # type: ignore[attr-defined]
    return hook


def poison(value: float) -> Callable[[Engine], None]:
    """Overwrites, before each step, the scratch block and all blocks that neither a request nor the cache owns."""
    is_first = True

    def hook(engine: Engine) -> None:
        nonlocal is_first
        pool, runner = engine.core.scheduler.kv.pool, engine.core.runner
        is_free = np.zeros(pool.num_blocks, bool)
        is_free[0] = True
        is_free[[block for block in range(1, pool.num_blocks) if pool.is_free(block) and block not in pool.index]] = (
            True
        )
        assert not is_first or is_free.all(), "start with an empty cache"
        is_first = False
        runner.worker.stages[0].kv_cache = _overwrite(runner.worker.stages[0].kv_cache, is_free, value)

    return hook


@jax.jit
def _overwrite(kv_cache: KVCache, is_free: jax.Array, value: float) -> KVCache:
    return jax.tree.map(lambda x: jnp.where(is_free[:, None, None, None], jnp.asarray(value, x.dtype), x), kv_cache)


def assert_same_scores(
    ours: Sequence[LogprobDict | None] | None, expected: Sequence[LogprobDict | None] | None, tolerance: float = 1e-4
) -> None:
    """The same ids are listed at every position, with the same logprobs."""
    assert ours is not None and expected is not None
    assert len(ours) == len(expected)
    for mine, other in zip(ours, expected, strict=True):
        if mine is None or other is None:
            assert mine is other
            continue
        assert mine.keys() == other.keys()
        for token, value in mine.items():
            assert abs(value.logprob - other[token].logprob) < tolerance
            assert value.rank == other[token].rank
