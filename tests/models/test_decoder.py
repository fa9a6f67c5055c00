"""The forward pass against an independent numpy decoder, for every config key that changes the arithmetic."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy_reference
import pytest
from forward_pass import ForwardPass
from numpy_reference import RandomModel, Tensors
from safetensors.numpy import save_file

LENGTH = 24
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 64,
}


def heads(num_heads: int, num_kv_heads: int, head_dim: int = 16, **more: int) -> dict[str, int]:
    return {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim, **more}


CASES: dict[str, dict[str, Any]] = {
    "cfg-2 tied": {"tie_word_embeddings": True},
    "cfg-3 attention bias": {"attention_bias": True},
    "cfg-3 mlp bias": {"mlp_bias": True},
    "cfg-3 qkv bias without a flag": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "cfg-3a eps": {"rms_norm_eps": 1e-2},
    "cfg-3a gelu": {"hidden_act": "gelu"},
    "cfg-3a gelu tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "cfg-3a relu": {"hidden_act": "relu"},
    "cfg-3a rope theta": {"rope_theta": 100.0},
    "cfg-3a one kv head": heads(4, 1),
    "cfg-3a as many kv heads": heads(4, 4),
    "cfg-4 48 / 4 is not 16": heads(4, 2, hidden_size=48),
    "cfg-4 head_dim 20": heads(4, 2, 20),
    "cfg-4 shape of smollm2": heads(9, 3, 64, hidden_size=576),
    "cfg-4a 9 to 3": heads(9, 3),
    "cfg-4a 12 to 4": heads(12, 4),
    "cfg-4a 5 to 1": heads(5, 1),
}


def check(model: RandomModel, ids: list[int], steps: list[int], **sizes: int) -> np.ndarray:
    """The logits, after they were found equal to the reference's."""
    expected = numpy_reference.logits(model.config, model.tensors, ids)
    logits = ForwardPass(model.directory, **sizes).logits(ids, steps, buckets=(1, LENGTH, 192))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * max(1.0, np.abs(expected).max() / 10))
    return logits


@pytest.fixture
def written(tmp_path: Path) -> Callable[[Mapping[str, Any], Tensors], RandomModel]:
    """Writes a model that has just these keys and tensors."""

    def write(config: Mapping[str, Any], tensors: Tensors) -> RandomModel:
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        save_file(tensors, directory / "model.safetensors")
        return RandomModel(directory, dict(config), tensors)

    return write


@pytest.mark.parametrize("case", CASES)
def test_cfg_2_cfg_3_cfg_3a_cfg_4_cfg_4a_logits_equal_the_reference(
    case: str, random_model: Callable[..., RandomModel], random_ids: Callable[..., list[int]]
) -> None:
    ids = random_ids(LENGTH)
    model = random_model(**CASES[case])
    logits = check(model, ids, [LENGTH])
    # The key is live: without it the numbers are others.
    plain = random_model()
    assert np.abs(logits - numpy_reference.logits(plain.config, plain.tensors, ids)).max() > 1e-2


def test_cfg_2_without_a_flag_the_output_weights_are_the_stored_ones(
    random_model: Callable[..., RandomModel],
    written: Callable[..., RandomModel],
    random_ids: Callable[..., list[int]],
) -> None:
    model = random_model()
    config = {name: value for name, value in model.config.items() if name != "tie_word_embeddings"}
    check(written(config, model.tensors), random_ids(LENGTH), [LENGTH])


def test_cfg_3_zero_biases_change_nothing(
    random_model: Callable[..., RandomModel],
    written: Callable[..., RandomModel],
    random_ids: Callable[..., list[int]],
) -> None:
    biased = random_model(attention_bias=True, mlp_bias=True)
    zeros = {name: tensor * (not name.endswith(".bias")) for name, tensor in biased.tensors.items()}
    logits = check(written(biased.config, zeros), random_ids(LENGTH), [LENGTH])
    plain = random_model()
    expected = numpy_reference.logits(plain.config, plain.tensors, random_ids(LENGTH))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("case", ["cfg-4 head_dim 20", "cfg-4 48 / 4 is not 16", "cfg-4 shape of smollm2"])
def test_cfg_4_odd_head_sizes_in_decode(
    case: str, block_size: int, random_model: Callable[..., RandomModel], random_ids: Callable[..., list[int]]
) -> None:
    model = random_model(**CASES[case])
    check(model, random_ids(LENGTH), [16] + [1] * (LENGTH - 16), block_size=block_size)


@pytest.mark.parametrize(
    "scaling", [LLAMA3_ROPE, {"rope_type": "linear", "factor": 2}, None], ids=["llama3", "linear", "none"]
)
def test_cfg_1_scaled_rope_at_long_positions(
    scaling: dict[str, Any] | None, random_model: Callable[..., RandomModel], random_ids: Callable[..., list[int]]
) -> None:
    model = random_model(rope_scaling=scaling)
    ids = random_ids(191)
    logits = check(model, ids, [191], num_blocks=49)
    plain = random_model()
    difference = np.abs(logits - numpy_reference.logits(plain.config, plain.tensors, ids)).max(axis=1)
    assert difference[0] < 1e-4
    assert (difference[64] > 1e-4) == (scaling is not None)


def test_cfg_1a_the_rope_base_is_read_wherever_it_is_written(
    random_model: Callable[..., RandomModel],
    written: Callable[..., RandomModel],
    random_ids: Callable[..., list[int]],
) -> None:
    model = random_model()
    config = {name: value for name, value in model.config.items() if name != "rope_theta"}
    top, inside = {"rope_theta": 100000}, {"rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}}
    ids = random_ids(51)
    first, *others = (
        ForwardPass(written(config | place, model.tensors).directory).logits(ids, [51])[50]
        for place in (top, inside, top | inside, {})
    )
    expected = numpy_reference.logits(config | top, model.tensors, ids)[50]
    np.testing.assert_allclose(first, expected, rtol=0, atol=1e-4)
    assert (others[0] == first).all()
    assert (others[1] == first).all()
    assert np.abs(others[2] - first).max() > 1e-2
    expected = numpy_reference.logits(config | {"rope_theta": 10000}, model.tensors, ids)[50]
    np.testing.assert_allclose(others[2], expected, rtol=0, atol=1e-4)
