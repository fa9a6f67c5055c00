"""Models whose keys and values are stored quantised: how near the logits stay, whatever the cut into steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from forward_pass import ForwardPass
from golden_data import TINY

from jaxpage.layers.kv_cache import kv_bytes_per_token

BOUNDS = {"int8": 0.03, "float8_e4m3fn": 0.25, "float8_e5m2": 0.5}
"""Error of the logits of a tiny random model, relative to their own size (root mean squares)."""


@pytest.mark.parametrize(
    ("family", "kv_cache_dtype"), [("qwen2", "int8"), ("gemma3_text", "float8_e4m3fn"), ("llama", "float8_e5m2")]
)
def test_logits_stay_near_the_exact_ones_and_do_not_depend_on_the_cut(
    family: str, kv_cache_dtype: str, tiny_model_dir: Callable[[str], Path]
) -> None:
    golden = np.load(TINY / family / "golden.npz")
    ids = golden["prompt_2"].tolist()
    model = ForwardPass(tiny_model_dir(family), kv_cache_dtype=kv_cache_dtype)
    logits = model.logits(ids, [60] + [1] * 30)
    exact = golden["last_logits_2"]
    error = np.sqrt(np.mean((logits[-1] - exact) ** 2) / np.mean(exact**2))
    assert 1e-4 < error < BOUNDS[kv_cache_dtype]
    # A key is quantised alone, and read from the cache by its own step too; other sums may round it otherwise.
    np.testing.assert_allclose(model.logits(ids, [90]), logits, rtol=0, atol=BOUNDS[kv_cache_dtype] / 10)


def test_scales_count() -> None:
    assert kv_bytes_per_token(2, 3, 64, "float32") == 2 * 2 * 3 * 64 * 4
    assert kv_bytes_per_token(2, 3, 64, "int8") == kv_bytes_per_token(2, 3, 64, "float8_e5m2") == 2 * 2 * 3 * (64 + 4)
