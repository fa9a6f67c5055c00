"""``python -m jaxpage.benchmarks.http_streams``: tokens per second over HTTP against those of the engine alone.

One loaded engine is driven in turn by a plain loop in this process and by the server, with as many streams from a
client in a process of its own. The model is tiny, with random weights: the smaller the model, the more HTTP weighs.
Meanwhile another process asks for /health. Then clients that vanish in mid-stream, and how soon nothing is left of
their requests. With --data-parallel-backend process the server's engine is a second one, in a process of its own, and
with --data-parallel-size there are several. Example:
    python -m jaxpage.benchmarks.http_streams --streams 256 --tokenizer tests/data/tokenizers/bytes_tokenizer
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import multiprocessing
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxpage.benchmarks import report, stream_clients
from jaxpage.config import DEFAULT_MODEL, EngineArgs

PROMPT_TOKENS = 16
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def main(argv: list[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256, help="concurrent requests (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=256, help="tokens of each (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of each way, in turn (default: %(default)s)")
    parser.add_argument("--vanish", type=int, default=1000, help="clients that vanish (default: %(default)s)")
    parser.add_argument("--json", help="file for the result")
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="tiny", enable_prefix_caching=False, max_model_len=1024, disable_log_stats=True)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        if options.model == "tiny":
            options.model, options.load_format = directory, "dummy"
            options.tokenizer = options.tokenizer or DEFAULT_MODEL
            write_tiny_model(Path(directory), options.tokenizer)
        options.max_num_seqs = options.max_num_seqs or options.streams
        rows = measure(EngineArgs.from_cli_args(options), options)
    print(report.table(rows))
    report.write(options.json, "http_streams", rows, streams=options.streams, max_tokens=options.max_tokens)


def write_tiny_model(directory: Path, tokenizer: str) -> None:
    """A checkpoint's directory with a config alone, for the vocabulary of ``tokenizer``."""
    from jaxpage.engine.build import open_tokenizer_source

    vocab_size = open_tokenizer_source(tokenizer).load_tokenizer().vocab_size
    (directory / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": vocab_size}))


def measure(args: EngineArgs, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the result: the medians of the rounds."""
    from jaxpage.engine.front import Engine
    from jaxpage.engine.settling import settle

    engine = Engine(dataclasses.replace(args, data_parallel_size=1, data_parallel_backend="thread"))
    is_shared = args.data_parallel_size == 1 and args.data_parallel_backend == "thread"
    num_tokens = options.streams * options.max_tokens
    spawn = multiprocessing.get_context("spawn")
    alone_s, http_s, health_s = [], [], []
    frames = 0.0
    with contextlib.ExitStack() as stack:
        clients = stack.enter_context(concurrent.futures.ProcessPoolExecutor(2, mp_context=spawn))
        serving = _serving_again_and_again(engine) if is_shared else stack.enter_context(_serving_others(args))
        settle()
        run_alone(engine, options.streams, options.max_tokens)  # warms up
        for number in range(options.rounds):
            alone_s.append(run_alone(engine, options.streams, options.max_tokens))
            with serving() as (_, address):
                if number == 0:
                    clients.submit(stream_clients.read_streams, address, bodies(options.streams, 2)).result()
                probing = clients.submit(stream_clients.probe_health, address, max(1.0, 0.9 * alone_s[-1]))
                reading = clients.submit(
                    stream_clients.read_streams, address, bodies(options.streams, options.max_tokens)
                )
                result = reading.result()
                http_s.append(result["wall_s"])
                frames = result["frames"]
                health_s += probing.result()
        with serving() as (server, address):
            vanished = clients.submit(stream_clients.vanish, address, bodies(options.vanish, 900))
            gone_s = time_to_nothing(server, vanished)
    alone, http = (num_tokens / statistics.median(each) for each in (alone_s, http_s))
    return [
        {
            "streams": options.streams,
            "engine tok/s": alone,
            "http tok/s": http,
            "ratio": http / alone,
            "tokens a frame": num_tokens / frames,
            "health p50 ms": 1e3 * statistics.median(health_s),
            "health p99 ms": 1e3 * statistics.quantiles(health_s, n=100)[-1],
            "health max ms": 1e3 * max(health_s),
            f"s until {options.vanish} are gone": gone_s,
        }
    ]


def prompts(count: int) -> list[list[int]]:
    """Prompts of equal length that differ from their first token on."""
    return [[33 + number % 64, *((number * 7 + place) % 90 + 1 for place in range(PROMPT_TOKENS - 1))]
            for number in range(count)]  # fmt: skip


def bodies(count: int, max_tokens: int) -> list[dict[str, Any]]:
    """The same requests as ``run_alone`` makes, for the server."""
    shared = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    return [shared | {"prompt": prompt} for prompt in prompts(count)]


def run_alone(engine: Any, count: int, max_tokens: int) -> float:
    """Seconds the engine takes for all requests, text included, with nobody else in the process."""
    from jaxpage.params import RequestOutputKind, SamplingParams

    kind = RequestOutputKind.DELTA
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, output_kind=kind)
    started_s = time.perf_counter()
    for number, prompt in enumerate(prompts(count)):
        engine.add(f"alone-{number}", prompt, params)
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started_s


Serving = Callable[[], contextlib.AbstractContextManager[tuple[Any, stream_clients.Address]]]


def _serving_again_and_again(engine: Any) -> Serving:
    """Servers around the engine that is driven in turn: each ends with the engine's thread."""
    from jaxpage.engine.async_engine import AsyncLLMEngine

    @contextlib.contextmanager
    def serve() -> Iterator[tuple[Any, stream_clients.Address]]:
        outer = AsyncLLMEngine(engine)
        with serving(outer) as server_and_address:
            yield server_and_address
        outer.shutdown()

    return serve


@contextlib.contextmanager
def _serving_others(args: EngineArgs) -> Iterator[Serving]:
    """Servers around engines of their own, as ``args`` ask for them."""
    from jaxpage.engine.async_engine import AsyncLLMEngine

    outer = AsyncLLMEngine.from_engine_args(args)
    try:
        yield lambda: serving(outer)
    finally:
        outer.shutdown()


@contextlib.contextmanager
def serving(outer: Any) -> Iterator[tuple[Any, stream_clients.Address]]:
    """The server around ``outer`` in this process, as ``jaxpage.serve`` runs it: its state and its address."""
    import uvicorn

    from jaxpage.server.app import create_app
    from jaxpage.server.connections import BoundedProtocol

    app = create_app(outer)
    config = uvicorn.Config(app, http=BoundedProtocol, ws="none", log_config=None, access_log=False, backlog=4096)
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield app.state.server, listener.getsockname()
        finally:
            server.should_exit = True
            thread.join()


def time_to_nothing(server: Any, vanished: concurrent.futures.Future[float]) -> float:
    """Seconds from the moment that the last client is gone until requests, waiting ones and blocks are, too."""
    group = server.engine.group
    gone_at = vanished.result()
    while server.num_in_flight or group.num_unfinished or group.kv_cache_stats().num_used_blocks:
        time.sleep(0.005)
        if time.monotonic() > gone_at + 60:
            raise RuntimeError("requests are left of clients that vanished a minute ago")
    return time.monotonic() - gone_at


if __name__ == "__main__":
    main()
