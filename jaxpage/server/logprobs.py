"""Owns how token scores look in answers: the lists of completions, of chat, and of scored prompts.

It must not know where scores come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxpage.request import Logprob, LogprobDict
from jaxpage.server.generation import TokenScore

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class LogprobFormat:
    """Renders scores for one request.

    Args:
        tokenizer: names tokens and knows their bytes.
        num_logprobs: alternatives to list; -1 lists all.
        tokens_as_ids: name tokens ``token_id:N``.
    """

    def __init__(self, tokenizer: Any, num_logprobs: int, tokens_as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs
        self._tokens_as_ids = tokens_as_ids

    def completion(self, scores: Sequence[TokenScore]) -> dict[str, list[Any]]:
        """Four lists of equal length, one entry a token."""
        return {
            "tokens": [self._name(score.token_id, (score.entry or {}).get(score.token_id)) for score in scores],
            "token_logprobs": [score.entry and _value(score.entry[score.token_id]) for score in scores],
            "top_logprobs": [score.entry and self._named_alternatives(score) for score in scores],
            "text_offset": [score.text_offset for score in scores],
        }

    def chat(self, scores: Sequence[TokenScore]) -> dict[str, Any]:
        """The chat form: an object a token, with bytes."""
        content = []
        for score in scores:
            entry = score.entry or {}
            alternatives = _best(entry, self._num_logprobs)
            content.append(
                self._chat_token(score.token_id, entry[score.token_id])
                | {"top_logprobs": [self._chat_token(token_id, logprob) for token_id, logprob in alternatives]}
            )
        return {"content": content, "refusal": None}

    def prompt(self, entries: Sequence[LogprobDict | None]) -> list[dict[str, Any] | None]:
        """``prompt_logprobs``: None for the first token, else id -> value, rank and text."""
        shown: list[dict[str, Any] | None] = []
        for entry in entries:
            if entry is None:
                shown.append(None)
                continue
            shown.append(
                {
                    str(token_id): {
                        "logprob": _value(logprob),
                        "rank": logprob.rank,
                        "decoded_token": self._name(token_id, logprob),
                    }
                    for token_id, logprob in entry.items()
                }
            )
        return shown

    def _named_alternatives(self, score: TokenScore) -> dict[str, float]:
        entry = score.entry or {}
        kept = dict(_best(entry, self._num_logprobs))
        kept.setdefault(score.token_id, entry[score.token_id])
        named: dict[str, float] = {}
        for token_id, logprob in kept.items():
            name = self._name(token_id, logprob)
            # Ids that look alike share a key; the maximum has to stay that of the most likely id.
            named[name] = max(named.get(name, LOWEST), _value(logprob))
        return named

    def _chat_token(self, token_id: int, logprob: Logprob) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        return {
            "token": self._name(token_id, logprob),
            "logprob": _value(logprob),
            "bytes": list(raw) if raw else None,
        }

    def _name(self, token_id: int, logprob: Logprob | None) -> str:
        if self._tokens_as_ids:
            return f"token_id:{token_id}"
        if logprob is not None and logprob.decoded_token is not None:
            return logprob.decoded_token
        return self._tokenizer.token_string(token_id)


def trimmed(entries: Sequence[LogprobDict | None], token_ids: Sequence[int], count: int) -> list[LogprobDict | None]:
    """``entries`` with at most ``count`` alternatives (-1: all) beside the token itself."""
    return [
        entry and dict(_best(entry, count)) | {token_id: entry[token_id]}
        for entry, token_id in zip(entries, token_ids, strict=True)
    ]


def _best(entry: LogprobDict, count: int) -> list[tuple[int, Logprob]]:
    """The ``count`` most likely ids of ``entry``, the lowest id first among equals; -1 gives all."""
    ordered = sorted(entry.items(), key=lambda item: (-item[1].logprob, item[0]))
    return ordered if count == -1 else ordered[:count]


def _value(logprob: Logprob) -> float:
    return max(logprob.logprob, LOWEST) if math.isfinite(logprob.logprob) else LOWEST
