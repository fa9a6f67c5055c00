"""Owns the JSON objects of completions: choices, chunks and what surrounds them.

It must not know HTTP or how text is generated.
"""

from __future__ import annotations

import time
from typing import Any

import jaxpage
from jaxpage.server.generation import Generation, Piece
from jaxpage.server.logprobs import LogprobFormat, trimmed
from jaxpage.server.protocol import GenerationRequest


class CompletionFormat:
    """Answers of POST /v1/completions.

    Args:
        model: the name clients know the model by.
        request_id: becomes part of ``id``.

    Attributes:
        envelope: what every object of the answer begins with.
    """

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, tokenizer: Any, request: GenerationRequest, model: str, request_id: str) -> None:
        self.request = request
        self.logprobs = LogprobFormat(tokenizer, request.num_logprobs or 0, request.tokens_as_ids)
        self.envelope = {
            "id": self.id_prefix + request_id,
            "object": self.chunk_object if request.stream else self.whole_object,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"jaxpage-{jaxpage.__version__}",
        }

    def whole(self, generation: Generation, pieces: list[Piece]) -> dict[str, Any]:
        """The answer without streaming, made of whole choices."""
        choices = [self.choice(piece) for piece in pieces]
        if self.request.num_prompt_logprobs is not None:
            for choice, piece in zip(choices, pieces, strict=True):
                choice["prompt_logprobs"] = self.prompt_logprobs(generation, piece)
        return self.envelope | {"choices": choices, "usage": generation.usage()}

    def chunks(self, generation: Generation, piece: Piece) -> list[dict[str, Any]]:
        """The stream's objects for one piece, without the envelope."""
        return [self.chunk(generation, piece, self.choice(piece))]

    def usage_chunk(self, generation: Generation) -> dict[str, Any]:
        """The object that ends a stream with include_usage, without the envelope."""
        return {"choices": [], "usage": generation.usage()}

    def choice(self, piece: Piece) -> dict[str, Any]:
        """A choice, whole or in part."""
        choice: dict[str, Any] = {
            "index": piece.index,
            "text": piece.text,
            "logprobs": None if self.request.num_logprobs is None else self.logprobs.completion(piece.scores),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self.request.return_token_ids:
            choice["token_ids"] = piece.token_ids
            if piece.is_first:
                choice["prompt_token_ids"] = piece.prompt.token_ids
        return choice

    def chunk(self, generation: Generation, piece: Piece, choice: dict[str, Any], **extra: Any) -> dict[str, Any]:
        """An object of the stream around one choice, without the envelope."""
        chunk = {"choices": [choice], **extra}
        if self.request.continuous_usage:
            chunk["usage"] = generation.usage_at(piece)
        return chunk

    def prompt_logprobs(self, generation: Generation, piece: Piece) -> list[dict[str, Any] | None] | None:
        """The scores of the prompt that ``piece`` belongs to, as far as they were asked for."""
        entries = generation.prompt_logprobs[piece.index // self.request.num_choices]
        if entries is None or self.request.num_prompt_logprobs is None:
            return None
        return self.logprobs.prompt(trimmed(entries, piece.prompt.token_ids, self.request.num_prompt_logprobs))
