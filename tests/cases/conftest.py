"""Fixtures of the behaviour cases: engines whose model is forced, and clients of a server over them."""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "server"))
sys.path.append(str(Path(__file__).parents[1] / "engine"))

from api_client import TOKENIZERS, Api  # the server's tests own it; "driving" is the engine's
from forced import ForcedModel

if TYPE_CHECKING:
    from numpy_reference import RandomModel

    from jaxpage import LLM

TEMPLATES = json.loads((TOKENIZERS / "fixtures.json").read_text(encoding="utf-8"))["templates"]
SMOL = "smollm2-135m-instruct"
SIZES: dict[str, dict[str, int]] = {
    "bytes": {},
    "wordmark": {"vocab_size": 281, "bos_token_id": 1, "eos_token_id": 2},
    "smol": {"vocab_size": 49152, "bos_token_id": 1, "eos_token_id": 2},
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def _forced_models() -> weakref.WeakKeyDictionary[LLM, ForcedModel]:
    return weakref.WeakKeyDictionary()


@pytest.fixture
def forced_model(
    llm_for: Callable[..., LLM],
    random_model: Callable[..., RandomModel],
    builtin_gguf: Callable[[str], Path],
    _forced_models: weakref.WeakKeyDictionary[LLM, ForcedModel],
) -> Callable[..., ForcedModel]:
    """Gives the forced model of a tokenizer, "bytes", "wordmark" or "smol", in an engine with some options.

    It says nothing but the end id until a test tells it what to say.
    """

    def get(tokenizer: str = "bytes", **options: Any) -> ForcedModel:
        # The name keeps this engine apart from those of other tests, whose model must stay what it is.
        small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
        directory = random_model(
            **small, num_key_value_heads=1, max_position_embeddings=2048, forced=tokenizer, **SIZES[tokenizer]
        ).directory
        if tokenizer == "wordmark":
            options["tokenizer"] = str(TOKENIZERS / "wordmark_tokenizer")
        elif tokenizer == "smol":
            options["tokenizer"] = str(builtin_gguf(SMOL))
        llm = llm_for(directory, **({"max_model_len": 512, "num_gpu_blocks_override": 160} | options))
        if llm not in _forced_models:
            _forced_models[llm] = ForcedModel(llm)
            if tokenizer != "smol":
                llm.engine.tokenizer.chat_template = TEMPLATES["plain"]
        _forced_models[llm].reset()
        return _forced_models[llm]

    return get


@pytest.fixture
def model(forced_model: Callable[..., ForcedModel]) -> ForcedModel:
    """The forced model with BYTES."""
    return forced_model()


@pytest.fixture
async def api(model: ForcedModel) -> AsyncIterator[Api]:
    """A server over ``model``."""
    async with model.serving() as api:
        yield api
