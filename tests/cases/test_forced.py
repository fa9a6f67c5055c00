"""The forced model itself: what it is asked is the request's own history, whatever the engine does with the cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from driving import ask, ids_of, preempt_at, run
from forced import ForcedModel

SCRIPT = list(range(100, 112))


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 3}, {"max_num_seqs": 2}])
def test_samples_say_their_scripts(forced_model: Callable[..., ForcedModel], options: dict[str, int]) -> None:
    model = forced_model(**options)
    model.says(lambda prompt, sample: [prompt[0] + sample, *SCRIPT[: 3 + sample]])
    outputs = run(model.llm, [ask([20 + place] * 7, max_tokens=9, n=3, ignore_eos=False) for place in range(3)])
    for place, output in enumerate(outputs):
        assert ids_of(output) == [[20 + place + sample, *SCRIPT[: 3 + sample], 257] for sample in range(3)]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_changes_nothing(forced_model: Callable[..., ForcedModel], mode: str) -> None:
    model = forced_model(preemption_mode=mode, swap_space=0.001)
    model.says(SCRIPT)
    hook = preempt_at(9, 13, 17)
    asks = [ask(list(range(9)), max_tokens=12, prompt_logprobs=1), ask(list(range(40, 51)), max_tokens=12)]
    outputs = run(model.llm, asks, hook)
    assert hook.left == []
    assert [ids_of(output) for output in outputs] == [[SCRIPT], [SCRIPT]]
    assert {len(seen.prompt) for seen in model.seen} == {9, 11}
    assert all(seen.output == SCRIPT[: len(seen.output)] for seen in model.seen)


@pytest.mark.anyio
async def test_over_http(model: ForcedModel, api) -> None:
    model.says([268, 269, 274])
    assert (await api.complete(prompt="Hi"))["choices"][0]["text"] == "Hello world"
    assert (await api.chat())["choices"][0]["message"]["content"] == "Hello world"
