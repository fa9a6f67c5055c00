"""Times other attention code, on data of the same shape, in a Python environment of its own.

This file is also the script that runs there: it must not import jaxpage at the top. The process stays alive and
measures one round whenever it is asked, so that rounds of both sides alternate on a machine whose speed drifts.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

END_SECONDS = 20
LEAST_SECONDS = 0.005
"""A round repeats shorter runs until so much time has passed, as ours does."""


class Peer:
    """A process that times attention with torch's SDPA and, where it is installed, vLLM's CPU kernel.

    Raises:
        RuntimeError: with the end of its output, if it fails.
    """

    def __init__(self, python: str, threads: int) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["OMP_NUM_THREADS"] = str(threads)
        self.process = subprocess.Popen(
            [python, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def facts(self) -> dict[str, Any]:
        """Versions and device."""
        return self._ask({"do": "facts"})

    def prepare(self, case: dict[str, Any]) -> dict[str, str | None]:
        """Makes the data of a case (see ``kernels.Case``); says for each way to compute it why it cannot, or None."""
        return self._ask({"do": "prepare", "case": case})

    def measure(self, name: str) -> float:
        """Seconds of a run of a way that ``prepare`` named."""
        return self._ask({"do": "measure", "name": name})

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # its end is reported below
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        raise RuntimeError(f"the peer ended with status {self.process.wait()}; see its output above")


def _torch_ways(case: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """torch SDPA on dense keys, in the ways it can be told that heads share them; making repeated keys is not timed."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch.nn.functional import scaled_dot_product_attention  # pyright: ignore[reportMissingImports]

    count, heads, kv_heads, dim = case["requests"], case["num_heads"], case["num_kv_heads"], case["head_dim"]
    queries, keys_per_request = case["queries"], case["context"]
    options = {"dtype": getattr(torch, case["dtype"]), "device": "cuda" if torch.cuda.is_available() else "cpu"}
    q = torch.randn(count, heads, queries, dim, **options)
    k, v = (torch.randn(count, kv_heads, keys_per_request, dim, **options) for _ in range(2))
    causal = queries > 1
    group = heads // kv_heads
    if causal and queries != keys_per_request:
        raise NotImplementedError("is_causal of torch means queries from position 0")
    ways = {"gqa": lambda: scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)}
    if group > 1:
        repeated = [x.repeat_interleave(group, dim=1) for x in (k, v)]
        ways["repeated"] = lambda: scaled_dot_product_attention(q, *repeated, is_causal=causal)
        if not causal:  # a group of query heads looks like as many queries
            stacked = q.reshape(count, kv_heads, group, dim)
            ways["stacked"] = lambda: scaled_dot_product_attention(stacked, k, v)
    return {f"torch SDPA, {name}": way for name, way in ways.items()}


def _vllm_ways(case: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """vLLM's CPU attention over its paged cache; its plan of the work is made once, as once a step for all layers."""
    import torch  # pyright: ignore[reportMissingImports]

    if torch.cuda.is_available():
        raise NotImplementedError("the CPU kernel is for machines without a GPU")
    from vllm import _custom_ops as ops  # pyright: ignore[reportMissingImports]
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # pyright: ignore[reportMissingImports]

    count, kv_heads, dim = case["requests"], case["num_kv_heads"], case["head_dim"]
    queries, context, block = case["queries"], case["context"], 32 * -(-case["block_size"] // 32)
    dtype = getattr(torch, case["dtype"])
    per_request = -(-context // block)
    order = torch.randperm(count * per_request, dtype=torch.int32) + 1
    tables = order.reshape(count, per_request)
    keys, values = torch.empty(count * per_request + 1, kv_heads, 2 * block, dim, dtype=dtype).chunk(2, dim=2)
    isa = _get_attn_isa(dtype, block, dim)
    positions = torch.arange(context)
    slots = (tables[:, positions // block].long() * block + positions % block).flatten()
    fresh = [torch.randn(len(slots), kv_heads, dim, dtype=dtype) for _ in range(2)]
    ops.cpu_attn_reshape_and_cache(*fresh, keys, values, slots, isa)
    q = torch.randn(count * queries, case["num_heads"], dim, dtype=dtype)
    out = torch.empty_like(q)
    starts = torch.arange(count + 1, dtype=torch.int32) * queries
    lens = torch.full((count,), context, dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=count, num_heads=case["num_heads"], num_kv_heads=kv_heads, head_dim=dim, seq_lens=lens, dtype=dtype,
        query_start_loc=starts, causal=True, sliding_window_size=-1, isa=isa, enable_kv_split=True,
    )  # fmt: skip

    def run() -> None:
        ops.cpu_attention_with_kv_cache(
            query=q, key_cache=keys, value_cache=values, output=out, query_start_loc=starts, seq_lens=lens,
            scale=dim**-0.5, causal=True, alibi_slopes=None, sliding_window=-1, block_table=tables, softcap=0,
            scheduler_metadata=plan, s_aux=None,
        )  # fmt: skip

    return {f"vLLM CPU, {isa}": run}


def _facts() -> dict[str, Any]:
    from importlib import metadata

    import torch  # pyright: ignore[reportMissingImports]

    facts: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name()
    with contextlib.suppress(metadata.PackageNotFoundError):
        facts["vllm"] = metadata.version("vllm")
    return facts


def _prepare(case: dict[str, Any]) -> tuple[dict[str, Callable[[], Any]], dict[str, str | None]]:
    ways: dict[str, Callable[[], Any]] = {}
    state: dict[str, str | None] = {}
    for name, make in (("torch SDPA", _torch_ways), ("vLLM CPU", _vllm_ways)):
        try:
            made = make(case)
        except Exception as error:  # not installed, or not for this case
            state[name] = f"{type(error).__name__}: {error!s:.300}"
            continue
        for way, run in made.items():
            try:
                _timed(run, 1)
            except Exception as error:  # out of memory, no kernel for this type
                state[way] = f"{type(error).__name__}: {error!s:.300}"
                continue
            ways[way], state[way] = run, None
    return ways, state


def _timed(run: Callable[[], Any], repeats: int) -> float:
    import torch  # pyright: ignore[reportMissingImports]

    started = time.perf_counter()
    for _ in range(repeats):
        run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / repeats


def _main() -> None:
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(0)
    ways: dict[str, Callable[[], Any]] = {}
    repeats: dict[str, int] = {}
    with torch.inference_mode():
        for line in sys.stdin:
            question = json.loads(line)
            answer: Any
            if question["do"] == "facts":
                answer = _facts()
            elif question["do"] == "prepare":
                ways.clear()  # before the next case takes memory
                ways, answer = _prepare(question["case"])
                repeats = {name: max(1, round(LEAST_SECONDS / _timed(run, 1))) for name, run in ways.items()}
            else:
                _timed(ways[question["name"]], 1)  # who had its turn before left caches to itself
                answer = _timed(ways[question["name"]], repeats[question["name"]])
            print("RESULT " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: peers have modules of the same names, such as "kernels"
    _main()
