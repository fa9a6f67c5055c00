"""The README's table: ten models on nine slices, in Markdown.

All of it is arithmetic, with estimated temporaries: compiling 90 pairs of steps would take hours. It must not know how
a single plan is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

from jaxpage.errors import ParameterError, StartupError
from jaxpage.plan.assess import Assessment, assess
from jaxpage.plan.models import find_values
from jaxpage.plan.slices import Slice, find_slice
from jaxpage.plan.splits import choose_scenario

MODELS = (
    "llama-3.2-1b", "qwen3-4b", "gemma-3-4b", "qwen2.5-7b", "llama-3.1-8b",
    "gemma-3-27b", "qwen3-30b-a3b", "qwen3-32b", "mixtral-8x7b", "llama-3.3-70b",
)  # fmt: skip
TARGETS = ("l4x1", "v5e-8", "v6e-16", "v5p-8", "v7x-8", "a100x8", "h100x8", "h200x8", "b200x8")
MAX_MODEL_LEN, CONTEXT, NUM_REQUESTS = 8192, 1024, 64
TYPES: Mapping[str, dict[str, Any]] = {
    "": {},
    "int8 ": {"quantization": "int8"},
    "int4, int8 KV ": {"quantization": "int4", "kv_cache_dtype": "int8"},
}
"""What is tried one after the other until it fits."""


def make_table(progress: TextIO) -> str:
    """The table; the names of models go to ``progress`` as they are done."""
    lines = [
        f"| model | {' | '.join(TARGETS)} |",
        f"|---|{'---|' * len(TARGETS)}",
    ]
    for name in MODELS:
        values = find_values(name)
        lines.append(f"| {name} | {' | '.join(make_cell(name, values, find_slice(target)) for target in TARGETS)} |")
        print(name, file=progress, flush=True)
    return "\n".join([*lines, "", explanation()])


def make_cell(name: str, values: Mapping[str, Any], where: Slice) -> str:
    """The first of ``TYPES`` that fits, in the sharding that is chosen without options; or "-"."""
    for prefix, types in TYPES.items():
        options = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": NUM_REQUESTS, **types}
        try:
            found = assess(choose_scenario(name, values, where, options), CONTEXT)
        except (ParameterError, StartupError):  # what has experts cannot be int4, for one
            continue
        if found.fits:
            return prefix + _shown(found)
    return "-"


def _shown(found: Assessment) -> str:
    replicas = found.scenario.num_replicas
    sizes = [f"TP {found.scenario.args.tensor_parallel_size}"] + ([f"DP {replicas}"] if replicas > 1 else [])
    tokens = found.memory.num_tokens * replicas
    shown = f"{tokens / 1e6:,.1f}M" if tokens >= 1e6 else f"{tokens / 1e3:,.0f}k"
    return f"{' x '.join(sizes)}: {shown}, {found.decode(NUM_REQUESTS).tokens_per_s:,.0f}"


def explanation() -> str:
    """What the cells mean."""
    return (
        "Of each: how the chips are used (tensor parallelism x replicas, as most requests fit), tokens of KV cache "
        "that fit on all of them, and the upper bound of tokens a second that "
        f"{NUM_REQUESTS} requests with {CONTEXT:,} tokens each can get. "
        f"bfloat16 where nothing else is said, else with int8 weights, else with int4 weights and an int8 cache; "
        f"- where a request of max_model_len {MAX_MODEL_LEN:,} does not fit even so. Temporaries are estimates."
    )
