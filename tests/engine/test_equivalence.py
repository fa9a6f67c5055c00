"""Greedy output does not depend on what else the engine does: it is that of a naive generator without any cache."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy_reference
import pytest
from driving import Ask, abort_after, ask, ids_of, poison, run

from jaxpage import BeamSearchParams

if TYPE_CHECKING:
    from numpy_reference import RandomModel

    from jaxpage import LLM

SMALL_POOL = {"num_gpu_blocks_override": 8}
"""32 tokens: any one of the requests below fits, two hardly."""
OPTIONS: dict[str, dict[str, Any]] = {
    "chunks of 16": {},
    "chunks of 64": {"max_num_batched_tokens": 64},
    "blocks of 16": {"block_size": 16, "num_gpu_blocks_override": 32},
    "no prefix cache": {"enable_prefix_caching": False},
    "no chunks": {"max_num_batched_tokens": 128, "enable_chunked_prefill": False},
    "small pool": SMALL_POOL,
    "small pool, no prefix cache": {**SMALL_POOL, "enable_prefix_caching": False},
}
TOGGLES: dict[str, tuple[Any, ...]] = {
    "block_size": (1, 8, 16, 32, 64),
    "pool": ("large", "recompute", "swap"),
    "enable_prefix_caching": (True, False),
    "max_num_batched_tokens": (8, 16, 64),
    "scheduling_policy": ("fcfs", "priority"),
}
LENGTHS = [(1, 12), (3, 7), (4, 12), (8, 9), (15, 12), (16, 10), (17, 12), (20, 12)]
"""Prompt and output lengths of the requests that are compared; about the sizes of blocks and chunks."""
CROWD: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"logit_bias": {7: 5.0}, "min_tokens": 3, "ignore_eos": False},
    {"logprobs": 3},
    {"prompt_logprobs": 2},
    {"temperature": 1.0, "n": 2},
    {"temperature": 1.5, "allowed_token_ids": [1, 2, 3]},
]


def pairs_of_toggles() -> list[dict[str, Any]]:
    """Few combinations in which every two values of two toggles meet (greedily chosen)."""
    names = list(TOGGLES)
    everything = [dict(zip(names, values, strict=True)) for values in itertools.product(*TOGGLES.values())]

    def pairs(combination: dict[str, Any]) -> set[Any]:
        return set(itertools.combinations(combination.items(), 2))

    missing = set().union(*map(pairs, everything))
    chosen = []
    while missing:
        chosen.append(max(everything, key=lambda combination: len(pairs(combination) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


def options_of(toggles: dict[str, Any]) -> dict[str, Any]:
    """Engine options: a small pool holds 32 tokens, or two blocks if that is more."""
    options = {name: value for name, value in toggles.items() if name != "pool"}
    if toggles["pool"] == "large":
        return options | {"num_gpu_blocks_override": 512 // toggles["block_size"]}
    few = max(2, 32 // toggles["block_size"])
    return options | {"num_gpu_blocks_override": few, "preemption_mode": toggles["pool"]}


@pytest.fixture(scope="module")
def greedy(
    random_model: Callable[..., RandomModel], random_ids: Callable[..., list[int]]
) -> list[tuple[Ask, list[int]]]:
    """Requests with the naive generator's answers."""
    model = random_model()
    pairs = []
    for prompt_length, count in LENGTHS:
        prompt = random_ids(prompt_length)
        expected = numpy_reference.greedy(model.config, model.tensors, prompt, count)
        pairs.append((ask(prompt, max_tokens=count), expected))
    return pairs


@pytest.fixture(params=OPTIONS)
def llm(request: pytest.FixtureRequest, llm_for: Callable[..., LLM], random_model: Callable[..., RandomModel]) -> LLM:
    return llm_for(random_model().directory, **OPTIONS[request.param])


def crowd(random_ids: Callable[..., list[int]]) -> list[Ask]:
    """24 requests of all kinds, so that the batch of 32 is mixed."""
    return [
        ask(random_ids(1 + 5 * index % 19, seed=7), max_tokens=3 + 3 * index % 11, **CROWD[index % len(CROWD)])
        for index in range(24)
    ]


def test_alone(llm: LLM, greedy: list[tuple[Ask, list[int]]]) -> None:
    for each, expected in greedy:
        assert ids_of(run(llm, [each])[0]) == [expected]


def test_in_a_mixed_batch_cold_and_warm(
    llm: LLM, greedy: list[tuple[Ask, list[int]]], random_ids: Callable[..., list[int]]
) -> None:
    stats = llm.engine.core.scheduler.stats
    preemptions = stats.num_preemptions
    others = crowd(random_ids)
    mixed = [each for index in range(8) for each in (greedy[index][0], *others[3 * index : 3 * index + 3])]
    for _ in range(2):
        outputs = run(llm, mixed)
        assert [ids_of(output) for output in outputs[::4]] == [[expected] for _, expected in greedy]
        assert all(output.finished for output in outputs)
    if llm.engine.core.scheduler.kv.pool.num_usable == SMALL_POOL["num_gpu_blocks_override"]:
        assert stats.num_preemptions > preemptions + 10
    else:
        assert stats.num_preemptions == preemptions


def test_in_any_order_of_arrival(
    llm: LLM, greedy: list[tuple[Ask, list[int]]], random_ids: Callable[..., list[int]]
) -> None:
    for order in (range(8), range(7, -1, -1), (3, 6, 0, 5, 7, 1, 4, 2)):
        asks = [dataclasses.replace(greedy[index][0], arrives_at=3 * place) for place, index in enumerate(order)]
        others = [dataclasses.replace(each, arrives_at=2 * place) for place, each in enumerate(crowd(random_ids)[:8])]
        outputs = run(llm, asks + others)
        for index, output in zip(order, outputs, strict=False):
            assert ids_of(output) == [greedy[index][1]]


@pytest.mark.slow
@pytest.mark.parametrize("toggles", pairs_of_toggles(), ids=lambda toggles: "-".join(map(str, toggles.values())))
def test_pairs_of_toggles(
    toggles: dict[str, Any],
    greedy: list[tuple[Ask, list[int]]],
    llm_for: Callable[..., LLM],
    random_model: Callable[..., RandomModel],
    random_ids: Callable[..., list[int]],
) -> None:
    """Cold and warm: greedy requests among samples, beams and requests that are aborted, of all priorities."""
    plain = llm_for(random_model().directory)
    samples = ask(random_ids(6, seed=1), n=4, temperature=1.0, seed=3, max_tokens=7)
    beams = Ask(random_ids(5, seed=2), BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True))
    expected = [[ids] for _, ids in greedy] + [ids_of(run(plain, [each])[0]) for each in (samples, beams)]

    llm = llm_for(random_model().directory, **options_of(toggles))
    stats, has_priorities = llm.engine.core.scheduler.stats, toggles["scheduling_policy"] == "priority"
    for round_ in range(2):
        preemptions = (stats.num_swap_preemptions, stats.num_recompute_preemptions)
        asks = [dataclasses.replace(each, arrives_at=place // 3) for place, (each, _) in enumerate(greedy)]
        asks += [dataclasses.replace(each, arrives_at=1) for each in (samples, beams)]
        doomed = [
            ask(random_ids(7 + place, seed=5), max_tokens=20, arrives_at=place, n=1 + place % 2) for place in range(4)
        ]
        for place, each in enumerate(asks + doomed):
            each.priority = (place * 5 + round_) % 7 - 3 if has_priorities else 0
        outputs = run(llm, asks + doomed, abort_after({len(asks) + place: 6 + 3 * place for place in range(4)}))
        assert [ids_of(output) for output in outputs[: len(asks)]] == expected
        assert all(output.finished for output in outputs)
        swaps = stats.num_swap_preemptions - preemptions[0]
        recomputes = stats.num_recompute_preemptions - preemptions[1]
        if toggles["pool"] == "large" and not has_priorities:
            assert swaps == recomputes == 0
        elif toggles["pool"] != "large" and toggles["block_size"] <= 8:
            assert swaps + recomputes > 0
            assert (swaps > 0) == (toggles["pool"] == "swap")


@pytest.mark.parametrize("value", [float("nan"), 1e30])
@pytest.mark.parametrize("name", ["chunks of 16", "small pool"])
def test_poison_in_unused_blocks_changes_nothing_pad_1b(
    value: float,
    name: str,
    greedy: list[tuple[Ask, list[int]]],
    llm_for: Callable[..., LLM],
    random_model: Callable[..., RandomModel],
    random_ids: Callable[..., list[int]],
) -> None:
    llm = llm_for(random_model().directory, **OPTIONS[name])
    asks = [each for each, _ in greedy]
    # The second half meets cached prefixes; the scored ones show that nothing is NaN beside the greedy choice.
    later = [dataclasses.replace(each, arrives_at=25) for each in asks]
    scored = [ask(random_ids(18, seed=3), max_tokens=4, logprobs=2, prompt_logprobs=2)]
    outputs = run(llm, asks + scored + later, poison(value))
    answers = [[expected] for _, expected in greedy]
    assert [ids_of(output) for output in outputs[:8]] == answers
    assert [ids_of(output) for output in outputs[9:]] == answers
    listed = [*outputs[8].prompt_logprobs[1:], *outputs[8].outputs[0].logprobs]
    assert len(listed) == 17 + 4
    assert all(-100 < value.logprob <= 0 for entry in listed for value in entry.values())
