"""What every implementation of ragged paged attention has to show: the cases and the checks.

It owns the cases and their bounds; it must not know of any implementation but the reference. An implementation's test
is ``check_contract(attend, CASES[name])``, ``attend`` being its ``ragged_paged_attention``, wrapped for an interpreter
where need be. All cases are small enough for interpreters.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.ragged_paged_attention import reference

Attend = Callable[..., jax.Array]

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
"""Largest stored magnitude of each quantised type of cache."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A batch of requests, as (query tokens, tokens in the cache with them), and how they are attended.

    Attributes:
        num_tokens, num_rows: padded sizes; the rest is padding.
        scales: where the scales of the cache come from: "none", "static" or "dynamic".
    """

    requests: tuple[tuple[int, int], ...]
    num_tokens: int
    num_rows: int
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    q_dtype: str = "float32"
    kv_dtype: str = "float32"
    scales: str = "none"
    scale: float | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def max_blocks(self) -> int:
        """One more than any request needs, so that every table has an entry that means nothing."""
        return -(-max((length for _, length in self.requests), default=1) // self.block_size) + 1

    @property
    def tolerance(self) -> float:
        """Bound of ``relative_error``. Quantised values are exact in what they stand for and add no error."""
        return 1e-2 if "bfloat16" in (self.q_dtype, self.kv_dtype) else 1e-5

    @property
    def options(self) -> dict[str, float | int | None]:
        """The arguments that are no arrays."""
        static = self.scales == "static"
        return {
            "scale": self.head_dim**-0.5 if self.scale is None else self.scale,
            "sliding_window": self.sliding_window,
            "soft_cap": self.soft_cap,
            "k_scale": 3.5 / LARGEST[self.kv_dtype] if static else None,
            "v_scale": 4.0 / LARGEST[self.kv_dtype] if static else None,
        }


DECODES = {"requests": ((1, 1), (1, 16), (1, 17), (1, 50)), "num_tokens": 8, "num_rows": 6}
MIXED = {"requests": ((1, 33), (0, 20), (5, 5), (1, 1), (7, 40), (0, 0), (2, 18)), "num_tokens": 24, "num_rows": 9}
BF16 = {"q_dtype": "bfloat16", "kv_dtype": "bfloat16"}
SMOLLM2 = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
GEMMA3 = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 256}
QWEN25 = {"num_heads": 14, "num_kv_heads": 2, "head_dim": 64}
LLAMA3 = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
GPT_OSS = {"num_heads": 16, "num_kv_heads": 2, "head_dim": 64}

CASES: dict[str, Case] = {
    "decodes": Case(**DECODES),
    "decodes 9/3x64 bf16": Case(**DECODES, **SMOLLM2, **BF16),
    "decodes 4/1x256 bf16": Case(**DECODES, **GEMMA3, **BF16),
    "decodes 8/1x96 block 8": Case(**DECODES, num_heads=8, num_kv_heads=1, head_dim=96, block_size=8),
    "mixed": Case(**MIXED),
    "mixed 9/3x64 bf16": Case(**MIXED, **SMOLLM2, **BF16),
    "mixed 9/3x64 block 64": Case(**MIXED, **SMOLLM2, block_size=64),
    "mixed 4/1x256 bf16 block 32": Case(**MIXED, **GEMMA3, **BF16, block_size=32),
    "mixed 14/2x64 bf16 block 32": Case(**MIXED, **QWEN25, **BF16, block_size=32),
    "mixed 32/8x128 bf16 block 16": Case(**MIXED, **LLAMA3, **BF16),
    "mixed 8/8x80 block 8": Case(**MIXED, num_heads=8, num_kv_heads=8, head_dim=80, block_size=8),
    "mixed 8/1x96 bf16": Case(**MIXED, num_heads=8, num_kv_heads=1, head_dim=96, **BF16),
    "mixed block 256": Case(requests=((1, 300), (3, 257), (2, 2)), num_tokens=8, num_rows=4, block_size=256),
    "prompt of 40": Case(requests=((40, 40),), num_tokens=48, num_rows=2),
    "long prompts bf16": Case(requests=((130, 130), (1, 200), (20, 150)), num_tokens=160, num_rows=4, **BF16),
    "no padding": Case(requests=((1, 18), (3, 3), (1, 32)), num_tokens=5, num_rows=3),
    "one decode": Case(requests=((1, 35),), num_tokens=1, num_rows=1),
    "nothing": Case(requests=(), num_tokens=4, num_rows=2),
    "window 1": Case(**MIXED, sliding_window=1),
    "window 18": Case(**MIXED, sliding_window=18),
    "window 70": Case(requests=((1, 200), (130, 190), (3, 67)), num_tokens=140, num_rows=4, sliding_window=70),
    "window 20 decodes 4/1x256 bf16": Case(**DECODES, **GEMMA3, **BF16, sliding_window=20),
    "soft cap": Case(**MIXED, soft_cap=3.0, scale=1.0),
    "scale": Case(**MIXED, scale=0.4),
    "sinks": Case(**MIXED, sinks=True),
    "sinks decodes 16/2x64 window bf16": Case(**DECODES, **GPT_OSS, **BF16, sinks=True, sliding_window=20),
    "sinks window soft cap": Case(**MIXED, sinks=True, sliding_window=18, soft_cap=2.0, scale=0.5),
    "q bf16, kv f32": Case(**MIXED, q_dtype="bfloat16"),
    "q f32, kv bf16": Case(**MIXED, kv_dtype="bfloat16"),
    "int8 dynamic": Case(**MIXED, kv_dtype="int8", scales="dynamic"),
    "int8 dynamic decodes 9/3x64 q bf16": Case(
        **DECODES, **SMOLLM2, q_dtype="bfloat16", kv_dtype="int8", scales="dynamic"
    ),
    "int8 dynamic all": Case(
        **MIXED, kv_dtype="int8", scales="dynamic", sinks=True, sliding_window=18, soft_cap=4.0, scale=0.3
    ),
    "int8 static 32/8x128 q bf16": Case(**MIXED, **LLAMA3, q_dtype="bfloat16", kv_dtype="int8", scales="static"),
    "e4m3 dynamic q bf16": Case(**MIXED, q_dtype="bfloat16", kv_dtype="float8_e4m3fn", scales="dynamic"),
    "e4m3 static": Case(**MIXED, kv_dtype="float8_e4m3fn", scales="static"),
    "e4m3 without scales q bf16": Case(**MIXED, q_dtype="bfloat16", kv_dtype="float8_e4m3fn"),
    "e5m2 dynamic": Case(**MIXED, kv_dtype="float8_e5m2", scales="dynamic"),
    "e5m2 static decodes q bf16": Case(**DECODES, q_dtype="bfloat16", kv_dtype="float8_e5m2", scales="static"),
}


def arguments(
    case: Case, seed: int = 0, *, constant: int | None = None, poisoned: bool = True
) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
    """Positional and keyword arguments of ``ragged_paged_attention`` for random contents.

    Args:
        constant: a request whose queries, keys and values are those of seed 0; the others have random lengths then.
        poisoned: what nobody owns is NaN (or the worst a type without NaN can hold); else it is zero.
    """
    layout = np.random.default_rng(seed)
    num_blocks, size = case.num_rows * case.max_blocks + 1, case.block_size
    kv_cache = np.zeros((num_blocks, case.num_kv_heads, size, 2 * case.head_dim), _dtype(case.kv_dtype))
    kv_scales = np.zeros((num_blocks, 2, case.num_kv_heads, size), np.float32)
    if poisoned:
        kv_cache[:] = 127 if case.kv_dtype == "int8" else np.nan
        kv_scales[:] = np.nan
    tables = layout.integers(0, num_blocks, (case.num_rows, case.max_blocks)).astype(np.int32)
    seq_lens = np.zeros(case.num_rows, np.int32)
    cu_seqlens_q = np.full(case.num_rows + 1, sum(count for count, _ in case.requests), np.int32)
    q = layout.standard_normal((case.num_tokens, case.num_heads, case.head_dim)).astype(_dtype(case.q_dtype))
    free = layout.permutation(np.arange(1, num_blocks))
    first = 0
    for row, (count, length) in enumerate(case.requests):
        if constant is not None and row != constant:
            length = int(layout.integers(count, case.max_blocks * size + 1))
        content = np.random.default_rng([0 if row == constant else seed, row])
        blocks = free[row * case.max_blocks :][: -(-length // size)]
        tables[row, : len(blocks)] = blocks
        seq_lens[row], cu_seqlens_q[row] = length, first
        q[first : first + count] = content.standard_normal((count, *q.shape[1:])).astype(q.dtype)
        real = content.standard_normal((length, 2, case.num_kv_heads, case.head_dim))
        stored, scales = _quantise(real, case)  # [S, 2, K, H] and [S, 2, K]
        block_ids, offsets = blocks[np.arange(length) // size], np.arange(length) % size
        kv_cache[block_ids, :, offsets] = np.concatenate([stored[:, 0], stored[:, 1]], axis=-1)
        kv_scales[block_ids, :, :, offsets] = scales
        first += count
    sinks = np.random.default_rng(1).standard_normal(case.num_heads).astype(q.dtype) if case.sinks else None
    scales = kv_scales if case.scales == "dynamic" else None
    return (q, kv_cache, tables, seq_lens, cu_seqlens_q), {"sinks": sinks, "kv_scales": scales, **case.options}


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def _quantise(real: np.ndarray, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Stored values of [S, 2, K, H] real ones, and the scales [S, 2, K] of dynamic quantisation."""
    scales = np.ones(real.shape[:-1], np.float32)
    if case.scales == "dynamic":
        scales = (np.abs(real).max(axis=-1) / LARGEST[case.kv_dtype]).astype(np.float32)
        real = real / scales[..., None]
    elif case.scales == "static":
        real = real / np.array([case.options["k_scale"], case.options["v_scale"]])[:, None, None]
    if case.kv_dtype in LARGEST:
        real = np.clip(real, -LARGEST[case.kv_dtype], LARGEST[case.kv_dtype])
    return (np.rint(real) if case.kv_dtype == "int8" else real).astype(_dtype(case.kv_dtype)), scales


@functools.cache
def _compiled(attend: Attend, case: Case) -> Any:
    return jax.jit(functools.partial(attend, **case.options))


def run(attend: Attend, case: Case, seed: int = 0, **how: Any) -> np.ndarray:
    """Result in float32 of an implementation for ``arguments(case, seed, **how)``; compiled once a case."""
    positional, keywords = arguments(case, seed, **how)
    arrays = {name: None if keywords[name] is None else jnp.asarray(keywords[name]) for name in ("sinks", "kv_scales")}
    out = _compiled(attend, case)(*map(jnp.asarray, positional), **arrays)
    assert out.dtype == case.q_dtype
    assert out.shape == positional[0].shape
    return np.asarray(out, np.float32)


def expected(case: Case, seed: int = 0) -> np.ndarray:
    """The float32 reference's result, not rounded to the type of the queries."""
    (q, *positional), keywords = arguments(case, seed)
    arrays = {name: keywords[name] for name in ("sinks", "kv_scales")}
    return np.asarray(_compiled(reference.ragged_paged_attention, case)(q.astype(np.float32), *positional, **arrays))


def relative_error(out: np.ndarray, exact: np.ndarray) -> float:
    """Largest over tokens and heads of the norm of the difference to the norm of the exact vector."""
    norms = np.linalg.norm(exact, axis=-1)
    return float(np.max(np.linalg.norm(out - exact, axis=-1) / np.where(norms > 0, norms, 1.0), initial=0.0))


def check_error(attend: Attend, case: Case) -> None:
    """Near the float32 reference though all that nobody owns is NaN; padding is zero."""
    out, exact = run(attend, case), expected(case)
    num_real = sum(count for count, _ in case.requests)
    assert not out[num_real:].any(), "padding tokens must be zero"
    error = relative_error(out[:num_real], exact[:num_real])
    assert error <= case.tolerance, f"relative error {error:.2e} is above {case.tolerance}"


def check_unowned(attend: Attend, case: Case) -> None:
    """What lies in blocks and slots that nobody owns changes no bit."""
    np.testing.assert_array_equal(run(attend, case, poisoned=True), run(attend, case, poisoned=False))


def check_repeat(attend: Attend, case: Case) -> None:
    """The same call twice gives the same bits."""
    np.testing.assert_array_equal(run(attend, case), run(attend, case))


def check_neighbours(attend: Attend, case: Case) -> None:
    """Other contents, lengths and blocks of the other requests change no bit of a request."""
    alone = run(attend, case)
    starts = np.cumsum([0] + [count for count, _ in case.requests])
    for row in {0, len(case.requests) // 2, len(case.requests) - 1} if case.requests else ():
        tokens = slice(starts[row], starts[row + 1])
        among_others = run(attend, case, seed=row + 1, constant=row)
        np.testing.assert_array_equal(among_others[tokens], alone[tokens])


def check_contract(attend: Attend, case: Case) -> None:
    """All of the above."""
    for check in (check_error, check_unowned, check_repeat, check_neighbours):
        check(attend, case)
