"""A Llama-like decoder in float64 numpy: one full pass, no cache, no batch. Shares no code with jaxpage.

It reads a Hugging Face config and tensors under Hugging Face's names, and knows nothing of paged caches or devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Tensors = dict[str, np.ndarray]


class RandomModel(NamedTuple):
    """A Hugging Face directory with random weights, and what is in it."""

    directory: Path
    config: dict[str, Any]
    tensors: Tensors


def head_size(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def random_tensors(config: Mapping[str, Any], seed: int = 0) -> Tensors:
    """Float32 weights, normal with deviation 0.1 (norms 1); each drawn by its name alone."""
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q_rows = config["num_attention_heads"] * head_size(config)
    kv_rows = config["num_key_value_heads"] * head_size(config)
    attention = {"q": (q_rows, hidden), "k": (kv_rows, hidden), "v": (kv_rows, hidden), "o": (hidden, q_rows)}
    mlp = {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}"
        shapes[f"{prefix}.input_layernorm.weight"] = shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        blocks = (("self_attn", attention, "attention_bias"), ("mlp", mlp, "mlp_bias"))
        for block, projections, flag in blocks:
            for name, shape in projections.items():
                shapes[f"{prefix}.{block}.{name}_proj.weight"] = shape
                if config.get(flag) or (config["model_type"] == "qwen2" and name in "qkv"):
                    shapes[f"{prefix}.{block}.{name}_proj.bias"] = shape[:1]
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    return {name: _random(name, shape, seed) for name, shape in shapes.items()}


def _random(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    if name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    generator = np.random.default_rng([seed, *name.encode()])
    return (0.1 * generator.standard_normal(shape)).astype(np.float32)


def inverse_frequencies(config: Mapping[str, Any]) -> np.ndarray:
    """Rope's angles per position, with the scaling the config asks for; written loop by loop from the papers."""
    size = head_size(config)
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = scaling.get("rope_theta") or config.get("rope_theta") or 10000.0
    result = []
    for pair in range(size // 2):
        frequency = theta ** (-2 * pair / size)
        kind = scaling.get("rope_type", "default")
        if kind == "linear":
            frequency /= scaling["factor"]
        elif kind == "llama3":
            turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            share = min(max((turns - low) / (high - low), 0.0), 1.0)
            frequency = share * frequency + (1 - share) * frequency / scaling["factor"]
        result.append(frequency)
    return np.array(result)


def logits(config: Mapping[str, Any], tensors: Tensors, token_ids: list[int]) -> np.ndarray:
    """Logits of every position, float64 [T, V]."""
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    return hidden_states(config, tensors, token_ids) @ head.astype(np.float64).T


def hidden_states(config: Mapping[str, Any], tensors: Tensors, token_ids: list[int]) -> np.ndarray:
    """What the head reads at every position, float64 [T, D]."""
    weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    x = weights["model.embed_tokens.weight"][token_ids]
    angles = np.arange(len(token_ids))[:, None] * inverse_frequencies(config)
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}"
        x = x + _attention(config, weights, f"{prefix}.self_attn", _norm(config, weights, f"{prefix}.input", x), angles)
        x = x + _mlp(config, weights, f"{prefix}.mlp", _norm(config, weights, f"{prefix}.post_attention", x))
    return _rms(config, weights["model.norm.weight"], x)


def greedy(config: Mapping[str, Any], tensors: Tensors, prompt: list[int], count: int) -> list[int]:
    """The ``count`` most likely next tokens, by a full pass each; fails if a choice is too close to be meaningful."""
    token_ids = list(prompt)
    for _ in range(count):
        last = logits(config, tensors, token_ids)[-1]
        best, second = np.sort(last)[::-1][:2]
        assert best - second > 1e-4, "choose other weights: this step is a near tie"
        token_ids.append(int(np.argmax(last)))
    return token_ids[len(prompt) :]


def log_softmax(values: np.ndarray) -> np.ndarray:
    shifted = values - values.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _norm(config: Mapping[str, Any], weights: Tensors, name: str, x: np.ndarray) -> np.ndarray:
    return _rms(config, weights[f"{name}_layernorm.weight"], x)


def _rms(config: Mapping[str, Any], scale: np.ndarray, x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + config["rms_norm_eps"]) * scale


def _project(weights: Tensors, name: str, x: np.ndarray) -> np.ndarray:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)


def _attention(config: Mapping[str, Any], weights: Tensors, name: str, x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    length, size = len(x), head_size(config)
    q, k, v = (_project(weights, f"{name}.{part}_proj", x).reshape(length, -1, size) for part in "qkv")
    q, k = _rotate(q, angles), _rotate(k, angles)
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    causal = np.tril(np.ones((length, length), bool))
    outputs = []
    for head in range(config["num_attention_heads"]):
        scores = q[:, head] @ k[:, head // group].T / math.sqrt(size)
        probabilities = np.exp(log_softmax(np.where(causal, scores, -np.inf)))
        outputs.append(probabilities @ v[:, head // group])
    return _project(weights, f"{name}.o_proj", np.concatenate(outputs, axis=1))


def _rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    turned = (x[..., : x.shape[-1] // 2] + 1j * x[..., x.shape[-1] // 2 :]) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _mlp(config: Mapping[str, Any], weights: Tensors, name: str, x: np.ndarray) -> np.ndarray:
    gate = _project(weights, f"{name}.gate_proj", x)
    return _project(
        weights, f"{name}.down_proj", ACTIVATIONS[config["hidden_act"]](gate) * _project(weights, f"{name}.up_proj", x)
    )


def _gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": _gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
}
