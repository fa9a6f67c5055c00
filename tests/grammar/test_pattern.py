"""Patterns in ECMA-262's sense."""

from __future__ import annotations

import json
import re

import pytest
from following import grammar, writes
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxpage.errors import ParameterError
from jaxpage.grammar import GrammarCompiler
from jaxpage.grammar.pattern import PatternError, translated


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("a", ["xay", "a"], ["xyz", ""]),
        ("^.$", ["漢", "a", "\x85", "\t"], ["\n", "\r", "\u2028", "ab", ""]),
        ("^[あ-ん]{2}$", ["ああ"], ["あ", "あa"]),
        ("^\\d+$", ["12"], ["٣"]),
        ("^\\w$", ["a", "_"], ["é"]),
        ("^\\W$", ["é", "-"], ["a"]),
        ("^\\s$", [" ", "\ufeff", "\u3000"], ["\x85", "a"]),
        ("^[\\s\\S]$", ["\n", "a"], ["ab"]),
        ("^[^a]$", ["\n", "b"], ["a"]),
        ("^[a[b]$", ["a", "[", "b"], ["]"]),
        ("^[a&&b]$", ["a", "&", "b"], ["-"]),
        ("^[\\]\\-x-z]$", ["]", "-", "y"], ["\\"]),
        ("^[-a]$", ["-", "a"], ["b"]),
        ("^[^]$", ["a", "\n"], [""]),
        ("^\\<\\>\\/\\-#~ &$", ["<>/-#~ &"], ["a"]),
        ("^a{,2}$", ["a{,2}"], ["a", "aa"]),
        ("^x{2}?y*?$", ["xx", "xxyy"], ["x"]),
        ("^(?<year>\\d)(?:a|b)$", ["1a"], ["1"]),
        ("^\\u0041\\x42\\u{43}\\cJ$", ["ABC\n"], ["ABC"]),
        ("^\\ud83d\\ude00$", ["😀"], ["x"]),
        ("^[\\ud83d\\ude00-\\u{1F602}]$", ["😁"], ["😎"]),
        ("^\\p{Lu}$", ["A", "É"], ["a"]),
        ("^[\\b\\t]$", ["\b", "\t"], ["b", "t"]),
        ("(^a|b$)", ["ac", "cb"], ["c"]),
        ("", ["", "a"], []),
    ],
)
def test_so_2a_patterns(pattern: str, matching: list[str], others: list[str], compiler: GrammarCompiler) -> None:
    compiled = grammar(compiler, json={"type": "string", "pattern": pattern})
    for text in matching:
        assert writes(compiled, json.dumps(text, ensure_ascii=False)), text
    for text in others:
        assert not writes(compiled, json.dumps(text, ensure_ascii=False)), text


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?=a)", "look-around"), ("(?<!a)b", "look-around"), ("(?i)a", "look-around and flags"), ("(a)\\1", "backref"),
        ("\\k<a>", "backref"), ("\\bword", "boundaries"), ("[a", "closed"), ("a\\", "backslash"), ("\\y", "escape"),
        ("[b-a]", "range"), ("[\\d-z]", "range"), ("\\ud83d", "no character"), ("\\u{110000}", "no character"),
    ],
)  # fmt: skip
def test_patterns_beyond_a_grammar_are_refused(pattern: str, reason: str, compiler: GrammarCompiler) -> None:
    with pytest.raises(PatternError, match=reason):
        translated(pattern)
    with pytest.raises(ParameterError, match=f"pattern.*{reason}"):
        grammar(compiler, json={"type": "string", "pattern": pattern})


_ATOMS = st.sampled_from(
    ["a", "b", "é", ".", "\\d", "\\D", "[ab]", "[^a]", "[a-c0]", "\\.", "-", "[\\d_]", "[^\\d]", "#", "&", "/", '"']
)
_PATTERNS = st.recursive(
    _ATOMS,
    lambda inner: (
        st.tuples(inner, inner).map("".join)
        | st.tuples(inner, inner).map("(?:{0[0]}|{0[1]})".format)
        | st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}", "*?"])).map(
            "(?:{0[0]}){0[1]}".format
        )
    ),
    max_leaves=5,
)


@given(_PATTERNS, st.booleans(), st.booleans(), st.lists(st.text('ab0c_é.-#&/" x\n', max_size=5), max_size=6))
def test_patterns_as_python_reads_them(
    compiler: GrammarCompiler, pattern: str, at_start: bool, at_end: bool, texts: list[str]
) -> None:
    pattern = "^" * at_start + f"(?:{pattern})" + "$" * at_end
    compiled = grammar(compiler, json={"type": "string", "pattern": pattern})
    for text in texts:
        assume(not text.endswith("\n"))  # Python's $ also stands before a last newline
        expected = re.search(pattern, text) is not None
        assert writes(compiled, json.dumps(text, ensure_ascii=False)) == expected, (pattern, text)
