"""The prefix cache of a real engine: whatever is found, shared or evicted, every model input is the request's own."""

from __future__ import annotations

import random
from collections.abc import Callable

from driving import Ask, ask, ids_of, run
from forced import ForcedModel
from schedules import recorded


def answer(prompt: list[int], sample: int = 0) -> list[int]:
    """What a prompt of ids below 100 is answered with: four ids above, which depend on all of it."""
    return [100 + hash((tuple(prompt), sample, place)) % 150 for place in range(4)]


def test_pfx_2_random_requests_with_shared_prefixes_in_a_pool_for_three(
    forced_model: Callable[..., ForcedModel],
) -> None:
    model = forced_model(num_gpu_blocks_override=15)
    model.says(answer)
    draw = random.Random(0)
    stems = [[draw.randrange(12) for _ in range(12)] for _ in range(4)]
    asks: list[Ask] = []
    for index in range(500):
        stem = draw.choice(stems)[: draw.randint(1, 12)]
        prompt = stem + [draw.randrange(3) for _ in range(draw.randint(0, 4))]
        asks.append(ask(prompt, max_tokens=4, arrives_at=index // 3))
    kv = model.llm.engine.core.scheduler.kv
    hits = kv.counters.num_hit_tokens
    outputs = run(model.llm, asks)
    assert [ids_of(output) for output in outputs] == [[answer(each.prompt)] for each in asks]
    assert kv.counters.num_hit_tokens > hits + 500
    assert kv.pool.num_free == kv.pool.num_usable


def test_pfx_2b_held_blocks_are_never_evicted(forced_model: Callable[..., ForcedModel]) -> None:
    model = forced_model(num_gpu_blocks_override=8)
    model.says(lambda prompt, sample: 6 * answer(prompt))
    prefix = list(range(12))
    a, b = (ask([*prefix, 20 + place], max_tokens=3 + 3 * place) for place in range(2))
    c = ask([5] * 20, max_tokens=3, arrives_at=1)
    with recorded(model.llm) as steps:
        outputs = run(model.llm, [a, b, c])
    for each, output in zip((a, b, c), outputs, strict=True):
        assert ids_of(output) == [(6 * answer(each.prompt))[: each.params.max_tokens]]
    lengths = [{row.request.num_prompt_tokens for row in rows} for rows in steps]
    assert not any({13, 20} <= together for together in lengths), "C waits until enough blocks are unheld"


def test_pfx_2c_partly_filled_blocks_are_not_written_by_two(forced_model: Callable[..., ForcedModel]) -> None:
    model = forced_model()
    for arrives_at in (12, 3):  # after P has ended, and while it runs
        model.llm.reset_prefix_cache()
        model.says(lambda prompt, sample: [50, 51, 52, 53, 54] if prompt == [0, 1, 2, 3, 4, 5] else answer(prompt))
        first = [0, 1, 2, 3, 4, 5]
        whole = [*first, 50, 51, 52, 53, 54]
        others = [ask([*whole[:count], 90, 91], max_tokens=4, arrives_at=arrives_at) for count in (5, 6, 7, 8)]
        output, *rest = run(model.llm, [ask(first, max_tokens=5), *others])
        assert ids_of(output) == [whole[6:]]
        assert [ids_of(each) for each in rest] == [[answer(each.prompt)] for each in others]
        cached = [each.num_cached_tokens for each in rest]
        assert all(0 < found < 9 for found in cached)
        if arrives_at == 12:
            assert cached == [5, 6, 7, 8]


def test_pfx_3_pfx_3a_wrong_hits_would_change_the_answer(forced_model: Callable[..., ForcedModel]) -> None:
    model = forced_model(block_size=2, num_gpu_blocks_override=256)
    model.says(answer)
    pairs = [([1, 23, 9], [12, 3, 9]), ([0, 1, 2], [1, 0, 2]), ([97] * 5, [97] * 7), ([1, 2, 3, 4, 5], [6, 2, 3, 4, 5])]
    found = []
    for pair in pairs:
        model.llm.reset_prefix_cache()
        outputs = [run(model.llm, [ask(prompt, max_tokens=4)])[0] for prompt in pair]
        assert [ids_of(output) for output in outputs] == [[answer(prompt)] for prompt in pair]
        found.append(outputs[1].num_cached_tokens)
    assert found == [0, 0, 5, 0]
