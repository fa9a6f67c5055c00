"""Reads the keys of a Hugging Face config.json that the families share, whatever the age of the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from jaxpage.errors import shown
from jaxpage.models.config import Activation, ExpertsSpec, LayerSpec, ModelConfig, RopeSpec, UnsupportedModelError

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}
ROPE_TYPES = ("default", "linear", "llama3")


class HFConfig:
    """A config.json with checked access: every key that is read has the right type or is an error by name."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UnsupportedModelError(f"config.json: {key} must be a positive integer, got {shown(value)}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise UnsupportedModelError(f"config.json: {key} must be a positive number, got {shown(value)}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        return default if value is None else bool(value)

    def activation(self, *keys: str) -> Activation:
        name = next((self.values[key] for key in keys if self.values.get(key)), "silu")
        if name not in ACTIVATIONS:
            raise UnsupportedModelError(
                f"config.json: activation {shown(name)} is not supported; supported: {', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[name]

    def rope(self, default_theta: float = 10000.0, part: str | None = None) -> RopeSpec:
        """The rotary settings: ``rope_parameters`` (of ``part``, where layers differ), else top-level keys."""
        parameters = self.values.get("rope_parameters") or {}
        if part is not None and isinstance(parameters.get(part), Mapping):
            parameters = parameters[part]
        scaling = {**(self.values.get("rope_scaling") or {}), **parameters}
        theta = scaling.get("rope_theta")
        top_level = self.values.get("rope_theta")
        if theta is not None and top_level is not None and part is None and float(theta) != float(top_level):
            raise UnsupportedModelError(
                f"config.json: rope_theta is {top_level} at the top level and {theta} in rope_parameters"
            )
        kind = scaling.get("rope_type", scaling.get("type", "default")) or "default"
        if kind not in ROPE_TYPES:
            raise UnsupportedModelError(
                f"config.json: rope type {shown(kind)} is not supported; supported: {', '.join(ROPE_TYPES)}"
            )
        factors = self.values.get("rope_freq_factors")
        common = {
            "theta": float(theta or top_level or default_theta),
            "freq_factors": tuple(float(x) for x in factors) if factors else None,
        }
        try:
            if kind == "linear":
                return RopeSpec(scaling="linear", factor=float(scaling["factor"]), **common)
            if kind == "llama3":
                return RopeSpec(
                    scaling="llama3",
                    factor=float(scaling["factor"]),
                    low_freq_factor=float(scaling["low_freq_factor"]),
                    high_freq_factor=float(scaling["high_freq_factor"]),
                    original_max_position=int(scaling["original_max_position_embeddings"]),
                    **common,
                )
        except KeyError as error:
            raise UnsupportedModelError(f"config.json: rope type {kind} needs {error.args[0]}") from None
        return RopeSpec(**common)

    def end_token_ids(self, generation_config: Mapping[str, Any]) -> tuple[int, ...]:
        """Ids that end a text, from config.json and generation_config.json together."""
        ids: list[int] = []
        for source in (self.values, generation_config):
            value = source.get("eos_token_id")
            ids += [] if value is None else [value] if isinstance(value, int) else list(value)
        return tuple(dict.fromkeys(ids))

    def window(self) -> int | None:
        """The sliding window in tokens, if the checkpoint uses one."""
        return self.integer("sliding_window") if self.values.get("sliding_window") else None

    def experts(self, num_experts: int, norm_topk_prob: bool, size_key: str = "intermediate_size") -> ExpertsSpec:
        """A mixture of ``num_experts``, whose size is under ``size_key``."""
        per_token = self.integer("num_experts_per_tok")
        if per_token > num_experts:
            raise UnsupportedModelError(
                f"config.json: num_experts_per_tok {per_token} is above the number of experts {num_experts}"
            )
        return ExpertsSpec(num_experts, per_token, self.integer(size_key), norm_topk_prob)

    def model_config(
        self, generation_config: Mapping[str, Any], layers: tuple[LayerSpec, ...], **overrides: Any
    ) -> ModelConfig:
        """The sizes that all families write the same way; ``overrides`` are the family's own facts."""
        num_heads = self.integer("num_attention_heads")
        hidden_size = self.integer("hidden_size")
        values = self.values
        if values.get("head_dim") is None and hidden_size % num_heads:
            raise UnsupportedModelError(
                f"config.json: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}"
            )
        head_dim = self.integer("head_dim", overrides.pop("head_dim", hidden_size // num_heads))
        num_kv_heads = self.integer("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise UnsupportedModelError(
                f"config.json: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
            )
        facts: dict[str, Any] = {
            "attention_scale": head_dim**-0.5,
            "tied_embeddings": self.flag("tie_word_embeddings"),
            **overrides,
        }
        return ModelConfig(
            model_type=cast(str, values.get("model_type") or ""),
            vocab_size=self.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self.integer("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            layers=layers,
            norm_eps=self.number("rms_norm_eps", 1e-6),
            max_position=self.integer("max_position_embeddings", 2048),
            end_token_ids=self.end_token_ids(generation_config),
            **facts,
        )
