"""``python -m jaxpage.serve``: options, the port, signals and exit codes."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from api_client import TOKENIZERS

from jaxpage import serve

HERE = Path(__file__).parent
SLOW = {"prompt": "Hi", "max_tokens": 300, "ignore_eos": True}


def run_serve(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxpage.serve", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@contextlib.contextmanager
def fake_server(*options: str):
    """A process that serves the fake engine: 100 tokens take a second. Gives the process and its URL."""
    command = [
        sys.executable,
        str(HERE / "serve_fake.py"),
        str(TOKENIZERS / "bytes_tokenizer"),
        "--port",
        "0",
        *options,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        ready = process.stdout.readline()
        url = re.fullmatch(r"jaxpage: ready: fake at (http://127\.0\.0\.1:\d+)/v1\n", ready)
        assert url is not None, ready + process.stderr.read()
        yield process, url[1]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_help_needs_no_model_and_no_jax():
    result = run_serve("--help")
    assert result.returncode == 0
    for flag in (
        "--host",
        "--port",
        "--api-key",
        "--max-body-bytes",
        "--shutdown-timeout",
        "--max-model-len",
        "--model",
    ):
        assert flag in result.stdout
    code = "import sys, jaxpage.serve, jaxpage.server.app; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--port", "65536"], "--port"),
        (["--port", "x"], "--port"),
        (["--max-body-bytes", "0"], "--max-body-bytes"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout"),
        (["--api-key", ""], "--api-key"),
        (["--uvicorn-log-level", "loud"], "--uvicorn-log-level"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_usage_errors_exit_with_2(options, word, capsys):
    with pytest.raises(SystemExit) as exit_:
        serve.main(options)
    assert exit_.value.code == 2
    assert word in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-model-len", "0"], "--max-model-len: must be at least 1, got 0"),
        (["--block-size", "0"], "--block-size: must be in [1, 256], got 0"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size: only 1 is supported in this version, got 2"),
        (["--trust-remote-code"], "--trust-remote-code: true is not supported: code in checkpoints is never run"),
        (["one", "--model", "two"], "two models are given: one and --model two"),
    ],
)
def test_bad_engine_options_are_one_line(options, message, capsys):
    assert serve.main(options) == 1
    assert capsys.readouterr().err == f"jaxpage: error: {message}\n"


@pytest.mark.parametrize("address", ["no.such.host.invalid", "203.0.113.1"])
def test_hosts_that_cannot_be_used(address, capsys):
    assert serve.main(["--host", address]) == 1
    assert re.fullmatch(rf"jaxpage: error: cannot listen on {address}:8000: .+\n", capsys.readouterr().err)


def test_port_in_use_is_noticed_before_the_model_is_loaded(capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert serve.main(["--port", str(port), "--model", "no such model"]) == 1
    error = capsys.readouterr().err
    assert f"127.0.0.1:{port}" in error
    assert error.count("\n") == 1


def test_options_reach_the_server():
    with fake_server("--api-key", "k1", "--api-key", "k2", "--max-body-bytes", "100") as (_, url):
        post = f"{url}/v1/completions"
        assert httpx.post(post, json={"prompt": "Hi"}).status_code == 401
        headers = {"Authorization": "Bearer k2"}
        assert httpx.post(post, json={"prompt": "Hi"}, headers=headers).status_code == 200
        assert httpx.post(post, json={"prompt": "Hi" * 100}, headers=headers).status_code == 413


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_lets_running_requests_end(sig):
    with fake_server() as (process, url):
        answers = []
        thread = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=SLOW, timeout=60))
        )
        thread.start()
        while httpx.get(f"{url}/load").json()["server_load"] == 0:
            time.sleep(0.01)
        time.sleep(0.3)  # it has arrived; now it is admitted too
        process.send_signal(sig)
        time.sleep(0.1)
        refused = httpx.post(f"{url}/v1/completions", json=SLOW)
        assert refused.status_code == 503
        thread.join()
        assert answers[0].json()["choices"][0]["text"] == "x" * SLOW["max_tokens"]
        assert process.wait(10) == 0


def test_idle_server_ends_at_once():
    with fake_server() as (process, url), httpx.Client() as client:
        client.get(f"{url}/health")  # its connection stays open and must not hold anything up
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0


@pytest.mark.parametrize("how", ["timeout", "second signal"])
def test_running_requests_are_cut_when_time_is_up(how):
    with fake_server("--shutdown-timeout", "0.3" if how == "timeout" else "60") as (process, url):
        body = SLOW | {"max_tokens": 4000, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            if how == "second signal":
                time.sleep(0.2)
                process.send_signal(signal.SIGTERM)
                assert process.wait(8) == 0
            else:
                rest = [line for line in lines if line]
                assert '"code":503' in rest[-2]
                assert rest[-1] == "data: [DONE]"
                assert process.wait(8) == 0
                assert "shut down: True" in process.stdout.read()


def test_privileged_port(capsys, monkeypatch):
    def refuse(self, address):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)  # for root no port is privileged
    assert serve.main(["--port", "80"]) == 1
    assert capsys.readouterr().err == "jaxpage: error: cannot listen on 127.0.0.1:80: Permission denied\n"
