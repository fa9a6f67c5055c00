"""``LLM``: every form of a prompt, and errors that name what is wrong and leave the engine as it was."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from driving import ask, ids_of, run

from jaxpage import LLM, EngineArgs, SamplingParams, TokensPrompt
from jaxpage.engine.front import Engine
from jaxpage.errors import ParameterError, shown
from jaxpage.tokenizer import ChatTemplateError

if TYPE_CHECKING:
    from numpy_reference import RandomModel

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def directory(random_model: Callable[..., RandomModel]) -> Path:
    return random_model().directory


@pytest.fixture
def llm(llm_for: Callable[..., LLM], directory: Path) -> LLM:
    return llm_for(directory)


def test_all_forms_of_a_prompt_mean_the_same(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("Hello")
    forms: list[Any] = ["Hello", {"prompt": "Hello"}, {"prompt_token_ids": ids}, TokensPrompt(prompt_token_ids=ids)]
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [ids] * 4
    assert [output.prompt for output in outputs] == ["Hello", "Hello", None, None]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    for form, output in zip(forms, outputs, strict=True):
        alone = llm.generate(form, GREEDY, use_tqdm=False)
        assert [ids_of(each) for each in alone] == [ids_of(output)]
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_text_is_the_decoded_ids(llm: LLM) -> None:
    output = llm.generate("Hello", GREEDY, use_tqdm=False)[0]
    assert output.finished
    assert output.outputs[0].text == llm.get_tokenizer().decode(output.outputs[0].token_ids, skip_special_tokens=True)
    silent = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=6, detokenize=False), use_tqdm=False)[0]
    assert silent.outputs[0].text == ""
    assert silent.outputs[0].token_ids == output.outputs[0].token_ids


def test_results_keep_the_order_of_the_prompts(llm: LLM, random_ids: Callable[..., list[int]]) -> None:
    prompts = [random_ids(1 + 3 * index % 20, seed=index) for index in range(20)]
    params = [SamplingParams(temperature=0, max_tokens=1 + 7 * index % 9, ignore_eos=True) for index in range(20)]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [each.max_tokens for each in params]


def test_params_are_not_changed_and_must_match_in_number(llm: LLM) -> None:
    before = repr(GREEDY)
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert repr(GREEDY) == before
    with pytest.raises(ParameterError, match="sampling_params: has 3 entries for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY] * 3, use_tqdm=False)


def test_chat_renders_the_template_once_per_conversation(llm: LLM) -> None:
    first = [{"role": "user", "content": "Hi"}]
    second = [*first, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Bye"}]
    outputs = llm.chat([first, second], GREEDY, use_tqdm=False, chat_template=TEMPLATE)
    texts = ["<user>Hi<assistant>", "<user>Hi<assistant>Yes?<user>Bye<assistant>"]
    encode = llm.get_tokenizer().encode
    assert [output.prompt_token_ids for output in outputs] == [encode(text, add_special_tokens=False) for text in texts]
    one = llm.chat(first, GREEDY, use_tqdm=False, chat_template=TEMPLATE)
    assert [ids_of(output) for output in one] == [ids_of(outputs[0])]
    with pytest.raises(ParameterError, match="messages: must not be empty"):
        llm.chat([], GREEDY)


def test_a_failing_template_is_an_error_of_its_own(llm: LLM) -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        llm.chat([{"role": "user", "content": "a"}], chat_template="{{ raise_exception('roles must alternate') }}")


def test_end_ids_end_and_are_not_shown(llm: LLM) -> None:
    ending = {"temperature": 0, "allowed_token_ids": [257, 65], "max_tokens": 5}
    stopped = llm.generate("x", SamplingParams(**ending, logit_bias={257: 50.0}), use_tqdm=False)[0].outputs[0]
    assert (stopped.token_ids, stopped.text, stopped.finish_reason, stopped.stop_reason) == ([257], "", "stop", None)
    params = SamplingParams(**ending, logit_bias={257: 50.0}, ignore_eos=True)
    ignored = llm.generate("x", params, use_tqdm=False)[0].outputs[0]
    assert (ignored.token_ids, ignored.finish_reason) == ([257] * 5, "length")
    params = SamplingParams(**ending, logit_bias={257: 50.0}, min_tokens=3)
    masked = llm.generate("x", params, use_tqdm=False)[0].outputs[0]
    assert (masked.token_ids, masked.finish_reason) == ([65, 65, 65, 257], "stop")
    params = SamplingParams(temperature=0, allowed_token_ids=[65], stop_token_ids=[65], max_tokens=5)
    named = llm.generate("x", params, use_tqdm=False)[0].outputs[0]
    assert (named.token_ids, named.finish_reason, named.stop_reason) == ([65], "stop", 65)


def test_stop_strings_cut_the_text(llm: LLM) -> None:
    common = {"temperature": 0, "allowed_token_ids": [65], "max_tokens": 9}
    cut = llm.generate("x", SamplingParams(**common, stop=["AAA"], min_tokens=4), use_tqdm=False)[0].outputs[0]
    assert cut.finish_reason == "stop"
    assert cut.stop_reason == "AAA"
    assert 4 <= len(cut.token_ids) < 9
    plain = llm.generate("x", SamplingParams(**common, stop="AAA"), use_tqdm=False)[0].outputs[0]
    assert (plain.text, len(plain.token_ids)) == ("", 3)
    kept = llm.generate("x", SamplingParams(**common, stop="AAA", include_stop_str_in_output=True), use_tqdm=False)
    assert kept[0].outputs[0].text == "AAA"


BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", r"prompt: has no tokens"),
    ({"prompt_token_ids": []}, r"prompt: has no tokens"),
    ({"prompt_token_ids": [1] * 128}, r"prompt: has 128 tokens; max_model_len is 128"),
    ({"prompt_token_ids": [5, 294]}, r"prompt_token_ids\[1\]: must be in \[0, 293\], got 294"),
    ({"prompt_token_ids": [-1]}, r"prompt_token_ids\[0\]: .*got -1"),
    ({"prompt_token_ids": [10**30]}, r"prompt_token_ids\[0\]: .*got 1000"),
    ({"prompt_token_ids": [True]}, r"prompt_token_ids\[0\]: must be an integer, got True"),
    ({"prompt_token_ids": ["1"]}, r"prompt_token_ids\[0\]: must be an integer, got '1'"),
    ({"prompt_token_ids": "12"}, r"prompt_token_ids: must be a list of token ids, got '12'"),
    ({"text": "Hello"}, r"prompts\[1\]: prompt: must be text, token ids or a dict of either"),
    (17, r"prompt: must be text"),
    ([1, -1], r"prompt\[1\]: must be in \[0, "),
    (None, r"prompt: must be text"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS, ids=[shown(prompt)[:40] for prompt, _ in BAD_PROMPTS])
def test_bad_prompts_are_refused_before_anything_runs(prompt: Any, message: str, llm: LLM) -> None:
    expected = ids_of(llm.generate("Hello", GREEDY, use_tqdm=False)[0])
    generated = llm.engine.core.scheduler.stats.num_generated_tokens
    with pytest.raises(ParameterError, match=message):
        llm.generate(["Hello", prompt], GREEDY, use_tqdm=False)
    assert llm.engine.core.scheduler.stats.num_generated_tokens == generated
    assert not llm.engine.has_work
    assert ids_of(llm.generate("Hello", GREEDY, use_tqdm=False)[0]) == expected


BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, r"temperature: must be in \[0, 2\], got -0.1"),
    ({"temperature": math.nan}, r"temperature: must be finite, got nan"),
    ({"temperature": "hot"}, r"temperature: must be a number, got 'hot'"),
    ({"top_p": 0}, r"top_p: must be in \(0, 1\], got 0"),
    ({"top_p": 1.5}, r"top_p: must be in \(0, 1\], got 1.5"),
    ({"top_k": -2}, r"top_k: must be at least -1, got -2"),
    ({"top_k": 2.5}, r"top_k: must be an integer, got 2.5"),
    ({"min_p": -1}, r"min_p: .*got -1"),
    ({"n": 0}, r"n: must be in \[1, 128\], got 0"),
    ({"best_of": 2}, r"best_of: is only supported equal to n \(1\), got 2"),
    ({"max_tokens": -1}, r"max_tokens: must be at least 0, got -1"),
    ({"max_tokens": 129}, r"max_tokens: 129 is above max_model_len 128"),
    ({"min_tokens": 9, "max_tokens": 8}, r"min_tokens: 9 is above max_tokens 8"),
    ({"presence_penalty": 2.1}, r"presence_penalty: .*got 2.1"),
    ({"frequency_penalty": math.inf}, r"frequency_penalty: must be finite, got inf"),
    ({"repetition_penalty": 0}, r"repetition_penalty: must be above 0, got 0"),
    ({"seed": 2**63}, rf"seed: .*got {2**63}"),
    ({"stop": [""]}, r"stop\[0\]: must not be empty"),
    ({"stop": 5}, r"stop: must be a string or a list of strings, got 5"),
    ({"stop": "x", "detokenize": False}, r"stop: needs detokenize=True"),
    ({"stop_token_ids": [294]}, r"stop_token_ids\[0\]: .*got 294"),
    ({"logprobs": 21}, r"logprobs: must be in \[0, 20\], got 21"),
    ({"prompt_logprobs": -1}, r"prompt_logprobs: must be in \[0, 20\], got -1"),
    ({"logit_bias": {294: 1.0}}, r"logit_bias: token id 294 is not in \[0, 293\]"),
    ({"logit_bias": {1: 101.0}}, r"logit_bias: entry 1: 101.0"),
    ({"allowed_token_ids": []}, r"allowed_token_ids: must not be empty"),
    ({"ignore_eos": 1}, r"ignore_eos: must be true or false, got 1"),
]


@pytest.mark.parametrize(("values", "message"), BAD_PARAMS, ids=[shown(values)[:40] for values, _ in BAD_PARAMS])
def test_bad_params_are_refused_by_name_and_value(values: dict[str, Any], message: str, llm: LLM) -> None:
    with pytest.raises(ParameterError, match=message) as caught:
        llm.generate("Hello", SamplingParams(**values), use_tqdm=False)
    assert caught.value.parameter in str(caught.value)
    assert not llm.engine.has_work


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"tensor_parallel_size": 64}, r"tensor_parallel_size: 64 and pipeline_parallel_size 1 need 64 devices, here are"),
    (
        {"pipeline_parallel_size": 2, "pipeline_layers": "3"},
        r"pipeline_layers: must be 2 numbers .* got '3'",
    ),
    (
        {"coordinator": "here:1"},
        r"num_processes: must be given too: coordinator, num_processes, process_id belong together",
    ),
    ({"tensor_parallel_size": 0}, r"tensor_parallel_size: must be at least 1, got 0"),
    ({"kv_cache_dtype": "fp4"}, r"kv_cache_dtype: must be one of auto, float32, bfloat16, int8, fp8, .*, got 'fp4'"),
    ({"dtype": "int8"}, r"dtype: must be one of auto, float32, bfloat16, got 'int8'"),
    ({"trust_remote_code": True}, r"trust_remote_code: true is not supported"),
    ({"max_model_len": 513}, r"max_model_len: 513 is above the model's limit 512"),
    ({"max_model_len": 1}, r"max_model_len: must leave room for a prompt and one token, got 1"),
    ({"block_size": 0}, r"block_size: must be in \[1, 256\], got 0"),
    ({"gpu_memory_utilization": 1.1}, r"gpu_memory_utilization: must be in \[0, 1\], got 1.1"),
    ({"max_num_seqs": True}, r"max_num_seqs: must be an integer, got True"),
    (
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
        r"max_num_batched_tokens: 64 is below max_model_len 512, which needs enable_chunked_prefill",
    ),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=[shown(options)[:40] for options, _ in BAD_OPTIONS])
def test_bad_options_are_refused_at_start(options: dict[str, Any], message: str, directory: Path) -> None:
    with pytest.raises(ParameterError, match=message):
        LLM(model=str(directory), **options)


def test_an_unknown_option_is_refused(directory: Path) -> None:
    with pytest.raises(TypeError, match="speculative_model"):
        LLM(model=str(directory), speculative_model=4)


def test_an_interrupted_call_leaves_the_engine_free(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, random_ids: Callable[..., list[int]]
) -> None:
    prompts: list[Any] = [{"prompt_token_ids": random_ids(8, seed=index)} for index in range(4)]
    expected = [ids_of(output) for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    with monkeypatch.context() as patch:
        steps = iter(range(3))
        patch.setattr(llm.engine, "step", lambda: Engine.step(llm.engine) if next(steps) < 2 else _interrupt())
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, GREEDY, use_tqdm=False)
    assert llm.engine.num_unfinished == 0
    assert [ids_of(output) for output in llm.generate(prompts, GREEDY, use_tqdm=False)] == expected


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_the_context_is_the_last_limit(llm: LLM, random_ids: Callable[..., list[int]]) -> None:
    for length, max_tokens in ((120, 100), (120, None), (127, 5)):
        output = run(llm, [ask(random_ids(length), max_tokens=max_tokens)])[0]
        assert len(ids_of(output)[0]) == 128 - length
        assert output.outputs[0].finish_reason == "length"


def test_recommended_values_are_the_default_and_bad_ones_are_ignored(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    recommended = {
        "temperature": 0.6,
        "top_p": 0,
        "top_k": 40,
        "min_p": None,
        "repetition_penalty": "x",
        "eos_token_id": 65,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
    with caplog.at_level(logging.WARNING, logger="jaxpage"):
        llm = LLM(model=str(tmp_path), max_model_len=64, max_num_seqs=2, enforce_eager=True, num_gpu_blocks_override=8)
    default = llm.get_default_sampling_params()
    assert (default.temperature, default.top_k) == (0.6, 40)
    assert (default.top_p, default.min_p, default.repetition_penalty) == (1.0, 0.0, 1.0)
    ignored = [record.getMessage() for record in caplog.records]
    assert [any(f"{name}: " in line for line in ignored) for name in recommended] == [
        False,
        True,
        False,
        False,
        True,
        False,
    ]
    assert llm.engine.generation_config == {"temperature": 0.6, "top_k": 40, "eos_token_id": 65}
    assert set(llm.engine.model.end_token_ids) == {257, 65}


def test_engine_args_check_themselves() -> None:
    args = EngineArgs(model="m", max_num_seqs=4.0)
    assert args.max_num_seqs == 4
    assert isinstance(args.max_num_seqs, int)


def test_prompts_may_be_token_ids(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("Hello")
    expected = ids_of(llm.generate("Hello", GREEDY, use_tqdm=False)[0])
    assert ids_of(llm.generate(ids, GREEDY, use_tqdm=False)[0]) == expected
    assert [ids_of(output) for output in llm.generate([ids, "Hello"], GREEDY, use_tqdm=False)] == [expected] * 2


@pytest.mark.parametrize("params", [{"max_tokens": 3}, 5, [None]])
def test_params_of_a_wrong_type_are_refused(params: Any, llm: LLM) -> None:
    with pytest.raises(ParameterError, match="sampling_params"):
        llm.generate(["Hello"], params, use_tqdm=False)


def test_min_tokens_with_nothing_but_end_ids_allowed_is_refused(llm: LLM) -> None:
    end = llm.engine.model.end_token_ids[0]
    with pytest.raises(ParameterError, match="allowed_token_ids: holds nothing but end"):
        llm.generate("Hello", SamplingParams(allowed_token_ids=[end], min_tokens=2), use_tqdm=False)


def test_outputs_tell_when_things_happened(llm: LLM) -> None:
    metrics = llm.generate("Hello", GREEDY, use_tqdm=False)[0].metrics
    assert metrics is not None and metrics.first_token_time is not None and metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time


@pytest.mark.parametrize("salt", [5, "", ["a"], "x" * 129, "a\0b", False])
def test_a_bad_salt_is_refused_before_the_engine_pfx_3b(salt: Any, llm: LLM) -> None:
    with pytest.raises(ParameterError, match="cache_salt: must have 1 to 128 characters"):
        llm.generate([{"prompt_token_ids": [1, 2], "cache_salt": salt}])
    assert not llm.engine.has_work
    assert len(llm.generate([[1, 2, 3]])) == 1


def test_salts_of_prompts_separate_them_pfx_3(llm: LLM) -> None:
    prompt = list(range(1, 20))
    params, cached = SamplingParams(max_tokens=1), []
    for salt in ("q", "r", None, "q"):
        each: Any = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        cached.append(llm.generate([each], params)[0].num_cached_tokens)
    assert cached == [0, 0, 0, 18]


def test_what_a_prompt_cannot_hold_is_refused(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="prompt: the key 'multi_modal_data' is not supported"):
        llm.generate({"prompt": "a", "multi_modal_data": {}})  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize(("priority", "message"), [(3, "must be a list"), ([1], "1 entries for 2"), ([0, "a"], "'a'")])
def test_bad_priorities_are_refused(priority: Any, message: str, llm: LLM) -> None:
    with pytest.raises(ParameterError, match=message):
        llm.generate([[1], [2]], priority=priority)
