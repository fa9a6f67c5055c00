"""Sends one request, streamed, and records when its tokens came. Knows the API's chunks, nothing of statistics."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

from jaxpage.benchmarks.serving.datasets import Sample
from jaxpage.client import EventParser, HttpClient, ServerError


@dataclass
class RequestRecord:
    """What became of one request; times are ``time.perf_counter``'s.

    Attributes:
        due_s, sent_s, end_s: when it was to be sent, was sent, and had its last token or failed.
        chunk_times: arrival of each piece of the answer that carries at least one token.
        num_output_tokens: what the server counted; the number of pieces if it does not say (``is_counted`` is False).
        error: why it failed; None for an answer that came to its end.
    """

    num_prompt_tokens: int
    due_s: float
    sent_s: float = 0.0
    end_s: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    num_output_tokens: int = 0
    is_counted: bool = False
    text: str = ""
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.chunk_times[0] - self.sent_s

    @property
    def e2el_s(self) -> float:
        return self.end_s - self.sent_s

    @property
    def itls_s(self) -> list[float]:
        return [after - before for before, after in zip(self.chunk_times, self.chunk_times[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """Mean time of the tokens after the first; None if there are none."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2el_s - self.ttft_s) / (self.num_output_tokens - 1)


@dataclass(frozen=True)
class Target:
    """Where requests go, and what every one of them carries."""

    client: HttpClient
    path: str
    is_chat: bool
    fields: dict[str, Any]
    timeout_s: float
    keep_text: bool = False

    def body(self, sample: Sample) -> bytes:
        fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        if self.is_chat:
            fields["messages"] = [{"role": "user", "content": sample.prompt}]
            fields["max_completion_tokens"] = sample.num_output_tokens
        else:
            fields["prompt"] = sample.prompt
            fields["max_tokens"] = sample.num_output_tokens
        return json.dumps(fields | self.fields).encode()

    async def send(self, sample: Sample, request_id: str, due_s: float) -> RequestRecord:
        """Sends it now and waits for the end; a failure is part of the record."""
        record = RequestRecord(sample.num_prompt_tokens, due_s)
        parser = EventParser(_Recorder(record, self.is_chat, self.keep_text).on_event)
        body = self.body(sample)
        record.sent_s = record.end_s = time.perf_counter()
        try:
            response = await self.client.request(
                "POST", self.path, body, {"x-request-id": request_id}, parser.feed, self.timeout_s
            )
            response.raise_for_status()
            if not parser.is_done:
                raise ServerError("the stream ended without [DONE]")
            if not record.chunk_times:
                raise ServerError("the answer has no tokens")
        except ServerError as error:
            record.error = str(error)
            record.end_s = time.perf_counter()
            return record
        record.end_s = record.chunk_times[-1]
        if not record.is_counted:
            record.num_output_tokens = len(record.chunk_times)
        return record


class _Recorder:
    """Reads chunks into a record."""

    def __init__(self, record: RequestRecord, is_chat: bool, keep_text: bool) -> None:
        self._record = record
        self._is_chat = is_chat
        self._keep_text = keep_text

    def on_event(self, event: dict[str, Any], arrived_s: float) -> None:
        record = self._record
        for choice in event.get("choices") or ():
            if not self._is_chat:
                text = choice.get("text")
            else:
                delta = choice.get("delta") or {}
                text = delta.get("content")
                # A piece that only opens or closes the message carries no token.
                if not delta or ("role" in delta and not text):
                    continue
            record.chunk_times.append(arrived_s)
            if self._keep_text and text:
                record.text += text
        if usage := event.get("usage"):
            record.is_counted = True
            record.num_output_tokens = usage.get("completion_tokens") or 0
            record.num_prompt_tokens = usage.get("prompt_tokens") or record.num_prompt_tokens
