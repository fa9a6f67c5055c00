"""What the load generator asks: lengths, shared beginnings, seeds; files of every kind."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from golden_data import DATA

from jaxpage.benchmarks.serving.datasets import as_text, make_samples
from jaxpage.benchmarks.serving.options import build_parser
from jaxpage.benchmarks.serving.tokens import LocalTokens
from jaxpage.benchmarks.traces import read_trace
from jaxpage.errors import ParameterError

AZURE = DATA / "traces" / "azure_conv_head.csv"
MOONCAKE = DATA / "traces" / "mooncake_synthetic_head.jsonl"


@pytest.fixture(scope="module")
def tokens() -> LocalTokens:
    """A token a byte, and some longer ones."""
    return LocalTokens.load(str(DATA / "tokenizers" / "bytes_tokenizer"))


def options(*argv: Any) -> Namespace:
    return build_parser("bench").parse_args([str(word) for word in argv])


def test_ordinary_tokens_only(tokens: LocalTokens) -> None:
    assert set(tokens.ids) == set(range(294)) - {256, 257, 258, 259}
    assert tokens.decode(tokens.encode("Hello é")) == "Hello é"


def test_random_lengths_and_prefix(tokens: LocalTokens) -> None:
    asked = options("--random-input-len", 20, "--random-output-len", 10, "--random-prefix-len", 5)
    asked.random_range_ratio = (0.5, 0.2)
    samples = make_samples(asked, tokens, 300, seed=0)
    assert {sample.num_prompt_tokens for sample in samples} == set(range(15, 36))
    assert {sample.num_output_tokens for sample in samples} == set(range(8, 13))
    assert all(len(sample.prompt) == sample.num_prompt_tokens for sample in samples)
    assert len({tuple(sample.prompt[:5]) for sample in samples}) == 1
    assert len({tuple(sample.prompt[5:10]) for sample in samples}) == 300
    assert samples == make_samples(asked, tokens, 300, seed=0) != make_samples(asked, tokens, 300, seed=1)


def test_general_lengths_give_way_to_exact_ones(tokens: LocalTokens) -> None:
    [sample] = make_samples(options("--input-len", 7, "--output-len", 3), tokens, 1, 0)
    assert (sample.num_prompt_tokens, sample.num_output_tokens) == (7, 3)
    [sample] = make_samples(options("--input-len", 7, "--random-input-len", 9), tokens, 1, 0)
    assert (sample.num_prompt_tokens, sample.num_output_tokens) == (9, 128)


def test_range_ratios_for_each_length() -> None:
    assert options("--random-range-ratio", "0.5").random_range_ratio == (0.5, 0.5)
    assert options("--random-range-ratio", '{"input": 0.5}').random_range_ratio == (0.5, 0.0)


def test_chats_get_text(tokens: LocalTokens) -> None:
    samples = make_samples(options("--input-len", 9), tokens, 3, 0)
    assert all(isinstance(sample.prompt, str) for sample in as_text(samples, tokens))


@pytest.fixture
def sharegpt(tmp_path: Path) -> Path:
    talks = [[("human", f"question {index}"), ("gpt", "a" * (5 + index))] for index in range(8)]
    talks += [[("human", "only a question")], [("human", "hi"), ("gpt", "too short a question")]]
    talks += [[("human", "x" * 1025), ("gpt", "too long")], [("human", "short"), ("gpt", "ok")]]
    entries = [{"conversations": [{"from": who, "value": text} for who, text in talk]} for talk in talks]
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([*entries, {"id": "nothing"}]))
    return file


def test_sharegpt(tokens: LocalTokens, sharegpt: Path) -> None:
    asked = options("--dataset-name", "sharegpt", "--dataset-path", sharegpt)
    samples = make_samples(asked, tokens, 20, seed=0)
    assert len(samples) == 20
    assert {sample.prompt for sample in samples} == {f"question {index}" for index in range(8)}
    assert all(sample.num_output_tokens == len(tokens.encode("a" * (5 + int(s[-1])))) for sample in samples[:8]
               if isinstance(s := sample.prompt, str))  # fmt: skip
    assert samples == make_samples(asked, tokens, 20, seed=0) != make_samples(asked, tokens, 20, seed=1)
    asked = options("--dataset-name", "sharegpt", "--dataset-path", sharegpt, "--no-oversample", "--disable-shuffle")
    assert [sample.prompt for sample in make_samples(asked, tokens, 20, 0)] == [f"question {i}" for i in range(8)]
    asked.sharegpt_output_len = 2
    found = make_samples(asked, tokens, 20, 0)
    assert {sample.num_output_tokens for sample in found} == {2}
    assert len(found) == 9, "with a fixed length a short answer does not count"


def test_sonnet(tokens: LocalTokens, tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    lines = [f"this is verse {index:02d}\n" for index in range(30)]
    file.write_text("".join(lines))
    asked = options("--dataset-name", "sonnet", "--dataset-path", file, "--sonnet-input-len", 200)
    asked.sonnet_prefix_len = 2 * len(tokens.encode(lines[0]))
    samples = make_samples(asked, tokens, 20, seed=0)
    first = {sample.prompt.split("\n")[1] + sample.prompt.split("\n")[2] for sample in samples}
    assert first == {"this is verse 00this is verse 01"}
    assert len({sample.prompt for sample in samples}) == 20
    assert all(200 - len(tokens.encode(lines[0])) < sample.num_prompt_tokens <= 200 for sample in samples)
    assert all(len(tokens.encode(sample.prompt)) == sample.num_prompt_tokens for sample in samples)
    assert {sample.num_output_tokens for sample in samples} == {150}
    asked.sonnet_input_len = 30
    with pytest.raises(ParameterError, match="30 tokens have no room"):
        make_samples(asked, tokens, 1, 0)


def test_traces_keep_times_lengths_and_shared_beginnings(tokens: LocalTokens) -> None:
    asked = options("--dataset-name", "timed_trace", "--dataset-path", MOONCAKE, "--trace-length-divisor", 16)
    asked.trace_time_scale = 0.5
    samples = make_samples(asked, tokens, 60, seed=0)
    rows = read_trace(MOONCAKE, 60)
    assert len(samples) == 60
    assert [sample.arrival_s for sample in samples] == [row.arrival_s / 2 for row in rows]
    assert [sample.num_prompt_tokens for sample in samples] == [-(-row.num_prompt_tokens // 16) for row in rows]
    assert [sample.num_output_tokens for sample in samples] == [-(-row.num_output_tokens // 16) for row in rows]
    num_shared = 0
    for one, first in zip(samples, rows, strict=True):
        assert len(one.prompt) == one.num_prompt_tokens
        for other, second in zip(samples, rows, strict=True):
            same = common(first.hash_ids or (), second.hash_ids or ())
            if first is not second and same:
                num_shared += 1
                assert one.prompt[: 32 * same] == other.prompt[: 32 * same]
                assert one.prompt[32 * same : 32 * same + 32] != other.prompt[32 * same : 32 * same + 32]
    assert num_shared


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Names that both begin with; 0 where one is the beginning of the other."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), 0)


def test_traces_without_block_names_share_nothing(tokens: LocalTokens) -> None:
    asked = options("--dataset-name", "timed_trace", "--dataset-path", AZURE)
    samples = make_samples(asked, tokens, 50, seed=0)
    assert [sample.num_prompt_tokens for sample in samples] == [row.num_prompt_tokens for row in read_trace(AZURE, 50)]
    assert len({tuple(sample.prompt[:8]) for sample in samples}) == 50
    other = make_samples(asked, tokens, 50, seed=1)
    assert [sample.num_prompt_tokens for sample in other] == [sample.num_prompt_tokens for sample in samples]
    assert other != samples


@pytest.mark.parametrize("name", ["sharegpt", "sonnet", "timed_trace"])
def test_files_that_are_missing_or_something_else(name: str, tokens: LocalTokens, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="dataset_path: is needed"):
        make_samples(options("--dataset-name", name), tokens, 1, 0)
    with pytest.raises(ParameterError, match="no such file"):
        make_samples(options("--dataset-name", name, "--dataset-path", "no/such"), tokens, 1, 0)
    file = tmp_path / "file"
    file.write_text('{"a": 1}\n' if name != "sonnet" else "\n\n")
    with pytest.raises(ParameterError, match="dataset_path: "):
        make_samples(options("--dataset-name", name, "--dataset-path", file), tokens, 1, 0)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("sharegpt", "[", "it is not JSON: "),
        ("sharegpt", "5", "it must be a list of conversations, not 5"),
        ("sharegpt", '[{"conversations": []}, 5]', "entry 1 must have a list of conversations, got 5"),
        ("sharegpt", '[{"conversations": [{"from": "a"}]}]', "entry 0 has a turn without a text as value: "),
        ("timed_trace", '{"arrival_s": 1}', "record 1 is not a request: it has no prompt_tokens: "),
        ("timed_trace", "{}\n{", "record 1 is not a request: it has no arrival_s: "),
        ("timed_trace", '{"arrival_s": "x"}', "record 1 is not a request: arrival_s must be a number, got 'x'"),
        ("timed_trace", '{"timestamp": [], "input_length": 1}', "timestamp must be a number, got []"),
        (
            "timed_trace",
            '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": 5}',
            "hash_ids must be a list",
        ),
        ("timed_trace", "TIMESTAMP,ContextTokens,GeneratedTokens\nx,1,1", "TIMESTAMP must be a date and time, got 'x'"),
        ("timed_trace", "TIMESTAMP,ContextTokens\n2023-11-16 18:01:51,1", "it has no GeneratedTokens"),
        ("timed_trace", "", "holds no request"),
        ("sharegpt", "\xff", "is not UTF-8 text"),
        ("sonnet", "\xff", "is not UTF-8 text"),
        ("timed_trace", "{\xff", "is not UTF-8 text"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_words(
    name: str, content: str, reason: str, tokens: LocalTokens, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(ParameterError) as caught:
        make_samples(options("--dataset-name", name, "--dataset-path", file), tokens, 9, 0)
    assert caught.value.parameter == "dataset_path"
    assert reason in caught.value.reason
    assert str(file) in caught.value.reason
    for name_of_ours in ("Error", "indices", "NoneType"):
        assert name_of_ours not in caught.value.reason


@pytest.mark.parametrize(
    "argv",
    [
        ["--num-prompts", "0"],
        ["--request-rate", "0"],
        ["--request-rate", "nan"],
        ["--burstiness", "inf"],
        ["--random-range-ratio", "1"],
        ["--random-range-ratio", '{"both": 0.1}'],
        ["--goodput", "itl:5"],
        ["--goodput", "ttft"],
        ["--metric-percentiles", "101"],
        ["--percentile-metrics", "ttft,x"],
        ["--header", "novalue"],
        ["--extra-body", "{"],
        ["--extra-body", "[]"],
        ["--endpoint", "v1"],
        ["--request-id-prefix", "a b"],
    ],
)
def test_bad_flags_exit_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        options(*argv)
    assert exit_.value.code == 2
    assert argv[0] in capsys.readouterr().err
