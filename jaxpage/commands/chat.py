"""``jaxpage chat``: a conversation in the terminal, with a running server or with a model loaded here.

It must not know how answers come about, and reads plain lines: what is piped in works like what is typed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import sys
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any, Protocol

from jaxpage.client import HttpClient, ServerError, stream_events
from jaxpage.client.http import authorization
from jaxpage.commands.answering import (
    Piece,
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
from jaxpage.params import TokensPrompt

Message = dict[str, str]
PROMPT = "> "
HELP = """\
/system TEXT   set the system message and start anew; without TEXT there is none
/reset         forget the conversation, keep the system message
/exit          end (so does the end of input)
Ctrl-C stops an answer. A message that starts with / is written with //."""


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The command line: whom to talk to, how to sample, and the engine's flags."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [--url URL] [options]",
        description="Chat in the terminal, with the server at --url or else with a model that is loaded here.",
        epilog=f"While chatting:\n{HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config_flag(parser)
    group = parser.add_argument_group("conversation")
    group.add_argument("--url", metavar="URL", help="of a running server, such as http://127.0.0.1:8000")
    group.add_argument("--api-key", metavar="KEY", help="for --url (default: $OPENAI_API_KEY)")
    group.add_argument("--insecure", action="store_true", help="do not check the certificate of --url")
    group.add_argument("--system-prompt", metavar="TEXT", help="system message")
    group.add_argument("-q", "--quick", metavar="TEXT", help="say this, print the answer and end")
    add_sampling_flags(group, max_tokens=None)
    AsyncEngineArgs.add_cli_args(parser)
    parser.set_defaults(model=None)  # for a server: the first it names
    return parser


class Partner(Protocol):
    """Who answers."""

    def pieces(self, messages: Sequence[Message]) -> AsyncGenerator[Piece]: ...


class ServerPartner:
    """A model behind an OpenAI-compatible API."""

    def __init__(self, client: HttpClient, model: str | None, fields: dict[str, Any]) -> None:
        self._client = client
        self._model = model
        self._fields = fields

    async def pieces(self, messages: Sequence[Message]) -> AsyncGenerator[Piece]:
        """Raises ServerError if the server is not there, refuses or breaks off."""
        if self._model is None:
            listed = (await self._client.get("/v1/models")).json().get("data") or []
            if not listed:
                raise ServerError("the server names no model; give --model")
            self._model = listed[0]["id"]
        body = {"model": self._model, "messages": list(messages), "stream": True, **self._fields}
        async with contextlib.aclosing(stream_events(self._client, "/v1/chat/completions", body)) as events:
            async for event in events:
                for choice in event.get("choices") or ():
                    delta = choice.get("delta") or {}
                    if thought := delta.get("reasoning_content"):
                        yield Piece(thought, is_reasoning=True)
                    if text := delta.get("content"):
                        yield Piece(text)


class LocalPartner:
    """An engine in this process; the whole conversation is sent each time, and its beginning found in the cache."""

    def __init__(self, engine: Any, given: dict[str, Any]) -> None:
        self._engine = engine
        self._given = given
        self._numbers = itertools.count()

    async def pieces(self, messages: Sequence[Message]) -> AsyncGenerator[Piece]:
        """Raises ParameterError if the model has no template, the template refuses, or the chat has grown too long."""
        tokenizer = self._engine.tokenizer
        if tokenizer.chat_template is None:
            raise ParameterError("model", "has no chat template; use jaxpage generate")
        prompt = TokensPrompt(prompt_token_ids=tokenizer.encode_chat(list(messages)))
        params = sampling_params(self._engine.generation_config, self._given)
        async with contextlib.aclosing(
            local_pieces(self._engine, prompt, params, f"chat-{next(self._numbers)}")
        ) as pieces:
            async for piece in pieces:
                yield piece


class Conversation:
    """The messages so far, and what a line of input does to them.

    Attributes:
        num_failures: answers that could not be had.
    """

    def __init__(self, partner: Partner, system: str | None, runner: asyncio.Runner) -> None:
        self._partner = partner
        self._runner = runner
        self.num_failures = 0
        self._begin(system)

    def _begin(self, system: str | None) -> None:
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []

    def take(self, line: str) -> bool:
        """Obeys or answers one line; False ends the conversation."""
        try:
            check_text("input", line)
        except ParameterError as error:
            self._failed(error)
            return True
        command, _, rest = line.strip().partition(" ")
        if command == "/exit":
            return False
        if command == "/reset":
            system = self.messages[0]["content"] if self.messages and self.messages[0]["role"] == "system" else None
            self._begin(system)
        elif command == "/system":
            self._begin(rest.strip() or None)
        elif command == "/help":
            print(HELP)
        elif command.startswith("/") and not command.startswith("//"):
            print(f"no such command: {command} (/help shows all)", file=sys.stderr)
        elif line.strip():
            self.say(line.removeprefix("/") if line.startswith("//") else line)
        return True

    def say(self, text: str) -> None:
        """Prints the answer to ``text``; keeps both, unless there is no answer."""
        self.messages.append({"role": "user", "content": text})
        said: list[str] = []
        try:
            self._runner.run(print_pieces(self._partner.pieces(self.messages), said))
        except KeyboardInterrupt:
            pass  # what was said until then is part of the conversation
        except (ServerError, ValueError, EngineDeadError) as error:
            self._failed(error)
            said.clear()
        if said:
            self.messages.append({"role": "assistant", "content": "".join(said)})
        else:
            self.messages.pop()

    def _failed(self, error: Exception) -> None:
        self.num_failures += 1
        fail(error)


def main(argv: Sequence[str] | None = None, prog: str = "python -m jaxpage.commands.chat") -> int:
    """Chats until the input ends.

    Returns:
        The exit code: 0, or 1 if the model or any answer could not be had; usage errors exit with 2.
    """
    parser = build_parser(prog)
    options = parser.parse_args(expand_config(parser, argv))
    try:
        check_options(options)
        with asyncio.Runner() as runner, open_partner(options, runner) as partner:
            conversation = Conversation(partner, options.system_prompt, runner)
            if options.quick is not None:
                conversation.say(options.quick)
            else:
                converse(conversation)
    except (ValueError, OSError, StartupError) as error:
        return fail(error, options)
    except KeyboardInterrupt:
        return 130
    return 1 if conversation.num_failures else 0


def check_options(options: argparse.Namespace) -> None:
    """Raises ParameterError for values out of range, and for flags without effect."""
    for name in ("quick", "system_prompt", "model"):
        check_text(name, getattr(options, name))
    if options.quick is not None and not options.quick.strip():
        raise ParameterError("quick", "must not be empty")
    sampling_params({}, given_sampling(options))
    if options.url is None:
        for name in ("api_key", "insecure"):
            if getattr(options, name):
                raise ParameterError(name, "needs --url")
        return
    for field in dataclasses.fields(AsyncEngineArgs):
        if field.name != "model" and getattr(options, field.name) != field.default:
            raise ParameterError(field.name, "is an option of the engine, which --url leaves to the server")


@contextlib.contextmanager
def open_partner(options: argparse.Namespace, runner: asyncio.Runner) -> Iterator[Partner]:
    """The server's client, or a loaded model; closed at the end."""
    if options.url is not None:
        url = options.url.rstrip("/").removesuffix("/v1")
        client = HttpClient(url, authorization(options.api_key), insecure=options.insecure)
        try:
            yield ServerPartner(client, options.model, given_sampling(options))
        finally:
            runner.run(client.close())
        return
    options.model = options.model or AsyncEngineArgs.model
    engine_args = AsyncEngineArgs.from_cli_args(options)
    show_log("warning")
    from jaxpage.engine.async_engine import AsyncLLMEngine  # late: neither --help nor --url needs jax

    engine = AsyncLLMEngine.from_engine_args(engine_args)
    try:
        yield LocalPartner(engine, given_sampling(options))
    finally:
        engine.shutdown()


def converse(conversation: Conversation) -> None:
    """Takes line after line from a terminal, which edits and remembers them, or from a pipe."""
    read_input_as_utf8()
    if not sys.stdin.isatty():
        for line in sys.stdin:
            if not conversation.take(line.removesuffix("\n")):
                return
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() edits lines once it is imported
    print("/help shows commands, /exit ends", file=sys.stderr)
    while True:
        try:
            line = input(PROMPT)
        except EOFError:
            print()
            return
        if not conversation.take(line):
            return


if __name__ == "__main__":
    sys.exit(main())
