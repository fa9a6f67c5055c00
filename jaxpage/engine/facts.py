"""Owns what has to be known about a loaded engine to take requests for it: plain data that can come from elsewhere.

It must not know where the engine runs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxpage.config import EngineConfig


@dataclasses.dataclass(frozen=True)
class EngineFacts:
    """A loaded model and its limits.

    Attributes:
        vocab_size: ids of the model are below this.
        end_token_ids: ids that end a sample unless it ignores them.
        max_logprobs: the largest number a request may ask for; -1 for the whole vocabulary.
        num_usable_blocks: KV blocks that requests can hold, all together.
        generation_config: recommended sampling values, the options' over the checkpoint's.
    """

    vocab_size: int
    hidden_size: int
    end_token_ids: tuple[int, ...]
    config: EngineConfig
    max_logprobs: int
    num_usable_blocks: int
    generation_config: dict[str, Any]

    def blocks_for(self, num_tokens: int) -> int:
        """KV blocks that hold this many tokens."""
        return -(-num_tokens // self.config.block_size)
