"""Incremental text: whole characters, left context, stop strings (behaviour cases DET-* and STOP-*)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.tokenizer import IncrementalDetokenizer, Tokenizer

DATA = Path(__file__).parent.parent / "data"
BYTES = Tokenizer.from_directory(DATA / "tokenizers" / "bytes_tokenizer")
WORDMARK = Tokenizer.from_directory(DATA / "tokenizers" / "wordmark_tokenizer")
BYTES_BACKEND = tokenizers.Tokenizer.from_file(str(DATA / "tokenizers" / "bytes_tokenizer" / "tokenizer.json"))
WORDMARK_BACKEND = tokenizers.Tokenizer.from_file(str(DATA / "tokenizers" / "wordmark_tokenizer" / "tokenizer.json"))
KLM, N, OP, Q, X, Y, EOS = 264, 78, 265, 81, 88, 89, 257


def stream(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    ends: bool = False,
    chunk: int = 1,
    **options: object,
) -> tuple[list[str], str | None, IncrementalDetokenizer]:
    """Feeds `output` in chunks and returns the deltas; `ends`: the last id is the ending id."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, **options)  # pyright: ignore[reportArgumentType]
    deltas = []
    found = None
    for start in range(0, len(output), chunk):
        ids = output[start : start + chunk]
        found = detokenizer.append(ids, suppress_last_text=ends and start + chunk >= len(output))
        deltas.append(detokenizer.take_delta())
        if found is not None:
            break
    detokenizer.finish()
    deltas.append(detokenizer.take_delta())
    assert "".join(deltas) == detokenizer.text
    assert detokenizer.token_offsets == sorted(detokenizer.token_offsets)
    return deltas, found, detokenizer


def text_of(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], **options: object) -> str:
    return stream(tokenizer, prompt, output, **options)[2].text  # pyright: ignore[reportArgumentType]


def difference(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], skip: bool) -> str:
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    return tokenizer.decode([*prompt, *output], skip_special_tokens=skip).removeprefix(before)


def test_det_1_cut_characters_arrive_whole() -> None:
    deltas, _, _ = stream(BYTES, [120], [97, 261, 131, 240, 262, 128, 98, EOS], ends=True)
    assert deltas == ["a", " ", "☃", "", "", "😀", "b", "", ""]


def test_det_1b_states_are_separate() -> None:
    first, second = IncrementalDetokenizer(BYTES, [120]), IncrementalDetokenizer(BYTES, [120])
    for a, b in zip([97, 240, 262, 128], [261, 131, 98, 98], strict=True):
        first.append([a])
        second.append([b])
    assert (first.text, second.text) == ("a😀", " ☃bb")


def test_det_1c_half_characters_are_flushed_when_certain() -> None:
    assert text_of(BYTES, [120], [97, 261]) == "a \ufffd"
    deltas, _, _ = stream(BYTES, [120], [97, 240, 262, 98, 98, EOS], ends=True)
    assert deltas == ["a", "", "", "\ufffdb", "b", "", ""]


@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        ([1, 278], [274, 260, 271, 280, 2], " end. It is"),
        ([1], [274, 260, 271, 280, 2], "end. It is"),
        ([1, 278], [260, 271, 280, 2], ". It is"),
        ([1], [260, 271, 280, 2], ". It is"),
        ([], [271], "It"),
        ([1, 259], [271], " It"),
    ],
)
def test_det_2_hidden_blanks(prompt: list[int], output: list[int], text: str) -> None:
    assert text_of(WORDMARK, prompt, output) == text
    assert difference(WORDMARK, prompt, output, skip=True) == text


@pytest.mark.parametrize("clean_up", [True, False])
def test_det_2a_no_tidying(tmp_path: Path, clean_up: bool) -> None:
    source = DATA / "tokenizers" / "bytes_tokenizer"
    (tmp_path / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["clean_up_tokenization_spaces"] = clean_up
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = Tokenizer.from_directory(tmp_path)
    text = "Hello , do n't . Yes !"
    assert text_of(tokenizer, [120], [*text.encode(), EOS], ends=True) == text
    assert tokenizer.decode(list(text.encode())) == text


def test_det_2c_special_tokens_in_the_middle() -> None:
    assert text_of(BYTES, [120], [97, 258, 98]) == "ab"
    assert text_of(BYTES, [120], [97, 258, 98], skip_special_tokens=False) == "a<|end|>b"
    assert text_of(BYTES, [120], [226, 152, 258, 131]) == "☃"


@pytest.mark.parametrize("stop", [(), ("zzz",)])
@pytest.mark.parametrize("prompt", [[120], [226] * 300])
def test_det_3_nothing_visible(prompt: list[int], stop: tuple[str, ...]) -> None:
    assert stream(BYTES, prompt, [EOS], ends=True, stop=stop)[0] == ["", ""]
    assert text_of(BYTES, prompt, [256, 256], stop=stop) == ""


def test_det_3a_first_token_is_the_stop() -> None:
    for include, text in ((False, ""), (True, ".\n")):
        _, found, detokenizer = stream(BYTES, [120], [275, 97], stop=[".\n"], include_stop_str_in_output=include)
        assert (found, detokenizer.text, len(detokenizer.token_offsets)) == (".\n", text, 1)


@pytest.mark.parametrize(
    ("stop", "output", "include", "expected"),
    [
        (["KLMNOPQ"], [KLM, N, OP, Q, 97], False, ("", "KLMNOPQ", 4)),
        (["KLMNOPQ"], [KLM, N, X, Y], False, ("KLMNXY", None, 4)),
        (["KLMNOPQ"], [KLM, N], False, ("KLMN", None, 2)),
        (["NOP", "KLMNOPQR"], [KLM, N, OP, Q], False, ("KLM", "NOP", 3)),
        (["KLMNOPQ"], [KLM, N, OP, Q, 97], True, ("KLMNOPQ", "KLMNOPQ", 4)),
    ],
)
@pytest.mark.parametrize("chunk", [1, 2, 9])
def test_stop_1_spread_over_tokens(
    stop: list[str], output: list[int], include: bool, expected: tuple[str, str | None, int], chunk: int
) -> None:
    _, found, detokenizer = stream(BYTES, [120], output, stop=stop, include_stop_str_in_output=include, chunk=chunk)
    assert (detokenizer.text, found, len(detokenizer.token_offsets)) == expected


def test_stop_1a_holds_back_no_more_than_needed() -> None:
    deltas, found, _ = stream(BYTES, [], [120] * 20 + [97, 98, 120, EOS], ends=True, stop=["abcdefghij"])
    assert deltas == ["x"] * 20 + ["", "", "abx", "", ""]
    assert found is None


def test_stop_1b_inside_tokens_and_characters() -> None:
    _, found, detokenizer = stream(BYTES, [], [268, 269, 274], stop=["lo wo"])
    assert (found, detokenizer.text, len(detokenizer.token_offsets)) == ("lo wo", "Hel", 3)
    assert stream(BYTES, [], [97, 261, 131, 98], stop=["☃"])[0] == ["a", " ", "", ""]
    _, found, detokenizer = stream(BYTES, [], [101, 204, 129, EOS], ends=True, stop=["\u00e9"])
    assert (found, detokenizer.text) == (None, "e\u0301")


def test_stop_1c_prompt_takes_no_part() -> None:
    prompt = list(b"xxKLM")
    _, found, detokenizer = stream(BYTES, prompt, [N, OP, Q, EOS], ends=True, stop=["KLMNOPQ", "xx"])
    assert (found, detokenizer.text) == (None, "NOPQ")


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_stop_2_ending_token(skip: bool, include: bool) -> None:
    output = [*b"sailing.", EOS]
    text = text_of(BYTES, [120], output, ends=not include, skip_special_tokens=skip)
    assert text == ("sailing.<|eos|>" if include and not skip else "sailing.")


def test_stop_2a_ordinary_token_as_stop_id() -> None:
    assert text_of(BYTES, [], [97, 275], ends=True) == "a"
    assert text_of(BYTES, [], [97, 275], ends=False) == "a.\n"


def test_stop_2b_suppressed_text_is_not_searched() -> None:
    _, found, detokenizer = stream(BYTES, [], [KLM, N, OP], ends=True, stop=["NOP"])
    assert (found, detokenizer.text) == (None, "KLMN")


@pytest.mark.parametrize(
    ("stop", "output", "expected"),
    [(["b", "a"], [286], "a"), (["ab", "abc"], [287], "ab"), (["abc", "ab"], [287], "abc")],
)
def test_stop_2c_earliest_then_list_order(stop: list[str], output: list[int], expected: str) -> None:
    _, found, detokenizer = stream(BYTES, [], output, stop=stop)
    assert (found, detokenizer.text) == (expected, "")


def test_stop_3_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="stop: must not hold an empty string"):
        IncrementalDetokenizer(BYTES, [], stop=["yes", ""])


@pytest.mark.parametrize(
    ("stop", "output", "text"), [(" ", [97, 32, 98], "a"), ("\n", [97, 275, 98], "a."), ("a", [97], "")]
)
def test_stop_3c_blanks_are_legal(stop: str, output: list[int], text: str) -> None:
    _, found, detokenizer = stream(BYTES, [], output, stop=[stop])
    assert (found, detokenizer.text) == (stop, text)


@pytest.mark.parametrize(
    ("min_tokens", "output", "expected"),
    [
        (0, b"abxab", ("ab", "")),
        (2, b"abxab", ("ab", "abx")),  # completed by token 2: too early
        (1, b"abxab", ("ab", "")),  # begins in token 1, completed by token 2
        (5, b"abxab", (None, "abxab")),
        (4, b"abxab", ("ab", "abx")),
    ],
)
@pytest.mark.parametrize("chunk", [1, 3, 5])
def test_min_tokens_delays_the_search(
    min_tokens: int, output: bytes, expected: tuple[str | None, str], chunk: int
) -> None:
    _, found, detokenizer = stream(BYTES, [], list(output), stop=["ab"], min_tokens=min_tokens, chunk=chunk)
    assert (found, detokenizer.text) == expected


def test_token_offsets_count_characters_before_each_token() -> None:
    _, _, detokenizer = stream(BYTES, [120], [97, 261, 131, 240, 262, 128, 98, EOS], ends=True, stop=["😀bc"])
    assert detokenizer.token_offsets == [0, 1, 2, 3, 3, 3, 4, 5]


def test_append_after_the_end_is_a_broken_invariant() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, [])
    detokenizer.finish()
    with pytest.raises(AssertionError, match="end of a sequence"):
        detokenizer.append([97])


ids_of_bytes = st.lists(st.integers(0, 299) | st.sampled_from([261, 131, 240, 262, 128, 226, 152]), max_size=30)
ids_of_wordmark = st.lists(st.integers(0, 285) | st.sampled_from([229, 155, 134, 259, 271, 274]), max_size=30)


@given(ids=ids_of_bytes, skip=st.booleans())
def test_byte_level_decode_equals_the_tokenizers_library(ids: list[int], skip: bool) -> None:
    assert BYTES.decode(ids, skip) == BYTES_BACKEND.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=30), skip=st.booleans())
def test_byte_fallback_decode_equals_the_tokenizers_library(text: str, skip: bool) -> None:
    ids = WORDMARK.encode(text)
    assert WORDMARK.decode(ids, skip) == WORDMARK_BACKEND.decode(ids, skip_special_tokens=skip)


def test_byte_fallback_marks_each_stray_byte_and_keeps_whole_characters() -> None:
    snowman = [3 + byte for byte in "☃".encode()]
    assert WORDMARK.decode([261, *snowman[:2], 262]) == "I\ufffd\ufffdt"
    assert WORDMARK.decode([*snowman, 3 + 0xF0]) == "☃\ufffd"


@given(
    case=st.tuples(st.just(BYTES), ids_of_bytes, ids_of_bytes)
    | st.tuples(st.just(WORDMARK), ids_of_wordmark, ids_of_wordmark),
    skip=st.booleans(),
    chunk=st.integers(1, 5),
)
def test_joined_deltas_equal_the_decoded_difference(
    case: tuple[Tokenizer, list[int], list[int]], skip: bool, chunk: int
) -> None:
    tokenizer, prompt, output = case
    whole = tokenizer.decode([*prompt, *output], skip_special_tokens=skip)
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    text = text_of(tokenizer, prompt, output, skip_special_tokens=skip, chunk=chunk)
    while not whole.startswith(before):  # the output completes the prompt's half character: its U+FFFD gives way
        assert before.endswith("\ufffd")
        before = before[:-1]
    assert text == whole.removeprefix(before)


@given(output=st.lists(st.sampled_from([97, 98, 99, 286, 287, 120]), max_size=14), data=st.data())
def test_stop_search_equals_a_search_of_the_whole_text(output: list[int], data: st.DataObject) -> None:
    stops = data.draw(st.lists(st.text("abcx", min_size=1, max_size=4), min_size=1, max_size=3))
    min_tokens = data.draw(st.integers(0, 4))
    _, found, detokenizer = stream(BYTES, [], output, stop=stops, min_tokens=min_tokens)
    expected_text, expected = BYTES.decode(output), None
    floor = len(BYTES.decode(output[:min_tokens]))
    for end in range(min_tokens + 1, len(output) + 1):
        text = BYTES.decode(output[:end])
        matches = [
            (begin, order, stop)
            for order, stop in enumerate(stops)
            for begin in range(len(text))
            if text.startswith(stop, begin) and begin + len(stop) > floor
        ]
        if matches:
            begin, _, expected = min(matches)
            expected_text = text[:begin]
            break
    assert (found, detokenizer.text) == (expected, expected_text)


def test_det_1a_real_vocabulary(gguf_tokenizer: Callable[[str], Tokenizer]) -> None:
    smol = gguf_tokenizer("smollm2-135m-instruct")
    deltas, _, detokenizer = stream(smol, [], [81, 4636, 242, 221, 10813, 242, 218, 82])
    assert detokenizer.text == "a ☃😀b"
    assert "\ufffd" not in "".join(deltas)
    texts = [
        "吾輩は猫である。名前はまだ無い。",
        "👩‍👩‍👧‍👦🇫🇷",
        "ﷺ ⅞ ½ ①",
        "\u202etest\u202e",
        "T\u0337\u0322o\u0337",
        "\ufeff\u0000 x",
    ]
    for text in texts:
        ids = smol.encode(text)
        assert text_of(smol, [], ids) == smol.decode(ids) == text


def test_det_2b_indentation_survives(gguf_tokenizer: Callable[[str], Tokenizer]) -> None:
    smol = gguf_tokenizer("smollm2-135m-instruct")
    prompt, solution = "def f(x):\n", "    for i in range(3):\n        x += i\n    return x\n"
    output = smol.encode(solution, add_special_tokens=False)
    for chunk in (1, 4):
        assert text_of(smol, smol.encode(prompt), output, chunk=chunk) == solution
    assert text_of(smol, [1], [81, 2, 82]) == "ab"
    assert text_of(smol, [1], [81, 2, 82], skip_special_tokens=False) == "a<|im_end|>b"
