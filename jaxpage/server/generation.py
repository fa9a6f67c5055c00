"""Owns one HTTP request's run in the engine: its prompts' outputs as pieces of choices, and the token counts.

It must not know JSON shapes or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import AsyncGenerator
from typing import Any

from jaxpage.params import TokensPrompt
from jaxpage.request import CompletionOutput, LogprobDict, RequestOutput
from jaxpage.server.admission import Ticket
from jaxpage.server.errors import GenerationError
from jaxpage.server.prompts import PreparedPrompt
from jaxpage.server.protocol import GenerationRequest
from jaxpage.server.tracing import CallTrace

QUEUED_PIECES = 64
"""Pieces of several prompts that may wait for a slow client; beyond it the engine's own streams wait."""


@dataclasses.dataclass(slots=True)
class TokenScore:
    """A token as logprob lists show it. ``entry`` is None where there is no score (a prompt's first token)."""

    token_id: int
    entry: LogprobDict | None
    text_offset: int


@dataclasses.dataclass(slots=True)
class Piece:
    """News of one choice; pieces of a choice joined in order are the choice.

    Attributes:
        index: of the choice: prompt number * n + number of the sample or beam.
        is_first: no piece of this choice came before; an echoed prompt is part of this one.
        token_ids: generated tokens only. ``scores`` starts with the prompt's tokens when they are echoed.
        num_completion_tokens: tokens of the choice so far, this piece included.
    """

    index: int
    prompt: PreparedPrompt
    text: str
    token_ids: list[int]
    scores: list[TokenScore]
    num_completion_tokens: int
    is_first: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def extend(self, later: Piece) -> None:
        """Appends the next piece of the same choice."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.scores += later.scores
        self.num_completion_tokens = later.num_completion_tokens
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason


class Generation:
    """Runs ``prompts`` in ``engine`` and keeps the counts that usage reports, and the one of ``ticket``.

    ``request_id`` is the call's, for logs; ``trace`` is told how each prompt ended.

    Attributes:
        prompt_logprobs: per prompt, the engine's scores of the prompt, None until (or unless) they arrive.
    """

    def __init__(
        self,
        engine: Any,
        prompts: list[PreparedPrompt],
        request: GenerationRequest,
        ticket: Ticket,
        request_id: str,
        trace: CallTrace | None = None,
    ) -> None:
        self.engine = engine
        self.prompts = prompts
        self.request = request
        self.prompt_logprobs: list[list[LogprobDict | None] | None] = [None] * len(prompts)
        self._ticket = ticket
        self._request_id = request_id
        self._trace = trace
        self._is_waiting = [True] * len(prompts)
        self._num_cached_tokens = [0] * len(prompts)
        self._num_completion_tokens: dict[int, int] = {}

    def pieces(self) -> AsyncGenerator[Piece]:
        """Pieces of all choices as they come. Closing the generator aborts what still runs.

        Raises:
            GenerationError: if the engine ended a sample without a result.
        """
        streams = [self._pieces_of(number) for number in range(len(self.prompts))]
        return streams[0] if len(streams) == 1 else _merged(streams)

    async def choices(self) -> list[Piece]:
        """Every choice whole, sorted by index."""
        whole: dict[int, Piece] = {}
        async with contextlib.aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                if piece.index in whole:
                    whole[piece.index].extend(piece)
                else:
                    whole[piece.index] = piece
        return [whole[index] for index in sorted(whole)]

    def usage(self) -> dict[str, Any]:
        """Token counts of the whole answer: each prompt once, all tokens generated."""
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        return _usage(prompt_tokens, sum(self._num_completion_tokens.values()), sum(self._num_cached_tokens))

    def usage_at(self, piece: Piece) -> dict[str, Any]:
        """Token counts of one choice as of ``piece``."""
        cached = self._num_cached_tokens[piece.index // self.request.num_choices]
        return _usage(len(piece.prompt.token_ids), piece.num_completion_tokens, cached)

    async def _pieces_of(self, number: int) -> AsyncGenerator[Piece]:
        """Pieces of one prompt's choices. A prompt that is given up gets its span, too."""
        waiting: list[RequestOutput] = []
        is_over = False
        try:
            async with contextlib.aclosing(self._start(self.prompts[number])) as outputs:
                async for output in outputs:
                    self._note_counts(number, output)
                    waiting.append(output)
                    # The first piece of every choice may need the prompt's scores, which come with one of the samples.
                    if self._lacks_prompt_scores(number) and not output.finished:
                        continue
                    for ready in waiting:
                        for sample in ready.outputs:
                            yield self._piece(number, sample)
                    waiting.clear()
                    if output.finished:
                        is_over = True
                        self._note_end(number, output)
        finally:
            if self._trace is not None and not is_over:
                self._trace.cut(len(self.prompts[number].token_ids))

    def _note_counts(self, number: int, output: RequestOutput) -> None:
        if self._is_waiting[number]:
            self._is_waiting[number] = False
            self._ticket.num_waiting_tokens -= len(self.prompts[number].token_ids)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[number] = output.prompt_logprobs
        if output.num_cached_tokens is not None:
            self._num_cached_tokens[number] = max(output.num_cached_tokens, 0)

    def _note_end(self, number: int, output: RequestOutput) -> None:
        if self._trace is not None:
            first = number * self.request.num_choices
            indices = range(first, first + self.request.num_choices)
            self._trace.ended(output, sum(self._num_completion_tokens.get(index, 0) for index in indices))

    def _lacks_prompt_scores(self, number: int) -> bool:
        return self.request.scores_prompts and self.prompt_logprobs[number] is None

    def _start(self, prompt: PreparedPrompt) -> AsyncGenerator[RequestOutput]:
        # Clients may send the same id, and may guess another's; no two requests have the same one in the engine.
        return self.engine.generate(
            TokensPrompt(prompt_token_ids=prompt.token_ids),
            self.request.params,
            f"{secrets.token_hex(16)}:{self._request_id}",
            cache_salt=self.request.cache_salt,
            priority=self.request.priority,
        )

    def _piece(self, number: int, sample: CompletionOutput) -> Piece:
        if sample.finish_reason not in (None, "stop", "length"):
            raise GenerationError(f"generation ended early ({sample.finish_reason})")
        index = number * self.request.num_choices + sample.index
        is_first = index not in self._num_completion_tokens
        total = self._num_completion_tokens.get(index, 0) + len(sample.token_ids)
        self._num_completion_tokens[index] = total
        prompt = self.prompts[number]
        piece = Piece(
            index=index,
            prompt=prompt,
            text=sample.text,
            token_ids=list(sample.token_ids),
            scores=self._scores(prompt, sample),
            num_completion_tokens=total,
            is_first=is_first,
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
        )
        if is_first and self.request.echo:
            piece.text = prompt.echo_text + piece.text
            piece.scores = self._prompt_scores(number) + piece.scores
        return piece

    def _scores(self, prompt: PreparedPrompt, sample: CompletionOutput) -> list[TokenScore]:
        if self.request.num_logprobs is None or sample.logprobs is None:
            return []
        start = len(prompt.echo_text) if self.request.echo else 0
        return [
            TokenScore(token_id, entry, start + offset)
            for token_id, entry, offset in zip(sample.token_ids, sample.logprobs, sample.text_offsets, strict=True)
        ]

    def _prompt_scores(self, number: int) -> list[TokenScore]:
        entries = self.prompt_logprobs[number]
        prompt = self.prompts[number]
        if self.request.num_logprobs is None or entries is None or not prompt.text_offsets:
            return []
        return [
            TokenScore(token_id, entry, offset)
            for token_id, entry, offset in zip(prompt.token_ids, entries, prompt.text_offsets, strict=True)
        ]


def _usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def coalesced(pieces: AsyncGenerator[Piece], interval: int) -> AsyncGenerator[Piece]:
    """Joins pieces of a choice until they hold ``interval`` tokens; its first and last pieces never wait."""
    return pieces if interval == 1 else _coalesced(pieces, interval)


async def _coalesced(pieces: AsyncGenerator[Piece], interval: int) -> AsyncGenerator[Piece]:
    waiting: dict[int, Piece] = {}
    async for piece in pieces:
        held = waiting.pop(piece.index, None)
        if held is not None:
            held.extend(piece)
            piece = held
        if piece.is_first or piece.finish_reason is not None or len(piece.token_ids) >= interval:
            yield piece
        else:
            waiting[piece.index] = piece


async def _merged(streams: list[AsyncGenerator[Piece]]) -> AsyncGenerator[Piece]:
    """The pieces of all ``streams`` as they come; the first error ends all."""
    queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(QUEUED_PIECES)

    async def pump(stream: AsyncGenerator[Piece]) -> None:
        end = None
        try:
            async with contextlib.aclosing(stream):
                async for piece in stream:
                    await queue.put(piece)
        except Exception as error:
            end = error
        await queue.put(end)

    pumps = [asyncio.create_task(pump(stream)) for stream in streams]
    num_open = len(streams)
    try:
        while num_open:
            news = await queue.get()
            if isinstance(news, Exception):
                raise news
            if news is None:
                num_open -= 1
            else:
                yield news
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
