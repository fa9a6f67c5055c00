"""``jaxpage chat``: history, commands, servers and local models, what goes wrong."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from api_client import serving
from fake_engine import FakeEngine

from jaxpage.commands import chat
from jaxpage.server.app import create_app

Say = Callable[..., int]
TLS = Path(__file__).parents[1] / "data" / "tls"


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Say:
    """Runs the command with lines piped in."""

    def run(text: str, *argv: str) -> int:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return chat.main(list(argv))

    return run


def prompts(engine: FakeEngine) -> list[str]:
    return [engine.tokenizer.decode(ids) for ids, *_ in engine.seen]


def test_history_grows_with_each_turn(engine: FakeEngine, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    assert say("Hi\n\nAgain\n") == 0
    assert capsys.readouterr().out == "Hello world\nHello world\n"
    first = "[user]Hi<|end|>[assistant]"
    assert prompts(engine) == [first, first + "Hello world<|end|>[user]Again<|end|>[assistant]"]
    assert engine.was_shut_down


def test_system_and_reset(engine: FakeEngine, say: Say) -> None:
    assert say("A\n/reset\nB\n/system  Be kind \nC\n/system\nD\n//E\n/exit\nF\n", "--system-prompt", "S") == 0
    assert prompts(engine) == [
        "[system]S<|end|>[user]A<|end|>[assistant]",
        "[system]S<|end|>[user]B<|end|>[assistant]",
        "[system]Be kind<|end|>[user]C<|end|>[assistant]",
        "[user]D<|end|>[assistant]",
        "[user]D<|end|>[assistant]Hello world<|end|>[user]/E<|end|>[assistant]",
    ]


def test_unknown_commands_are_not_said(engine: FakeEngine, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    assert say("/sytem x\n/help\n") == 0
    assert engine.seen == []
    shown = capsys.readouterr()
    assert "no such command: /sytem" in shown.err
    assert "/reset" in shown.out


def test_sampling_flags(engine: FakeEngine, say: Say) -> None:
    engine.generation_config = {"temperature": 0.6, "top_k": 7}
    assert say("", "-q", "Hi", "--temperature", "0", "--max-tokens", "2", "--stop", "x") == 0
    params = engine.seen[0][1]
    assert (params.temperature, params.top_k, params.max_tokens, params.stop) == (0, 7, 2, ["x"])


def test_an_answer_that_cannot_be_had_is_no_part_of_the_history(
    engine: FakeEngine, say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    assert say(f"{'long ' * 100}\nHi\n") == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("jaxpage: error: prompt") and shown.err.count("\n") == 1
    assert prompts(engine) == ["[user]Hi<|end|>[assistant]"]


def test_ctrl_c_stops_the_answer_and_not_the_chat(engine: FakeEngine, say: Say) -> None:
    def interrupted(prompt: object, sample: int) -> list[int]:
        if len(engine.seen) == 1:
            raise KeyboardInterrupt
        return [268]

    engine.script = interrupted
    assert say("A\nB\n") == 0
    assert prompts(engine)[1] == "[user]B<|end|>[assistant]"


def test_with_a_server(engine: FakeEngine, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(create_app(engine)) as url:
        assert say("Hi\nAgain\n", "--url", f"{url}/v1/", "--system-prompt", "S", "--temperature", "0") == 0
        assert capsys.readouterr().out == "Hello world\nHello world\n"
        assert prompts(engine)[1].startswith("[system]S<|end|>[user]Hi<|end|>[assistant]Hello world<|end|>[user]Again")
        assert engine.seen[0][1].temperature == 0
        assert say("Hi\n", "--url", url, "--model", "other") == 1
        assert "jaxpage: error: HTTP 404: " in capsys.readouterr().err
    assert say("Hi\nAgain\n", "--url", url) == 1
    assert capsys.readouterr().err.count("connection refused") == 2


def test_a_server_with_a_certificate_of_its_own(
    engine: FakeEngine, say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(create_app(engine), ssl_certfile=TLS / "cert.pem", ssl_keyfile=TLS / "key.pem") as url:
        assert say("", "-q", "Hi", "--url", url, "--insecure") == 0
    assert capsys.readouterr().out == "Hello world\n"


def test_lines_that_are_not_utf8_are_passed_over(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\nH\xc3\xb6\n"), encoding="ascii"))
    assert chat.main([]) == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("Hello world\n", "jaxpage: error: input: is not UTF-8 text\n")
    assert len(prompts(engine)) == 1 and "Hö" in prompts(engine)[0]


def test_reasoning_is_no_part_of_the_answer(say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    pieces = [chat.Piece("hm", is_reasoning=True), chat.Piece("yes")]
    heard = []

    class Thinker:
        async def pieces(self, messages):
            heard.append(list(messages))
            for piece in pieces:
                yield piece

    with asyncio.Runner() as runner:
        conversation = chat.Conversation(Thinker(), None, runner)
        conversation.take("Q")
        conversation.take("R")
    assert heard[1][1] == {"role": "assistant", "content": "yes"}
    assert capsys.readouterr().out == "hmyes\nhmyes\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--url", "http://x", "--max-model-len", "5"], "--max-model-len: is an option of the engine"),
        (["--api-key", "k"], "--api-key: needs --url"),
        (["--insecure"], "--insecure: needs --url"),
        (["--url", "http://x", "--api-key", "a b"], "--api-key: must be visible ASCII characters"),
        (["--url", "http://["], "--url: must be http://HOST"),
        (["-q", ""], "--quick: must not be empty"),
        (["-q", "a\udcff"], "--quick: is not UTF-8 text"),
        (["--stop", "a\udcff"], "--stop: is not UTF-8 text"),
        (["--temperature", "3"], "--temperature: must be in [0, 2], got 3.0"),
        (["--url", "x"], "--url: must be http://HOST"),
    ],
)
def test_flags_without_effect_and_out_of_range(
    argv: list[str], message: str, say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    assert say("Hi\n", *argv) == 1
    assert capsys.readouterr().err.startswith(f"jaxpage: error: {message}")


def test_models_without_a_template(engine: FakeEngine, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    engine.tokenizer.chat_template = None
    assert say("Hi\n") == 1
    assert "has no chat template" in capsys.readouterr().err
