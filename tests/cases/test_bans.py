"""Cases BAD: banned words in a real engine and over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from api_client import Api
from asking import COMPLETIONS, PATHS, all_ways, both_modes, whole
from driving import ask, ids_of, preempt_at, run
from forced import BEST, ForcedModel, Rule

pytestmark = pytest.mark.anyio
MADRID, MA_DRI, D = 285, 281, 283  # " Madrid", "Madri", "d"


def wishes(best: Sequence[int], second: int, impossible: Sequence[int] = (), vocab_size: int = 294) -> Rule:
    """The best id at each position, then the end; ``second`` is what comes where the best is banned."""

    def rule(prompt: list[int], output: list[int], sample: int) -> np.ndarray:
        logits = np.zeros(vocab_size, np.float32)
        logits[second] = 10.0
        logits[list(impossible)] = -1e9
        logits[best[len(output)] if len(output) < len(best) else (257 if vocab_size == 294 else 2)] = BEST
        return logits

    return rule


@pytest.mark.parametrize(
    ("word", "best", "expected"),
    [
        ("Madrid", [MADRID, MA_DRI, D], [97, MA_DRI, 97]),
        (" Madrid", [MADRID, MA_DRI, D], [97, MA_DRI, D]),
        ("ab", [97, 98, 286], [97, 99, 99]),
    ],
)
async def test_bad_1_every_spelling_is_banned(
    word: str, best: list[int], expected: list[int], model: ForcedModel, api: Api
) -> None:
    model.scores(wishes(best, expected[-1] if word == "ab" else 97))
    [free] = await all_ways(api)
    assert free.token_ids == [*best, 257]
    [answer] = await all_ways(api, bad_words=[word])
    assert answer.token_ids == [*expected, 257]


async def test_bad_1a_overlaps_and_history(model: ForcedModel, api: Api) -> None:
    model.scores(wishes([97, 98] * 6, 99, impossible=[286]))
    for prompt in ("x", "xab"):  # generated tokens only: the prompt's "ab" counts for nothing
        [answer] = await both_modes(api, COMPLETIONS, prompt=prompt, max_tokens=12, bad_words=["aba"])
        assert answer.text == "abcb" * 3
        assert "aba" not in answer.text
    model.scores(wishes([97, 98, 97, 98, 97], 99, impossible=[286]))
    [answer] = await both_modes(api, COMPLETIONS, prompt="xab", bad_words=["aba"])
    assert answer.text == "abcba"


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("count", [6, 7])
def test_bad_1b_the_ban_survives_preemption_and_is_per_request(
    mode: str, count: int, forced_model: Callable[..., ForcedModel]
) -> None:
    model = forced_model(preemption_mode=mode, swap_space=0.001)
    model.scores(wishes([MADRID, MA_DRI, D], 97))
    hook = preempt_at(count)
    common = {"max_tokens": 5, "ignore_eos": False}
    banned, free = run(model.llm, [ask([120] * 5, bad_words=["Madrid"], **common), ask([121] * 5, **common)], hook)
    assert hook.left == []
    assert ids_of(banned) == [[97, MA_DRI, 97, 257]]
    assert free.outputs[0].text == " MadridMadrid"


async def test_bad_1c_a_banned_word_inside_a_longer_one(forced_model: Callable[..., ForcedModel]) -> None:
    model = forced_model("smol")
    model.scores(wishes([1710, 40219], 81, vocab_size=49152))
    async with model.serving() as api:
        for words, expected in [
            ([], [1710, 40219, 2]),
            (["for"], [81, 40219, 2]),
            (["bidden"], [1710, 81, 2]),
            (["forbidden"], [1710, 81, 2]),
            (["bid"], [1710, 40219, 2]),  # a longer token that merely holds the word is no offence
        ]:
            [answer] = await both_modes(api, COMPLETIONS, bad_words=words)
            assert answer.token_ids == expected
        for path in PATHS:
            for words in (["a"] * 129, ["\u0004"]):
                await api.refused(
                    path,
                    {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "bad_words": words},
                    "bad_words",
                )
            assert (await whole(api, path, bad_words=["a"] * 128))[0].finish_reason == "stop"
