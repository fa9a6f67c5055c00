"""Fixtures of the page's tests: a server process with a tiny model, and a browser."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import Browser, chromium
from page_server import Server
from safetensors.numpy import load_file, save_file

MAX_MODEL_LEN = 8192


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One window for all tests; each opens the page anew."""
    with chromium(tmp_path_factory.mktemp("chromium") / "profile") as browser:
        yield browser


@pytest.fixture(scope="session")
def model(tiny_model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose greedy answers go on until somebody stops them."""
    directory = tmp_path_factory.mktemp("page") / "model"
    shutil.copytree(tiny_model_dir("llama"), directory)
    config = json.loads((directory / "config.json").read_text()) | {"max_position_embeddings": MAX_MODEL_LEN}
    (directory / "config.json").write_text(json.dumps(config))
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"][config["eos_token_id"]] = 0  # some other logit is always above 0
    save_file(weights, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="session")
def server(browser: Browser, model: Path) -> Iterator[Server]:
    """A server without keys. Needs the browser first, so that nobody waits for a model where there is none."""
    server = Server(model)
    yield server
    server.kill()


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Browser]:
    """The page, connected, on a desktop's screen. Afterwards nothing may stand on the console."""
    browser.resize(1280, 800)
    browser.emulate("Emulation.setEmulatedMedia", features=[])
    browser.open(server.url)
    browser.wait_for(lambda: (browser.text("#status"), browser.text("#num-running")) == ("live", "0"))
    browser.problems()
    yield browser
    assert browser.problems() == []
