"""A model for scheduler tests: the next token is a hash of everything that is read back from the cache.

Owns what a request or a search gives when it has the engine to itself; knows nothing about blocks or steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from jaxpage.kv.manager import KVCacheManager
from jaxpage.params import BeamSearchParams, SamplingParams
from jaxpage.request import FinishReason, Request
from jaxpage.scheduler.beam import BeamSearch
from jaxpage.scheduler.preemption import PreemptionPolicy
from jaxpage.scheduler.scheduler import Scheduler

VOCAB_SIZE = 12
END_ID = 11
PRIME = 1_000_003
MODULUS = 2**61 - 1


def make_request(
    name: str,
    prompt: Iterable[int],
    max_tokens: int = 4,
    *,
    end_ids: Iterable[int] = (),
    index: int = 0,
    salt: str | None = None,
    **params: Any,
) -> Request:
    settings = SamplingParams(max_tokens=max_tokens, **params)
    end_token_ids = frozenset(end_ids) | frozenset(settings.stop_token_ids or ())
    return Request(
        name, list(prompt), settings, max_tokens, sample_index=index, end_token_ids=end_token_ids, cache_salt=salt
    )


def make_samples(name: str, prompt: Iterable[int], n: int, max_tokens: int = 4, **settings: Any) -> list[Request]:
    """The requests of one prompt with ``n`` samples."""
    tokens = list(prompt)
    return [make_request(f"{name}{index}", tokens, max_tokens, index=index, **settings) for index in range(n)]


def make_search(max_tokens: int = 6, width: int = 3, *, end_ids: Iterable[int] = (), **params: Any) -> BeamSearch:
    settings = BeamSearchParams(beam_width=width, max_tokens=max_tokens, **params)
    return BeamSearch(settings, max_tokens, frozenset(end_ids), VOCAB_SIZE)


def make_scheduler(
    num_usable: int = 64,
    block_size: int = 4,
    *,
    max_num_seqs: int = 8,
    budget: int = 64,
    max_model_len: int = 128,
    chunked: bool = True,
    caching: bool = False,
    num_host_blocks: int = 0,
    mode: str = "recompute",
    policy: str = "fcfs",
    threshold: int = 0,
    num_stages: int = 1,
) -> Scheduler:
    return Scheduler(
        KVCacheManager(num_usable + 1, block_size, caching, num_host_blocks=num_host_blocks),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        enable_chunked_prefill=chunked,
        policy=policy,
        long_prefill_token_threshold=threshold,
        preemption=PreemptionPolicy(mode),
        num_stages=num_stages,
    )


def extended(state: int, token_id: int) -> int:
    """What the cache holds at a position: a hash of this token and of what is read at the position before."""
    return (state * PRIME + token_id + 1) % MODULUS


def chain(token_ids: Iterable[int], state: int = 0) -> list[int]:
    """What the cache holds at the positions of these tokens, which follow ``state``."""
    states = []
    for token_id in token_ids:
        state = extended(state, token_id)
        states.append(state)
    return states


def mixed(states: Iterable[int]) -> int:
    """Depends on every state: a wrong block anywhere in a history shows."""
    value = 0
    for state in states:
        value = extended(value, state)
    return value


def sampled(states: Sequence[int], request: Request, output_index: int) -> int:
    """The request's next token after a history with these states; end ids are masked until ``min_tokens``."""
    token_id = hash((mixed(states), request.sample_index)) % VOCAB_SIZE  # of integers, so the same in every process
    while output_index < request.params.min_tokens and token_id in request.end_token_ids:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def candidates(states: Sequence[int], count: int) -> list[tuple[int, float]]:
    """The most likely (token id, logprob) after a history with these states, best first."""
    value = mixed(states)
    logits = [hash((value, token_id)) % 1000 / 250 for token_id in range(VOCAB_SIZE)]
    total = math.log(sum(map(math.exp, logits)))
    pairs = [(token_id, logit - total) for token_id, logit in enumerate(logits)]
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count]


def undisturbed(request: Request, max_model_len: int, num_slots: int) -> tuple[list[int], FinishReason]:
    """The output of a request that has the engine to itself, with ``num_slots`` tokens of cache."""
    known, states = list(request.prompt_token_ids), []
    if request.max_tokens == 0:
        return [], FinishReason.LENGTH
    while True:
        states += chain(known[len(states) :], states[-1] if states else 0)
        if len(states) > num_slots:
            return known[request.num_prompt_tokens :], FinishReason.LENGTH
        index = len(known) - request.num_prompt_tokens
        known.append(sampled(states, request, index))
        if known[-1] in request.end_token_ids and index >= request.params.min_tokens:
            return known[request.num_prompt_tokens :], FinishReason.STOP
        if index + 1 == request.max_tokens or len(known) == max_model_len:
            return known[request.num_prompt_tokens :], FinishReason.LENGTH


def undisturbed_search(prompt: Sequence[int], search: BeamSearch, max_steps: int | None = None) -> BeamSearch:
    """A search like ``search`` run without any engine; cut after ``max_steps`` if it is not over by then."""
    fresh = BeamSearch(search.params, search.max_tokens, search.end_token_ids, VOCAB_SIZE)
    num_steps = 0
    while not fresh.is_over:
        if num_steps == max_steps:
            fresh.cut()
            break
        fresh.advance([candidates(chain([*prompt, *beam.token_ids]), fresh.num_candidates) for beam in fresh.beams])
        num_steps += 1
    return fresh
