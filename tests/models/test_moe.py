"""Mixtures of experts: the layer against a loop over tokens, padding, quantised experts, and what configs describe."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forward_pass import ForwardPass
from golden_data import TINY

from jaxpage.errors import StartupError
from jaxpage.layers.moe import moe_mlp
from jaxpage.models.config import ExpertsSpec, UnsupportedModelError
from jaxpage.models.registry import build_config
from jaxpage.parallel.placement import ON_ONE_DEVICE
from jaxpage.weights import open_checkpoint
from jaxpage.weights.loader import load_params
from pallas_kernels.quantized_matmul import QuantizedWeight, dequantize, quantize

NUM_EXPERTS, TOP_K, HIDDEN, FFN, NUM_TOKENS = 5, 2, 24, 16, 12
NO_INT4 = r"quantization int4: tensor model.layers.0.block_sparse_moe.experts.0.w1.weight is of a mixture"


def weights() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    shapes = {"router": (NUM_EXPERTS, HIDDEN), "gate_up": (NUM_EXPERTS, 2, FFN, HIDDEN)}
    shapes |= {"down": (NUM_EXPERTS, HIDDEN, FFN)}
    return {name: (0.3 * generator.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def tokens(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((NUM_TOKENS, HIDDEN)).astype(np.float32)


@partial(jax.jit, static_argnames=("norm_topk_prob", "top_k"))
def mixture(x: Any, num_tokens: int, norm_topk_prob: bool = True, top_k: int = TOP_K) -> jax.Array:
    return moe_mlp(
        x, **weights(), activation="silu",
        num_experts_per_tok=top_k, norm_topk_prob=norm_topk_prob, num_tokens=jnp.asarray(num_tokens),
    )  # fmt: skip


def one_token(x: np.ndarray, norm_topk_prob: bool, top_k: int) -> np.ndarray:
    given = {name: weight.astype(np.float64) for name, weight in weights().items()}
    odds = np.exp(given["router"] @ x)
    chosen = np.argsort(-odds)[:top_k]
    total = odds[chosen].sum() if norm_topk_prob else odds.sum()
    y = np.zeros(HIDDEN)
    for expert in chosen:
        gate, up = given["gate_up"][expert] @ x
        y += odds[expert] / total * (given["down"][expert] @ (gate / (1 + np.exp(-gate)) * up))
    return y


@pytest.mark.parametrize(("norm_topk_prob", "top_k"), [(True, 2), (False, 2), (True, 1), (False, NUM_EXPERTS)])
def test_every_token_goes_through_its_experts(norm_topk_prob: bool, top_k: int) -> None:
    x = tokens()
    y = mixture(x, NUM_TOKENS, norm_topk_prob, top_k)
    expected = np.stack([one_token(each, norm_topk_prob, top_k) for each in x])
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)


def test_padding_goes_to_no_expert_and_nothing_spreads() -> None:
    x, num_real = tokens(), 7
    y = np.asarray(mixture(x, num_real))
    assert not y[num_real:].any()
    padded = x.copy()
    padded[num_real:] = np.nan
    np.testing.assert_array_equal(mixture(padded, num_real), y)
    # A token of NaN is its own problem; where the others' rows lie may change.
    padded[3] = np.nan
    among = np.asarray(mixture(padded, num_real))
    assert np.isnan(among[3]).all()
    others = [row for row in range(NUM_TOKENS) if row != 3]
    np.testing.assert_allclose(among[others], y[others], rtol=0, atol=1e-6)
    np.testing.assert_array_equal(mixture(x, num_real), y)
    assert not np.asarray(mixture(x, 0)).any()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantised_experts_are_what_they_stand_for(kind: str) -> None:
    given = weights()
    stored: dict[str, Any] = {name: quantize(jnp.asarray(given[name]), kind) for name in ("gate_up", "down")}
    options = {"activation": "silu", "num_experts_per_tok": 2, "norm_topk_prob": True, "num_tokens": NUM_TOKENS}
    multiply = jax.jit(partial(moe_mlp, **options))
    y = multiply(tokens(), given["router"], stored["gate_up"], stored["down"])
    real = [dequantize(stored[name]) for name in ("gate_up", "down")]
    np.testing.assert_allclose(y, multiply(tokens(), given["router"], *real), rtol=0, atol=1e-5)


def test_a_model_with_quantised_experts(tiny_model_dir: Callable[[str], Path]) -> None:
    golden = np.load(TINY / "mixtral" / "golden.npz")
    ids = golden["prompt_1"].tolist()
    model = ForwardPass(tiny_model_dir("mixtral"), quantization="int8")
    for layer in model.params["layers"]:
        stored = {name for name, leaf in layer.items() if isinstance(leaf, QuantizedWeight)}
        assert stored == {"qkv", "output", "experts_gate_up", "experts_down"}
        assert layer["experts_gate_up"].scales.shape == (4, 2, 64)
    logits, exact = model.logits(ids, [len(ids)], buckets=(17,)), golden["last_logits_1"]
    assert np.sqrt(np.mean((logits[-1] - exact) ** 2) / np.mean(exact**2)) < 0.03


def test_int4_experts_are_refused(tiny_model_dir: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(tiny_model_dir("mixtral"))
    config, specs = build_config(checkpoint.config)
    with pytest.raises(StartupError, match=NO_INT4):
        load_params(checkpoint, config, specs, "float32", ON_ONE_DEVICE, quantization="int4")


def qwen3_moe(**changes: Any) -> list[ExpertsSpec | None]:
    config, specs = build_config(json.loads((TINY / "qwen3_moe" / "config.json").read_text()) | changes)
    for index, layer in enumerate(config.layers):
        names = {spec.path[-1] for spec in specs if spec.path[:2] == ("layers", index)}
        assert ("router" in names) == ("experts_down" in names) == (layer.experts is not None) == ("down" not in names)
    return [layer.experts for layer in config.layers]


def test_which_layers_of_qwen3_moe_have_experts() -> None:
    spec = ExpertsSpec(8, 3, 32, True)
    assert qwen3_moe() == [spec, spec]
    assert qwen3_moe(num_hidden_layers=4, decoder_sparse_step=2) == [None, spec, None, spec]
    assert qwen3_moe(num_hidden_layers=3, mlp_only_layers=[0, 2]) == [None, spec, None]
    assert qwen3_moe(num_experts=6) == [ExpertsSpec(6, 3, 32, True)] * 2
    assert qwen3_moe(norm_topk_prob=None) == [ExpertsSpec(8, 3, 32, False)] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is above the number of experts 8"),
        ({"num_local_experts": None}, "num_local_experts must be a positive integer, got None"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be a positive integer, got 0"),
        ({"mlp_only_layers": 1}, "mlp_only_layers must be a list, got 1"),
    ],
)
def test_impossible_mixtures_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        qwen3_moe(**changes)
