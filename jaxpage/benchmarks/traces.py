"""Reads recorded arrivals, makes prompts that share what the recorded ones shared, and says what a cache could find.

Knows three file formats; nothing about schedulers or blocks of the KV cache.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxpage.errors import shown

MOONCAKE_BLOCK_TOKENS = 512
OUTPUT_TOKEN_ID = 2**31 - 1
"""Generated tokens are this id and the ones below: prompts count from 0 upwards and hold none of them."""
_FILLER_ID = 1
_FIRST_ID = 2


@dataclasses.dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request.

    Attributes:
        arrival_s: seconds since the first row.
        hash_ids: names of the prompt's 512-token blocks, the last one partial; None if the trace has none.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] | None = None

    def prompt_token_ids(self, index: int) -> list[int]:
        """Made-up ids, equal where the blocks of two rows are; rows without blocks share nothing if ``index`` differs.

        Different blocks, and different rows, differ in their first token.
        """
        if self.hash_ids is None:
            return [_FIRST_ID + index, *[_FILLER_ID] * (self.num_prompt_tokens - 1)]
        blocks = ([_FIRST_ID + name, *[_FILLER_ID] * (MOONCAKE_BLOCK_TOKENS - 1)] for name in self.hash_ids)
        return list(itertools.islice(itertools.chain.from_iterable(blocks), self.num_prompt_tokens))


def read_trace(path: str | Path, limit: int | None = None, time_scale: float = 1.0) -> list[TraceRow]:
    """The first ``limit`` rows in order of arrival; gaps between arrivals are multiplied by ``time_scale``.

    Formats, told apart by the first line: CSV with TIMESTAMP, ContextTokens, GeneratedTokens (Azure LLM inference
    trace); JSON lines with timestamp (ms), input_length, output_length and perhaps hash_ids (Mooncake); JSON lines with
    arrival_s, prompt_tokens, output_tokens.

    Raises:
        ValueError: unknown format, or a row without its numbers; names the line.
    """
    with open(path, encoding="utf-8", newline="") as file:
        first = file.readline()
        file.seek(0)
        is_json = first.lstrip().startswith("{")
        records = (line for line in file if line.strip()) if is_json else csv.DictReader(file)
        rows = []
        for line, record in enumerate(itertools.islice(records, limit), start=1):
            try:
                rows.append(_row(json.loads(record) if isinstance(record, str) else record))
            except KeyError as error:
                reason = f"it has no {error.args[0]}"
            except (ValueError, RecursionError) as error:
                reason = str(error)
            else:
                continue
            raise ValueError(f"{path}: record {line} is not a request: {reason[:200]}: {shown(record)}")
    rows.sort(key=lambda row: row.arrival_s)
    start = rows[0].arrival_s if rows else 0.0
    return [dataclasses.replace(row, arrival_s=(row.arrival_s - start) * time_scale) for row in rows]


def _row(record: Any) -> TraceRow:
    if not isinstance(record, Mapping):
        raise ValueError("it is no object")
    hash_ids = None
    if "TIMESTAMP" in record:
        arrival_s = _moment_s("TIMESTAMP", record)
        names = ("ContextTokens", "GeneratedTokens")
    elif "timestamp" in record:
        arrival_s = _number("timestamp", record) / 1000
        names = ("input_length", "output_length")
        hash_ids = _hash_ids(record.get("hash_ids"))
    else:
        arrival_s = _number("arrival_s", record)
        names = ("prompt_tokens", "output_tokens")
    num_prompt, num_output = (int(_number(name, record)) for name in names)
    if num_prompt < 1 or num_output < 1:
        raise ValueError("a request has at least one token of each kind")
    if hash_ids is not None and len(hash_ids) != -(-num_prompt // MOONCAKE_BLOCK_TOKENS):
        raise ValueError(f"{len(hash_ids)} hash_ids for {num_prompt} tokens")
    return TraceRow(arrival_s, num_prompt, num_output, hash_ids)


def _number(name: str, record: Mapping[str, Any]) -> float:
    try:
        value = float(record[name])
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a number, got {shown(record[name])}")
    return value


def _moment_s(name: str, record: Mapping[str, Any]) -> float:
    try:
        # Seven decimals are one more than datetime reads.
        moment = datetime.datetime.fromisoformat(str(record[name])[:26])
    except ValueError:
        raise ValueError(f"{name} must be a date and time, got {shown(record[name])}") from None
    return moment.replace(tzinfo=datetime.UTC).timestamp()


def _hash_ids(names: Any) -> tuple[int, ...] | None:
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, int) for name in names):
        raise ValueError(f"hash_ids must be a list of whole numbers, got {shown(names)}")
    return tuple(names)


@dataclasses.dataclass(frozen=True, slots=True)
class IdealHits:
    """Prompt tokens a cache without limits could find, each row finished before the next; one token is left to compute.

    Attributes:
        num_full_block_tokens: in full 512-token blocks.
        num_tokens: in all, the beginnings of blocks included.
    """

    num_prompt_tokens: int
    num_full_block_tokens: int
    num_tokens: int


def ideal_hits(rows: Iterable[TraceRow]) -> IdealHits | None:
    """Computed from the block names alone, without tokens, hashes or pools; None if the trace has no names."""
    size = MOONCAKE_BLOCK_TOKENS
    nodes: dict[tuple[int, int], int] = {}  # (node before, name) -> node: a path of names is a node
    longest = [size]  # by node: most tokens of its block that a row had
    prompt = full = in_all = 0
    for row in rows:
        if row.hash_ids is None:
            return None
        prompt += row.num_prompt_tokens
        node, found, full_found, is_open = 0, 0, 0, True
        for place, name in enumerate(row.hash_ids):
            count = min(size, row.num_prompt_tokens - place * size)
            child = nodes.setdefault((node, name), len(longest))
            if child == len(longest):
                longest.append(0)
            if is_open:
                common = min(count, longest[child])
                found += common
                is_open = common == size
                full_found += size if is_open else 0
            longest[child] = max(longest[child], count)
            node = child
        limit = row.num_prompt_tokens - 1
        in_all += min(found, limit)
        full += min(full_found, limit // size * size)
    return IdealHits(prompt, full, in_all)
