"""The load generator against a server process with a fake engine, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from golden_data import DATA

from jaxpage.benchmarks.serving import main as bench
from jaxpage.benchmarks.serving.client import Target
from jaxpage.benchmarks.serving.datasets import Sample
from jaxpage.benchmarks.serving.load import run_load
from jaxpage.benchmarks.serving.tokens import ServerTokens
from jaxpage.client import HttpClient

SERVER_TESTS = Path(__file__).parents[1] / "server"
BYTES = str(DATA / "tokenizers" / "bytes_tokenizer")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A process that serves the fake engine with a key: each answer is x after x, a hundred a second."""
    command = [sys.executable, str(SERVER_TESTS / "serve_fake.py"), BYTES, "--port", "0", "--api-key", "k"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", ready)
        assert found is not None, ready
        yield found[0]
        process.kill()
        process.communicate()


@pytest.fixture
def measure(url: str, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs the command; gives the result it stores."""

    def run(*argv: str) -> dict[str, Any]:
        file = tmp_path / "result.json"
        assert bench.main(["--base-url", url, "--api-key", "k", "--json", str(file), *argv]) == 0
        return json.loads(file.read_text())

    return run


LENGTHS = ("--random-input-len", "20", "--random-output-len", "8", "--ignore-eos", "--num-prompts", "30")


def test_completions(
    measure: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "plot.png"
    flags = ("--request-rate", "60", "--num-warmups", "2", "--goodput", "ttft:2000", "e2e:5000", "--plot", str(plot))
    result = measure(*LENGTHS, *flags, "--save-detailed", "--metadata", "who=me")
    assert (result["completed"], result["failed"], result["failures"]) == (30, 0, {})
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (600, 240)
    assert result["input_lens"] == [20] * 30 and result["output_lens"] == [8] * 30
    assert result["generated_texts"] == ["x" * 8] * 30
    assert [len(gaps) for gaps in result["itls"]] == [7] * 30
    # A token takes 10 ms, however busy the machine that runs the tests is; 30 requests arrive in half a second.
    assert result["mean_itl_ms"] >= 9 and result["p50_ttft_ms"] >= 9 and result["mean_e2el_ms"] >= 75
    assert 0.5 <= result["duration"] < 20
    assert result["request_goodput"] == result["request_throughput"]
    assert (result["model_id"], result["request_rate"], result["who"]) == ("fake", 60, "me")
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "time to first token (TTFT)" in capsys.readouterr().out


def test_chat_with_few_at_once(measure: Callable[..., dict[str, Any]]) -> None:
    result = measure(*LENGTHS, "--backend", "openai-chat", "--max-concurrency", "10", "--tokenizer", BYTES)
    assert (result["completed"], result["total_output_tokens"]) == (30, 240)
    assert result["peak_concurrent_requests"] == 10
    assert result["request_rate"] == "inf"
    # Two thirds of them waited here for at least one of the others.
    assert result["p90_client_queue_time_ms"] > 70


def test_a_trace_keeps_its_times(measure: Callable[..., dict[str, Any]]) -> None:
    trace = str(DATA / "traces" / "azure_conv_head.csv")
    flags = ["--dataset-name", "timed_trace", "--dataset-path", trace, "--num-prompts", "20"]
    flags += ["--trace-length-divisor", "64", "--trace-time-scale", "0.05", "--ignore-eos", "--save-detailed"]
    result = measure(*flags)
    assert result["completed"] == 20
    assert result["output_lens"][:4] == [1, 2, 1, 1]
    starts = [start - result["start_times"][0] for start in result["start_times"]]
    assert starts[1] == pytest.approx(0.05 * 4.3145, abs=0.05)


def test_failures_are_counted_with_their_reasons(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.json"
    flags = ["--base-url", url, "--api-key", "k", "--json", str(file), "--num-prompts", "4", "--output-len", "2"]
    assert bench.main([*flags, "--input-len", "20", "--temperature", "9"]) == 1
    result = json.loads(file.read_text())
    assert (result["completed"], result["failed"]) == (0, 4)
    [reason] = result["failures"]
    assert re.match(r"HTTP 400: .*temperature", reason)
    assert f"     4  {reason}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--base-url", "http://127.0.0.1:1"], "cannot connect to http://127.0.0.1:1: connection refused"),
        (["--api-key", "wrong"], "HTTP 401: missing or wrong API key"),
        (["--api-key", "k", "--num-warmups", "1", "--temperature", "9"], "a warm-up request failed: HTTP 400: "),
        (["--api-key", "k", "--dataset-name", "sonnet"], "--dataset-path: is needed for --dataset-name sonnet"),
        (["--json", "/no/such/dir/x.json"], "--json: no such directory: /no/such/dir"),
        (["--result-dir", "x"], "--result-dir: needs --save-result"),
        (["--plot", "x.docx"], "--plot: must end in one of"),
    ],
)
def test_a_run_that_cannot_begin(
    argv: list[str], message: str, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert bench.main(["--base-url", url, *argv]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"jaxpage: error: {message}") and error.count("\n") == 1


def test_waits_for_a_server_only_as_long_as_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--base-url", "http://127.0.0.1:1", "--ready-check-timeout-sec", "1"]) == 1
    assert "connection refused" in capsys.readouterr().err


def test_results_named_by_themselves(url: str, tmp_path: Path) -> None:
    flags = ["--base-url", url, "--api-key", "k", "--num-prompts", "2", "--input-len", "5", "--output-len", "2"]
    assert bench.main([*flags, "--save-result", "--result-dir", str(tmp_path), "--label", "mine"]) == 0
    [file] = tmp_path.iterdir()
    assert re.fullmatch(r"mine-infqps-fake-\d{8}-\d{6}\.json", file.name)


def test_the_servers_tokenizer(url: str) -> None:
    tokens = ServerTokens(url, {})
    assert tokens.decode(tokens.encode("Hello")) == "Hello"
    assert len(tokens.ids) > 40 and max(tokens.ids) < 294
    tokens.close()


CHUNKS = {
    "completions": [{"choices": [{"text": "a"}]}, {"choices": [{"text": ""}]}, {"choices": []}],
    "chat": [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "a"}}]},
        {"choices": [{"delta": {"reasoning_content": "b"}}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    ],
}
DONE = b"data: [DONE]\n\n"


def send_to(answer: bytes, is_chat: bool = False, timeout_s: float = 5.0) -> Any:
    """The record of one request to a server that answers with ``answer`` and closes."""

    async def main() -> Any:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
            writer.write(answer)
            if b"wait" in answer:
                await reader.read()
            writer.close()
            closed.set()

        closed = asyncio.Event()
        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with HttpClient(address) as client:
                target = Target(client, "/v1/completions", is_chat, {"model": "m"}, timeout_s)
                done = await run_load(target, [Sample("x", 1, 4)], [0.0], shows_progress=False)
            await closed.wait()
        return done.records[0]

    return asyncio.run(main())


def stream(events: list[Any], end: bytes = DONE) -> bytes:
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + end
    return b"HTTP/1.1 200 OK\r\n\r\n" + body


@pytest.mark.parametrize(("kind", "count"), [("completions", 2), ("chat", 2)])
def test_servers_without_usage_are_counted_by_pieces(kind: str, count: int) -> None:
    record = send_to(stream(CHUNKS[kind]), kind == "chat")
    assert record.error is None
    assert (record.num_output_tokens, len(record.chunk_times), record.is_counted) == (count, count, False)


def test_usage_counts() -> None:
    record = send_to(
        stream([{"choices": [{"text": "abc"}]}, {"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": 9}}])
    )
    assert (record.num_output_tokens, record.num_prompt_tokens, record.is_counted) == (3, 9, True)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", "the server closed the connection without an answer"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nfull", "HTTP 503: 'full'"),
        (stream(CHUNKS["completions"], end=b""), "the stream ended without [DONE]"),
        (stream([]), "the answer has no tokens"),
        (stream([{"error": {"message": "boom"}}]), "error in mid-stream: boom"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nwait", "no complete answer within 0.2 s"),
    ],
)
def test_every_way_to_fail_has_a_reason(answer: bytes, error: str) -> None:
    record = send_to(answer, timeout_s=0.2 if b"wait" in answer else 5.0)
    assert record.error == error
    assert record.end_s > record.sent_s
