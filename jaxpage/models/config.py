"""A model as data: sizes, and one ``LayerSpec`` per layer. No arrays, no forward pass, no Hugging Face names."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


class UnsupportedModelError(ValueError):
    """The checkpoint asks for something the decoder does not have; the message names it and what there is."""


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding: base, and how frequencies are scaled.

    Attributes:
        scaling: "default", "linear" (all frequencies divided by ``factor``) or "llama3" (frequencies whose wavelength
            is long against ``original_max_position`` are divided, those in between blended; Llama 3.1 model card).
        freq_factors: divisors of each frequency, as some GGUF files carry them instead of a formula.
    """

    theta: float = 10000.0
    scaling: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    freq_factors: tuple[float, ...] | None = None

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """The angle per position of each pair of dimensions, float32 [head_dim // 2]."""
        frequencies = 1.0 / self.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.freq_factors is not None:
            frequencies = frequencies / np.asarray(self.freq_factors, np.float64)
        if self.scaling == "linear":
            frequencies = frequencies / self.factor
        elif self.scaling == "llama3":
            wavelengths = 2 * math.pi / frequencies
            low = self.original_max_position / self.low_freq_factor
            high = self.original_max_position / self.high_freq_factor
            blend = (self.original_max_position / wavelengths - self.low_freq_factor) / (
                self.high_freq_factor - self.low_freq_factor
            )
            between = (1 - blend) * frequencies / self.factor + blend * frequencies
            frequencies = np.where(
                wavelengths > low, frequencies / self.factor, np.where(wavelengths < high, frequencies, between)
            )
        return frequencies.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class ExpertsSpec:
    """The experts that take the place of a layer's MLP.

    Attributes:
        intermediate_size: of each expert.
        norm_topk_prob: the weights of a token's experts are made to sum to 1.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool = True


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What one decoder layer does.

    Attributes:
        sliding_window: keys a query sees, itself included; None means all.
        qk_norm: RMS norm of each query and key head before rope.
        qkv_bias, output_bias, mlp_bias: biases of the projections.
        post_norms: a second pair of norms, on the outputs of attention and MLP before they are added.
        experts: a mixture of experts instead of one MLP, without biases.
    """

    rope: RopeSpec
    sliding_window: int | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    activation: Activation = "silu"
    post_norms: bool = False
    experts: ExpertsSpec | None = None


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The sizes and constants of a decoder-only model.

    Attributes:
        attention_scale: factor on query-key dot products.
        embedding_scale: factor on the input embeddings.
        norm_offset: added to the stored weights of RMS norms when they are loaded (1 for Gemma).
        tied_embeddings: the output projection is the embedding table.
        max_position: the longest sequence the positions are made for, in tokens.
        end_token_ids: ids that end a text, from the checkpoint.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    attention_scale: float
    max_position: int
    embedding_scale: float = 1.0
    norm_offset: float = 0.0
    tied_embeddings: bool = False
    end_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)
