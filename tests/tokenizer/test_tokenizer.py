"""Encoding, single tokens, BOS, and loading from directories and GGUF metadata (behaviour cases BOS-*)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpage.tokenizer import Tokenizer
from jaxpage.tokenizer.pretokenizers import PRE_TOKENIZERS, byte_level
from jaxpage.tokenizer.token_bytes import byte_alphabet

DATA = Path(__file__).parent.parent / "data"
TINY = DATA / "golden" / "tiny"
GOLDEN = json.loads((TINY / "tokenizer_golden.json").read_text(encoding="utf-8"))
SPECIAL_TEXT = "</s><s><unk><0x41>"


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: ascii(case["text"])[:20])
def test_golden_tokenization(case: dict[str, Any]) -> None:
    byte_level_bpe = Tokenizer.from_directory(TINY / "byte_tokenizer")
    spm = Tokenizer.from_directory(TINY / "spm_tokenizer")
    assert byte_level_bpe.encode(case["text"], add_special_tokens=False) == case["byte_ids"]
    assert byte_level_bpe.decode(case["byte_ids"]) == case["byte_decoded"]
    assert spm.decode(case["spm_ids"]) == case["spm_decoded"]
    if case["text"] == SPECIAL_TEXT:  # parsed here, as Hugging Face does; SentencePiece alone takes it as text
        assert spm.encode(case["text"], add_special_tokens=False)[:3] == [2, 1, 0]
    else:
        assert spm.encode(case["text"], add_special_tokens=False) == case["spm_ids"]


@pytest.mark.parametrize(
    ("model", "golden"),
    [
        ("smollm2-135m-instruct", "smollm2-135m"),
        pytest.param("gemma-3-270m", "gemma3-270m", marks=pytest.mark.slow),
    ],
)
def test_gguf_prompts_exact(gguf_tokenizer: Callable[[str], Tokenizer], model: str, golden: str) -> None:
    tokenizer = gguf_tokenizer(model)
    prompts = json.loads((DATA / "golden" / "real" / f"{golden}.json").read_text(encoding="utf-8"))["prompts"]
    with np.load(DATA / "golden" / "real" / f"{golden}.npz") as arrays:
        for prompt in prompts:
            ids = arrays[f"{prompt['name']}.prompt_ids"].tolist()
            assert tokenizer.encode(prompt["text"], prompt["add_special_tokens"]) == ids, prompt["name"]
            assert tokenizer.decode(arrays[f"{prompt['name']}.greedy_ids"].tolist()) == prompt["greedy_text"]


def test_smollm_splits_every_numeric_character(gguf_tokenizer: Callable[[str], Tokenizer]) -> None:
    smol = gguf_tokenizer("smollm2-135m-instruct")
    assert [smol.token_string(i) for i in smol.encode("x 2024")] == ["x", " ", "2", "0", "2", "4"]
    for char in ("\u2460", "\u00bd"):
        assert smol.encode(" " + char)[0] == smol.encode(" ")[0]  # the blank stays apart


def test_special_ids_and_sizes(bytes_tokenizer: Tokenizer, wordmark: Tokenizer) -> None:
    assert (bytes_tokenizer.vocab_size, wordmark.vocab_size) == (294, 281)
    assert (bytes_tokenizer.bos_token_id, bytes_tokenizer.eos_token_id, bytes_tokenizer.pad_token_id) == (256, 257, 257)
    assert (wordmark.bos_token, wordmark.eos_token, wordmark.unk_token, wordmark.pad_token) == (
        "<s>",
        "</s>",
        "<unk>",
        None,
    )
    assert (bytes_tokenizer.adds_bos, wordmark.adds_bos) == (False, True)


def test_token_strings_and_bytes(bytes_tokenizer: Tokenizer, wordmark: Tokenizer, fixtures: dict[str, Any]) -> None:
    for token_id in range(256):
        assert bytes_tokenizer.token_bytes(token_id) == wordmark.token_bytes(3 + token_id) == bytes([token_id])
    for token_id, piece in fixtures["bytes_tokenizer"]["pieces_hex"].items():
        assert bytes_tokenizer.token_bytes(int(token_id)) == bytes.fromhex(piece)
    assert wordmark.token_string(271) == " It"
    assert wordmark.token_bytes(271) == b" It"
    assert bytes_tokenizer.token_string(261) == " \ufffd"
    assert wordmark.token_string(3 + 0xE2) == "\ufffd"
    assert (bytes_tokenizer.token_string(257), wordmark.token_string(1)) == ("<|eos|>", "<s>")
    assert (bytes_tokenizer.token_bytes(999), bytes_tokenizer.token_string(999)) == (b"", "")
    with pytest.raises(ValueError, match="token_id: must not be negative, got -1"):
        bytes_tokenizer.token_bytes(-1)


def test_byte_alphabet_is_a_bijection() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert (alphabet["a"], alphabet["\u0120"], alphabet["\u010a"]) == (97, 32, 10)


def test_bos_1_exactly_one(wordmark: Tokenizer) -> None:
    assert wordmark.encode("It") == [1, 271]
    assert wordmark.encode("<s>It") == [1, 271]
    assert wordmark.encode("It", add_special_tokens=False) == [271]
    assert wordmark.encode("<s>It", add_special_tokens=False) == [1, 271]
    assert wordmark.encode("") == [1]
    messages = [{"role": "user", "content": "It"}]
    assert wordmark.encode_chat(messages).count(1) == 1
    plain = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert wordmark.encode_chat(messages, chat_template=plain) == [271]


def test_bos_1c_no_end_token_behind_prompts(tmp_path: Path) -> None:
    source = DATA / "tokenizers" / "wordmark_tokenizer"
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    processor = tokenizer["post_processor"]
    processor["single"].append({"SpecialToken": {"id": "</s>", "type_id": 0}})
    processor["special_tokens"]["</s>"] = {"id": "</s>", "ids": [2], "tokens": ["</s>"]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_bytes((source / "tokenizer_config.json").read_bytes())
    assert Tokenizer.from_directory(tmp_path).encode("It") == [1, 271]


@pytest.mark.parametrize(("flag", "ids"), [(None, [1, 271]), (True, [1, 271]), (False, [271])])
def test_add_bos_token_overrides_the_post_processor(tmp_path: Path, flag: bool | None, ids: list[int]) -> None:
    source = DATA / "tokenizers" / "wordmark_tokenizer" / "tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(source.read_bytes())
    config = {"bos_token": {"content": "<s>"}, "add_bos_token": flag}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert Tokenizer.from_directory(tmp_path).encode("It") == ids


def test_spm_directory_adds_bos() -> None:
    spm = Tokenizer.from_directory(TINY / "spm_tokenizer")
    assert (spm.bos_token_id, spm.eos_token_id, spm.adds_bos) == (1, 2, True)
    assert spm.encode("Hello")[0] == 1


def test_bad_directories(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path: no tokenizer\.json or tokenizer\.model in"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\xff\xff\xff")
    with pytest.raises(ValueError, match=r"path: tokenizer\.model is not a SentencePiece model"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"path: tokenizer\.json cannot be read"):
        Tokenizer.from_directory(tmp_path)


def test_lone_surrogates_are_refused(bytes_tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"text: expected valid Unicode text, got 'a\\ud800'"):
        bytes_tokenizer.encode("a\ud800")


def test_encode_and_decode_from_several_threads(bytes_tokenizer: Tokenizer) -> None:
    texts = [f"Hello world {i} ☃😀 Madrid" for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: bytes_tokenizer.decode(bytes_tokenizer.encode(text)), texts)) == texts


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """GGUF metadata of a small byte-level tokenizer; `changes` go under tokenizer.ggml."""
    tokens = [*byte_alphabet(), "ab", "\u0120ab", "<|end|>", "<tool x>"]
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * 258 + [3, 4],
        "merges": ["a b", "\u0120 ab"],
        "eos_token_id": 258,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in {**keys, **changes}.items() if value is not None}


def test_gguf_byte_level() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata())
    ids = tokenizer.encode("ab ab<|end|><|end|><tool x>é")
    assert [tokenizer.token_string(i) for i in ids] == [
        "ab",
        " ab",
        "<|end|>",
        "<|end|>",
        "<tool x>",
        "\ufffd",
        "\ufffd",
    ]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab ab<tool x>é"
    assert (tokenizer.eos_token, tokenizer.bos_token_id, tokenizer.adds_bos) == ("<|end|>", None, False)


@pytest.mark.parametrize(
    ("changes", "adds_bos"),
    [
        ({}, False),
        ({"add_bos_token": True}, True),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
    ],
)
def test_gguf_bos(changes: dict[str, Any], adds_bos: bool) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(bos_token_id=258, **changes))
    assert tokenizer.adds_bos is adds_bos
    assert (tokenizer.encode("ab")[0] == 258) is adds_bos


def llama_metadata(**changes: Any) -> dict[str, Any]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "ab", "\u2581ab"]
    keys = {
        "model": "llama",
        "tokens": pieces,
        "scores": [0.0] * 259 + [-9.0, -9.0, -9.0, -1.0, -2.0],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * 5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in {**keys, **changes}.items() if value is not None}


@pytest.mark.parametrize(("prefix", "pieces"), [(None, [" ab", " ab"]), (True, [" ab", " ab"]), (False, ["ab", " ab"])])
def test_gguf_llama(prefix: bool | None, pieces: list[str]) -> None:
    tokenizer = Tokenizer.from_gguf(llama_metadata(add_space_prefix=prefix))
    ids = tokenizer.encode("ab ab")
    assert ids[0] == 1
    assert [tokenizer.token_string(i) for i in ids[1:]] == pieces
    assert tokenizer.decode(ids[1:]) == "ab ab"
    assert tokenizer.decode(tokenizer.encode("☃ a\n"), skip_special_tokens=True) == "☃ a\n"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, r"tokenizer\.ggml\.model: 'None' is not supported; supported: gpt2, llama"),
        (byte_level_metadata(model="t5"), "'t5' is not supported"),
        (byte_level_metadata(pre="qwen99"), r"tokenizer\.ggml\.pre: 'qwen99' is not known; known: .*smollm"),
        (byte_level_metadata(tokens=None), r"tokenizer\.ggml\.tokens: expected a list, got None"),
        (byte_level_metadata(merges=["a zz"]), r"tokenizer\.ggml\.merges: 'a zz' does not join"),
        (byte_level_metadata(token_type=[1]), r"tokenizer\.ggml\.token_type: 1 entries for 260 tokens"),
        (byte_level_metadata(eos_token_id=999), r"tokenizer\.ggml\.eos_token_id: 999 is not an id below 260"),
        (llama_metadata(scores=[]), r"tokenizer\.ggml\.scores: 0 entries for 264 tokens"),
    ],
)
def test_gguf_errors(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(metadata)


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt-2", "It's 1234  x\n", ["It", "'s", " 1234", " ", " x", "\n"]),
        ("llama-bpe", "IT'S 12345\n\n x", ["IT", "'S", " ", "123", "45", "\n\n", " x"]),
        ("qwen2", "a 123", ["a", " ", "1", "2", "3"]),
        ("smollm", "a 12\u2460", ["a", " ", "1", "2", "\u2460"]),
        ("tekken", "JsonValue don't 12", ["Json", "Value", " don", "'t", " ", "1", "2"]),
        ("gpt-4o", "JsonValue don't 1234", ["Json", "Value", " don't", " ", "123", "4"]),
        ("deepseek-v3", "x=1234 漢字ab", ["x", "=", "123", "4", " ", "漢字", "ab"]),
    ],
)
def test_pre_tokenizers_cut(name: str, text: str, pieces: list[str]) -> None:
    cut = byte_level(PRE_TOKENIZERS[name].splits).pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in cut] == pieces


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_pre_tokenizers_lose_nothing(name: str) -> None:
    text = "Hi there's  12345 漢字 é\u0301 ½①\r\n\t{x}_y :-) end"
    cut = byte_level(PRE_TOKENIZERS[name].splits).pre_tokenize_str(text)
    alphabet = byte_alphabet()
    assert bytes(alphabet[char] for piece, _ in cut for char in piece).decode() == text


def test_import_is_light() -> None:
    code = "import sys, jaxpage.tokenizer; print(sorted({'jax', 'torch', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
