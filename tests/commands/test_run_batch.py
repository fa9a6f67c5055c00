"""``jaxpage run-batch``: results equal to the server's, bad lines, and going on after being killed at any time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from api_client import TOKENIZERS, Api
from fake_engine import FakeEngine

from jaxpage.commands import run_batch
from jaxpage.commands.batch_file import BatchFileError, read_requests, take_up

Run = Callable[..., int]


def line(custom_id: Any = "a", url: Any = "/v1/completions", method: Any = "POST", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": method, "url": url, "body": {"prompt": "Hi", **body}}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


@pytest.fixture
def run(engine: FakeEngine, files: tuple[Path, Path]) -> Run:
    """Runs the command on lines: objects, or texts as they are."""

    def run(lines: list[Any], *argv: str) -> int:
        source, target = files
        source.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))
        engine.is_dead = False
        return run_batch.main(["-i", str(source), "-o", str(target), *argv])

    return run


def results(target: Path) -> dict[str | None, dict[str, Any]]:
    """By custom_id; each at most once."""
    found = [json.loads(each) for each in target.read_text().splitlines()]
    by_id = {each["custom_id"]: each for each in found}
    assert len(by_id) == len(found)
    return by_id


def test_answers_have_openais_form(run: Run, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    chat = {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions"}
    chat["body"] = {"messages": [{"role": "user", "content": "Hé"}]}
    assert run([line("a"), chat, ""]) == 0
    found = results(files[1])
    assert list(found["a"]) == ["id", "custom_id", "response", "error"]
    assert found["a"]["error"] is None
    response = found["a"]["response"]
    assert response["status_code"] == 200
    assert response["body"]["choices"][0]["text"] == "Hello world"
    assert response["body"]["id"] == f"cmpl-{response['request_id']}"
    assert found["b"]["response"]["body"]["choices"][0]["message"]["content"] == "Hello world"
    assert found["a"]["id"] != found["b"]["id"]
    assert "2 requests answered, 0 failed, 0 bad lines" in capsys.readouterr().err


@pytest.mark.parametrize("body", [{"max_tokens": -1}, {"temperature": "hot"}, {"model": "other"}, {"prompt": ""}])
def test_errors_are_the_servers(body: dict[str, Any], run: Run, files: tuple[Path, Path], engine: FakeEngine) -> None:
    async def ask_server() -> tuple[int, Any]:
        api = Api(engine)
        response = await api.post("/v1/completions", {"prompt": "Hi"} | body)
        await api.client.aclose()
        return response.status_code, response.json()

    assert run([line("a"), line("b", **body)]) == 1
    found = {custom_id: result["response"] for custom_id, result in results(files[1]).items()}
    assert found["a"]["status_code"] == 200
    expected = asyncio.run(ask_server())
    assert expected[0] in (400, 404)
    assert (found["b"]["status_code"], found["b"]["body"]) == expected


@pytest.mark.parametrize(
    ("bad", "custom_id", "code", "message"),
    [
        ("{not json", None, "invalid_json_line", "line 2: is no JSON object: '{not json\\n'"),
        ("[1]", None, "invalid_json_line", "line 2: is no JSON object"),
        (line(None), None, "invalid_custom_id", "line 2: custom_id must be a string"),
        (line("x" * 513), None, "invalid_custom_id", "line 2: custom_id must be a string"),
        (line("b", method="GET"), "b", "invalid_method", "line 2: method must be \"POST\", got 'GET'"),
        (line("b", url="/v1/files"), "b", "invalid_url", "line 2: url must be one of /v1/chat/completions"),
        (line("b") | {"body": []}, "b", "invalid_body", "line 2: body must be an object, got []"),
        (line("b", stream=True), "b", "invalid_body", "line 2: body.stream must be false"),
    ],
)
def test_bad_lines_are_results_too(
    run: Run, files: tuple[Path, Path], bad: Any, custom_id: str | None, code: str, message: str
) -> None:
    assert run([line("a"), bad]) == 1
    found = results(files[1])
    assert found["a"]["response"]["status_code"] == 200
    assert found[custom_id]["response"] is None
    assert found[custom_id]["error"]["code"] == code
    assert found[custom_id]["error"]["message"].startswith(message)


def test_a_custom_id_is_used_once(run: Run, files: tuple[Path, Path], engine: FakeEngine) -> None:
    assert run([line("a"), line("a")]) == 1
    assert len(engine.seen) == 1
    first, second = sorted(map(json.loads, files[1].read_text().splitlines()), key=lambda each: each["error"] is None)
    assert first["error"]["message"] == "line 2: custom_id stands in line 1 too"
    assert second["response"]["status_code"] == 200
    assert run([line("a"), line("a")]) == 1, "it is said again"
    assert len(engine.seen) == 1
    assert len(files[1].read_text().splitlines()) == 2


def test_goes_on_where_it_stopped(run: Run, files: tuple[Path, Path], engine: FakeEngine) -> None:
    assert run([line("a"), line("b")]) == 0
    kept = files[1].read_text()
    assert run([line("a"), line("b"), line("c")]) == 0
    assert len(engine.seen) == 3
    assert files[1].read_text().startswith(kept)
    assert set(results(files[1])) == {"a", "b", "c"}
    assert run([line("a"), line("b"), line("c")]) == 0
    assert len(engine.seen) == 3


def test_a_half_written_line_is_asked_again(run: Run, files: tuple[Path, Path], engine: FakeEngine) -> None:
    assert run([line("a"), line("b")]) == 0
    whole = files[1].read_bytes()
    first_length = whole.index(b"\n") + 1
    for cut in (first_length, first_length + 1, len(whole) - 1):
        files[1].write_bytes(whole[:cut])
        engine.seen.clear()
        assert run([line("a"), line("b")]) == 0
        assert len(engine.seen) == 1, cut
        assert set(results(files[1])) == {"a", "b"}


def test_mended_lines_and_faults_of_the_server_are_tried_again(
    run: Run, files: tuple[Path, Path], engine: FakeEngine
) -> None:
    engine.fail_after = 1
    assert run([line("a"), "nonsense"]) == 1
    assert results(files[1])["a"]["response"]["status_code"] == 500
    engine.fail_after = None
    assert run([line("a"), line("b")]) == 0
    assert {each["response"]["status_code"] for each in results(files[1]).values()} == {200}


def test_an_engine_that_dies_leaves_the_rest_for_another_run(
    run: Run, files: tuple[Path, Path], engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(prompt: object, sample: int) -> list[int]:
        engine.is_dead = len(engine.seen) > 2
        return [268]

    engine.script = script
    batch = [line(str(number)) for number in range(10)]
    assert run(batch, "--max-concurrency", "1") == 1
    assert "the engine has stopped" in capsys.readouterr().err
    assert all(each["response"]["status_code"] == 200 for each in results(files[1]).values())
    engine.script = lambda prompt, sample: [268]
    assert run(batch) == 0
    assert len(results(files[1])) == 10


def test_no_more_run_at_once_than_wanted(run: Run, engine: FakeEngine) -> None:
    most = 0

    def script(prompt: object, sample: int) -> list[int]:
        nonlocal most
        most = max(most, len(engine.running))
        return [268] * 5

    engine.script = script
    assert run([line(str(number)) for number in range(20)], "--max-concurrency", "3") == 0
    assert most == 3


def test_outputs_of_other_batches_are_left_alone(run: Run, files: tuple[Path, Path]) -> None:
    assert run([line("a")]) == 0
    kept = files[1].read_text()
    assert run([line("b")]) == 1
    assert files[1].read_text() == kept
    files[1].write_text("notes\nof mine\n")
    assert run([line("b")]) == 1
    assert files[1].read_text() == "notes\nof mine\n"
    with pytest.raises(BatchFileError, match="line 1 is no result of a batch"):
        take_up(files[1], ["b"])


def test_files_that_cannot_be_used(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    source, target = map(str, files)
    assert run_batch.main(["-i", source, "-o", target]) == 1
    assert capsys.readouterr().err == f"jaxpage: error: --input-file: {source!r}: No such file or directory\n"
    files[0].write_text("")
    assert run_batch.main(["-i", source, "-o", source]) == 1
    assert "--output-file: must not be the input file" in capsys.readouterr().err
    assert run_batch.main(["-i", source, "-o", str(files[0].parent)]) == 1
    assert capsys.readouterr().err == f"jaxpage: error: --output-file: {str(files[0].parent)!r}: Is a directory\n"
    files[1].write_text("no result\n")
    files[0].write_text(json.dumps(line("a")) + "\n")
    assert run_batch.main(["-i", source, "-o", target]) == 1
    assert f"error: --output-file: {target}: line 1 is no result" in capsys.readouterr().err


def test_numbers_that_are_none_in_json_do_not_end_the_run(run: Run, files: tuple[Path, Path]) -> None:
    assert (
        run([line("a"), '{"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"top_p": NaN}}']) == 1
    )
    assert results(files[1])["b"]["response"]["status_code"] == 400


def test_reading_keeps_the_order(files: tuple[Path, Path]) -> None:
    files[0].write_text("".join(json.dumps(line(str(number))) + "\n" for number in range(5)))
    good, bad = read_requests(files[0])
    assert [request.custom_id for request in good] == list("01234")
    assert json.loads(good[0].body) == {"prompt": "Hi"}
    assert not bad


BATCH_WITH_FAKE_ENGINE = """
import sys, types
sys.path.insert(0, sys.argv.pop(1))
from pathlib import Path
from fake_engine import FakeEngine
from jaxpage.commands import run_batch
from jaxpage.tokenizer import Tokenizer
engine = FakeEngine(Tokenizer.from_directory(Path(sys.argv.pop(1))), [120] * 20, max_model_len=100)
engine.step_s = 0.002
module = types.ModuleType("jaxpage.engine.async_engine")
module.AsyncLLMEngine = types.SimpleNamespace(from_engine_args=lambda args: engine)
sys.modules[module.__name__] = module
sys.exit(run_batch.main())
"""


def test_killed_in_the_middle_and_started_again(files: tuple[Path, Path]) -> None:
    source, target = files
    source.write_text("".join(json.dumps(line(str(number))) + "\n" for number in range(60)))
    server_tests = Path(__file__).parents[1] / "server"
    command = [sys.executable, "-c", BATCH_WITH_FAKE_ENGINE, str(server_tests), str(TOKENIZERS / "bytes_tokenizer")]
    command += ["-i", str(source), "-o", str(target), "--max-concurrency", "4"]
    killed = subprocess.Popen(command, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not target.exists() or target.read_bytes().count(b"\n") < 10:
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    with target.open("ab") as file:
        file.write(b'{"id": "batch_req_1", "custom_id": "5')  # as if it had been killed while it wrote
    before = target.read_bytes().splitlines()[:-1]
    assert 10 <= len(before) < 60
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert f"({len(before)} were already)" in done.stderr
    assert target.read_bytes().splitlines()[: len(before)] == before, "what was answered is not touched"
    found = results(target)
    assert set(found) == {str(number) for number in range(60)}
    assert all(each["response"]["body"]["choices"][0]["text"] for each in found.values())
