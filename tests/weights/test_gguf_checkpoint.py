"""GGUF checkpoints: values, names and configuration in Hugging Face's terms, and how unfit files are refused."""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from loaded_blocks import kept_blocks

from jaxpage.models.registry import build_config
from jaxpage.weights import WeightsError, open_checkpoint

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 64, 256, 4, 2, 16, 40, 2
MATRICES = {
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_gate": (FFN, HIDDEN),
    "ffn_up": (FFN, HIDDEN),
    "ffn_down": (HIDDEN, FFN),
}
NORMS = {
    "llama": {"attn_norm": HIDDEN, "ffn_norm": HIDDEN},
    "qwen2": {"attn_norm": HIDDEN, "ffn_norm": HIDDEN},
    "qwen3": {"attn_norm": HIDDEN, "ffn_norm": HIDDEN, "attn_q_norm": HEAD_DIM, "attn_k_norm": HEAD_DIM},
}
NORMS["gemma3"] = NORMS["qwen3"] | {"post_attention_norm": HIDDEN, "post_ffw_norm": HIDDEN}
MISSING = object()


def tiny_tensors(architecture: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in MATRICES.items()}
        shapes |= {f"blk.{layer}.{name}.weight": (size,) for name, size in NORMS[architecture].items()}
        if architecture == "qwen2":
            shapes |= {f"blk.{layer}.{name}.bias": MATRICES[name][:1] for name in ("attn_q", "attn_k", "attn_v")}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def tiny_metadata() -> dict[str, Any]:
    return {
        "context_length": 128,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 0.5,
        "attention.sliding_window": 32,
        "rope.freq_base": 5000.0,
    }


def write(
    path: Path,
    architecture: str = "llama",
    tensors: dict[str, np.ndarray] | None = None,
    types: dict[str, GGMLQuantizationType] | None = None,
    **changes: Any,
) -> Path:
    """Write a tiny model; ``changes`` set or (MISSING) drop metadata keys, written with "__" for "."."""
    writer = GGUFWriter(path, architecture)
    metadata = tiny_metadata() | {key.replace("__", "."): value for key, value in changes.items()}
    for key, value in metadata.items():
        full_key = key if key.startswith(("tokenizer.", "split.")) else f"{architecture}.{key}"
        if isinstance(value, str):
            writer.add_string(full_key, value)
        elif isinstance(value, float):
            writer.add_float32(full_key, value)
        elif isinstance(value, list):
            writer.add_array(full_key, value)
        elif value is not MISSING:
            writer.add_uint32(full_key, value)
    if tensors is None:
        tensors = tiny_tensors(architecture if architecture in NORMS else "llama")
    for name, array in tensors.items():
        writer.add_tensor(name, array, raw_dtype=(types or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


def test_llama_names_shapes_and_row_order(path: Path) -> None:
    tensors = tiny_tensors("llama")
    checkpoint = open_checkpoint(write(path))
    layer = "model.layers.1."
    renamed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        layer + "input_layernorm.weight": "blk.1.attn_norm.weight",
        layer + "post_attention_layernorm.weight": "blk.1.ffn_norm.weight",
        layer + "self_attn.v_proj.weight": "blk.1.attn_v.weight",
        layer + "self_attn.o_proj.weight": "blk.1.attn_output.weight",
        layer + "mlp.gate_proj.weight": "blk.1.ffn_gate.weight",
        layer + "mlp.up_proj.weight": "blk.1.ffn_up.weight",
        layer + "mlp.down_proj.weight": "blk.1.ffn_down.weight",
    }
    for name, source in renamed.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensors[source])
        assert checkpoint.shape(name) == tensors[source].shape
        assert checkpoint.dtype(name) == np.float32
    for name, source, heads in (("q_proj", "attn_q", HEADS), ("k_proj", "attn_k", KV_HEADS)):
        rows = checkpoint.read(f"{layer}self_attn.{name}.weight")
        for row in range(heads * HEAD_DIM):
            head, within = divmod(row, HEAD_DIM)
            half, pair = divmod(within, HEAD_DIM // 2)
            expected = tensors[f"blk.1.{source}.weight"][head * HEAD_DIM + 2 * pair + half]
            np.testing.assert_array_equal(rows[row], expected)
    assert len(checkpoint.names()) == len(set(checkpoint.names())) == len(tensors)


def test_llama_config(path: Path) -> None:
    ids = {"bos_token_id": 1, "eos_token_id": 2, "eot_token_id": 7, "padding_token_id": 3}
    checkpoint = open_checkpoint(write(path, **{f"tokenizer__ggml__{key}": value for key, value in ids.items()}))
    assert checkpoint.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rms_norm_eps": 0.5,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": 3}


def test_defaults_of_absent_keys(path: Path) -> None:
    absent = {key: MISSING for key in ("attention__key_length", "attention__head_count_kv", "rope__freq_base")}
    tensors = tiny_tensors("llama")
    for layer in range(LAYERS):
        tensors[f"blk.{layer}.attn_k.weight"] = tensors[f"blk.{layer}.attn_q.weight"]
    config = open_checkpoint(write(path, tensors=tensors, **absent)).config
    assert config["head_dim"] == HEAD_DIM
    assert config["num_key_value_heads"] == HEADS
    assert config["rope_parameters"]["rope_theta"] == 10000.0


def test_output_weight_and_biases_show_in_the_config(path: Path) -> None:
    tensors = tiny_tensors("llama")
    tensors |= {"output.weight": tensors["token_embd.weight"] + 1}
    for layer in range(LAYERS):
        tensors |= {
            f"blk.{layer}.{name}.bias": np.arange(shape[0], dtype=np.float32) for name, shape in MATRICES.items()
        }
    checkpoint = open_checkpoint(write(path, tensors=tensors))
    assert checkpoint.config["tie_word_embeddings"] is False
    assert checkpoint.config["attention_bias"] is checkpoint.config["mlp_bias"] is True
    np.testing.assert_array_equal(checkpoint.read("lm_head.weight"), tensors["output.weight"])
    # Biases follow the rows of their weights: evens of the first head, then its odds.
    bias = checkpoint.read("model.layers.0.self_attn.q_proj.bias")
    assert bias[:HEAD_DIM].tolist() == [*range(0, HEAD_DIM, 2), *range(1, HEAD_DIM, 2)]
    assert checkpoint.read("model.layers.0.self_attn.v_proj.bias").tolist() == list(range(KV_HEADS * HEAD_DIM))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_rows_are_left_in_place(path: Path, architecture: str) -> None:
    tensors = tiny_tensors(architecture)
    checkpoint = open_checkpoint(write(path, architecture))
    assert checkpoint.config["model_type"] == architecture
    assert ("attention_bias" in checkpoint.config) == (architecture == "qwen3")
    np.testing.assert_array_equal(
        checkpoint.read("model.layers.0.self_attn.q_proj.weight"), tensors["blk.0.attn_q.weight"]
    )
    extra = {
        "qwen2": ("self_attn.k_proj.bias", "attn_k.bias"),
        "qwen3": ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    }
    name, source = extra[architecture]
    np.testing.assert_array_equal(checkpoint.read(f"model.layers.1.{name}"), tensors[f"blk.1.{source}"])
    assert len(checkpoint.names()) == len(tensors)


def test_gemma3_norms_lose_their_offset(path: Path) -> None:
    tensors = tiny_tensors("gemma3")
    checkpoint = open_checkpoint(write(path, "gemma3"))
    renamed = {
        "input_layernorm": "attn_norm",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
    for name, source in renamed.items():
        np.testing.assert_array_equal(
            checkpoint.read(f"model.layers.1.{name}.weight"), tensors[f"blk.1.{source}.weight"] - 1
        )
    np.testing.assert_array_equal(checkpoint.read("model.norm.weight"), tensors["output_norm.weight"] - 1)
    for name in ("q_proj", "v_proj"):
        np.testing.assert_array_equal(
            checkpoint.read(f"model.layers.0.self_attn.{name}.weight"), tensors[f"blk.0.attn_{name[0]}.weight"]
        )


def test_gemma3_config(path: Path) -> None:
    config = open_checkpoint(write(path, "gemma3")).config
    expected = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": HEAD_DIM,
        "sliding_window": 32,
        "layer_types": ["sliding_attention"] * LAYERS,
        "rope_theta": 5000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
    }
    assert config.items() >= expected.items()
    scaled = open_checkpoint(write(path, "gemma3", rope__scaling__type="linear", rope__scaling__factor=8.0)).config
    assert scaled["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize("pattern", [2, [True, False]], ids=["period", "list"])
def test_gemma3_layer_pattern_of_the_file_counts(path: Path, pattern: Any) -> None:
    config = open_checkpoint(write(path, "gemma3", attention__sliding_window_pattern=pattern)).config
    assert config["layer_types"] == ["sliding_attention", "full_attention"]


QUANTIZABLE = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


@pytest.mark.parametrize("type_name", [*QUANTIZABLE, "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"])
def test_dequantised_values(path: Path, type_name: str) -> None:
    kind = GGMLQuantizationType[type_name]
    tensors = tiny_tensors("llama")
    source = "blk.0.ffn_down.weight"
    if type_name in QUANTIZABLE:
        packed = quantize(tensors[source], kind)
    else:
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        # Bytes below 64 keep the float16 scales within the blocks finite.
        shape = (HIDDEN, FFN // block_size * block_bytes)
        packed = np.random.default_rng(1).integers(0, 64, shape).astype(np.uint8)
    types = {} if type_name in ("F32", "F16") else {source: kind}
    checkpoint = open_checkpoint(write(path, tensors=tensors | {source: packed}, types=types))
    read = checkpoint.read("model.layers.0.mlp.down_proj.weight")
    assert read.dtype == np.float32
    assert read.shape == checkpoint.shape("model.layers.0.mlp.down_proj.weight") == (HIDDEN, FFN)
    np.testing.assert_array_equal(read, dequantize(packed, kind).reshape(HIDDEN, FFN))
    if type_name in QUANTIZABLE:
        np.testing.assert_allclose(read, tensors[source], atol=0.5)


def test_cfg_1_linear_rope_scaling(path: Path) -> None:
    config = open_checkpoint(write(path, rope__scaling__type="linear", rope__scaling__factor=2.0)).config
    assert config["rope_parameters"] == {"rope_theta": 5000.0, "rope_type": "linear", "factor": 2.0}
    config = open_checkpoint(write(path, rope__scale_linear=4.0)).config
    assert config["rope_parameters"] == {"rope_theta": 5000.0, "rope_type": "linear", "factor": 4.0}
    config = open_checkpoint(write(path, rope__scaling__type="none", rope__scaling__factor=2.0)).config
    assert config["rope_parameters"] == {"rope_theta": 5000.0, "rope_type": "default"}


@pytest.mark.parametrize("kind", ["yarn", "longrope", "strange"])
def test_cfg_1_other_rope_scaling_is_refused_by_name(path: Path, kind: str) -> None:
    with pytest.raises(WeightsError, match=f"rope scaling type '{kind}' is not supported"):
        open_checkpoint(write(path, rope__scaling__type=kind, rope__scaling__factor=2.0))


def test_cfg_1_llama3_rope_factors_are_recognised(path: Path) -> None:
    # The factors at base 500000, head size 16, original context 8192, by the published rule.
    factors = []
    for pair in range(HEAD_DIM // 2):
        wavelength = 2 * np.pi * 500000.0 ** (2 * pair / HEAD_DIM)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192 / 1:
            factors.append(32.0)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / 32 + smooth))
    assert 1 < factors[4] < 32
    tensors = tiny_tensors("llama") | {"rope_freqs.weight": np.array(factors, np.float32)}
    checkpoint = open_checkpoint(write(path, tensors=tensors, rope__freq_base=500000.0))
    assert checkpoint.config["rope_parameters"] == {
        "rope_theta": 500000.0,
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freq_factors" not in checkpoint.config
    assert not any("rope" in name for name in checkpoint.names())


def test_other_rope_factors_are_handed_over(path: Path) -> None:
    factors = np.linspace(1, 3, HEAD_DIM // 2, dtype=np.float32)
    checkpoint = open_checkpoint(write(path, tensors=tiny_tensors("llama") | {"rope_freqs.weight": factors}))
    assert checkpoint.config["rope_parameters"] == {"rope_theta": 5000.0, "rope_type": "default"}
    assert checkpoint.config["rope_freq_factors"] == factors.tolist()
    assert not any("rope" in name for name in checkpoint.names())


@pytest.mark.parametrize("factors", [np.ones(3, np.float32), np.zeros(HEAD_DIM // 2, np.float32)])
def test_unfit_rope_factors_are_refused(path: Path, factors: np.ndarray) -> None:
    with pytest.raises(WeightsError, match=r"rope_freqs.weight must hold 8 positive numbers"):
        open_checkpoint(write(path, tensors=tiny_tensors("llama") | {"rope_freqs.weight": factors}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": MISSING}, r"llama.block_count is missing"),
        ({"attention__head_count": [4, 2]}, r"llama.attention.head_count must be one positive number, got \[4, 2\]"),
        ({"attention__head_count": 0}, r"head_count must be one positive number, got 0"),
        ({"attention__head_count": 4.5}, r"head_count must be an integer, got 4.5"),
        ({"embedding_length": "64"}, r"embedding_length must be one positive number, got '64'"),
        ({"attention__head_count": 2}, r"tensor 'blk.0.attn_q.weight' has 64 rows, expected 32"),
        ({"rope__dimension_count": 8}, r"rotary positions on 8 of 16 head dimensions"),
        ({"expert_count": 8}, r"llama.expert_used_count is missing"),
        ({"expert_count": "8"}, r"llama.expert_count must be one positive number, got '8'"),
        ({"split__count": 3}, r"one of 3 parts of a split GGUF"),
    ],
)
def test_unfit_metadata_is_refused_by_name(path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message) as caught:
        open_checkpoint(write(path, **changes))
    assert str(caught.value).startswith("tiny.gguf: ")


EXPERTS, EXPERT_FFN = 3, 32
EXPERT_MATRICES = {
    "ffn_gate_inp": (EXPERTS, HIDDEN),
    "ffn_gate_exps": (EXPERTS, EXPERT_FFN, HIDDEN),
    "ffn_up_exps": (EXPERTS, EXPERT_FFN, HIDDEN),
    "ffn_down_exps": (EXPERTS, HIDDEN, EXPERT_FFN),
}


def tensors_with_experts(architecture: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    dense = tiny_tensors("llama" if architecture == "llama" else "qwen3")
    tensors = {name: array for name, array in dense.items() if name.split(".")[-2] not in MATRICES or "attn" in name}
    for layer in range(LAYERS):
        for name, shape in EXPERT_MATRICES.items():
            tensors[f"blk.{layer}.{name}.weight"] = rng.normal(size=shape).astype(np.float32)
    return tensors


@pytest.mark.parametrize(
    ("architecture", "hf_class", "gate", "names"),
    [
        ("llama", "MixtralForCausalLM", "block_sparse_moe.gate", ("block_sparse_moe.experts", "w1", "w3", "w2")),
        ("qwen3moe", "Qwen3MoeForCausalLM", "mlp.gate", ("mlp.experts", "gate_proj", "up_proj", "down_proj")),
    ],
)
def test_experts_are_read_one_by_one(
    path: Path, architecture: str, hf_class: str, gate: str, names: tuple[str, ...]
) -> None:
    tensors = tensors_with_experts(architecture)
    counts = {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": EXPERT_FFN}
    if architecture == "llama":
        counts = {**counts, "feed_forward_length": EXPERT_FFN}
    quantised = "blk.1.ffn_up_exps.weight"
    checkpoint = open_checkpoint(
        write(path, architecture, tensors | {quantised: quantize(tensors[quantised], GGMLQuantizationType.Q8_0)},
              {quantised: GGMLQuantizationType.Q8_0}, **counts)
    )  # fmt: skip
    config, specs = build_config(checkpoint.config)
    assert checkpoint.config["architectures"] == [hf_class]
    experts = config.layers[1].experts
    assert experts is not None
    assert (experts.num_experts, experts.num_experts_per_tok, experts.intermediate_size) == (EXPERTS, 2, EXPERT_FFN)
    assert experts.norm_topk_prob
    assert {name for spec in specs for name in spec.sources} == set(checkpoint.names())
    for spec in specs:
        for name, shape in spec.sources.items():
            assert checkpoint.shape(name) == checkpoint.read(name).shape == shape
    np.testing.assert_array_equal(
        checkpoint.read(f"model.layers.1.{gate}.weight"), tensors["blk.1.ffn_gate_inp.weight"]
    )
    block, *kinds = names
    for kind, source in zip(kinds, ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), strict=True):
        for expert in range(EXPERTS):
            read = checkpoint.read(f"model.layers.1.{block}.{expert}.{kind}.weight")
            tolerance = 0.05 if source == "ffn_up_exps" else 0
            np.testing.assert_allclose(read, tensors[f"blk.1.{source}.weight"][expert], rtol=0, atol=tolerance)


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
def test_blocks_are_kept_where_all_of_a_matrix_is_in_blocks_and_no_expert(path: Path, architecture: str) -> None:
    """Of two layers, k of the second is not; a head of its own is; experts are."""
    tensors = tensors_with_experts(architecture)
    tensors |= {"output.weight": tensors["token_embd.weight"] + 1}
    names = ["output", *(f"blk.{layer}.{name}" for layer in range(LAYERS) for name in (*MATRICES, "ffn_up_exps"))]
    names = [f"{name}.weight" for name in names if f"{name}.weight" in tensors and name != "blk.1.attn_k"]
    types = dict.fromkeys(names, GGMLQuantizationType.Q8_0)
    counts = {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": EXPERT_FFN}
    stored = tensors | {name: quantize(tensors[name], kind) for name, kind in types.items()}
    checkpoint = open_checkpoint(
        write(path, architecture, stored, types, **(counts | {"feed_forward_length": EXPERT_FFN}))
    )
    config, specs = build_config(checkpoint.config)
    found = kept_blocks(checkpoint, config, specs, specs)
    assert found == {("lm_head",), ("layers", 0, "qkv"), ("layers", 0, "output"), ("layers", 1, "output")}


def test_experts_of_another_number_are_refused(path: Path) -> None:
    counts = {"expert_count": EXPERTS + 1, "expert_used_count": 2}
    with pytest.raises(
        WeightsError, match=r"tensor 'blk.0.ffn_gate_exps.weight' has shape \[3, 32, 64\], expected 4 matr"
    ):
        open_checkpoint(write(path, tensors=tensors_with_experts("llama"), **counts))
    with pytest.raises(
        WeightsError, match=r"'qwen2' with experts is not supported .*; with experts: llama, qwen3moe\)"
    ):
        open_checkpoint(write(path, "qwen2", **counts))
    with pytest.raises(WeightsError, match=r"'blk.0.ffn_gate_inp.weight' has no place in a LlamaForCausalLM model"):
        open_checkpoint(write(path, tensors=tensors_with_experts("llama")))


def test_equal_per_layer_counts_are_one_count(path: Path) -> None:
    config = open_checkpoint(write(path, attention__head_count=[4, 4], attention__head_count_kv=[2, 2])).config
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)


def test_unknown_architecture_is_refused_by_name(path: Path) -> None:
    with pytest.raises(WeightsError, match=r"'mamba' is not supported \(supported: llama, qwen2, qwen3, gemma3; "):
        open_checkpoint(write(path, "mamba"))


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q_norm.weight", "blk.0.ffn_up.scale", "other.weight", "blk.x.attn_q.weight"]
)
def test_unknown_tensor_is_refused_by_name(path: Path, name: str) -> None:
    tensors = tiny_tensors("llama") | {name: np.ones(4, np.float32)}
    with pytest.raises(WeightsError, match=f"tensor '{name}' has no place in a LlamaForCausalLM model"):
        open_checkpoint(write(path, tensors=tensors))


def test_tensor_that_cannot_be_dequantised_is_refused_by_name(path: Path) -> None:
    tensors = tiny_tensors("llama") | {"blk.0.ffn_up.weight": np.ones((FFN, HIDDEN), np.int16)}
    with pytest.raises(WeightsError, match=r"tensor 'blk.0.ffn_up.weight': type I16 cannot be dequantised"):
        open_checkpoint(write(path, tensors=tensors))


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.0.attn_q.weight"])
def test_tensors_the_config_comes_from_must_be_there(path: Path, name: str) -> None:
    tensors = tiny_tensors("llama")
    del tensors[name]
    with pytest.raises(WeightsError, match=f"tensor {name} is missing"):
        open_checkpoint(write(path, tensors=tensors))


def test_absent_tensor_is_refused_by_name(path: Path) -> None:
    checkpoint = open_checkpoint(write(path))
    for ask in (checkpoint.read, checkpoint.shape, checkpoint.dtype):
        with pytest.raises(WeightsError, match=r"tiny.gguf: the checkpoint has no tensor 'lm_head.weight'"):
            ask("lm_head.weight")


def test_wgt_1b_no_cut_goes_unnoticed(path: Path) -> None:
    content = write(path).read_bytes()
    end_of_table = content.rindex(b"blk.1.") + 64
    cuts = [*range(0, end_of_table, 37), *range(end_of_table, len(content), 50_021), len(content) - 32]
    for cut in cuts:
        path.write_bytes(content[:cut])
        with pytest.raises(WeightsError, match=r"^tiny.gguf: (is empty|is not a GGUF file|is truncated)") as caught:
            open_checkpoint(path)
        assert "\n" not in str(caught.value)


def test_wgt_1b_no_changed_byte_crashes_the_reader(path: Path) -> None:
    content = write(path).read_bytes()
    end_of_table = content.rindex(b"blk.1.") + 64
    for position in range(4, end_of_table, 11):
        path.write_bytes(content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :])
        try:
            checkpoint = open_checkpoint(path)
        except WeightsError:
            continue
        for name in checkpoint.names():
            assert checkpoint.read(name).shape == checkpoint.shape(name)


def change(offset: int, new: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[:offset] + new + content[offset + len(new) :]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change(0, b"GGML"), "is not a GGUF file"),
        (change(4, struct.pack("<I", 1)), "GGUF version 1 is not supported"),
        (change(4, struct.pack(">I", 3)), "GGUF version 50331648 is not supported"),
        (change(16, struct.pack("<Q", 1 << 60)), "damaged"),
        (change(24, struct.pack("<Q", 1 << 60)), "is truncated or damaged: it ends within metadata entry 0"),
        (lambda content: b"", "is empty"),
        (lambda content: b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
    ],
)
def test_wgt_1b_damaged_header_is_refused(path: Path, edit: Callable[[bytes], bytes], message: str) -> None:
    path.write_bytes(edit(write(path).read_bytes()))
    with pytest.raises(WeightsError, match=message):
        open_checkpoint(path)


def test_overlapping_tensors_are_refused_by_name(path: Path) -> None:
    content = write(path).read_bytes()
    name = b"blk.1.attn_v.weight"
    offset_at = content.index(name) + len(name) + 4 + 2 * 8 + 4
    path.write_bytes(change(offset_at, struct.pack("<Q", 0))(content))
    with pytest.raises(WeightsError, match="overlaps"):
        open_checkpoint(path)


def test_tokenizer_is_made_from_the_metadata(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = SimpleNamespace(Tokenizer=SimpleNamespace(from_gguf=lambda metadata: metadata))
    monkeypatch.setitem(sys.modules, "jaxpage.tokenizer", fake)
    write(
        path, tokenizer__ggml__tokens=["a", "ä", "▁b"], tokenizer__ggml__scores=[0.0, -1.5], tokenizer__ggml__model="x"
    )
    metadata: Any = open_checkpoint(path).load_tokenizer()
    assert metadata["tokenizer.ggml.tokens"] == ["a", "ä", "▁b"]
    assert metadata["tokenizer.ggml.scores"] == [0.0, -1.5]
    assert metadata["tokenizer.ggml.model"] == "x"


def test_directory_with_one_gguf_file_is_that_file(path: Path) -> None:
    write(path)
    assert open_checkpoint(path.parent).path == path


def test_built_in_smollm2_equals_its_hugging_face_form(builtin_gguf: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(builtin_gguf("smollm2-135m-instruct"))
    assert len(checkpoint.names()) == 2 + 30 * 9
    assert checkpoint.shape("model.embed_tokens.weight") == (49152, 576)
    shapes = {
        "input_layernorm": (576,),
        "post_attention_layernorm": (576,),
        "self_attn.q_proj": (576, 576),
        "self_attn.k_proj": (192, 576),
        "self_attn.v_proj": (192, 576),
        "self_attn.o_proj": (576, 576),
        "mlp.gate_proj": (1536, 576),
        "mlp.up_proj": (1536, 576),
        "mlp.down_proj": (576, 1536),
    }
    for layer in range(30):
        for name, shape in shapes.items():
            assert checkpoint.shape(f"model.layers.{layer}.{name}.weight") == shape
    assert checkpoint.config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    assert checkpoint.config["tie_word_embeddings"] is True
    # Hashes of what transformers makes of the same file (from_pretrained with gguf_file, saved as safetensors).
    for name, digest in SMOLLM2_SHA256.items():
        assert hashlib.sha256(checkpoint.read(name).tobytes()).hexdigest() == digest, name


SMOLLM2_SHA256 = {
    "model.norm.weight": "3b87f8e27335e67fc08f159cabfd2d18f205d6c5b225a6f978153552bf01d559",
    "model.layers.29.self_attn.q_proj.weight": "2f39f8002e96772faadb7667719e615167fe314589ce699ce97a007e33f2f298",
    "model.layers.29.self_attn.k_proj.weight": "8e99b2450d5f3d53731f52790cc82f80b04341e533306bcfee6669ffa3c79921",
    "model.layers.29.self_attn.v_proj.weight": "ccd13910de7a7987521feaa22b57227cc1ff00a702bea83b345c238c5800fe27",
    "model.layers.29.mlp.down_proj.weight": "c19605745425a11e704e305ce3d27b632c406195d39eb3377e9cfb140ac643d1",
}
