"""Every option of every command with values it cannot take: one line that names the option, and never a traceback."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine

from jaxpage import serve
from jaxpage.benchmarks import latency, offline, throughput
from jaxpage.benchmarks.serving import main as bench_serve
from jaxpage.benchmarks.serving.options import build_parser as bench_parser
from jaxpage.commands import chat, generate, run_batch
from jaxpage.errors import EngineDeadError

VALUES = ("", "no such thing", "-1", "nan", "1e999", "[1", "{}", "http://[", "a\0b", "\udcff", ".")
TOGETHER = {"--coordinator", "--num-processes", "--process-id"}
"""Given alone, they are an error about the others."""


class AcceptedError(EngineDeadError):
    """The value was fine: the engine would be loaded now, or the server asked."""


def accept(*args: Any, **kwargs: Any) -> Any:
    raise AcceptedError("accepted")


@pytest.fixture(autouse=True)
def nothing_is_loaded(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``engine`` is what loading an engine gives; whoever got so far has accepted its options."""
    monkeypatch.setattr(engine, "generate", accept)
    monkeypatch.setattr(serve, "serve", accept)
    for module, name in ((bench_serve, "served_model"), (throughput, "compare"), (latency, "by_prompt_length")):
        monkeypatch.setattr(module, name, accept)
    monkeypatch.setattr(offline, "Engine", accept)
    monkeypatch.setattr(run_batch, "answer_all", accept)
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n')


def parser_of(parse: Callable[[list[str], str], Any], monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """The parser that ``parse`` makes for itself."""
    made: list[argparse.ArgumentParser] = []
    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", lambda self, *args: made.append(self) or accept())
        with pytest.raises(AcceptedError):
            parse([], "prog")
    return made[0]


def options_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    return (action for action in parser._actions if action.option_strings and action.nargs != 0)


COMMANDS: dict[str, tuple[Any, Any, list[str]]] = {
    "serve": (serve.main, serve.build_parser, ["--port", "0"]),
    "chat": (chat.main, chat.build_parser, ["-q", "Hi"]),
    "chat --url": (chat.main, chat.build_parser, ["-q", "Hi", "--url", "http://127.0.0.1:1"]),
    "generate": (generate.main, generate.build_parser, ["Hi"]),
    "run-batch": (run_batch.main, run_batch.build_parser, ["-i", "in.jsonl", "-o", "out.jsonl"]),
    "bench serve": (bench_serve.main, bench_parser, []),
    "bench throughput": (throughput.main, throughput.parse, []),
    "bench latency": (latency.main, latency.parse, ["--dataset-name", "random"]),
}


def outcome(main: Callable[..., int], argv: list[str]) -> str | None:
    """What is said on stderr; None if the options were taken."""
    stderr = io.StringIO()  # takes what is no UTF-8, as the real one does
    with contextlib.redirect_stderr(stderr):
        try:
            code = main(argv)
        except SystemExit as error:
            code = error.code
        except AcceptedError:
            return None
    said = stderr.getvalue()
    if code == 0 or said.endswith(("error: accepted\n", "connection refused\n")):
        return None
    assert code in (1, 2), (argv, code)
    return said


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_named_when_its_value_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    main, build, base = COMMANDS[name]
    parser = parser_of(build, monkeypatch) if name in ("bench throughput", "bench latency") else build("prog")
    num_refused = 0
    for action in options_of(parser):
        flag = max(action.option_strings, key=len)
        given = [] if any(each in action.option_strings for each in base[::2]) else base
        for value in VALUES:
            said = outcome(main, [*given, *_rest(base, action), f"{flag}={value}"])
            if said is None or flag in TOGETHER:
                continue
            num_refused += 1
            *usage, message = said.rstrip("\n").split("\n")
            assert "Traceback" not in said
            assert all(not line or line.startswith("usage:") or line.startswith(" ") for line in usage), said
            assert re.match(r"\S.*: error: ", message), said
            assert any(each in message for each in action.option_strings), (flag, value, message)
    assert num_refused > 20


def _rest(base: list[str], action: argparse.Action) -> list[str]:
    """What remains of ``base`` without the option that is tried."""
    pairs = list(zip(base[::2], base[1::2], strict=False))
    if not any(flag in action.option_strings for flag, _ in pairs):
        return []
    return [word for flag, value in pairs if flag not in action.option_strings for word in (flag, value)]


@pytest.mark.parametrize("command", [throughput, latency])
def test_a_data_set_without_its_file_is_noticed_before_loading(
    command: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--dataset-name", "sharegpt"]) == 1
    assert capsys.readouterr().err == "jaxpage: error: --dataset-path: is needed for --dataset-name sharegpt\n"
    assert command.main(["--dataset-name", "sonnet", "--dataset-path", "no such"]) == 1
    assert capsys.readouterr().err == "jaxpage: error: --dataset-path: no such file: 'no such'\n"
    assert command.main(["--json", "no/such/file.json"]) == 1
    assert capsys.readouterr().err == "jaxpage: error: --json: no such directory: no/such\n"
