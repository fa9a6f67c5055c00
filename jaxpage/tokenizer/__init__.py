"""Text to token ids and back: the tokenizer, its chat template, and incremental detokenization.

A host package: it never imports jax.
"""

from __future__ import annotations

from jaxpage.tokenizer.chat_template import ChatTemplateError
from jaxpage.tokenizer.detokenizer import IncrementalDetokenizer
from jaxpage.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatTemplateError", "IncrementalDetokenizer", "Tokenizer"]
