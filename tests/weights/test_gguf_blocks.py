"""Blocks of GGUF tensors against what the ``gguf`` package makes of the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxpage.weights.gguf_blocks import unpack, with_block_size

FLOAT16_AT = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2],
              "Q6_K": [208]}  # fmt: skip
"""Offsets in a block of its float16 numbers; every other byte may be anything."""


def stored(kind: str) -> tuple[np.ndarray, GGMLQuantizationType]:
    """Rows of random blocks, with scales of both signs, zero, the least and the largest."""
    quantization = GGMLQuantizationType[kind]
    num_bytes = GGML_QUANT_SIZES[quantization][1]
    random = np.random.default_rng(len(kind) + num_bytes)
    blocks = random.integers(0, 256, (500, num_bytes), dtype=np.uint8)
    extremes = np.array([0.0, -0.0, 6e-8, -6e-8, 65504.0, -65504.0], np.float16)
    for at in FLOAT16_AT[kind]:
        numbers = random.standard_normal(500).astype(np.float16)
        numbers[:6], numbers[6:12] = extremes, random.permutation(extremes)
        blocks[:, at : at + 2] = numbers[:, None].view(np.uint8)
    return blocks.reshape(50, -1), quantization


@pytest.mark.parametrize("kind", FLOAT16_AT)
def test_no_number_is_changed(kind: str) -> None:
    rows, quantization = stored(kind)
    blocks = unpack(rows, quantization)
    assert blocks is not None and blocks.values.dtype == np.int8 and blocks.block_size in (16, 32)
    expected = dequantize(rows, quantization)
    assert np.ptp(expected) > 1e5 and blocks.values.shape == expected.shape
    for found in (blocks, with_block_size(blocks, 16)):
        scales, offsets = (
            None if part is None else np.repeat(part, found.block_size, axis=-1) for part in (found[1], found[2])
        )
        real = found.values.astype(np.float32) * scales
        np.testing.assert_array_equal(real if offsets is None else real + offsets, expected)
        # With one rounding less, as a fused multiply-add has it, the same: the products are exact.
        wide = found.values.astype(np.float64) * scales
        np.testing.assert_array_equal(np.float32(wide if offsets is None else wide + offsets), expected)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "IQ4_NL", "TQ1_0"])
def test_other_types_are_no_such_blocks(kind: str) -> None:
    quantization = GGMLQuantizationType[kind]
    assert unpack(np.zeros((2, GGML_QUANT_SIZES[quantization][1]), np.uint8), quantization) is None
