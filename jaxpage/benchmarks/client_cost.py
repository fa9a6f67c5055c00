"""``python -m jaxpage.benchmarks.client_cost``: processor time that the load generator spends on a token.

A process of its own sends made-up chunks to many streams at a fixed pace, so that neither a model nor the speed of a
server counts. With --peer httpx the same streams are read with that library. Example:
    python -m jaxpage.benchmarks.client_cost --streams 256 --peer httpx
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import sys
import time
from collections.abc import Coroutine
from multiprocessing.connection import Connection
from typing import Any

from jaxpage.benchmarks import report
from jaxpage.benchmarks.serving.client import Target
from jaxpage.benchmarks.serving.datasets import Sample
from jaxpage.benchmarks.serving.load import run_load
from jaxpage.benchmarks.serving.options import whole
from jaxpage.client import HttpClient, run

PATH = "/v1/completions"
CHOICE = {"index": 0, "text": " word", "logprobs": None, "finish_reason": None, "stop_reason": None}
CHUNK = {
    "id": "cmpl-" + "a" * 32,
    "object": "text_completion",
    "created": 1764400000,
    "model": "m",
    "choices": [CHOICE],
}


def main(argv: list[str] | None = None) -> int:
    """Measures and prints; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=whole(1), default=256, help="default: %(default)s")
    parser.add_argument("--tokens", type=whole(1), default=100, help="in each stream (default: %(default)s)")
    parser.add_argument("--interval-ms", type=whole(1), default=50, help="between tokens (default: %(default)s)")
    parser.add_argument("--peer", choices=["httpx"], action="append", default=[], help="client to run beside")
    parser.add_argument("--json", metavar="FILE", help="file for the result")
    options = parser.parse_args(argv)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    server = spawn.Process(target=_serve, args=(options.tokens, options.interval_ms / 1e3, theirs), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{ours.recv()}"
    rows = [_measure("jaxpage", _ours(url, options.streams), options)]
    rows += [_measure(peer, _httpx(url, options.streams), options) for peer in options.peer]
    server.kill()
    server.join()
    print(report.table(rows))
    report.write(options.json, "client_cost", rows, streams=options.streams, interval_ms=options.interval_ms)
    return 0


def _measure(name: str, read: Coroutine[Any, Any, int], options: argparse.Namespace) -> dict[str, Any]:
    cpu, started = time.process_time(), time.perf_counter()
    count = run(read)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - started
    assert count == options.streams * options.tokens, f"{name} read {count} tokens"
    return {
        "client": name,
        "tokens/s": count / wall,
        "us of processor a token": 1e6 * cpu / count,
        "core %": 100 * cpu / wall,
    }


async def _ours(url: str, streams: int) -> int:
    async with HttpClient(url) as client:
        target = Target(client, PATH, is_chat=False, fields={"model": "m"}, timeout_s=600)
        done = await run_load(target, [Sample("x", 1, 1)] * streams, [0.0] * streams, shows_progress=False)
    return sum(record.num_output_tokens for record in done.records)


async def _httpx(url: str, streams: int) -> int:
    import httpx

    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=None) as client:

        async def read() -> int:
            times = []
            async with client.stream("POST", url + PATH, json={"prompt": "x"}) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        times.append((time.perf_counter(), json.loads(line[6:])["choices"]))
            return len(times)

        return sum(await asyncio.gather(*[read() for _ in range(streams)]))


def _serve(tokens: int, interval_s: float, port: Connection) -> None:
    """The other process: ``tokens`` chunks a request, each sent by itself."""
    data = b"data: " + json.dumps(CHUNK, separators=(",", ":")).encode() + b"\n\n"
    chunk, done = (b"%x\r\n%s\r\n" % (len(event), event) for event in (data, b"data: [DONE]\n\n"))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                for _ in range(tokens):
                    await asyncio.sleep(interval_s)
                    writer.write(chunk)
                writer.write(done + b"0\r\n\r\n")
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    run(serve())


if __name__ == "__main__":
    sys.exit(main())
