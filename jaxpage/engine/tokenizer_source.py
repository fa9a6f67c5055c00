"""Owns where an engine's tokenizer comes from: the model, or a place of its own. Needs no jax.

It must not know what is tokenized.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jaxpage.config import EngineArgs
from jaxpage.errors import ParameterError
from jaxpage.tokenizer import Tokenizer
from jaxpage.weights.source import open_checkpoint, resolve_model


def load_tokenizer(args: EngineArgs) -> Tokenizer:
    """The tokenizer that ``args`` name.

    Raises:
        ValueError, OSError, StartupError: in one line, if there is none.
    """
    if args.tokenizer is not None:
        return open_tokenizer_source(args.tokenizer).load_tokenizer()
    return open_checkpoint(resolve_model(args.model, args.revision), needs_weights=False).load_tokenizer()


def open_tokenizer_source(path: str) -> Any:
    """A tokenizer that lives apart from the weights: a directory or a GGUF file."""
    try:
        source = resolve_model(path)
    except ValueError as error:
        raise ParameterError("tokenizer", str(error).removeprefix("model: ")) from error
    if source.is_dir():
        return _TokenizerDirectory(source)
    return open_checkpoint(source)


@dataclasses.dataclass(frozen=True)
class _TokenizerDirectory:
    path: Path

    def load_tokenizer(self) -> Tokenizer:
        try:
            return Tokenizer.from_directory(self.path)
        except ValueError as error:
            raise ParameterError("tokenizer", str(error).removeprefix("path: ")) from error
