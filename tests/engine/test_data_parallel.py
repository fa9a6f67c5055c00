"""Several engines behind one: the same answers as one engine gives, streams, pictures and profiles."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replicas import SMALL, collect, params

from jaxpage import LLM, AsyncLLMEngine, BeamSearchParams, RequestOutput, RequestOutputKind
from jaxpage.engine.replicas import remote
from jaxpage.errors import ParameterError
from jaxpage.params import StructuredOutputsParams

Draw = Callable[..., list[int]]


def assert_same(ours: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for mine, other in zip(ours, expected, strict=True):
        assert (mine.prompt, mine.prompt_token_ids, mine.finished) == (other.prompt, other.prompt_token_ids, True)
        for sample, same in zip(mine.outputs, other.outputs, strict=True):
            assert (sample.token_ids, sample.text, sample.finish_reason) == (
                same.token_ids, same.text, same.finish_reason,
            )  # fmt: skip
            # Prompts do not meet the same ones in a step: logprobs agree to rounding only.
            assert (sample.cumulative_logprob is None) == (same.cumulative_logprob is None)
            for entry, twin in zip(sample.logprobs or [], same.logprobs or [], strict=True):
                assert entry.keys() == twin.keys()
                assert [each.rank for each in entry.values()] == [each.rank for each in twin.values()]
                assert [each.logprob for each in entry.values()] == pytest.approx(
                    [each.logprob for each in twin.values()], abs=1e-4
                )


@pytest.mark.parametrize(
    "sampling",
    [
        params(logprobs=2, prompt_logprobs=1),
        params(temperature=1.0, n=2),
        params(stop=["e"], ignore_eos=False, max_tokens=20),
        BeamSearchParams(beam_width=3, max_tokens=6, logprobs=1),
        params(structured_outputs=StructuredOutputsParams(json={"type": "boolean"}), ignore_eos=False),
    ],
    ids=["greedy", "sampled", "stop", "beams", "grammar"],
)
def test_two_processes_say_what_one_engine_says(many: LLM, one: LLM, sampling: Any, random_ids: Draw) -> None:
    prompts: list[Any] = [
        "Hello there",
        *({"prompt_token_ids": random_ids(3 + place % 9, place)} for place in range(9)),
    ]
    before = [each.read().num_accepted for each in many.engine.group.metrics]
    # Both draw the seeds of requests without one in the order of the prompts; so they must have drawn as many before.
    many.engine.group._seeds.seed(5)
    one.engine._seeds.seed(5)
    expected = one.generate(prompts, sampling)  # first, so that the processes find what it has compiled
    assert_same(many.generate(prompts, sampling), expected)
    after = [each.read().num_accepted for each in many.engine.group.metrics]
    assert all(now > then for now, then in zip(after, before, strict=True)), "both had some of it"


def test_vectors_and_chats(many: LLM, one: LLM, random_ids: Draw) -> None:
    prompts = [{"prompt_token_ids": random_ids(6, place)} for place in range(4)]
    for mine, other in zip(many.embed(prompts), one.embed(prompts), strict=True):
        assert np.allclose(mine.embedding, other.embedding, atol=1e-5)
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    conversation = [{"role": "user", "content": "Hi"}]
    assert_same(
        many.chat(conversation, params(), chat_template=template),
        one.chat(conversation, params(), chat_template=template),
    )


def test_a_bad_prompt_of_many_is_named_before_anything_runs(many: LLM) -> None:
    with pytest.raises(ParameterError, match=r"prompts\[1\]: prompt: has 200 tokens; max_model_len is 128"):
        many.generate([{"prompt_token_ids": [1]}, {"prompt_token_ids": [1] * 200}], params())
    with pytest.raises(ParameterError, match="sampling_params: cannot be sent to the engine: "):
        many.generate({"prompt_token_ids": [1]}, params(top_k=2**70))
    assert many.generate({"prompt_token_ids": [1]}, params())[0].finished


def test_cached_prefixes_draw_prompts_to_their_engine(engine: AsyncLLMEngine, random_ids: Draw) -> None:
    prefixes = [random_ids(40, seed) for seed in (1, 2)]

    async def go() -> list[int | None]:
        cached = []
        for turn in range(4):
            for number, prefix in enumerate(prefixes):
                outputs = await collect(engine, [*prefix, turn, number], params(max_tokens=1), f"{turn}-{number}")
                cached.append(outputs[-1].num_cached_tokens)
        return cached

    assert asyncio.run(go()) == [0, 0, *[40] * 6]


def test_streams_and_aborts(engine: AsyncLLMEngine, random_ids: Draw) -> None:
    async def go() -> None:
        prompt = random_ids(5)
        whole = await collect(engine, prompt, params(), "whole")
        assert [len(output.outputs[0].token_ids) for output in whole] == list(range(1, 9))
        delta = params(output_kind=RequestOutputKind.DELTA, logprobs=1)
        pieces = [output.outputs[0] for output in await collect(engine, prompt, delta, "delta")]
        assert "".join(piece.text for piece in pieces) == whole[-1].outputs[0].text
        assert [token for piece in pieces for token in piece.token_ids] == whole[-1].outputs[0].token_ids
        assert all(len(piece.logprobs or []) == len(piece.token_ids) for piece in pieces)
        assert (await collect(engine, prompt, params(output_kind=RequestOutputKind.FINAL_ONLY), "f"))[-1].finished

        first = engine.generate({"prompt_token_ids": prompt}, params(max_tokens=100), "same")
        await anext(first)
        with pytest.raises(ParameterError, match="request_id: 'same' is in use"):
            await collect(engine, prompt, params(), "same")
        await engine.abort(["same", "never seen"])
        last = [output async for output in first][-1]
        assert last.finished and last.outputs[0].finish_reason == "abort"

        left = engine.generate({"prompt_token_ids": prompt}, params(max_tokens=100), "left")
        await anext(left)
        await left.aclose()
        assert (await collect(engine, prompt, params(), "left"))[-1].finished, "the id is free again"
        grammar = params(structured_outputs=StructuredOutputsParams(regex="[ab]{90}"), ignore_eos=False, max_tokens=99)
        task = asyncio.create_task(collect(engine, prompt, grammar, "grammar"))
        while not engine.num_unfinished_requests:
            await asyncio.sleep(0.001)
        await engine.abort("grammar")
        assert (await task)[-1].outputs[0].finish_reason == "abort"
        while (await engine.snapshot()).num_running:
            await asyncio.sleep(0.01)

    asyncio.run(go())
    assert engine.group.kv_cache_stats().num_used_blocks == 0


def test_a_reader_that_does_not_read_is_left_behind(
    engine: AsyncLLMEngine, random_ids: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MAX_UNREAD_OUTPUTS", 5)

    async def go() -> None:
        stream = engine.generate({"prompt_token_ids": random_ids(5)}, params(max_tokens=110), "lazy")
        await anext(stream)
        while engine.num_unfinished_requests:
            await asyncio.sleep(0.01)
        last = [output async for output in stream][-1]
        assert last.finished and last.outputs[0].finish_reason == "abort"

    asyncio.run(go())


def test_pictures_show_all_pools_one_behind_the_other(engine: AsyncLLMEngine, random_ids: Draw) -> None:
    async def go() -> None:
        tasks = [
            asyncio.create_task(collect(engine, random_ids(9, place), params(max_tokens=100), str(place)))
            for place in range(4)
        ]
        while (picture := await engine.snapshot()).num_running < 4:
            await asyncio.sleep(0.005)
        blocks = [block for request in picture.running for block in request.block_ids]
        size = len(picture.block_states) // 2
        assert {block // size for block in blocks} == {0, 1} and len(set(blocks)) == len(blocks)
        assert all(picture.block_states[block] == 2 for block in blocks), "in use"
        assert picture.block_states[0] == picture.block_states[size] == 4, "the scratch blocks"
        assert picture.max_num_seqs == 16
        await engine.abort([str(place) for place in range(4)])
        await asyncio.gather(*tasks)

    asyncio.run(go())


def test_profiles_are_recorded_where_the_engines_are(engine: AsyncLLMEngine, tmp_path: Path, random_ids: Draw) -> None:
    async def go() -> None:
        await engine.start_profile(tmp_path)
        with pytest.raises(ParameterError, match="profile: is being recorded already"):
            await engine.start_profile(tmp_path)
        await asyncio.gather(*(collect(engine, random_ids(4, place), params(), str(place)) for place in range(4)))
        await engine.stop_profile()

    asyncio.run(go())
    assert len(list(tmp_path.glob("plugins/**/*.xplane.pb"))) == 1
    assert len(list(tmp_path.glob("engine-1/plugins/**/*.xplane.pb"))) == 1


THREADS = """
import asyncio, json, sys
from jaxpage import LLM, BeamSearchParams, SamplingParams
from jaxpage.errors import EngineDeadError

def main():
    options, prompts = json.loads(sys.argv[1])
    llm = LLM(data_parallel_size=2, **options)
    engine = llm.engine
    greedy = SamplingParams(temperature=0, ignore_eos=True, max_tokens=8)
    prompts = [{"prompt_token_ids": ids} for ids in prompts]
    said = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy)]
    counts = [each.read().num_accepted for each in engine.all_metrics]

    def burn(*arguments):
        raise RuntimeError("the device is on fire")

    engine.group.engines[0].engine.core.step = burn

    async def go():
        async def one(number, prompt):
            outputs = engine.generate(prompt, greedy, str(number))
            return [output async for output in outputs][-1].outputs[0].token_ids
        return await asyncio.gather(*(one(*each) for each in enumerate(prompts)), return_exceptions=True)

    first, second = asyncio.run(go()), asyncio.run(go())
    engine.shutdown()
    print(json.dumps([said, counts, *([each if isinstance(each, list) else repr(each) for each in results]
                                     for results in (first, second))]))

main()
"""


def test_two_engines_in_threads_and_the_death_of_one(one: LLM, replica_directory: Path, random_ids: Draw) -> None:
    """In a process of its own, which has two CPU devices."""
    prompts = [random_ids(3 + place % 7, place) for place in range(8)]
    expected = [
        output.outputs[0].token_ids
        for output in one.generate([{"prompt_token_ids": prompt} for prompt in prompts], params())
    ]
    options = SMALL | {"model": str(replica_directory)}
    program = [sys.executable, "-c", THREADS, json.dumps([options, prompts])]
    result = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    said, counts, first, second = json.loads(result.stdout.splitlines()[-1])
    assert said == expected and counts == [4, 4]
    failed = [each for each in first if isinstance(each, str)]
    assert 1 <= len(failed) <= 4 and all("the device is on fire" in each for each in failed)
    assert all(each in (expected[place], *failed) for place, each in enumerate(first))
    assert second == expected, "the one that lives takes all"


ENDS = """
import json, sys
from jaxpage import LLM, SamplingParams

llm = LLM(data_parallel_size=2, **json.loads(sys.argv[1]))
llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=2))
"""


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_a_program_need_not_end_its_engines(backend: str, replica_directory: Path) -> None:
    options = SMALL | {"model": str(replica_directory), "data_parallel_backend": backend}
    program = [sys.executable, "-c", ENDS, json.dumps(options)]
    result = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr


def test_too_few_devices_for_threads(replica_directory: Path) -> None:
    import jax

    count = len(jax.local_devices()) + 1
    with pytest.raises(RuntimeError, match=f"data_parallel_size {count} needs {count} devices, 1 for each engine"):
        LLM(model=str(replica_directory), data_parallel_size=count, **SMALL)
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", -1)
