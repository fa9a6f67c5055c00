"""Owns the JSON objects of chat: messages, deltas and what surrounds them.

It must not know HTTP, or how text is generated and read into parts.
"""

from __future__ import annotations

from typing import Any

from jaxpage.server.chat_protocol import ChatRequest
from jaxpage.server.formats import CompletionFormat
from jaxpage.server.generation import Generation, Piece
from jaxpage.server.tools.parts import AnswerReader, CallArguments, CallStart, Part, Reasoning, joined


class ChatFormat(CompletionFormat):
    """Answers of POST /v1/chat/completions.

    Each choice has a reader of its own. A message is made of the parts that it finds, a delta of those that it finds in
    one piece: so both say the same.
    """

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Any, request: ChatRequest, model: str, request_id: str) -> None:
        super().__init__(tokenizer, request, model, request_id)
        self._chat = request
        self._choices: dict[int, _ChoiceReader] = {}

    def whole(self, generation: Generation, pieces: list[Piece]) -> dict[str, Any]:
        """The answer without streaming; what belongs to the prompt stands beside the choices."""
        answer = self.envelope | {"choices": [self.choice(piece) for piece in pieces], "usage": generation.usage()}
        if self.request.return_token_ids:
            answer["prompt_token_ids"] = generation.prompts[0].token_ids
        if self.request.num_prompt_logprobs is not None:
            answer["prompt_logprobs"] = self.prompt_logprobs(generation, pieces[0])
        return answer

    def chunks(self, generation: Generation, piece: Piece) -> list[dict[str, Any]]:
        """The stream's objects for one piece; the first of a choice is preceded by the one with the role."""
        chunks = []
        if piece.is_first:
            role = {"role": "assistant", "content": ""}
            opening = {"index": piece.index, "delta": role, "logprobs": None, "finish_reason": None}
            extra = {"prompt_token_ids": piece.prompt.token_ids} if self.request.return_token_ids else {}
            chunks.append(self.chunk(generation, piece, opening, **extra))
        fields, finish_reason = self._read(piece)
        # Every piece makes a chunk, so that clients can tell when tokens came; the last one may be without text.
        delta = fields if fields or finish_reason is not None else {"content": ""}
        choice = {"index": piece.index, "delta": delta} | self._details(piece, finish_reason)
        return [*chunks, self.chunk(generation, piece, choice)]

    def choice(self, piece: Piece) -> dict[str, Any]:
        """A whole choice."""
        fields, finish_reason = self._read(piece)
        calls = [{key: value for key, value in call.items() if key != "index"} for call in fields.pop("tool_calls", [])]
        message = {"role": "assistant", "content": None if fields or calls else "", "refusal": None} | fields
        if calls:
            message["tool_calls"] = calls
        return {"index": piece.index, "message": message} | self._details(piece, finish_reason)

    def _read(self, piece: Piece) -> tuple[dict[str, Any], str | None]:
        """What ``piece`` adds to its message, and the finish reason if it ends it."""
        if piece.index not in self._choices:
            self._choices[piece.index] = _ChoiceReader(self._chat, piece.prompt.opens_thoughts)
        return self._choices[piece.index].read(piece)

    def _details(self, piece: Piece, finish_reason: str | None) -> dict[str, Any]:
        details: dict[str, Any] = {
            "logprobs": None if self.request.num_logprobs is None else self.logprobs.chat(piece.scores),
            "finish_reason": finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self.request.return_token_ids:
            details["token_ids"] = piece.token_ids
        return details


class _ChoiceReader:
    """Reads the pieces of one choice, leaves out what the client does not want and says why the message ended."""

    def __init__(self, request: ChatRequest, opens_thoughts: bool) -> None:
        self._request = request
        self._reader: AnswerReader = request.new_reader(opens_thoughts)
        self._has_calls = False

    def read(self, piece: Piece) -> tuple[dict[str, Any], str | None]:
        """The message's new fields, and its finish reason."""
        parts = self._reader.feed(piece.text)
        # Whether a call was cut shows only before the reader gives up waiting for its end.
        is_cut = self._reader.has_open_call
        if piece.finish_reason is not None:
            parts += self._reader.finish()
        wanted = [part for part in parts if self._is_wanted(part)]
        self._has_calls |= any(isinstance(part, CallStart) for part in wanted)
        by_itself = piece.finish_reason == "stop" and self._has_calls and not is_cut
        calls = by_itself and self._request.tools.choice != "named"
        return joined(wanted), "tool_calls" if calls else piece.finish_reason

    def _is_wanted(self, part: Part) -> bool:
        match part:
            case Reasoning():
                return self._request.includes_reasoning
            case CallStart(index=index) | CallArguments(index=index):
                return index == 0 or self._request.tools.parallel
        return True
