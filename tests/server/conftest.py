"""Fixtures of the server's tests: the tokenizer of the cases, the fake engine, and a client without sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from api_client import TOKENIZERS, Api
from fake_engine import FakeEngine

from jaxpage.tokenizer import Tokenizer

PLAIN = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def bytes_tokenizer() -> Tokenizer:
    """BYTES of the cases, with the template "plain"."""
    tokenizer = Tokenizer.from_directory(TOKENIZERS / "bytes_tokenizer")
    tokenizer.chat_template = PLAIN
    return tokenizer


@pytest.fixture(scope="session")
def wordmark_tokenizer() -> Tokenizer:
    """WORDMARK of the cases."""
    return Tokenizer.from_directory(TOKENIZERS / "wordmark_tokenizer")


@pytest.fixture
def engine(bytes_tokenizer: Tokenizer) -> FakeEngine:
    """Says "Hello world" unless a test scripts something else."""
    return FakeEngine(bytes_tokenizer, [268, 269, 274])


@pytest.fixture
async def api(engine: FakeEngine) -> AsyncIterator[Api]:
    """The app around ``engine``, without keys."""
    api = Api(engine)
    yield api
    await api.client.aclose()
