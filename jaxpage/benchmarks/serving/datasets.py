"""What the load generator asks: prompts of known lengths, made up or from files.

Knows nothing of servers; a ``TokenSource`` turns ids into text and back.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxpage.benchmarks.serving.tokens import TokenSource
from jaxpage.benchmarks.traces import MOONCAKE_BLOCK_TOKENS, TraceRow, read_trace
from jaxpage.errors import ParameterError, shown, unusable_file

SONNET_INSTRUCTION = "Write a poem in the style of these lines:\n"
# ShareGPT holds stubs and books; these bounds are vLLM's, so that both measure the same conversations.
MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOTAL_TOKENS = 4, 1024, 2048


@dataclass(frozen=True)
class Sample:
    """One request to send.

    Attributes:
        prompt: text, or token ids where only the length counts.
        num_prompt_tokens: of the bare prompt, without a chat template's.
        num_output_tokens: most tokens to generate.
        arrival_s: when a trace says that it was sent, from the trace's start.
    """

    prompt: str | list[int]
    num_prompt_tokens: int
    num_output_tokens: int
    arrival_s: float | None = None


def make_samples(options: argparse.Namespace, tokens: TokenSource, count: int, seed: int) -> list[Sample]:
    """``count`` requests of the data set that ``options`` name (see ``options.add_dataset_flags``).

    Fewer where a file has no more and oversampling is off, or is a trace. The same arguments give the same requests.

    Raises:
        ParameterError: a file is missing or does not hold what it should, or lengths that no prompt can have.
    """
    generator = np.random.default_rng(seed)
    return MAKERS[options.dataset_name](options, tokens, count, generator)


def check_dataset(options: argparse.Namespace) -> None:
    """Raises ParameterError if the data set's file is not there: better before a model is loaded than after it."""
    if options.dataset_name != "random":
        _path(options)
    elif options.dataset_path is not None:
        raise ParameterError("dataset_path", "has no effect with --dataset-name random")


def as_text(samples: list[Sample], tokens: TokenSource) -> list[Sample]:
    """With texts for prompts: a chat takes no ids. Tokenised again they may be a little longer or shorter."""
    return [
        sample if isinstance(sample.prompt, str) else replace(sample, prompt=tokens.decode(sample.prompt))
        for sample in samples
    ]


def random_samples(
    options: argparse.Namespace, tokens: TokenSource, count: int, generator: np.random.Generator
) -> list[Sample]:
    """Tokens drawn at random: a prefix that all share, then their own; lengths even within mean * (1 +- ratio)."""
    num_input = options.random_input_len or options.input_len or 1024
    num_output = options.random_output_len or options.output_len or 128
    input_ratio, output_ratio = options.random_range_ratio
    prefix = _draw(generator, tokens, options.random_prefix_len)
    samples = []
    for _ in range(count):
        ids = prefix + _draw(generator, tokens, _length(generator, num_input, input_ratio))
        samples.append(Sample(ids, len(ids), _length(generator, num_output, output_ratio)))
    return samples


def sharegpt_samples(
    options: argparse.Namespace, tokens: TokenSource, count: int, generator: np.random.Generator
) -> list[Sample]:
    """First questions of conversations; as many tokens are generated as the recorded answer has."""
    path = _path(options)
    turns = _turns(path, _text(path))
    if not options.disable_shuffle:
        turns = [turns[index] for index in generator.permutation(len(turns))]
    fixed_output = options.sharegpt_output_len or options.output_len
    samples = []
    for question, answer in turns:
        if len(samples) == count:
            break
        num_prompt = len(tokens.encode(question))
        num_output = fixed_output or len(tokens.encode(answer))
        is_stub = num_prompt < MIN_TOKENS or (num_output < MIN_TOKENS and not fixed_output)
        if not is_stub and num_prompt <= MAX_PROMPT_TOKENS and num_prompt + num_output <= MAX_TOTAL_TOKENS:
            samples.append(Sample(question, num_prompt, num_output))
    if not samples:
        raise ParameterError("dataset_path", f"{path} holds no conversation of a usable length")
    if options.no_oversample:
        return samples
    return [samples[index % len(samples)] for index in range(count)]


def _turns(path: Path, text: str) -> list[tuple[str, str]]:
    """The first question and answer of each conversation that has them."""

    def wrong(what: str) -> ParameterError:
        return ParameterError("dataset_path", f"{path} is not a ShareGPT file: {what}")

    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise wrong(f"it is not JSON: {str(error)[:200]}") from None
    if not isinstance(entries, list):
        raise wrong(f"it must be a list of conversations, not {shown(entries)}")
    turns = []
    for index, entry in enumerate(entries):
        talk = (entry.get("conversations") or entry.get("conversation") or []) if isinstance(entry, dict) else None
        if not isinstance(talk, list):
            raise wrong(f"entry {index} must have a list of conversations, got {shown(entry)}")
        said = [turn.get("value") if isinstance(turn, dict) else None for turn in talk[:2]]
        if not all(isinstance(value, str) for value in said):
            raise wrong(f"entry {index} has a turn without a text as value: {shown(talk[:2])}")
        if len(said) == 2:
            turns.append((said[0], said[1]))
    return turns


def sonnet_samples(
    options: argparse.Namespace, tokens: TokenSource, count: int, generator: np.random.Generator
) -> list[Sample]:
    """Lines of a text file: the first ones in every prompt, others drawn anew, up to the length asked for."""
    path = _path(options)
    num_input = options.sonnet_input_len or options.input_len or 550
    num_output = options.sonnet_output_len or options.output_len or 150
    lines = [line for line in _text(path).splitlines(keepends=True) if line.strip()]
    if not lines:
        raise ParameterError("dataset_path", f"{path} is empty")
    lengths = [len(tokens.encode(line)) for line in lines]
    room = num_input - len(tokens.encode(SONNET_INSTRUCTION))
    if room < max(lengths):
        raise ParameterError("sonnet_input_len", f"{num_input} tokens have no room for a line of {max(lengths)}")
    prefix: list[int] = []
    for index in range(len(lines)):
        if sum(lengths[line] for line in prefix) + lengths[index] > min(options.sonnet_prefix_len, room):
            break
        prefix.append(index)
    samples = []
    for _ in range(count):
        chosen = list(prefix)
        left = room - sum(lengths[line] for line in chosen)
        while left >= lengths[line := int(generator.integers(len(lines)))]:
            chosen.append(line)
            left -= lengths[line]
        text = SONNET_INSTRUCTION + "".join(lines[line] for line in chosen)
        samples.append(Sample(text, len(tokens.encode(text)), num_output))
    return samples


def trace_samples(
    options: argparse.Namespace, tokens: TokenSource, count: int, generator: np.random.Generator
) -> list[Sample]:
    """The first rows of a recorded trace. Equal block names give equal tokens, so that prefixes are shared as recorded.

    Text does not matter to a trace, so there is none to read: tokens are drawn at random, by block name if it has any.
    """
    path = _path(options)
    try:
        rows = read_trace(path, count, options.trace_time_scale)
    except UnicodeDecodeError:
        raise ParameterError("dataset_path", f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise unusable_file("dataset_path", path, error) from None
    except ValueError as error:
        raise ParameterError("dataset_path", str(error)) from None
    if not rows:
        raise ParameterError("dataset_path", f"{path} holds no request")
    divisor = options.trace_length_divisor
    seed = int(generator.integers(2**31))
    return [_trace_sample(row, index, divisor, seed, tokens) for index, row in enumerate(rows)]


def _trace_sample(row: TraceRow, index: int, divisor: int, seed: int, tokens: TokenSource) -> Sample:
    num_prompt, num_output = -(-row.num_prompt_tokens // divisor), -(-row.num_output_tokens // divisor)
    if row.hash_ids is None:
        ids = _draw(np.random.default_rng([seed, 0, index]), tokens, num_prompt)
    else:
        size = -(-MOONCAKE_BLOCK_TOKENS // divisor)
        blocks = [_draw(np.random.default_rng([seed, 1, name]), tokens, size) for name in row.hash_ids]
        ids = [token_id for block in blocks for token_id in block][:num_prompt]
    return Sample(ids, len(ids), num_output, row.arrival_s)


MAKERS: dict[str, Callable[[Any, TokenSource, int, np.random.Generator], list[Sample]]] = {
    "random": random_samples,
    "sharegpt": sharegpt_samples,
    "sonnet": sonnet_samples,
    "timed_trace": trace_samples,
}


def _draw(generator: np.random.Generator, tokens: TokenSource, count: int) -> list[int]:
    return [tokens.ids[index] for index in generator.integers(0, len(tokens.ids), count)]


def _length(generator: np.random.Generator, mean: int, ratio: float) -> int:
    low, high = max(1, int(mean * (1 - ratio))), max(1, int(mean * (1 + ratio)))
    return int(generator.integers(low, high + 1))


def _path(options: argparse.Namespace) -> Path:
    if options.dataset_path is None:
        raise ParameterError("dataset_path", f"is needed for --dataset-name {options.dataset_name}")
    path = Path(options.dataset_path)
    if not path.is_file():
        raise ParameterError("dataset_path", f"no such file: {shown(options.dataset_path)}")
    return path


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ParameterError("dataset_path", f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise unusable_file("dataset_path", path, error) from None
