"""``jaxpage generate``: one prompt from the command line, its answer streamed to the terminal.

It must not know how the engine works.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from jaxpage.commands.answering import (
    add_sampling_flags,
    given_sampling,
    local_pieces,
    print_pieces,
    sampling_params,
)
from jaxpage.config import AsyncEngineArgs
from jaxpage.config_file import add_config_flag, expand_config
from jaxpage.console import check_text, fail, read_input_as_utf8, show_log
from jaxpage.errors import EngineDeadError, ParameterError, StartupError
from jaxpage.parallel.cluster import joins_others
from jaxpage.params import TextPrompt, TokensPrompt


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The command line: the prompt, how to sample, and the engine's flags."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s PROMPT [options]",
        description="Generate text from a prompt and stream it to the terminal.",
    )
    parser.add_argument("text", metavar="PROMPT", help="the prompt; - reads it from standard input")
    add_config_flag(parser)
    group = parser.add_argument_group("generation")
    add_sampling_flags(group, max_tokens=256)
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")
    group.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="put the prompt into the model's chat template as a user message; default: if the model has a template",
    )
    AsyncEngineArgs.add_cli_args(parser)
    return parser


def main(argv: Sequence[str] | None = None, prog: str = "python -m jaxpage.generate") -> int:
    """Generates and prints one answer.

    Returns:
        The exit code: 0 when the answer is complete, 1 for errors, 130 after Ctrl-C; usage errors exit with 2.
    """
    parser = build_parser(prog)
    options = parser.parse_args(expand_config(parser, argv))
    try:
        engine_args = AsyncEngineArgs.from_cli_args(options)
        sampling_params({}, given_sampling(options))
        if options.text == "-":
            read_input_as_utf8()
            options.text = sys.stdin.read()
        check_text("PROMPT", options.text)
    except ParameterError as error:
        return fail(error, options)
    except KeyboardInterrupt:
        return 130
    show_log("warning")
    try:
        # Imported late, so that --help and wrong options need no jax.
        from jaxpage.engine.async_engine import AsyncLLMEngine

        if joins_others(engine_args):
            from jaxpage.engine.build import lead_or_follow

            if not lead_or_follow(engine_args):
                return 0
        engine = AsyncLLMEngine.from_engine_args(engine_args)
        try:
            asyncio.run(answer(engine, options))
        finally:
            engine.shutdown()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output is gone; without this the interpreter would complain while flushing at exit.
        sys.stdout = None
        return 1
    except (ValueError, OSError, StartupError, EngineDeadError) as error:
        return fail(error, options)
    return 0


async def answer(engine: Any, options: argparse.Namespace) -> None:
    """Prints the answer as it comes."""
    params = sampling_params(engine.generation_config, given_sampling(options), ignore_eos=options.ignore_eos)
    built = build_prompt(engine.tokenizer, options.text, options.chat)
    await print_pieces(local_pieces(engine, built, params, "generate"), [])


def build_prompt(tokenizer: Any, prompt: str, chat: bool | None) -> TextPrompt | TokensPrompt:
    """``prompt`` as it is, or as the user message of a chat.

    Raises:
        ParameterError: if chat is asked for and the model has no template.
    """
    if chat is None:
        chat = tokenizer.chat_template is not None
    if not chat:
        return TextPrompt(prompt=prompt)
    if tokenizer.chat_template is None:
        raise ParameterError("chat", "the model has no chat template; use --no-chat")
    return TokensPrompt(prompt_token_ids=tokenizer.encode_chat([{"role": "user", "content": prompt}]))
