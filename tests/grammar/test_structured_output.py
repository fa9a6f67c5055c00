"""The cases of structured output, token by token."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from following import BYTES_END, allowed, grammar, may_write, walk, writes

from jaxpage.errors import ParameterError
from jaxpage.grammar import GrammarCompiler, GrammarError
from jaxpage.tokenizer import Tokenizer

TOKENIZERS = Path(__file__).parents[1] / "data" / "tokenizers"
WORDS = ["夏目", "🐈", "naïve", 'a"b\\c\n']
Smol = tuple[Tokenizer, GrammarCompiler]


def preferring(*wanted: int) -> Callable[[Sequence[int], int], int]:
    """Forced logits: these ids are best, in this order; else the lowest id, and an end only where nothing else is."""

    def choose(ids: Sequence[int], position: int) -> int:
        for token_id in wanted:
            if token_id in ids:
                return token_id
        return next((token_id for token_id in ids if token_id != BYTES_END), BYTES_END)

    return choose


def written(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("ensure_ascii", [True, False])
def test_so_2_text_outside_ascii(word: str, ensure_ascii: bool, compiler: GrammarCompiler, smol: Smol) -> None:
    text = json.dumps(word, ensure_ascii=False)
    for schema, document in [
        ({"enum": WORDS}, text),
        ({"const": word}, text),
        ({"properties": {word: {"const": 1}}, "required": [word], "type": "object"}, f"{{{text}: 1}}"),
    ]:
        sent = json.dumps(schema, ensure_ascii=ensure_ascii)
        assert writes(grammar(compiler, json=sent), document)
        assert not writes(grammar(compiler, json=sent), document.replace(text, '"x"'))
        tokenizer, for_smol = smol
        ids = tokenizer.encode(document, add_special_tokens=False)
        assert may_write(grammar(for_smol, json=sent), ids, end=2, num_ids=tokenizer.vocab_size)


@pytest.mark.parametrize("word", [*WORDS, "\x01", "\x7f", "</s>", "/x/", "\u2028", "<|eos|>", "%json"])
def test_so_2_choices_outside_ascii(word: str, compiler: GrammarCompiler) -> None:
    compiled = grammar(compiler, choice=[*WORDS, word])
    assert writes(compiled, word)
    assert not writes(compiled, word + "x")


def test_so_2a_lengths_count_code_points(compiler: GrammarCompiler) -> None:
    compiled = grammar(compiler, json={"type": "string", "minLength": 2, "maxLength": 2})
    texts = ["😀😀", "ab", "\n\n", "a", "abc", "😀"]
    assert [writes(compiled, json.dumps(text, ensure_ascii=False)) for text in texts] == [True] * 3 + [False] * 3


def test_so_2b_escapes(compiler: GrammarCompiler) -> None:
    broken = ['"\\ud83d"', '"\n"', '"\x01"', '"\\x"', '"\\ud83d\\u0041"', b'"\xff"', b'"\xed\xa0\xbd"']
    narrower = ['"\\u00e9"', '"\\ud83d\\ude00"', '"\\/"']
    in_schema = grammar(compiler, json={"type": "string"})
    as_object = grammar(compiler, json_object=True)
    for text in broken:
        raw = text.encode() if isinstance(text, str) else text
        assert not writes(in_schema, raw)
        assert not writes(as_object, b'{"a":' + raw + b"}")
    for text in narrower:  # documented: strings of a schema have one spelling
        assert not writes(in_schema, text)
        assert writes(as_object, f'{{"a":{text}}}')
    for text in ('"\\n\\t\\"\\\\"', '"é😀\u2028"'):
        assert writes(in_schema, text)


def test_so_3_a_model_that_likes_blanks(compiler: GrammarCompiler, bytes_tokenizer: Tokenizer) -> None:
    schema = {"properties": {"a": {"type": "boolean"}, "b": {"enum": ["x"]}}, "required": ["a", "b"], "type": "object"}
    for compiled in (grammar(compiler, json=schema), grammar(compiler, json=schema | {"additionalProperties": False})):
        ids, has_ended = walk(compiled, preferring(10, 32, 13, 9, 125), 64)
        assert has_ended
        jsonable = json.loads(written(ids, bytes_tokenizer))
        assert set(jsonable) == {"a", "b"}
    ids, has_ended = walk(grammar(compiler, json={"type": "string"}), preferring(10, 97), 6)
    assert (written(ids, bytes_tokenizer), has_ended) == ('"aaaaa', False)


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        ({"type": "number"}, b"9"),
        ({"type": "integer"}, b"9"),
        ({"type": "string"}, b"a"),
        ({"type": "array", "items": {"type": "integer"}}, b",1"),
    ],
)
def test_so_3a_values_without_an_end(schema: Any, wanted: bytes, compiler: GrammarCompiler) -> None:
    """They run to the length limit; every token is legal, and at every point the value can still be ended."""
    compiled = grammar(compiler, json=schema)
    ids, has_ended = walk(compiled, preferring(*wanted), 50)
    assert not has_ended
    for length in (1, 20, 50):
        ended = walk(compiled, lambda legal, i, n=length: ids[i] if i < n else _closing(legal), 60)
        assert ended[1]


def _closing(legal: Sequence[int]) -> int:
    return next(each for each in (BYTES_END, *b'"]', *b"1") if each in legal)


def test_so_3b_after_the_last_brace(compiler: GrammarCompiler) -> None:
    for wanted, text, after in [
        ({"json": {"const": {"a": 1}}}, '{"a": 1}', {BYTES_END}),
        ({"json_object": True}, "{}", {BYTES_END}),
        ({"choice": ["yes", "yes please"]}, "yes", {BYTES_END, 32}),
        ({"choice": ["yes", "yes please"]}, "yes please", {BYTES_END}),
        ({"regex": "a|ab"}, "a", {BYTES_END, 98}),
        ({"regex": "a|ab"}, "ab", {BYTES_END}),
        ({"grammar": 'start: "a"'}, "a", {BYTES_END}),
    ]:
        matcher = grammar(compiler, **wanted).matcher()
        for byte in text.encode():
            matcher.accept(byte)
        assert allowed(matcher) == after


def test_every_way_to_cut_a_text_into_tokens_is_open(compiler: GrammarCompiler) -> None:
    matcher = grammar(compiler, choice=["abcKLM"]).matcher()
    assert allowed(matcher) == {97, 286, 287}  # a, ab, abc
    matcher.accept(287)
    assert allowed(matcher) == {75, 263, 264}  # K, KL, KLM


def test_all_end_ids_and_no_other_special_token(bytes_tokenizer: Tokenizer) -> None:
    compiled = grammar(GrammarCompiler(bytes_tokenizer, 294, [257, 97, 258]), regex="[a-c]*|<.*")
    assert allowed(compiled.matcher(), 294) == {
        60,
        98,
        99,
        286,
        287,
        97,
        257,
        258,
    }  # an end id is no text, even if it looks so
    matcher = compiled.matcher()
    matcher.accept(60)
    assert not allowed(matcher, 294) & {256, 259}
    with pytest.raises(ParameterError, match="end token"):
        grammar(GrammarCompiler(bytes_tokenizer, 294, []), regex="a")


def test_forks_are_independent(compiler: GrammarCompiler) -> None:
    matcher = grammar(compiler, choice=["ab", "ac"]).matcher()
    matcher.accept(97)
    other = matcher.fork()
    matcher.accept(98)
    assert allowed(matcher) == {BYTES_END}
    assert allowed(other) == {98, 99}


def test_a_forbidden_token_ends_in_an_error(compiler: GrammarCompiler) -> None:
    matcher = grammar(compiler, choice=["ab"]).matcher()
    matcher.accept(120)
    with pytest.raises(GrammarError):
        allowed(matcher)


def test_so_2_characters_from_byte_tokens_of_a_wordmark_tokenizer() -> None:
    tokenizer = Tokenizer.from_directory(TOKENIZERS / "wordmark_tokenizer")
    by_bytes = {tokenizer.token_bytes(token_id): token_id for token_id in range(3, tokenizer.vocab_size)}
    compiled = grammar(GrammarCompiler(tokenizer, tokenizer.vocab_size, [2]), choice=WORDS)
    for word in WORDS:
        ids = [by_bytes[bytes([byte])] for byte in word.encode()]
        assert may_write(compiled, ids, end=2, num_ids=tokenizer.vocab_size)
        assert not may_write(compiled, ids[:-1], end=2, num_ids=tokenizer.vocab_size)
