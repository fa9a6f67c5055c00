"""jaxpage: serve and study large language models natively in JAX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jaxpage.config import AsyncEngineArgs, EngineArgs
    from jaxpage.engine.async_engine import AsyncLLMEngine
    from jaxpage.engine.llm import LLM
    from jaxpage.params import (
        BeamSearchParams,
        PoolingParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
        TextPrompt,
        TokensPrompt,
    )
    from jaxpage.request import CompletionOutput, EmbeddingOutput, Logprob, RequestOutput

_HOME = {
    "AsyncEngineArgs": "jaxpage.config",
    "EngineArgs": "jaxpage.config",
    "AsyncLLMEngine": "jaxpage.engine.async_engine",
    "LLM": "jaxpage.engine.llm",
    "BeamSearchParams": "jaxpage.params",
    "CompletionOutput": "jaxpage.request",
    "EmbeddingOutput": "jaxpage.request",
    "Logprob": "jaxpage.request",
    "PoolingParams": "jaxpage.params",
    "RequestOutput": "jaxpage.request",
    "RequestOutputKind": "jaxpage.params",
    "SamplingParams": "jaxpage.params",
    "StructuredOutputsParams": "jaxpage.params",
    "TextPrompt": "jaxpage.params",
    "TokensPrompt": "jaxpage.params",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingOutput",
    "EngineArgs",
    "Logprob",
    "PoolingParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that the host packages and `--help` do not pay for importing jax.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
