"""What ``generate`` and ``chat`` share: flags for sampling, answers of a local engine, printing them as they come."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

from jaxpage.console import check_text
from jaxpage.params import RequestOutputKind, SamplingParams, TextPrompt, TokensPrompt

RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling values that a checkpoint may recommend."""
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class Piece(NamedTuple):
    """Some text of an answer, or of the reasoning before it."""

    text: str
    is_reasoning: bool = False


def add_sampling_flags(group: Any, max_tokens: int | None) -> None:
    """Adds the flags that ``sampling_params`` reads to an argument group."""
    shown = "the model's limit" if max_tokens is None else str(max_tokens)
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help=f"most tokens (default: {shown})"
    )
    group.add_argument("--temperature", type=float, metavar="T", help="0 takes the most likely token")
    group.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest tokens that make up this share")
    group.add_argument("--top-k", type=int, metavar="K", help="keep this many tokens; 0 keeps all")
    group.add_argument("--stop", action="append", metavar="TEXT", help="text that ends the answer; may be repeated")


def given_sampling(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling values that stand on the command line, under the API's names.

    Raises:
        ParameterError: for text that is none.
    """
    names = ("max_tokens", "temperature", "top_p", "top_k", "stop")
    for text in options.stop or ():
        check_text("stop", text)
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def sampling_params(generation_config: dict[str, Any], given: dict[str, Any], **more: Any) -> SamplingParams:
    """Sampling values: what is given, then the model's own, then the defaults. Without max_tokens there is no limit.

    Raises:
        ParameterError: for a value out of range.
    """
    values = {name: generation_config[name] for name in RECOMMENDED if name in generation_config}
    values |= {"max_tokens": None} | given | more
    return SamplingParams(**values, output_kind=RequestOutputKind.DELTA)


async def local_pieces(
    engine: Any, prompt: TextPrompt | TokensPrompt, params: SamplingParams, request_id: str
) -> AsyncGenerator[Piece]:
    """The answer of an engine in this process; leaving early aborts the request."""
    limit = engine.max_model_len
    if params.max_tokens is not None and params.max_tokens > limit:
        params.max_tokens = limit
    outputs = engine.generate(prompt, params, request_id)
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            yield Piece(output.outputs[0].text)


async def print_pieces(pieces: AsyncGenerator[Piece], said: list[str]) -> None:
    """Prints an answer as it comes, and a line's end. ``said`` gets its text, also of one that is broken off."""
    was_reasoning = False
    has_styles = sys.stdout.isatty()
    try:
        async with contextlib.aclosing(pieces):
            async for text, is_reasoning in pieces:
                if is_reasoning != was_reasoning and has_styles:
                    print(DIM if is_reasoning else f"{PLAIN}\n\n", end="")
                was_reasoning = is_reasoning
                print(text, end="", flush=True)
                if not is_reasoning:
                    said.append(text)
    finally:
        print(PLAIN if was_reasoning and has_styles else "", flush=True)
