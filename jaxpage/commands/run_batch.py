"""``jaxpage run-batch``: answers a file of requests with the server's own app, in this process and without a port.

It must not know what requests mean: the app answers them, with the errors and the shapes that the server has.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.console
import rich.progress

from jaxpage.commands.asgi import AppClient
from jaxpage.commands.batch_file import (
    BadLine,
    BatchFileError,
    BatchRequest,
    ResultWriter,
    read_requests,
    result_id,
    take_up,
)
from jaxpage.config import AsyncEngineArgs, EngineArgs
from jaxpage.config_file import add_config_flag, expand_config
from jaxpage.console import fail, show_log
from jaxpage.errors import EngineDeadError, ParameterError, StartupError, unusable_file
from jaxpage.server.chat_cli import add_chat_args
from jaxpage.server.cli import number
from jaxpage.server.options import ServerOptions

DEFAULT_CONCURRENCY = 256
"""As many as run in a step at most by default; more would only wait in the queue."""


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The command line: files, how many at once, and the engine's flags."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s -i IN.jsonl -o OUT.jsonl [options]",
        description="Answer a file of requests in OpenAI's batch format. A run that was broken off goes on where it "
        "stopped: what OUT.jsonl answers already is not asked again.",
    )
    add_config_flag(parser)
    group = parser.add_argument_group("batch")
    group.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="lines of custom_id, method, url, body"
    )
    group.add_argument("-o", "--output-file", required=True, metavar="FILE", help="gets results as they come")
    group.add_argument(
        "--max-concurrency",
        type=number(int, 1),
        default=DEFAULT_CONCURRENCY,
        metavar="N",
        help="requests in the engine at once (default: %(default)s)",
    )
    add_chat_args(parser.add_argument_group("chat"))
    AsyncEngineArgs.add_cli_args(parser)
    return parser


def main(argv: Sequence[str] | None = None, prog: str = "python -m jaxpage.commands.run_batch") -> int:
    """Runs what is left of a batch.

    Returns:
        The exit code: 0 if all is answered with success, 1 if a line or an answer is bad or the run cannot begin, 130
        after Ctrl-C; usage errors exit with 2.
    """
    parser = build_parser(prog)
    options = parser.parse_args(expand_config(parser, argv))
    source, target = Path(options.input_file), Path(options.output_file)
    try:
        engine_args = AsyncEngineArgs.from_cli_args(options)
        if source.absolute() == target.absolute():
            raise ParameterError("output_file", "must not be the input file")
        requests, bad = _read(source)
        answered = _taken_up(target, requests)
        todo = [request for request in requests if request.custom_id not in answered]
        with ResultWriter(target) as writer:
            writer.write(line.result() for line in bad)
            statuses = _answer_all(engine_args, options, todo, writer) if todo else Counter()
    except (ValueError, OSError, StartupError, EngineDeadError) as error:
        return fail(error, options)
    except KeyboardInterrupt:
        print(f"jaxpage: stopped; the same command goes on with {target}", file=sys.stderr)
        return 130
    return _report(statuses, bad, len(answered), target)


def _read(source: Path) -> tuple[list[BatchRequest], list[BadLine]]:
    try:
        return read_requests(source)
    except (OSError, ValueError) as error:
        raise unusable_file("input_file", source, error) from None


def _taken_up(target: Path, requests: list[BatchRequest]) -> set[str]:
    """The requests answered already; the file is known to be writable then."""
    try:
        answered = take_up(target, (request.custom_id for request in requests))
        target.open("ab").close()
    except BatchFileError as error:
        raise ParameterError("output_file", str(error)) from None
    except (OSError, ValueError) as error:
        raise unusable_file("output_file", target, error) from None
    return answered


def _answer_all(
    engine_args: EngineArgs, options: argparse.Namespace, todo: list[BatchRequest], writer: ResultWriter
) -> Counter[int]:
    show_log("warning")
    from jaxpage.engine.async_engine import AsyncLLMEngine  # late: --help and bad files need no jax

    engine = AsyncLLMEngine.from_engine_args(engine_args)
    try:
        return asyncio.run(answer_all(engine, server_options(options), todo, writer, options.max_concurrency))
    finally:
        engine.shutdown()


def server_options(options: argparse.Namespace) -> ServerOptions:
    """The app's options: what the command line has of them, the defaults for the rest."""
    names = [field.name for field in dataclasses.fields(ServerOptions) if hasattr(options, field.name)]
    return ServerOptions(**{name: getattr(options, name) for name in names})


async def answer_all(
    engine: Any, options: ServerOptions, todo: list[BatchRequest], writer: ResultWriter, max_concurrency: int
) -> Counter[int]:
    """Answers ``todo`` into ``writer``; gives how often each status came.

    Raises:
        EngineDeadError: the engine has stopped; what it did not answer is left for another run.
    """
    from jaxpage.server.app import create_app

    client = AppClient(create_app(engine, options))
    room = asyncio.Semaphore(max_concurrency)
    results: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    statuses: Counter[int] = Counter()

    async def answer(request: BatchRequest) -> None:
        try:
            status, headers, body = await client.post(request.url, request.body, {})
        finally:
            room.release()
        if engine.is_dead:
            raise EngineDeadError("the engine has stopped; the same command goes on with what is left")
        statuses[status] += 1
        response = {"status_code": status, "request_id": headers.get("x-request-id"), "body": json.loads(body)}
        results.put_nowait({"id": result_id(), "custom_id": request.custom_id, "response": response, "error": None})

    try:
        async with client.lifespan(), asyncio.TaskGroup() as everything:
            everything.create_task(_write(results, writer, len(todo)))
            async with asyncio.TaskGroup() as answers:
                for request in todo:
                    await room.acquire()  # before there is a task: a batch can be long
                    answers.create_task(answer(request))
            results.put_nowait(None)
    except ExceptionGroup as errors:
        raise _first(errors) from None
    return statuses


async def _write(results: asyncio.Queue[dict[str, Any] | None], writer: ResultWriter, count: int) -> None:
    """Writes results until a None; those that come while the disk is busy share the next wait for it."""
    with _progress() as bar:
        task = bar.add_task("requests", total=count)
        is_open = True
        while is_open:
            ready = [await results.get()]
            while not results.empty():
                ready.append(results.get_nowait())
            is_open = None not in ready
            lines = [result for result in ready if result is not None]
            await asyncio.to_thread(writer.write, lines)
            bar.advance(task, len(lines))


def _first(error: Exception) -> Exception:
    """What went wrong first, without the groups around it."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _progress() -> rich.progress.Progress:
    columns = (*rich.progress.Progress.get_default_columns(), rich.progress.MofNCompleteColumn())
    return rich.progress.Progress(
        *columns, console=rich.console.Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    )


def _report(statuses: Counter[int], bad: list[BadLine], num_before: int, target: Path) -> int:
    failed = sum(count for status, count in statuses.items() if status != 200)
    before = f" ({num_before} were already)" if num_before else ""
    print(
        f"jaxpage: {statuses[200]} requests answered{before}, {failed} failed, {len(bad)} bad lines: {target}",
        file=sys.stderr,
    )
    return 1 if failed or bad else 0


if __name__ == "__main__":
    sys.exit(main())
