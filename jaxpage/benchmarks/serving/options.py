"""The command line of the load generator, under vLLM's names where the meaning is the same."""

from __future__ import annotations

import argparse
import json
import math
import re
from typing import Any

from jaxpage.benchmarks.serving.datasets import MAKERS
from jaxpage.config_file import add_config_flag
from jaxpage.errors import shown

BACKENDS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
SAMPLING_FLAGS = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "repetition_penalty": float,
}
METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def build_parser(prog: str) -> argparse.ArgumentParser:
    """All flags of ``jaxpage bench serve``."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [options]",
        description="Send load to an OpenAI-compatible server and measure what its users would see.",
    )
    add_config_flag(parser)
    _add_server_flags(parser.add_argument_group("server"))
    add_dataset_flags(parser, default="random", num_prompts=1000)
    _add_load_flags(parser.add_argument_group("load"))
    sampling = parser.add_argument_group("sampling, sent with each request if given")
    for name, kind in SAMPLING_FLAGS.items():
        sampling.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=kind.__name__.upper())
    sampling.add_argument("--logprobs", type=whole(0), metavar="N", help="ask for this many log probabilities a token")
    sampling.add_argument(
        "--ignore-eos", action="store_true", help="generate exactly as many tokens as the data set says"
    )
    sampling.add_argument("--extra-body", type=json_object, metavar="JSON", help="object of further fields")
    _add_result_flags(parser.add_argument_group("results"))
    return parser


def add_dataset_flags(
    parser: argparse.ArgumentParser, default: str | None, num_prompts: int, is_offline: bool = False
) -> None:
    """The data set: shared with the benchmarks that run the engine in process.

    Those take no notice of a trace's times, and have the engine's --seed.
    """
    group = parser.add_argument_group("data set")
    group.add_argument("--dataset-name", choices=tuple(MAKERS), default=default, help=f"default: {default or 'none'}")
    group.add_argument(
        "--dataset-path", metavar="FILE", help="ShareGPT's JSON, lines of text, or a trace (CSV or JSON lines)"
    )
    group.add_argument("--num-prompts", type=whole(1), default=num_prompts, metavar="N", help="default: %(default)s")
    group.add_argument("--input-len", type=whole(1), metavar="N", help="prompt tokens, where not said more exactly")
    group.add_argument("--output-len", type=whole(1), metavar="N", help="generated tokens, likewise")
    group.add_argument("--random-input-len", type=whole(1), metavar="N", help="default: 1024")
    group.add_argument("--random-output-len", type=whole(1), metavar="N", help="default: 128")
    group.add_argument(
        "--random-range-ratio",
        type=range_ratio,
        default=(0.0, 0.0),
        metavar="R",
        help='lengths vary within mean * (1 +- R); {"input": R, "output": R} for one each',
    )
    group.add_argument(
        "--random-prefix-len", type=whole(0), default=0, metavar="N", help="tokens that all prompts begin with"
    )
    group.add_argument("--sharegpt-output-len", type=whole(1), metavar="N", help="default: as in the file")
    group.add_argument("--sonnet-input-len", type=whole(1), metavar="N", help="default: 550")
    group.add_argument("--sonnet-output-len", type=whole(1), metavar="N", help="default: 150")
    group.add_argument(
        "--sonnet-prefix-len", type=whole(0), default=200, metavar="N", help="tokens of lines all share (default: 200)"
    )
    group.add_argument("--no-oversample", action="store_true", help="use no conversation twice")
    group.add_argument("--disable-shuffle", action="store_true", help="conversations in the file's order")
    group.add_argument(
        "--trace-length-divisor", type=whole(1), default=1, metavar="N", help="divide a trace's lengths (default: 1)"
    )
    if is_offline:
        parser.set_defaults(trace_time_scale=1.0)
        return
    group.add_argument("--seed", type=whole(0), default=0, help="of prompts, lengths and arrivals (default: 0)")
    group.add_argument(
        "--trace-time-scale", type=positive, default=1.0, metavar="F", help="multiply a trace's gaps (default: 1)"
    )
    group.add_argument(
        "--self-timed",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="send a trace's requests at its own times and not at --request-rate",
    )


def _add_server_flags(group: Any) -> None:
    group.add_argument("--backend", choices=tuple(BACKENDS), default="openai", help="default: %(default)s")
    group.add_argument("--base-url", metavar="URL", help="http(s)://HOST[:PORT][/PATH]; goes before host and port")
    group.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    group.add_argument("--port", type=whole(1), default=8000, help="default: %(default)s")
    group.add_argument("--endpoint", type=url_path, metavar="/PATH", help="default: the backend's")
    group.add_argument("--model", metavar="NAME", help="default: the first the server names")
    group.add_argument("--api-key", metavar="KEY", help="default: $OPENAI_API_KEY")
    group.add_argument("--header", nargs="*", type=key_value, default=[], metavar="K=V", help="further headers")
    group.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    group.add_argument(
        "--tokenizer", metavar="NAME", help="built-in name, directory or .gguf; default: the server's /tokenize"
    )
    group.add_argument(
        "--ready-check-timeout-sec", type=whole(0), default=0, metavar="S", help="wait this long for the server"
    )
    group.add_argument(
        "--request-timeout", type=positive, default=3600.0, metavar="S", help="for one request (default: %(default)g)"
    )


def _add_load_flags(group: Any) -> None:
    group.add_argument(
        "--request-rate", type=rate, default=math.inf, metavar="R", help="requests a second; default: inf, all at once"
    )
    group.add_argument(
        "--burstiness",
        type=positive,
        default=1.0,
        metavar="B",
        help="1: Poisson, less: bursts, more: even (default: 1)",
    )
    group.add_argument("--max-concurrency", type=whole(1), metavar="N", help="requests in flight; the others wait here")
    group.add_argument(
        "--num-warmups", type=whole(0), default=0, metavar="N", help="requests before the run, not counted (default: 0)"
    )
    group.add_argument("--request-id-prefix", type=visible, default="bench-", metavar="TEXT", help="of x-request-id")
    group.add_argument("--profile", action="store_true", help="have the server record a profile of the run")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def _add_result_flags(group: Any) -> None:
    group.add_argument(
        "--percentile-metrics",
        type=metric_names,
        default=METRICS[:4],
        metavar="LIST",
        help="default: ttft,tpot,itl,e2el",
    )
    group.add_argument(
        "--metric-percentiles", type=percentiles, default=(50.0, 90.0, 99.0), metavar="LIST", help="default: 50,90,99"
    )
    group.add_argument(
        "--goodput", nargs="+", type=objective, metavar="METRIC:MS", help="count requests that keep all of these limits"
    )
    group.add_argument("--plot", metavar="FILE.png", help="draw distributions and a timeline; needs jaxpage[plot]")
    group.add_argument("--json", metavar="FILE", help="store the result here")
    group.add_argument("--save-result", action="store_true", help="store it under a name made of model, rate and time")
    group.add_argument("--result-dir", metavar="DIR", help="where --save-result puts it")
    group.add_argument("--result-filename", metavar="NAME", help="name for --save-result")
    group.add_argument("--save-detailed", action="store_true", help="store every request too")
    group.add_argument("--label", metavar="TEXT", help="first part of the file's name")
    group.add_argument(
        "--metadata", nargs="*", type=key_value, default=[], metavar="K=V", help="stored with the result"
    )


def whole(low: int) -> Any:
    """A parser of whole numbers from ``low`` on."""

    def integer(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if number < low:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {low}, got {shown(text)}")
        return number

    return integer


def positive(text: str) -> float:
    """A finite number above 0."""
    number = rate(text)
    if math.isinf(number):
        raise argparse.ArgumentTypeError(f"must be finite, got {shown(text)}")
    return number


def rate(text: str) -> float:
    """A number above 0, perhaps inf."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {shown(text)}")
    return number


def range_ratio(text: str) -> tuple[float, float]:
    """One ratio for both lengths, or a JSON object with one each."""
    try:
        value: Any = json.loads(text)
        both: Any = value if isinstance(value, dict) else {"input": value, "output": value}
        ratios = float(both.pop("input", 0)), float(both.pop("output", 0))
        if both or not all(0 <= ratio < 1 for ratio in ratios):
            raise ValueError
    except (ValueError, TypeError):
        raise argparse.ArgumentTypeError(
            f'must be a number in [0, 1) or {{"input": R, "output": R}}, got {shown(text)}'
        ) from None
    return ratios


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {shown(text)}")
    return value


def visible(text: str) -> str:
    """Visible ASCII characters, as headers and paths have them."""
    if not re.fullmatch("[!-~]*", text):
        raise argparse.ArgumentTypeError(f"must be visible ASCII characters, got {shown(text)}")
    return text


def url_path(text: str) -> str:
    """The path of a URL."""
    if not text.startswith("/"):
        raise argparse.ArgumentTypeError(f"must start with /, got {shown(text)}")
    return visible(text)


def key_value(text: str) -> tuple[str, str]:
    """``KEY=VALUE``."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, got {shown(text)}")
    return key, value


def objective(text: str) -> tuple[str, float]:
    """``METRIC:MS``, a limit for each request."""
    name, _, limit = text.partition(":")
    name = {"e2e": "e2el"}.get(name, name)
    try:
        if name in GOODPUT_METRICS:
            return name, positive(limit)
    except argparse.ArgumentTypeError:
        pass
    raise argparse.ArgumentTypeError(f"must be ttft:MS, tpot:MS or e2el:MS, got {shown(text)}")


def metric_names(text: str) -> tuple[str, ...]:
    """A list of metrics, separated by commas."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in METRICS:
            raise argparse.ArgumentTypeError(f"must be some of {','.join(METRICS)}, got {shown(name)}")
    return names


def percentiles(text: str) -> tuple[float, ...]:
    """A list of numbers from 0 to 100, separated by commas."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = (math.nan,)
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"must be numbers in [0, 100], separated by commas, got {shown(text)}")
    return values
