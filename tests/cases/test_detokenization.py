"""Cases DET: the text of tokens, from a model that says them to the client that reads it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from api_client import TOKENIZERS, Api
from asking import CHAT, COMPLETIONS, PATHS, all_ways, both_modes, streamed
from fake_engine import FakeEngine
from forced import ForcedModel

from jaxpage.tokenizer import IncrementalDetokenizer, Tokenizer

pytestmark = pytest.mark.anyio
TEXTS = Path(__file__).parents[1] / "data" / "texts"


@pytest.fixture(scope="session")
def smol(builtin_gguf: Callable[[str], Path]) -> Tokenizer:
    from jaxpage.weights.source import open_checkpoint

    return open_checkpoint(builtin_gguf("smollm2-135m-instruct")).load_tokenizer()


async def test_det_1_cut_characters_reach_the_client_whole(model: ForcedModel, api: Api) -> None:
    model.says([97, 261, 131, 240, 262, 128, 98, 257])
    [answer] = await all_ways(api)
    assert answer.ending == ("a ☃😀b", "stop", None, 8)
    for path in PATHS:
        [answer] = await streamed(api, path)
        assert all(delta in "a ☃😀b" for delta in answer.deltas)


def _awkward() -> list[str]:
    strings = json.loads((TEXTS / "naughty_strings.json").read_text(encoding="utf-8"))
    return strings + (TEXTS / "japanese.txt").read_text(encoding="utf-8").splitlines()


def test_det_1a_awkward_strings_of_a_real_vocabulary(smol: Tokenizer) -> None:
    for ids in ([81, 4636, 242, 221, 10813, 242, 218, 82], *map(smol.encode, _awkward())):
        text = IncrementalDetokenizer(smol, [])
        deltas = []
        for token_id in ids:
            text.append([token_id])
            deltas.append(text.take_delta())
        text.finish()
        deltas.append(text.take_delta())
        whole = smol.decode(ids)
        assert "".join(deltas) == whole
        assert "\ufffd" in whole or not any("\ufffd" in delta for delta in deltas)


async def test_det_1b_each_choice_has_its_own_half_character(model: ForcedModel, api: Api) -> None:
    scripts = {0: [97, 240, 262, 128, 257], 1: [261, 131, 98, 98, 257]}
    model.says(lambda prompt, sample: scripts[sample])
    answers = await all_ways(api, n=2, max_tokens=5)
    assert [answer.text for answer in answers] == ["a😀", " ☃bb"]
    model.says(lambda prompt, sample: scripts[prompt[-1] - ord("a")])
    pair = await asyncio.gather(*(streamed(api, COMPLETIONS, prompt=prompt, max_tokens=5) for prompt in "ab"))
    assert [answer.text for answers in pair for answer in answers] == ["a😀", " ☃bb"]


async def test_det_1c_generation_ends_or_goes_on_inside_a_character(model: ForcedModel, api: Api) -> None:
    model.says([97, 261])
    [answer] = await all_ways(api, max_tokens=2)
    assert answer.ending == ("a \ufffd", "length", None, 2)
    model.says([97, 240, 262, 98, 98, 257])
    [answer] = await all_ways(api)
    assert answer.ending == ("a\ufffdbb", "stop", None, 6)
    assert any(delta.startswith("\ufffdb") for delta in answer.deltas)  # what is certain waits for no later token


async def test_det_2_the_blank_of_the_first_word_is_kept(forced_model: Callable[..., ForcedModel]) -> None:
    model = forced_model("wordmark")
    tokenizer = model.llm.engine.tokenizer
    async with model.serving() as api:
        for prompt, first, expected in [
            ([1, 278], 274, " end. It is"),
            ([1], 274, "end. It is"),
            ([1, 278], 260, ". It is"),
            ([1], 260, ". It is"),
        ]:
            output = [274, 260, 271, 280, 2] if first == 274 else [260, 271, 280, 2]
            model.says(output)
            [answer] = await both_modes(api, COMPLETIONS, prompt=prompt)
            assert answer.text == expected
            assert tokenizer.decode(prompt, True) + answer.text == tokenizer.decode(prompt + output, True)


@pytest.mark.parametrize("clean_up", [False, True])
async def test_det_2a_no_tidying_of_blanks(clean_up: bool, tmp_path: Path) -> None:
    source, text = TOKENIZERS / "bytes_tokenizer", "Hello , do n't . Yes !"
    (tmp_path / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    config |= {"clean_up_tokenization_spaces": clean_up, "chat_template": "{{ messages[0].content }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    api = Api(FakeEngine(Tokenizer.from_directory(tmp_path), [*text.encode(), 257]))
    [answer] = await all_ways(api, max_tokens=40)
    assert answer.text == text


async def test_det_2b_indentation_and_leading_blanks_survive(smol: Tokenizer) -> None:
    problems = json.loads((TEXTS / "humaneval.json").read_text(encoding="utf-8"))
    solutions = {prompt: solution for prompt, solution in problems}

    def solve(prompt: list[int], sample: int) -> list[int]:
        return smol.encode(solutions[smol.decode(prompt)], add_special_tokens=False)

    engine = FakeEngine(smol, solve, max_model_len=1024)
    engine.vocab_size = 49152
    api = Api(engine)
    for prompt, solution in problems:
        count = len(smol.encode(solution, add_special_tokens=False))
        for interval in (1, 4):
            [answer] = await streamed(api, COMPLETIONS, prompt=prompt, max_tokens=count, stream_interval=interval)
            assert answer.text == solution
            assert len(answer.deltas) >= count // interval


async def test_det_2c_special_tokens_in_the_middle(forced_model: Callable[..., ForcedModel]) -> None:
    model = forced_model("smol")
    model.says([81, 2, 82])
    async with model.serving() as api:
        for skip, text in ((True, "ab"), (False, "a<|im_end|>b")):
            [answer] = await all_ways(api, ignore_eos=True, max_tokens=3, skip_special_tokens=skip)
            assert answer.ending == (text, "length", None, 3)
            assert answer.token_ids == [81, 2, 82]


@pytest.mark.parametrize("stop", [None, ["zzz"]])
@pytest.mark.parametrize("prompt", ["x", "x" * 300])
async def test_det_3_an_answer_of_no_visible_tokens(
    prompt: str, stop: list[str] | None, model: ForcedModel, api: Api
) -> None:
    [answer] = await all_ways(api, prompt=prompt, stop=stop)
    assert answer.ending == ("", "stop", None, 1)
    assert answer.token_ids == [257]


async def test_det_3a_the_first_token_is_the_stop_string(model: ForcedModel, api: Api) -> None:
    model.says([275, 97])
    for include, text in ((False, ""), (True, ".\n")):
        [answer] = await all_ways(api, stop=[".\n"], include_stop_str_in_output=include)
        assert answer.ending == (text, "stop", ".\n", 1)


async def test_det_3b_only_invisible_tokens(forced_model: Callable[..., ForcedModel]) -> None:
    model = forced_model("smol")
    model.says([0, 1, 0])
    async with model.serving() as api:
        [answer] = await all_ways(api, ignore_eos=True, max_tokens=3)
        assert answer.ending == ("", "length", None, 3)
        for path in PATHS:
            [answer] = await streamed(api, path, ignore_eos=True, max_tokens=3)
            assert len(answer.deltas) >= 1


async def test_det_3c_one_choice_ends_at_once(model: ForcedModel, api: Api) -> None:
    model.says(lambda prompt, sample: [[257], [268, 269, 274, 257]][sample])
    answers = await all_ways(api, n=2)
    assert [answer.ending for answer in answers] == [("", "stop", None, 1), ("Hello world", "stop", None, 4)]
    assert answers[0].usage["completion_tokens"] == 1 + 4
    [first, _] = await streamed(api, CHAT, n=2)
    assert len(first.deltas) == 2  # the role, then the finish
