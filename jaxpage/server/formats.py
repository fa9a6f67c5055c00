"""Owns the JSON objects of the two generating endpoints: choices, chunks and what surrounds them.

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
    """

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, tokenizer: Any, request: GenerationRequest, model: str, request_id: str) -> None:
        self.request = request
        self.logprobs = LogprobFormat(tokenizer, request.num_logprobs or 0, request.tokens_as_ids)
        self._envelope = {
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
                choice["prompt_logprobs"] = self._prompt_logprobs(generation, piece)
        return self._envelope | {"choices": choices, "usage": generation.usage()}

    def chunks(self, generation: Generation, piece: Piece) -> list[dict[str, Any]]:
        """The stream's objects for one piece."""
        return [self._chunk(generation, piece, self.choice(piece))]

    def usage_chunk(self, generation: Generation) -> dict[str, Any]:
        """The object that ends a stream with include_usage."""
        return self._envelope | {"choices": [], "usage": generation.usage()}

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

    def _chunk(self, generation: Generation, piece: Piece, choice: dict[str, Any], **extra: Any) -> dict[str, Any]:
        usage = {"usage": generation.usage_at(piece)} if self.request.continuous_usage else {}
        return self._envelope | {"choices": [choice]} | extra | usage

    def _prompt_logprobs(self, generation: Generation, piece: Piece) -> list[dict[str, Any] | None] | None:
        entries = generation.prompt_logprobs[piece.index // self.request.num_choices]
        if entries is None or self.request.num_prompt_logprobs is None:
            return None
        return self.logprobs.prompt(trimmed(entries, piece.prompt.token_ids, self.request.num_prompt_logprobs))


class ChatFormat(CompletionFormat):
    """Answers of POST /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, generation: Generation, pieces: list[Piece]) -> dict[str, Any]:
        """The answer without streaming; what belongs to the prompt stands beside the choices."""
        answer = self._envelope | {"choices": [self.choice(piece) for piece in pieces], "usage": generation.usage()}
        if self.request.return_token_ids:
            answer["prompt_token_ids"] = generation.prompts[0].token_ids
        if self.request.num_prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._prompt_logprobs(generation, pieces[0])
        return answer

    def chunks(self, generation: Generation, piece: Piece) -> list[dict[str, Any]]:
        """The stream's objects for one piece; the first of a choice is preceded by the one with the role."""
        chunks = []
        if piece.is_first:
            role = {"role": "assistant", "content": ""}
            opening = {"index": piece.index, "delta": role, "logprobs": None, "finish_reason": None}
            extra = {"prompt_token_ids": piece.prompt.token_ids} if self.request.return_token_ids else {}
            chunks.append(self._chunk(generation, piece, opening, **extra))
        empty_end = piece.finish_reason is not None and not piece.text
        choice = {"index": piece.index, "delta": {} if empty_end else {"content": piece.text}} | self._details(piece)
        chunks.append(self._chunk(generation, piece, choice))
        return chunks

    def choice(self, piece: Piece) -> dict[str, Any]:
        """A whole choice."""
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": piece.index, "message": message} | self._details(piece)

    def _details(self, piece: Piece) -> dict[str, Any]:
        details: dict[str, Any] = {
            "logprobs": None if self.request.num_logprobs is None else self.logprobs.chat(piece.scores),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self.request.return_token_ids:
            details["token_ids"] = piece.token_ids
        return details
