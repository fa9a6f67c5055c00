"""``python -m jaxpage.serve``: options, the port, signals and exit codes."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from api_client import TOKENIZERS

from jaxpage import serve
from jaxpage.server import cli
from jaxpage.server.options import ServerOptions

HERE = Path(__file__).parent
TLS = HERE.parent / "data" / "tls"
SLOW = {"prompt": "Hi", "max_tokens": 300, "ignore_eos": True}


def run_serve(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxpage.serve", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@contextlib.contextmanager
def fake_server(*options: str, environment: dict[str, str] | None = None):
    """A process that serves the fake engine: 100 tokens take a second. Gives the process and its URL."""
    tokenizer = str(TOKENIZERS / "bytes_tokenizer")
    place = () if "--uds" in options else ("--port", "0")
    command = [sys.executable, str(HERE / "serve_fake.py"), tokenizer, *place, *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | (environment or {})
    )
    try:
        ready = process.stdout.readline()
        where = re.fullmatch(r"jaxpage: ready: fake at (?:(https?://127\.0\.0\.1:\d+)/v1|(unix:.+))\n", ready)
        assert where is not None, ready + process.stderr.read()
        yield process, where[1] or where[2]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_tls_with_certificates_of_clients(tmp_path):
    files = ("--ssl-certfile", str(TLS / "cert.pem"), "--ssl-keyfile", str(TLS / "key.pem"))
    with fake_server(*files, "--ssl-ca-certs", str(TLS / "cert.pem"), "--ssl-cert-reqs", "2") as (_, url):
        assert url.startswith("https://")
        context = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
        with pytest.raises((httpx.HTTPError, ssl.SSLError)):
            httpx.get(f"{url}/health", verify=context)
        context.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
        assert httpx.get(f"{url}/health", verify=context).status_code == 200


def test_unix_socket_and_path_in_front(tmp_path):
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)  # a server that was killed leaves its file
    with fake_server("--uds", path, "--root-path", "/llm", "--disable-uvicorn-access-log") as (process, where):
        assert where == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=path)) as client:
            body = {"prompt": "Hi", "max_tokens": 2}
            assert client.post("http://x/v1/completions", json=body).json()["choices"][0]["text"] == "xx"
        assert serve.main(["--uds", path, "--model", "no such model"]) == 1, "it is taken"
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=10)
        assert process.returncode == 0
        assert "POST" not in output[0] + output[1]
    assert not os.path.exists(path)


@pytest.mark.parametrize(
    ("options", "named", "reason"),
    [
        ({"certfile": "missing.pem"}, "--ssl-certfile", "missing.pem': No such file"),
        ({"certfile": "cert.pem", "keyfile": "missing.pem"}, "--ssl-keyfile", "missing.pem': No such file"),
        ({"certfile": "key.pem"}, "--ssl-certfile", "key.pem: "),
        ({"certfile": "cert.pem", "keyfile": "other_key.pem"}, "--ssl-certfile", "and --ssl-keyfile"),
        ({"certfile": "cert.pem", "keyfile": "locked_key.pem"}, "--ssl-certfile", "the key has a password"),
        ({"certfile": "cert.pem", "keyfile": "key.pem", "ca_certs": "missing.pem"}, "--ssl-ca-certs", "No such file"),
        ({"certfile": "cert.pem", "keyfile": "key.pem", "ca_certs": "key.pem"}, "--ssl-ca-certs", "key.pem: "),
    ],
)
def test_bad_tls_files_are_one_line_before_the_model_is_loaded(options, named, reason, capsys):
    flags = [f"--ssl-{name.replace('_', '-')}={TLS / file}" for name, file in options.items()]
    assert serve.main([*flags, "--port", "0", "--model", "no such model"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"jaxpage: error: {named}: ") and error.count("\n") == 1
    assert reason in error


def test_file_in_the_way_of_a_unix_socket_is_kept(tmp_path, capsys):
    file = tmp_path / "precious"
    file.write_text("x")
    assert serve.main(["--uds", str(file)]) == 1
    assert file.read_text() == "x"
    reason = f"cannot listen on {file}: the file exists and is no socket"
    assert capsys.readouterr().err == f"jaxpage: error: --uds: {reason}\n"


def test_key_from_the_environment():
    with fake_server(environment={"JAXPAGE_API_KEY": "secret"}) as (_, url):
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_every_option_has_a_flag_with_its_default():
    parsed = serve.build_parser().parse_args([])
    options = ServerOptions.from_cli_args(argparse.Namespace(**(vars(parsed) | {"api_key": ()})))
    assert options == ServerOptions()


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
        (["--allowed-origins", "*"], "--allowed-origins"),
        (["--allowed-origins", "[1]"], "--allowed-origins"),
        (["--ssl-keyfile", "x"], "--ssl-keyfile"),
        (["--ssl-cert-reqs", "2"], "--ssl-cert-reqs"),
        (["--root-path", "llm"], "--root-path"),
        (["--max-n", "129"], "--max-n"),
        (["--max-num-queued-reqs", "0"], "--max-num-queued-reqs"),
        (["--sse-keep-alive-interval", "0"], "--sse-keep-alive-interval"),
        (["--pooling", "max"], "--pooling"),
        (["--override-generation-config", "[]"], "--override-generation-config"),
        (["--generation-config", "some/path"], "--generation-config"),
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
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size: must be at least 1, got 0"),
        (["--trust-remote-code"], "--trust-remote-code: true is not supported: code in checkpoints is never run"),
        (
            ["--override-generation-config", '{"temperature": 3}'],
            "--override-generation-config: temperature: must be in [0, 2], got 3",
        ),
        (["--served-model-name", "a", ""], "--served-model-name: must be one or more names, got ''"),
        (["one", "--model", "two"], "two models are given: one and --model two"),
    ],
)
def test_bad_engine_options_are_one_line(options, message, capsys):
    assert serve.main(options) == 1
    assert capsys.readouterr().err == f"jaxpage: error: {message}\n"


@pytest.mark.parametrize("address", ["no.such.host.invalid", "203.0.113.1"])
def test_hosts_that_cannot_be_used(address, capsys):
    assert serve.main(["--host", address]) == 1
    assert re.fullmatch(rf"jaxpage: error: --host: cannot listen on {address}:8000: .+\n", capsys.readouterr().err)


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
    assert capsys.readouterr().err == "jaxpage: error: --port: cannot listen on 127.0.0.1:80: Permission denied\n"


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--uds", "x.sock", "--host", "1.2.3.4"], "--uds"),
        (["--otlp-traces-endpoint", "nonsense"], "--otlp-traces-endpoint"),
        (["--otlp-traces-endpoint", "ftp://host:1"], "--otlp-traces-endpoint"),
        (["--otlp-traces-endpoint", "host:port"], "--otlp-traces-endpoint"),
        (["--profiler-dir", "/dev/null/profiles"], "--profiler-dir"),
    ],
)
def test_flags_without_effect_or_use_are_refused(
    flags: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = serve.build_parser()
    with pytest.raises(SystemExit) as ended:
        cli.check_cli_args(parser, parser.parse_args(flags))
    assert ended.value.code == 2 and part in capsys.readouterr().err


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:4317", "http://collector/v1/traces", "https://[::1]:4317", "[::1]:4317"]
)
def test_collectors_that_can_be(endpoint: str) -> None:
    parser = serve.build_parser()
    cli.check_cli_args(parser, parser.parse_args(["--otlp-traces-endpoint", endpoint]))
