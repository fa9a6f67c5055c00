"""Fixtures of the commands' tests: the server's fake engine, in place of one that would have to be loaded."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "server"))

from api_client import TOKENIZERS  # the server's tests own it
from fake_engine import FakeEngine

from jaxpage.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|end|>{% endfor %}[assistant]"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """What commands get when they load an engine; says "Hello world"."""
    tokenizer = Tokenizer.from_directory(TOKENIZERS / "bytes_tokenizer")
    tokenizer.chat_template = TEMPLATE
    engine = FakeEngine(tokenizer, [268, 269, 274], max_model_len=200)
    module = types.ModuleType("jaxpage.engine.async_engine")
    module.AsyncLLMEngine = types.SimpleNamespace(from_engine_args=lambda args: engine)  # pyright: ignore
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return engine
