"""Asks a server the same thing in every way it can be asked: both endpoints, whole and as a stream. They must agree."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

from api_client import Api

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATHS = (COMPLETIONS, CHAT)


@dataclasses.dataclass
class Answer:
    """One choice.

    Attributes:
        deltas: its pieces of text in order; a whole answer is one piece.
        logprobs: as the endpoint writes them, a stream's joined; None if there are none.
        usage: of the call that it belongs to.
    """

    text: str
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int]
    logprobs: Any
    usage: dict[str, Any]
    deltas: list[str] = dataclasses.field(default_factory=list, compare=False)

    @property
    def ending(self) -> tuple[str, str, str | int | None, int]:
        """Text, finish_reason, stop_reason, number of tokens."""
        return self.text, self.finish_reason, self.stop_reason, len(self.token_ids)


def body_for(path: str, prompt: Any = "x", **body: Any) -> dict[str, Any]:
    """A body with ``prompt``, which is a message's content for chat."""
    content = {"prompt": prompt} if path == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
    return {"temperature": 0, "max_tokens": 16, "return_token_ids": True} | content | body


async def whole(api: Api, path: str, **body: Any) -> list[Answer]:
    """The choices of a whole answer."""
    response = await api.post(path, body_for(path, **body))
    assert response.status_code == 200, response.text
    answer = response.json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [
        Answer(
            text,
            choice["finish_reason"],
            choice["stop_reason"],
            choice["token_ids"],
            choice["logprobs"],
            answer["usage"],
            [text],
        )
        for choice in answer["choices"]
        for text in [choice["text"] if path == COMPLETIONS else choice["message"]["content"]]
    ]


async def streamed(api: Api, path: str, **body: Any) -> list[Answer]:
    """The choices of a stream, put together; its chunks must come in the order that clients rely on."""
    options = {"stream_options": {"include_usage": True}}
    *chunks, last = await api.stream(path, **(body_for(path, **body) | options))
    assert last["choices"] == []
    pieces: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for chunk in chunks:
        [choice] = chunk["choices"]
        pieces[choice["index"]].append(choice)
    return [_joined(path, pieces[index], last["usage"]) for index in sorted(pieces)]


def _joined(path: str, pieces: list[dict[str, Any]], usage: dict[str, Any]) -> Answer:
    last = pieces[-1]
    assert [piece["finish_reason"] is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    if path == COMPLETIONS:
        deltas = [piece["text"] for piece in pieces]
    else:
        assert ["role" in piece["delta"] for piece in pieces] == [True] + [False] * (len(pieces) - 1)
        deltas = [piece["delta"].get("content", "") for piece in pieces]
    scored = [piece["logprobs"] for piece in pieces if piece.get("logprobs") is not None]
    logprobs: Any = None
    if scored:
        logprobs = {
            name: [entry for part in scored for entry in part[name]] if name != "refusal" else None
            for name in scored[0]
        }
    ids = [token_id for piece in pieces for token_id in piece.get("token_ids") or []]
    return Answer("".join(deltas), last["finish_reason"], last["stop_reason"], ids, logprobs, usage, deltas)


async def both_modes(api: Api, path: str, **body: Any) -> list[Answer]:
    """The choices of a stream, which must be those of the whole answer. Needs a seed or temperature 0."""
    # The stream first: what it leaves in the prefix cache shows in the usage of the answer after it.
    answers, expected = await streamed(api, path, **body), await whole(api, path, **body)
    for each in (*answers, *expected):
        each.usage = each.usage | {"prompt_tokens_details": None}
    assert answers == expected
    assert sum(len(each.token_ids) for each in answers) == answers[0].usage["completion_tokens"]
    return answers


async def all_ways(api: Api, **body: Any) -> list[Answer]:
    """The choices of a stream of completions, which must be those of all other ways."""
    completions, chat = [await both_modes(api, path, **body) for path in PATHS]
    assert [each.ending for each in completions] == [each.ending for each in chat]
    assert [each.token_ids for each in completions] == [each.token_ids for each in chat]
    assert all("\ufffd" not in delta for each in chat for delta in each.deltas) or "\ufffd" in chat[0].text
    return completions
