"""What a config.json is turned into: rope, activations, sizes; and what is refused, by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy_reference
import pytest

from jaxpage.models.config import ModelConfig, UnsupportedModelError
from jaxpage.models.registry import ARCHITECTURES, build_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 294,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 64,
}


def config(**changes: Any) -> ModelConfig:
    return build_config(LLAMA | changes)[0]


def frequencies(**changes: Any) -> np.ndarray:
    return config(**changes).layers[0].rope.inverse_frequencies(16)


def test_cfg_1_llama3_rope_frequencies() -> None:
    expected = [1, 0.244385, 0.0130423, 0.00395285, 0.00125, 0.000395285, 0.000125, 0.0000395285]
    np.testing.assert_allclose(frequencies(rope_scaling=LLAMA3_ROPE), expected, rtol=1e-5)


@pytest.mark.parametrize(
    "scaling", [None, {"rope_type": "default"}, {"type": "linear", "factor": 2.0}, LLAMA3_ROPE | {"factor": 32.0}]
)
def test_rope_frequencies_equal_an_independent_formula(scaling: dict[str, Any] | None) -> None:
    reference = {"rope_type": scaling["type"], **scaling} if scaling and "type" in scaling else scaling
    expected = numpy_reference.inverse_frequencies(LLAMA | {"rope_scaling": reference, "rope_theta": 50000.0})
    np.testing.assert_allclose(frequencies(rope_scaling=scaling, rope_theta=50000.0), expected, rtol=1e-6)


def test_cfg_1a_the_rope_base_is_found_wherever_it_is_written() -> None:
    inside = {"rope_theta": 100000.0, "rope_type": "default"}
    top = frequencies(rope_theta=100000)
    assert (frequencies(rope_parameters=inside) == top).all()
    assert (frequencies(rope_parameters=inside, rope_theta=100000.0) == top).all()
    assert (frequencies() == frequencies(rope_theta=10000.0)).all()
    assert (frequencies() != top)[1:].all()


def test_cfg_1a_contradicting_rope_bases_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"rope_theta.*20000.*10000"):
        config(rope_theta=20000.0, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"})


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_cfg_1_an_unknown_rope_type_is_refused_by_name(place: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"rope type 'yarn' .*supported: default, linear, llama3"):
        config(**{place: {"rope_type": "yarn", "factor": 4.0}})


def test_a_rope_type_without_its_numbers_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"llama3 needs low_freq_factor"):
        config(rope_scaling={"rope_type": "llama3", "factor": 8.0})


def test_cfg_3a_an_unknown_architecture_is_refused_with_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'MambaForCausalLM' \(model_type 'mamba'\)") as caught:
        config(architectures=["MambaForCausalLM"], model_type="mamba")
    for name in ARCHITECTURES:
        assert name in str(caught.value)
    with pytest.raises(UnsupportedModelError, match="architecture None"):
        config(architectures=None)


def test_cfg_3a_an_unknown_activation_is_refused_with_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModelError, match=r"activation 'xielu' is not supported; supported: silu, .*relu"):
        config(hidden_act="xielu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, r"vocab_size must be a positive integer, got 0"),
        ({"hidden_size": "64"}, r"hidden_size must be a positive integer, got '64'"),
        ({"num_key_value_heads": 3}, r"num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": None, "hidden_size": 66}, r"hidden_size 66 is not a multiple of num_attention_heads 4"),
        ({"rms_norm_eps": -1.0}, r"rms_norm_eps must be a positive number, got -1.0"),
        ({"num_hidden_layers": None}, r"num_hidden_layers must be a positive integer, got None"),
    ],
)
def test_impossible_sizes_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config(**changes)


def test_cfg_3a_sizes_are_read_and_not_assumed() -> None:
    assert config(rms_norm_eps=1e-2).norm_eps == 1e-2
    assert config(max_position_embeddings=16).max_position == 16
    assert config(head_dim=20).attention_scale == 20**-0.5
    assert config(head_dim=None).head_dim == 16
    assert config(num_key_value_heads=None).num_kv_heads == 4
    assert config(hidden_act="gelu").layers[0].activation == "gelu"


def test_end_ids_come_from_both_files() -> None:
    both, _ = build_config(LLAMA | {"eos_token_id": 2}, {"eos_token_id": [7, 2]})
    assert both.end_token_ids == (2, 7)
    assert config().end_token_ids == ()


def test_cfg_2_output_weights_are_tied_by_flag_or_family() -> None:
    gemma = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    for changes, tied in [({}, False), ({"tie_word_embeddings": True}, True), (gemma, True)]:
        model, specs = build_config(LLAMA | changes)
        names = {name for spec in specs for name in spec.sources}
        assert model.tied_embeddings is tied
        assert ("lm_head.weight" in names) is not tied


def test_qwen_windows_are_on_the_layers_the_config_says() -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 4, "sliding_window": 32}
    windows = [layer.sliding_window for layer in config(**qwen).layers]
    assert windows == [None] * 4
    windows = [layer.sliding_window for layer in config(**qwen, use_sliding_window=True, max_window_layers=3).layers]
    assert windows == [None, None, None, 32]
    kinds = ["sliding_attention", "full_attention"] * 2
    windows = [layer.sliding_window for layer in config(**qwen, use_sliding_window=True, layer_types=kinds).layers]
    assert windows == [32, None, 32, None]
    with pytest.raises(UnsupportedModelError, match="layer_types has 2 entries, num_hidden_layers is 4"):
        config(**qwen, use_sliding_window=True, layer_types=kinds[:2])


def test_gemma_softcaps_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"final_logit_softcapping 30.0"):
        config(architectures=["Gemma3ForCausalLM"], final_logit_softcapping=30.0)
