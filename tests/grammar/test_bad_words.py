"""Bad words: what is masked after which tokens, whatever tokens a word is made of."""

from __future__ import annotations

import numpy as np
import pytest
from golden_data import DATA

from jaxpage.errors import ParameterError
from jaxpage.grammar import ConstraintBuilder
from jaxpage.params import SamplingParams
from jaxpage.request import TokenConstraint
from jaxpage.tokenizer import Tokenizer

V = 294


@pytest.fixture(scope="module")
def builder() -> ConstraintBuilder:
    return ConstraintBuilder(Tokenizer.from_directory(DATA / "tokenizers" / "bytes_tokenizer"), V, [257])


def constraint(builder: ConstraintBuilder, *words: str) -> TokenConstraint:
    params = SamplingParams(bad_words=words)
    builder.check(params)
    built = builder.build(params)
    assert built is not None
    return built


def banned(each: TokenConstraint) -> set[int]:
    words = np.full(-(-V // 32), -1, np.int32)
    each.mask(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:V] == 0).tolist())


def after(each: TokenConstraint, *token_ids: int) -> set[int]:
    each = each.fork()
    for token_id in token_ids:
        each.accept(token_id)
    return banned(each)


def test_bad_1_both_tokenizations_and_the_form_after_a_blank(builder: ConstraintBuilder) -> None:
    # "Madrid" is [281, 283], " Madrid" is [285].
    word = constraint(builder, "Madrid")
    assert banned(word) == {285}
    assert after(word, 281) == {285, 283}
    assert after(word, 281, 97) == {285}
    assert after(word, *b"Madri") == {285, ord("d")}
    assert after(word, 32, 281) == {285, 283}


def test_bad_1_a_word_with_its_blank_is_banned_in_that_form_only(builder: ConstraintBuilder) -> None:
    word = constraint(builder, " Madrid")
    assert banned(word) == {285}
    assert after(word, 281) == {285}
    assert after(word, 32, 281) == {285, 283}


def test_bad_1_ab_as_one_and_as_two_tokens(builder: ConstraintBuilder) -> None:
    word = constraint(builder, "ab")
    assert 286 in banned(word) and 98 not in banned(word)
    assert {286, 98} <= after(word, 97)


def test_bad_1a_overlaps(builder: ConstraintBuilder) -> None:
    word = constraint(builder, "aba")
    assert 97 in after(word, 97, 98)
    assert 97 in after(word, 97, 98, 99, 97, 98)
    assert 97 not in after(word, 98)
    # A repeated beginning does not hide the word that begins later.
    assert 98 in after(constraint(builder, "aab"), 97, 97, 97)


def test_a_special_token_does_not_break_a_word(builder: ConstraintBuilder) -> None:
    word = constraint(builder, "Madrid")
    assert after(word, 281, 258) == {285, 283}


def test_forks_are_independent(builder: ConstraintBuilder) -> None:
    word = constraint(builder, "ab")
    other = word.fork()
    other.accept(97)
    assert 98 in banned(other) and 98 not in banned(word)


def test_bad_1c_words_without_tokens_are_refused() -> None:
    tokenizer = Tokenizer.from_directory(DATA / "tokenizers" / "bytes_tokenizer")
    tokenizer.encode = lambda text, add_special_tokens=True: []  # type: ignore[method-assign]
    with pytest.raises(ParameterError, match="no tokens"):
        ConstraintBuilder(tokenizer, V, [257]).check(SamplingParams(bad_words=["\u0004"]))


@pytest.mark.parametrize("words", [[""], ["a"] * 129, "word", [5], ["x" * 2000], 7])
def test_bad_1c_wrong_lists(words: object) -> None:
    with pytest.raises(ParameterError, match="bad_words"):
        SamplingParams(bad_words=words)  # type: ignore[arg-type]


def test_no_bad_words_is_no_constraint(builder: ConstraintBuilder) -> None:
    assert builder.build(SamplingParams()) is None
    assert builder.build(SamplingParams(bad_words=[])) is None
