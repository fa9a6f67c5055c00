"""The server behind Ray Serve: the shipped config with a small model, on a cluster of this machine."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml

from jaxpage import LLM, SamplingParams

if TYPE_CHECKING:
    from numpy_reference import RandomModel

pytest.importorskip("ray")
with warnings.catch_warnings(action="ignore"):  # Ray's own
    from jaxpage import ray_serve

CONFIG = Path(__file__).parents[2] / "configs" / "ray" / "serve.yaml"
START_TIMEOUT_S = 240.0
PROGRAM = """
import logging, sys
import ray
from ray import serve
from ray.serve.scripts import cli

ray.init(num_cpus=3, num_gpus=0, include_dashboard=False, object_store_memory=80 * 2**20, namespace="serve",
         logging_level=logging.ERROR)
cli(["run", "--non-blocking", sys.argv[1]], standalone_mode=False)
sys.stdin.read()
serve.shutdown()
ray.shutdown()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def url(random_model: Callable[..., RandomModel], tmp_path: Path) -> Iterator[str]:
    """Of the model "tiny"."""
    content = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    content["http_options"]["port"] = port = free_port()
    content["applications"][0]["args"] |= {
        "model": str(random_model().directory),
        "served_model_name": "tiny",
        "max-model-len": 128,
        "max-num-seqs": 8,
        "max-num-batched-tokens": 8,
        "block-size": 4,
        "enforce-eager": True,
        "api-key": ["secret"],
    }
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    log = tmp_path / "log"
    with log.open("w") as stream:
        program = [sys.executable, "-c", PROGRAM, str(file)]
        process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=stream, stderr=stream)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_served(url):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.2)
        yield url
        process.communicate(timeout=60)
        assert process.returncode == 0, log.read_text()[-4000:]
    finally:
        process.kill()


def is_served(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer secret"}, timeout=5).is_success
    except httpx.HTTPError:
        return False


def test_the_shipped_config_serves(url: str, random_model: Callable[..., RandomModel], random_ids: Any) -> None:
    prompt = random_ids(6)
    llm = LLM(model=str(random_model().directory), enforce_eager=True, max_model_len=128, num_gpu_blocks_override=64)
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    expected = llm.generate({"prompt_token_ids": prompt}, greedy)[0].outputs[0].text
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    with httpx.Client(base_url=url, headers={"Authorization": "Bearer secret"}, timeout=120) as client:
        assert client.get("/health").is_success
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["tiny"]
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == expected
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert events.pop() == "[DONE]" and len(events) > 1
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == expected
        refused = client.post("/v1/completions", json=body | {"max_tokens": -1})
        assert refused.status_code == 400 and "max_tokens" in refused.json()["error"]["message"]
    assert httpx.get(f"{url}/v1/models", timeout=60).status_code == 401


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            {"max-model-length": 5},
            "args: 'max-model-length' is no option of jaxpage serve, did you mean max-model-len?",
        ),
        ({"max-model-len": "many"}, "args: max-model-len: must be a number, got 'many'"),
        ({"max-num-seqs": 0}, "max_num_seqs: must be at least 1, got 0"),
        ({"api-key": [""]}, "args: argument --api-key: must not be empty"),
        ({"port": 8001}, "port: is Ray Serve's to say: see http_options"),
        ({"shutdown_timeout": 8}, "shutdown_timeout: is Ray Serve's to say: see graceful_shutdown_timeout_s"),
    ],
)
def test_what_is_wrong_with_args_is_said_in_one_line(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        ray_serve.app(args)
    assert message in str(caught.value) and "\n" not in str(caught.value)
