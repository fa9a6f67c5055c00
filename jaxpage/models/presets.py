"""Configurations of well-known models, for planning without a checkpoint: facts from their published config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LLAMA_3_VOCAB = 128256
QWEN_VOCAB, QWEN_LARGE_VOCAB = 151936, 152064


def _sizes(vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


def _llama_3(hidden: int, ffn: int, layers: int, heads: int, **facts: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        **_sizes(LLAMA_3_VOCAB, hidden, ffn, layers, heads, 8),
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        **facts,
    }


def _llama_3_long(*sizes: int, factor: float = 8.0, **facts: Any) -> dict[str, Any]:
    """From 3.1 on: 128k positions."""
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return _llama_3(*sizes, max_position_embeddings=131072, rope_scaling=scaling, **facts)


def _qwen2(vocab: int, *sizes: int, tied: bool = False) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        **_sizes(vocab, *sizes),
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "tie_word_embeddings": tied,
    }


def _qwen3(*sizes: int, tied: bool = False, **facts: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        **_sizes(QWEN_VOCAB, *sizes),
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "tie_word_embeddings": tied,
        **facts,
    }


def _qwen3_moe(*sizes: int, expert_ffn: int) -> dict[str, Any]:
    return _qwen3(
        *sizes,
        architectures=["Qwen3MoeForCausalLM"],
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=expert_ffn,
        norm_topk_prob=True,
    )


def _gemma3(vocab: int, *sizes: int, window: int = 1024, **facts: Any) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        **_sizes(vocab, *sizes),
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": window,
        "max_position_embeddings": 32768 if window == 512 else 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None if window == 512 else {"rope_type": "linear", "factor": 8.0},
        "hidden_activation": "gelu_pytorch_tanh",
        **facts,
    }


PRESETS: Mapping[str, dict[str, Any]] = {
    "llama-3-8b": _llama_3(4096, 14336, 32, 32),
    "llama-3-70b": _llama_3(8192, 28672, 80, 64),
    "llama-3.1-8b": _llama_3_long(4096, 14336, 32, 32),
    "llama-3.2-1b": _llama_3_long(2048, 8192, 16, 32, factor=32.0, head_dim=64, tie_word_embeddings=True),
    "llama-3.2-3b": _llama_3_long(3072, 8192, 28, 24, factor=32.0, head_dim=128, tie_word_embeddings=True),
    "llama-3.3-70b": _llama_3_long(8192, 28672, 80, 64),
    "qwen2.5-0.5b": _qwen2(QWEN_VOCAB, 896, 4864, 24, 14, 2, tied=True),
    "qwen2.5-1.5b": _qwen2(QWEN_VOCAB, 1536, 8960, 28, 12, 2, tied=True),
    "qwen2.5-3b": _qwen2(QWEN_VOCAB, 2048, 11008, 36, 16, 2, tied=True),
    "qwen2.5-7b": _qwen2(QWEN_LARGE_VOCAB, 3584, 18944, 28, 28, 4),
    "qwen2.5-14b": _qwen2(QWEN_LARGE_VOCAB, 5120, 13824, 48, 40, 8),
    "qwen2.5-32b": _qwen2(QWEN_LARGE_VOCAB, 5120, 27648, 64, 40, 8),
    "qwen2.5-72b": _qwen2(QWEN_LARGE_VOCAB, 8192, 29568, 80, 64, 8),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, 8, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, 8, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, 8),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, 8),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, 8),
    "qwen3-30b-a3b": _qwen3_moe(2048, 6144, 48, 32, 4, expert_ffn=768),
    "qwen3-235b-a22b": _qwen3_moe(4096, 12288, 94, 64, 4, expert_ffn=1536),
    "gemma-3-270m": _gemma3(262144, 640, 2048, 18, 4, 1, window=512),
    "gemma-3-1b": _gemma3(262144, 1152, 6912, 26, 4, 1, window=512),
    "gemma-3-4b": _gemma3(262208, 2560, 10240, 34, 8, 4),
    "gemma-3-12b": _gemma3(262208, 3840, 15360, 48, 16, 8),
    "gemma-3-27b": _gemma3(262208, 5376, 21504, 62, 32, 16, head_dim=128, query_pre_attn_scalar=168),
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        **_sizes(32000, 4096, 14336, 32, 32, 8),
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
    },
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"],
        **_sizes(49152, 576, 1536, 30, 9, 3),
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
}
"""By the names that people give them. The sizes of Gemma 3 are those of its language model."""
