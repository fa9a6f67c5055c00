"""Requests that lose their blocks in a real engine: by recompute or by swap, nothing of them is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from driving import ask, ids_of, preempt_at, run
from forced import ForcedModel
from schedules import PreemptMembers, recorded

from jaxpage import RequestOutputKind
from jaxpage.errors import ParameterError

if TYPE_CHECKING:
    from numpy_reference import RandomModel

    from jaxpage import LLM

modes = pytest.mark.parametrize("mode", ["recompute", "swap"])
PROMPT = list(range(10, 16))


def options(mode: str) -> dict[str, Any]:
    return {"preemption_mode": mode, "swap_space": 0.001}


@modes
@pytest.mark.parametrize("count", [2, 4])
def test_pre_1a_requests_that_fit_one_at_a_time(
    mode: str, count: int, forced_model: Callable[..., ForcedModel]
) -> None:
    model = forced_model(num_gpu_blocks_override=8, **options(mode))

    def answer(prompt: list[int], sample: int = 0) -> list[int]:
        return [100 + prompt[0] + place for place in range(20)]

    model.says(answer)
    asks = [ask([place] * 10, max_tokens=20) for place in range(count)]
    with recorded(model.llm) as steps:
        outputs = run(model.llm, asks)
    assert [ids_of(output) for output in outputs] == [[answer(each.prompt)] for each in asks]
    requests = {row.request for rows in steps for row in rows}
    assert len(requests) == count
    assert sum(request.num_preemptions for request in requests) >= 1
    assert max(request.num_preemptions for request in requests) <= 2


@pytest.mark.parametrize("num_usable", [1, 2, 3])
def test_pre_1c_pools_at_the_edge(num_usable: int, forced_model: Callable[..., ForcedModel]) -> None:
    """A prompt is served if one token more fits the context; it then gets what it asks for, up to the context."""
    context = 4 * num_usable
    model = forced_model(num_gpu_blocks_override=num_usable, max_model_len=context)
    model.says(list(range(100, 120)))
    for length, max_tokens in [(3, 1), (4, 4), (12, 1)]:
        each = ask([7] * length, max_tokens=max_tokens)
        if length + 1 > context:
            with pytest.raises(ParameterError, match=f"has {length} tokens; max_model_len is {context}"):
                run(model.llm, [each])
        else:
            [output] = run(model.llm, [each])
            assert ids_of(output) == [list(range(100, 100 + min(max_tokens, context - length)))]
            assert output.outputs[0].finish_reason == "length"


@modes
@pytest.mark.parametrize("computed", [1, 2])
@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
@pytest.mark.parametrize(
    ("forced", "stop", "text"),
    [([264, 78, 88, 89, 257], ["KLMNOPQ"], "KLMNXY"), ([97, 240, 262, 128, 257], None, "a\U0001f600")],
    ids=["half a stop string", "half a character"],
)
def test_pre_2a_text_that_is_held_back(
    mode: str,
    computed: int,
    kind: RequestOutputKind,
    forced: list[int],
    stop: list[str] | None,
    text: str,
    forced_model: Callable[..., ForcedModel],
) -> None:
    model = forced_model(**options(mode))
    model.says(forced)
    hook = preempt_at(len(PROMPT) + computed)
    [output] = run(model.llm, [ask(PROMPT, max_tokens=9, ignore_eos=False, stop=stop, output_kind=kind)], hook)
    assert not hook.left
    sample = output.outputs[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason) == (text, "stop", None)
    assert sample.token_ids == forced


@modes
@pytest.mark.parametrize("members", [[1], [0, 1, 2]])
def test_pre_2b_forked_samples(
    mode: str,
    members: list[int],
    llm_for: Callable[..., LLM],
    random_model: Callable[..., RandomModel],
) -> None:
    llm = llm_for(random_model().directory, **options(mode))
    stats, pool = llm.engine.core.scheduler.stats, llm.engine.core.scheduler.kv.pool
    each = ask(PROMPT, n=3, seed=2, temperature=1.0, max_tokens=12)
    undisturbed = ids_of(run(llm, [each])[0])
    assert len({tuple(ids) for ids in undisturbed}) == 3
    llm.reset_prefix_cache()
    before = stats.num_swap_preemptions, stats.num_recompute_preemptions
    hook = PreemptMembers([8, 12], members)
    assert ids_of(run(llm, [each], hook)[0]) == undisturbed
    assert not hook.left
    num_swaps = stats.num_swap_preemptions - before[0]
    # A part of a group finds what it shares with the rest still on the device: it is never swapped.
    assert num_swaps == (6 if mode == "swap" and len(members) == 3 else 0)
    assert num_swaps + stats.num_recompute_preemptions - before[1] == 2 * len(members)
    assert pool.num_free == pool.num_usable
    assert pool.num_shared == 0


def test_pre_3_prompt_and_generated_tokens_are_prefilled_again(forced_model: Callable[..., ForcedModel]) -> None:
    model = forced_model(max_num_batched_tokens=4)
    script = list(range(100, 112))
    model.says(script)
    hook = preempt_at(14)
    with recorded(model.llm) as steps:
        [output] = run(model.llm, [ask(PROMPT, max_tokens=12)], hook)
    assert ids_of(output) == [script]
    rows = [row for rows in steps for row in rows]
    again = next(place for place, row in enumerate(rows) if place and row.start == 0)
    counts = [(row.num_tokens, row.samples) for row in rows[again : again + 4]]
    assert counts == [(4, False), (4, False), (4, False), (3, True)]
    assert sum(row.samples for row in rows) == len(script), "one sample a token"


def test_pre_3b_recompute_is_not_a_new_prompt(forced_model: Callable[..., ForcedModel]) -> None:
    model = forced_model()
    script = list(range(100, 120))
    model.says(script)
    metrics = model.llm.engine.metrics
    before = metrics.read()
    hook = PreemptMembers([20], [0], keep_cache=True)
    prompt = list(range(12))
    with recorded(model.llm) as steps:
        [output] = run(model.llm, [ask(prompt, max_tokens=20)], hook)
    assert not hook.left
    assert ids_of(output) == [script]
    assert output.num_cached_tokens == 0, "that of the first admission"
    num_computed = sum(row.num_tokens for rows in steps for row in rows)
    after = metrics.read()
    recomputed = after.counts.num_recomputed_tokens - before.counts.num_recomputed_tokens
    assert after.counts.num_prompt_tokens - before.counts.num_prompt_tokens == 12
    assert after.num_generation_tokens - before.num_generation_tokens == 20
    # All but the token sampled last are found; it is computed for the first time, as part of the prefill.
    assert recomputed == 1
    assert num_computed == 12 + 19
