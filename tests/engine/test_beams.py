"""Beam search in the engine: the beams of Hugging Face transformers, whatever happens to their blocks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from driving import Ask, ask, preempt_at, run
from golden_data import DATA

from jaxpage import LLM, BeamSearchParams
from jaxpage.errors import ParameterError

if TYPE_CHECKING:
    from numpy_reference import RandomModel

CASES = json.loads((DATA / "golden" / "beam" / "tiny.json").read_text())
FAMILIES = sorted({case["family"] for case in CASES})
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "blocks of one token, small chunks": {"block_size": 1, "num_gpu_blocks_override": 500, "max_num_batched_tokens": 9},
}


def search(prompt: list[int], width: int, **params: Any) -> Ask:
    return Ask(prompt, BeamSearchParams(beam_width=width, **({"ignore_eos": True} | params)))  # type: ignore[arg-type]


@pytest.fixture
def model(random_model: Callable[..., RandomModel]) -> RandomModel:
    return random_model()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_beams_equal_those_of_transformers(
    family: str, options: str, tiny_model_dir: Callable[[str], Path], llm_for: Callable[..., LLM]
) -> None:
    llm = llm_for(tiny_model_dir(family), **OPTIONS[options])
    cases = [case for case in CASES if case["family"] == family]
    asks = [
        search(
            case["prompt_ids"],
            case["beam_width"],
            max_tokens=case["max_tokens"],
            length_penalty=case["length_penalty"],
            early_stopping=case["early_stopping"],
            stop_token_ids=case["eos_token_ids"],
        )
        for case in cases
    ]
    # All at once: searches of many widths take turns for eight rows, beside samples.
    outputs = run(llm, [*asks, ask([1, 2, 3], n=3, temperature=1.0, seed=1, max_tokens=9)])
    for case, output in zip(cases, outputs, strict=False):
        assert [beam.token_ids for beam in output.outputs] == [beam["token_ids"] for beam in case["beams"]]
        for beam, expected in zip(output.outputs, case["beams"], strict=True):
            assert beam.score == pytest.approx(expected["score"], abs=2e-4)
            ends = beam.token_ids[-1] in case["eos_token_ids"]
            assert beam.finish_reason == ("stop" if ends else "length")


def test_beam_1a_scores_add_up_and_width_1_is_greedy(
    llm_for: Callable[..., LLM], model: RandomModel, random_ids: Callable[..., list[int]]
) -> None:
    llm, prompt = llm_for(model.directory), random_ids(9)
    wide = run(llm, [search(prompt, 4, max_tokens=10, logprobs=2)])[0].outputs
    assert len({tuple(beam.token_ids) for beam in wide}) == 4
    assert [beam.score for beam in wide] == sorted((beam.score for beam in wide), reverse=True)
    for beam in wide:
        scored = run(llm, [ask(prompt + beam.token_ids, max_tokens=0, prompt_logprobs=0)])[0].prompt_logprobs
        assert scored is not None
        listed = [entry[token].logprob for entry, token in zip(scored[9:], beam.token_ids, strict=True) if entry]
        assert sum(listed) == pytest.approx(beam.cumulative_logprob, abs=1e-3)
        assert beam.logprobs is not None
        own = [entry[token].logprob for entry, token in zip(beam.logprobs, beam.token_ids, strict=True)]
        assert own == pytest.approx(listed, abs=1e-4)
        assert all(2 <= len(entry) <= 3 for entry in beam.logprobs)
    [greedy] = run(llm, [ask(prompt, max_tokens=10)])[0].outputs
    [narrow] = run(llm, [search(prompt, 1, max_tokens=10)])[0].outputs
    assert (narrow.token_ids, narrow.text) == (greedy.token_ids, greedy.text)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [True, False])
def test_beam_1c_beams_share_blocks_and_survive_preemption(
    mode: str,
    caching: bool,
    llm_for: Callable[..., LLM],
    model: RandomModel,
    random_ids: Callable[..., list[int]],
) -> None:
    options = {"preemption_mode": mode, "enable_prefix_caching": caching}
    llm = llm_for(model.directory, num_gpu_blocks_override=3 * 9, **options)
    each = search(random_ids(6), 4, max_tokens=30)
    held: list[int] = []
    pool = llm.engine.core.scheduler.kv.pool
    expected = run(llm, [each], lambda engine: held.append(pool.num_used))[0]
    assert 0 < max(held) < 4 * 9
    assert pool.num_used == 0
    stats = llm.engine.core.scheduler.stats
    for counts in ([9], [16], [12, 20, 31]):
        before = (stats.num_swap_preemptions, stats.num_recompute_preemptions)
        hook = preempt_at(*counts)
        again = run(llm, [each], hook)[0]
        assert [beam.token_ids for beam in again.outputs] == [beam.token_ids for beam in expected.outputs]
        scores = [beam.score for beam in expected.outputs]
        assert [beam.score for beam in again.outputs] == pytest.approx(scores, abs=1e-4)
        assert not hook.left
        swaps, recomputes = stats.num_swap_preemptions - before[0], stats.num_recompute_preemptions - before[1]
        assert (swaps > 0, recomputes > 0) == (mode == "swap", mode == "recompute")
    llm.engine.add("gone", each.prompt, each.params)
    for _ in range(20):
        assert llm.engine.step() == []
    output = llm.engine.abort("gone")
    assert output is not None and output.finished
    assert [beam.finish_reason for beam in output.outputs] == ["abort"] * 4
    run(llm, [])
    assert pool.num_used == 0


def test_a_search_that_outgrows_the_pool_ends_with_what_it_has(
    llm_for: Callable[..., LLM], model: RandomModel, random_ids: Callable[..., list[int]]
) -> None:
    llm = llm_for(model.directory, num_gpu_blocks_override=8)
    output, other = run(llm, [search(random_ids(6), 4, max_tokens=60), ask(random_ids(7), max_tokens=9)])
    assert [beam.finish_reason for beam in output.outputs] == ["length"] * 4
    assert 2 <= len(output.outputs[0].token_ids) < 30
    assert len(other.outputs[0].token_ids) == 9


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"beam_width": 9}, "beam_width: 9 is above max_num_seqs 8"),
        ({"beam_width": 5}, r"beam_width: 5 with 1 end ids needs max_logprobs 6 or more, it is 5"),
        ({"beam_width": 2, "logprobs": 6}, r"logprobs: must be in \[0, 5\], got 6"),
        ({"beam_width": 2, "max_tokens": 129}, "max_tokens: 129 is above max_model_len 128"),
        ({"beam_width": 2, "stop_token_ids": [294]}, "stop_token_ids"),
    ],
)
def test_what_the_engine_cannot_search_is_refused(
    params: dict[str, Any], message: str, llm_for: Callable[..., LLM], model: RandomModel
) -> None:
    llm = llm_for(model.directory, max_logprobs=5)
    with pytest.raises(ParameterError, match=message):
        llm.beam_search([1, 2, 3], BeamSearchParams(**params))
    assert not llm.engine.has_work


def test_llm_beam_search_gives_whole_sequences(llm_for: Callable[..., LLM], model: RandomModel) -> None:
    llm = llm_for(model.directory)
    params = BeamSearchParams(beam_width=3, max_tokens=5)
    first, second = llm.beam_search(["Hello", {"prompt_token_ids": [5, 6]}], params, use_tqdm=False)
    assert [len(each.sequences) for each in (first, second)] == [3, 3]
    generated = llm.generate("Hello", params, use_tqdm=False)[0]
    for sequence, beam in zip(first.sequences, generated.outputs, strict=True):
        assert sequence.tokens == generated.prompt_token_ids + beam.token_ids
        assert sequence.text == "Hello" + beam.text
        # The second search found its prompt in the cache: the same up to rounding.
        scores = (beam.cumulative_logprob, beam.score)
        assert (sequence.cum_logprob, sequence.score) == pytest.approx(scores, abs=1e-4)
    assert all(sequence.tokens[:2] == [5, 6] for sequence in second.sequences)
