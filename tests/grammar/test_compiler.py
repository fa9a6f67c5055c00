"""Compiling: errors, the cache, limits on time, threads."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from following import grammar, writes

from jaxpage.errors import ParameterError
from jaxpage.grammar import GrammarCompiler, trial
from jaxpage.params import StructuredOutputsParams
from jaxpage.tokenizer import Tokenizer

RUNAWAY = {"allOf": [{"pattern": f"a.{{{index}}}b"} for index in range(40)]}


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("regex", "(", "unclosed group"),
        ("regex", "[a", "unclosed character class"),
        ("regex", "(?=a)", "look"),
        ("regex", "\\bfoo", "lookarounds not supported"),
        ("regex", "[^\\s\\S]", "no text matches"),
        ("regex", "(" * 2000 + ")" * 2000, "nested"),
        ("regex", "x" * 100_000, "characters"),
        ("regex", "(a|b|ab)*" * 2000, "too large"),
        ("regex", "a\ud83d", "surrogate"),
        ("choice", ["\ud83d"], "surrogate"),
        ("grammar", "hello", "line 1, column 6: Expected token ':'"),
        ("grammar", 'START: "a"', "no start rule"),
        ("grammar", 'root: "a"', "no start rule"),
        ("grammar", "start: a\na: foo", 'line 2, column 4: unknown name: "foo"'),
        ("grammar", "root ::= foo", "not found"),
        ("grammar", "root ::= (", "Expected"),
        ("grammar", "root ::= " + "(" * 5000, "nested"),
        ("grammar", "start: a\na: b\nb: a", "no text matches"),
        ("grammar", 'start: %json {"foo": 1}', "%json"),
        ("grammar", "start: <[99999]>", ""),
    ],
)
def test_so_1_what_does_not_compile_is_named(field: str, value: Any, reason: str, compiler: GrammarCompiler) -> None:
    for _ in range(2):  # the second time from the cache
        with pytest.raises(ParameterError) as caught:
            grammar(compiler, **{field: value})
        assert caught.value.parameter == f"structured_outputs.{field}"
        assert reason in caught.value.reason
        for secret in ("\n", "backtrace", ".rs:", "/work", "Traceback"):
            assert secret not in caught.value.reason
        assert 0 < len(caught.value.reason) <= 300


@pytest.mark.parametrize(
    ("wanted", "accepted", "refused"),
    [
        ({"grammar": 'root ::= "a" root | "b" | "\\u00e9" [^/]{2}'}, ["aab", "b", "éxy"], ["a", "é//"]),
        ({"grammar": 'start: "a" x\nx: /b+/'}, ["abb"], ["a"]),
        ({"grammar": '%llguidance {}\nstart: "a"'}, ["a"], ["b"]),
        ({"regex": "a/b\\d{2}"}, ["a/b12"], ["a/b1", " a/b12"]),
        ({"regex": "^a$"}, ["a"], ["aa"]),
        ({"regex": "x*"}, ["", "xx"], ["y"]),
        ({"choice": ["yes", "no", "yes"]}, ["yes", "no"], ["yesno", ""]),
        ({"json": True}, ["1", '{"a": [null, true]}'], ["{", "tru"]),
        ({"json": '{"type": "null"}'}, ["null"], ["1"]),
    ],
)
def test_what_is_accepted(wanted: Any, accepted: list[str], refused: list[str], compiler: GrammarCompiler) -> None:
    compiled = grammar(compiler, **wanted)
    for text in accepted:
        assert writes(compiled, text), text
    for text in refused:
        assert not writes(compiled, text), text


def test_a_grammar_is_compiled_once(bytes_tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(bytes_tokenizer, 294, [257], cache_size=2)
    first = grammar(compiler, json={"type": "integer"})
    started = time.perf_counter()
    for _ in range(100):
        assert grammar(compiler, json={"type": "integer"}) is first
    assert time.perf_counter() - started < 0.1
    assert grammar(compiler, json={"type": "string"}) is not first
    assert grammar(compiler, json={"type": "integer"}) is first
    grammar(compiler, regex="a")  # the string, least recently used, goes
    assert grammar(compiler, json={"type": "integer"}) is first
    grammar(compiler, regex="b")
    grammar(compiler, regex="c")
    assert grammar(compiler, json={"type": "integer"}) is not first


def test_so_1_a_schema_that_takes_too_long_is_given_up(
    bytes_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "TIME_LIMIT_S", 0.5)
    compiler = GrammarCompiler(bytes_tokenizer, 294, [257])
    started = time.perf_counter()
    with pytest.raises(ParameterError, match=r"json: takes more than 0\.5 s"):
        grammar(compiler, json=RUNAWAY)
    assert time.perf_counter() - started < 5
    assert writes(grammar(compiler, json={"type": "null"}), "null")


def test_who_waits_too_long_finds_the_outcome_later(
    bytes_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()
    monkeypatch.setattr("jaxpage.grammar.compiler.tried", lambda *args: may_go_on.wait(10) and trial.tried(*args))
    impatient = GrammarCompiler(bytes_tokenizer, 294, [257], timeout_s=0.01)
    with pytest.raises(ParameterError, match=r"takes more than 0\.01 s"):
        grammar(impatient, json={"type": "null"})
    may_go_on.set()
    [pending] = impatient._cache.values()
    pending.result(60)
    assert writes(grammar(impatient, json={"type": "null"}), "null")


def test_a_dead_worker_is_replaced(compiler: GrammarCompiler) -> None:
    grammar(compiler, regex="before")
    worker = trial._take()
    worker._process.kill()
    worker._process.wait()
    trial._idle.put(worker)
    assert writes(grammar(compiler, regex="after"), "after")


def test_many_threads(bytes_tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(bytes_tokenizer, 294, [257])
    found: list[object] = []

    def work(number: int) -> None:
        for index in range(12):
            compiled = compiler.compile(StructuredOutputsParams(regex=f"a{{{index % 6 + 1}}}"))
            assert writes(compiled, "a" * (index % 6 + 1))
        found.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(8))  # pyright: ignore
