"""Models whose linear weights are quantised while they are loaded: what is stored, and what it does to the logits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forward_pass import ForwardPass
from golden_data import TINY

from jaxpage.errors import StartupError
from jaxpage.models.registry import build_config
from jaxpage.parallel.placement import ON_ONE_DEVICE
from jaxpage.weights import open_checkpoint
from jaxpage.weights.loader import dummy_params, load_params
from pallas_kernels.quantized_matmul import QuantizedWeight, dequantize

LINEAR = ("qkv", "output", "gate_up", "down")
BOUNDS = {"int8": 0.07, "fp8": 0.25, "int4": 0.8}
"""Error of the logits of a tiny random model, relative to their own size (root mean squares). A weight in a wrong place
gives about 1.4; trained models are far less sensitive than random ones."""


def is_weight(node: Any) -> bool:
    return isinstance(node, QuantizedWeight)


@pytest.mark.parametrize(
    ("family", "quantization"),
    [("qwen2", "int8"), ("gemma3_text", "int4"), ("llama", "fp8")],
)
def test_logits_are_those_of_the_stored_weights_and_near_the_exact_ones(
    family: str, quantization: str, tiny_model_dir: Callable[[str], Path]
) -> None:
    golden = np.load(TINY / family / "golden.npz")
    ids = golden["prompt_2"].tolist()
    model = ForwardPass(tiny_model_dir(family), quantization=quantization)
    for layer in model.params["layers"]:
        assert {name for name, leaf in layer.items() if is_weight(leaf)} == set(LINEAR)
        assert {layer[name].kind for name in LINEAR} == {quantization}
    logits = model.logits(ids, [90])
    exact = golden["last_logits_2"]
    error = np.sqrt(np.mean((logits[-1] - exact) ** 2) / np.mean(exact**2))
    assert 1e-4 < error < BOUNDS[quantization]

    model.params = jax.tree.map(
        lambda leaf: dequantize(leaf) if is_weight(leaf) else leaf, model.params, is_leaf=is_weight
    )
    np.testing.assert_allclose(model.logits(ids, [90]), logits, rtol=0, atol=1e-4)


def num_bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("quantization", "bits", "scale_columns"), [("int8", 8, None), ("int4", 4, 64), ("fp8", 8, None)]
)
def test_only_linear_weights_shrink_and_dummies_look_the_same(
    quantization: str, bits: int, scale_columns: int | None, tiny_model_dir: Callable[[str], Path]
) -> None:
    checkpoint = open_checkpoint(tiny_model_dir("gemma3_text"))
    config, specs = build_config(checkpoint.config, checkpoint.generation_config)
    placement = ON_ONE_DEVICE
    full = load_params(checkpoint, config, specs, "bfloat16", placement)
    small = load_params(checkpoint, config, specs, "bfloat16", placement, quantization=quantization)
    for before, after in zip(full["layers"], small["layers"], strict=True):
        for name, leaf in before.items():
            if name not in LINEAR:
                assert after[name].dtype == leaf.dtype == jnp.bfloat16
                continue
            assert after[name].shape == leaf.shape
            # 96 columns of the output projection are groups of 32.
            per_scale = leaf.shape[-1] if scale_columns is None else 32 if name == "output" else scale_columns
            assert num_bytes(after[name]) == leaf.size * bits // 8 + 4 * leaf.size // per_scale
    dummy = dummy_params(config, specs, "bfloat16", placement, 0, quantization)
    shapes = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in (dummy, small)]
    assert shapes[0] == shapes[1]


def test_weights_are_rounded_once(tiny_model_dir: Callable[[str], Path]) -> None:
    """From what the checkpoint says, not from the activations' type."""
    checkpoint = open_checkpoint(tiny_model_dir("llama"))
    config, specs = build_config(checkpoint.config, checkpoint.generation_config)
    placement = ON_ONE_DEVICE
    weights = [load_params(checkpoint, config, specs, dtype, placement, quantization="int8")["layers"][0]["down"]
               for dtype in ("float32", "bfloat16")]  # fmt: skip
    np.testing.assert_array_equal(weights[0].values, weights[1].values)


@pytest.mark.parametrize("is_dummy", [False, True])
def test_columns_that_do_not_divide_into_groups_are_named(
    is_dummy: bool, random_model: Callable[..., Any], tmp_path: Path
) -> None:
    model = random_model(intermediate_size=80)
    shutil.copytree(model.directory, tmp_path, dirs_exist_ok=True)
    assert json.loads((tmp_path / "config.json").read_text())["intermediate_size"] == 80
    checkpoint = open_checkpoint(tmp_path)
    config, specs = build_config(checkpoint.config, checkpoint.generation_config)
    placement = ON_ONE_DEVICE
    with pytest.raises(StartupError, match=r"int4: tensor model.layers.0.mlp.down_proj.weight has 80 columns"):
        if is_dummy:
            dummy_params(config, specs, "float32", placement, 0, "int4")
        else:
            load_params(checkpoint, config, specs, "float32", placement, quantization="int4")
    assert is_weight(
        load_params(checkpoint, config, specs, "float32", placement, quantization="int8")["layers"][0]["down"]
    )
