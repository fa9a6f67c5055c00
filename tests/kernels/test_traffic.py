"""The formulas of bytes that attention moves. Those of the TPU kernel are also counted, in ``test_mosaic_tpu``."""

from __future__ import annotations

from typing import Any

import pytest

from pallas_kernels.ragged_paged_attention import traffic

LENS = [700, 0, 1033, 64, 2000]
LLAMA: dict[str, Any] = {"num_kv_heads": 8, "head_dim": 128, "kv_itemsize": 2, "seq_lens": LENS}


def decode_bytes(implementation: str, **changes: Any) -> int:
    shape: dict[str, Any] = {"num_heads": 32, "block_size": 64, "q_itemsize": 2, "max_blocks": 64}
    return traffic.decode_bytes(implementation, **(shape | LLAMA | changes))


def test_the_minimum_is_each_visible_key_and_value_once() -> None:
    assert traffic.minimum_bytes(**LLAMA) == 2 * 8 * 128 * 2 * sum(LENS)
    assert traffic.minimum_bytes(**LLAMA, has_scales=True) == 2 * 8 * (128 * 2 + 4) * sum(LENS)
    assert traffic.minimum_bytes(**LLAMA, sliding_window=100) == 2 * 8 * 128 * 2 * 364


def test_a_tpu_copies_whole_rows_of_lanes_and_parts_of_long_blocks() -> None:
    def copied(**changes: Any) -> int:
        shape: dict[str, Any] = {
            "num_kv_heads": 1,
            "head_dim": 64,
            "block_size": 128,
            "kv_itemsize": 1,
            "seq_lens": [129],
        }
        return traffic.mosaic_tpu_cache_bytes(**(shape | changes))

    assert copied() == 160 * 128
    assert copied(block_size=16) == 144 * 128
    assert copied(head_dim=80) == 160 * 256
    assert copied(head_dim=256) == 160 * 512
    assert copied(sliding_window=30) == 64 * 128, "keys 99 to 128 lie in two stretches of 32"


@pytest.mark.parametrize("implementation", ["mosaic_tpu", "mosaic_gpu", "triton", "native"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_kernels_stay_within_a_tenth_of_the_minimum(implementation: str, head_dim: int) -> None:
    changes: dict[str, Any] = {"head_dim": head_dim}
    moved, least = decode_bytes(implementation, **changes), traffic.minimum_bytes(**(LLAMA | changes))
    assert least < moved <= 1.1 * least


@pytest.mark.parametrize("implementation", ["mosaic_tpu", "mosaic_gpu", "triton", "native", "xla"])
def test_what_adds_bytes(implementation: str) -> None:
    plain = decode_bytes(implementation)
    assert decode_bytes(implementation, has_scales=True) >= plain + 8 * 8 * sum(LENS)
    long = [2000, 2000, 1999]
    assert decode_bytes(implementation, sliding_window=500, seq_lens=long) < decode_bytes(implementation, seq_lens=long)
    assert decode_bytes(implementation, seq_lens=[0, *LENS, 0]) == plain, "padding rows move nothing"
    assert decode_bytes(implementation, seq_lens=[0]) == 0


def test_an_implementation_without_a_formula_is_refused() -> None:
    with pytest.raises(ValueError, match="'reference'"):
        decode_bytes("reference")
