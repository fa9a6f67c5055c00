"""Owns ``python -m jaxpage.generate``: one prompt from the command line, its answer streamed to the terminal.

It must not know how the engine works.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from jaxpage.config import AsyncEngineArgs
from jaxpage.console import show_log
from jaxpage.errors import EngineDeadError, ParameterError, StartupError
from jaxpage.request import RequestOutputKind, SamplingParams, TextPrompt, TokensPrompt


def build_parser() -> argparse.ArgumentParser:
    """The command line: the prompt, how to sample, and the engine's flags."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxpage.generate", description="Generate text from a prompt and stream it to the terminal."
    )
    parser.add_argument("prompt", help="the prompt; - reads it from standard input")
    group = parser.add_argument_group("generation")
    group.add_argument("--max-tokens", type=int, default=256, metavar="N", help="most tokens (default: %(default)s)")
    group.add_argument("--temperature", type=float, metavar="T", help="0 takes the most likely token")
    group.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest tokens that make up this share")
    group.add_argument("--top-k", type=int, metavar="K", help="keep this many tokens; 0 keeps all")
    group.add_argument("--stop", action="append", metavar="TEXT", help="text that ends the answer; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")
    group.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="put the prompt into the model's chat template as a user message; default: if the model has a template",
    )
    AsyncEngineArgs.add_cli_args(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Generates and prints one answer.

    Returns:
        The exit code: 0 when the answer is complete, 1 for errors, 130 after Ctrl-C; usage errors exit with 2.
    """
    parser = build_parser()
    options = parser.parse_args(argv)
    try:
        engine_args = AsyncEngineArgs.from_cli_args(options)
        sampling_params({}, options)
    except ParameterError as error:
        print(f"jaxpage: error: --{error.parameter.replace('_', '-')}: {error.reason}", file=sys.stderr)
        return 1
    show_log("warning")
    try:
        prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
        # Imported late, so that --help and wrong options need no jax.
        from jaxpage.engine.async_engine import AsyncLLMEngine

        engine = AsyncLLMEngine.from_engine_args(engine_args)
        try:
            asyncio.run(stream(engine, prompt, options))
        finally:
            engine.shutdown()
    except KeyboardInterrupt:
        print(flush=True)
        return 130
    except BrokenPipeError:
        # The reader of our output is gone; without this the interpreter would complain while flushing at exit.
        sys.stdout = None
        return 1
    except (ValueError, OSError, StartupError, EngineDeadError) as error:
        print("jaxpage: error: " + " ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


def sampling_params(generation_config: dict[str, Any], options: argparse.Namespace) -> SamplingParams:
    """Sampling values: flags that were given, then the model's own, then the defaults.

    Raises:
        ParameterError: for a value out of range.
    """
    defaults = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    values = {name: generation_config[name] for name in defaults if name in generation_config}
    flags = {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
    values |= {name: value for name, value in flags.items() if value is not None}
    return SamplingParams(
        **values,
        max_tokens=options.max_tokens,
        stop=options.stop,
        ignore_eos=options.ignore_eos,
        output_kind=RequestOutputKind.DELTA,
    )


async def stream(engine: Any, prompt: str, options: argparse.Namespace) -> None:
    """Prints the answer to ``prompt`` as it comes; leaving early aborts the request."""
    params = sampling_params(engine.generation_config, options)
    limit = engine.max_model_len
    if params.max_tokens is not None and params.max_tokens > limit:
        params.max_tokens = limit
    outputs = engine.generate(build_prompt(engine.tokenizer, prompt, options.chat), params, "generate")
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            print(output.outputs[0].text, end="", flush=True)
    print(flush=True)


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


if __name__ == "__main__":
    sys.exit(main())
