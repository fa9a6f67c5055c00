"""Loads parameters with the blocks of a GGUF file kept and without, and compares what they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxpage.models.config import ModelConfig
from jaxpage.models.weight_map import ParamSpec
from jaxpage.parallel.placement import ON_ONE_DEVICE
from jaxpage.weights import Checkpoint
from jaxpage.weights.loader import load_params
from pallas_kernels.matmul import BlockWeight, dequantize


def kept_blocks(
    checkpoint: Checkpoint, config: ModelConfig, specs: Sequence[ParamSpec], some: Sequence[ParamSpec]
) -> set[tuple[str | int, ...]]:
    """Paths of the parameters of ``some`` that stay in blocks, after checking that no number of any is changed."""
    kept, floats = (
        load_params(checkpoint, config, some, "float32", ON_ONE_DEVICE, all_specs=specs, keeps_blocks=keeps)
        for keeps in (True, False)
    )
    found = set()
    for spec in some:
        leaf: Any = kept
        expected: Any = floats
        for part in spec.path:
            leaf, expected = leaf[part], expected[part]
        if isinstance(leaf, BlockWeight):
            found.add(spec.path)
            assert sum(part.nbytes for part in jax.tree.leaves(leaf)) < 0.4 * expected.nbytes
            leaf = dequantize(leaf)
        assert leaf.shape == spec.shape
        np.testing.assert_array_equal(leaf, expected)
    return found
