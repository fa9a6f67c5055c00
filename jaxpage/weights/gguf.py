"""Presents a GGUF file as a Hugging Face checkpoint: names, orientation, row order and configuration translated.

It must not know the container's layout (``gguf_file`` does), nor how a model uses its configuration.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpage.errors import shown
from jaxpage.weights.checkpoint import Checkpoint, WeightsError
from jaxpage.weights.gguf_blocks import Blocks
from jaxpage.weights.gguf_file import GgufFile

if TYPE_CHECKING:
    from jaxpage.tokenizer import Tokenizer

_ROPE_FACTORS = "rope_freqs.weight"
_ARCHITECTURE = "general.architecture"
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
# The file has a matrix of all experts of a layer in one tensor, Hugging Face one tensor for each expert.
_MIXTRAL_EXPERTS = ("block_sparse_moe", {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"})
_QWEN_EXPERTS = ("mlp", {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"})
_ROUTER = "ffn_gate_inp"
_SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class _Architecture:
    """How one ``general.architecture`` differs from its Hugging Face form.

    Attributes:
        permuted: The file holds the rows of q and k of each head with rotary pairs side by side: (0, 1), (2, 3), ...;
            Hugging Face pairs row i with row i + head_dim / 2.
        norm_offset: What the file's norm weights have added to them.
        experts: Hugging Face's name of the block of experts, and of the matrices of each; None for a dense model.
    """

    hf_class: str
    model_type: str
    layer_names: dict[str, str]
    permuted: bool = False
    norm_offset: float = 0.0
    experts: tuple[str, dict[str, str]] | None = None


_ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", "llama", _LAYER_NAMES, permuted=True),
    "qwen2": _Architecture("Qwen2ForCausalLM", "qwen2", _LAYER_NAMES),
    "qwen3": _Architecture("Qwen3ForCausalLM", "qwen3", _LAYER_NAMES | _QK_NORMS),
    "gemma3": _Architecture(
        "Gemma3ForCausalLM", "gemma3_text", _LAYER_NAMES | _QK_NORMS | _SANDWICH_NORMS, norm_offset=1.0
    ),
}
_EXPERT_ARCHITECTURES = {
    "llama": _Architecture("MixtralForCausalLM", "mixtral", _LAYER_NAMES, permuted=True, experts=_MIXTRAL_EXPERTS),
    "qwen3moe": _Architecture("Qwen3MoeForCausalLM", "qwen3_moe", _LAYER_NAMES | _QK_NORMS, experts=_QWEN_EXPERTS),
}
"""Those of files that say how many experts they have."""


class GgufCheckpoint(Checkpoint):
    """One GGUF file. ``read`` dequantises to float32, ``read_blocks`` leaves numbers as small as they are.

    ``config`` has, besides Hugging Face's keys, ``rope_freq_factors`` (a list of head_dim / 2 numbers that divide the
    inverse frequencies) where the file has such factors and they are not those of a known ``rope_parameters``.

    Raises:
        WeightsError: the file is damaged, its architecture, a tensor or a setting is not supported, or a metadata key
            is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GgufFile(path)
        metadata = self._file.metadata
        name = metadata.get(_ARCHITECTURE)
        has_experts = bool(metadata.get(f"{name}.expert_count"))
        known = _EXPERT_ARCHITECTURES if has_experts else _ARCHITECTURES
        if not isinstance(name, str) or name not in known:
            raise WeightsError(
                f"{path.name}: {_ARCHITECTURE} {shown(name)}{' with experts' if has_experts else ''} is not supported "
                f"(supported: {', '.join(_ARCHITECTURES)}; with experts: {', '.join(_EXPERT_ARCHITECTURES)})"
            )
        if metadata.get("split.count", 1) != 1:
            raise WeightsError(
                f"{path.name}: is one of {metadata['split.count']} parts of a split GGUF; join them first"
            )
        self._architecture = known[name]
        values = _Metadata(path.name, name, metadata)
        self._num_experts = values.size("expert_count") if has_experts else 0
        self._sources = self._map_names()
        self.config = _translate_config(values, self._file, self._architecture)
        self.generation_config = _generation_config(metadata)

    def names(self) -> list[str]:
        return list(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        source, expert = self._source(name)
        shape = self._file.tensors[source].shape
        return shape if expert is None else shape[1:]

    def dtype(self, name: str) -> np.dtype:
        self._source(name)
        return np.dtype(np.float32)

    def read(self, name: str) -> np.ndarray:
        array = self._file.read(*self._source(name))
        if self._architecture.norm_offset and name.endswith("norm.weight"):
            return array - np.float32(self._architecture.norm_offset)
        return self._in_order(name, array)

    def read_blocks(self, name: str) -> Blocks | None:
        blocks = self._file.read_blocks(*self._source(name))
        if blocks is None or (self._architecture.norm_offset and name.endswith("norm.weight")):
            return None
        return Blocks(*(None if part is None else self._in_order(name, part) for part in blocks))  # pyright: ignore[reportArgumentType]

    def _in_order(self, name: str, array: np.ndarray) -> np.ndarray:
        """With rows in Hugging Face's order."""
        if self._architecture.permuted and ".self_attn.q_proj." in name:
            return _halves_from_pairs(array, self.config["num_attention_heads"])
        if self._architecture.permuted and ".self_attn.k_proj." in name:
            return _halves_from_pairs(array, self.config["num_key_value_heads"])
        return array

    def load_tokenizer(self) -> Tokenizer:
        from jaxpage.tokenizer import Tokenizer

        return Tokenizer.from_gguf(self._file.metadata)

    def _source(self, name: str) -> tuple[str, int | None]:
        """The file's tensor, and the expert's index in it if it is that of all experts."""
        if name not in self._sources:
            raise WeightsError(f"{self.path.name}: the checkpoint has no tensor {shown(name)}")
        return self._sources[name]

    def _map_names(self) -> dict[str, tuple[str, int | None]]:
        sources: dict[str, tuple[str, int | None]] = {}
        for source in self._file.tensors:
            if source == _ROPE_FACTORS:
                continue
            experts = self._expert_names(source)
            if experts is None:
                sources[self._hf_name(source)] = (source, None)
            else:
                sources |= {name: (source, index) for index, name in enumerate(experts)}
        return sources

    def _expert_names(self, source: str) -> list[str] | None:
        """Hugging Face's names of the parts of a tensor of all experts; None for another tensor."""
        found = re.fullmatch(r"blk\.(\d+)\.(\w+_exps)\.weight", source)
        if not found or self._architecture.experts is None or found[2] not in self._architecture.experts[1]:
            return None
        shape = self._file.tensors[source].shape
        if len(shape) != 3 or shape[0] != self._num_experts:
            raise WeightsError(
                f"{self.path.name}: tensor {shown(source)} has shape {list(shape)}, "
                f"expected {self._num_experts} matrices"
            )
        block, names = self._architecture.experts
        layer = f"model.layers.{int(found[1])}.{block}.experts"
        return [f"{layer}.{index}.{names[found[2]]}.weight" for index in range(self._num_experts)]

    def _hf_name(self, source: str) -> str:
        stem, _, kind = source.rpartition(".")
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        name = None
        if layer and layer[2] in self._architecture.layer_names:
            name = f"model.layers.{int(layer[1])}.{self._architecture.layer_names[layer[2]]}"
        elif layer and layer[2] == _ROUTER and self._architecture.experts is not None:
            name = f"model.layers.{int(layer[1])}.{self._architecture.experts[0]}.gate"
        elif not layer:
            name = _TOP_NAMES.get(stem)
        if name is None or kind not in ("weight", "bias"):
            raise WeightsError(
                f"{self.path.name}: tensor {shown(source)} has no place in a {self._architecture.hf_class} model"
            )
        return f"{name}.{kind}"


def _halves_from_pairs(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo the row order of permuted q and k projections (weights or biases)."""
    paired = array.reshape(num_heads, -1, 2, *array.shape[1:])
    return paired.swapaxes(1, 2).reshape(array.shape)


class _Metadata:
    """Checked access to the keys ``<architecture>.<key>``."""

    def __init__(self, file_name: str, architecture: str, values: dict[str, Any]) -> None:
        self.file_name = file_name
        self.architecture = architecture
        self.values = values

    def number(self, key: str, default: float | None = None) -> Any:
        """A positive number; a per-layer list counts as one number if all its entries are equal.

        Raises:
            WeightsError: the key is missing and has no default, or is no such number.
        """
        full_key = f"{self.architecture}.{key}"
        value = self.values.get(full_key, default)
        if value is None:
            raise WeightsError(f"{self.file_name}: metadata key {full_key} is missing")
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise WeightsError(
                f"{self.file_name}: metadata key {full_key} must be one positive number, got {shown(value)}"
            )
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """The same for a positive integer."""
        value = self.number(key, default)
        if not isinstance(value, int):
            raise WeightsError(
                f"{self.file_name}: metadata key {self.architecture}.{key} must be an integer, got {value}"
            )
        return value

    def get(self, key: str) -> Any:
        """The value as it is, or None."""
        return self.values.get(f"{self.architecture}.{key}")


def _translate_config(metadata: _Metadata, file: GgufFile, architecture: _Architecture) -> dict[str, Any]:
    """Build the content of config.json."""
    name = metadata.file_name
    for tensor, num_dims in (("token_embd.weight", 2), ("blk.0.attn_q.weight", 2)):
        if tensor not in file.tensors or len(file.tensors[tensor].shape) != num_dims:
            raise WeightsError(f"{name}: tensor {tensor} is missing or not a matrix")
    num_heads = metadata.size("attention.head_count")
    num_kv_heads = metadata.size("attention.head_count_kv", num_heads)
    head_dim = metadata.size("attention.key_length", file.tensors["blk.0.attn_q.weight"].shape[0] // num_heads)
    _check_heads(name, file, {"attn_q": num_heads * head_dim, "attn_k": num_kv_heads * head_dim})
    if (rope_dim := metadata.size("rope.dimension_count", head_dim)) != head_dim:
        raise WeightsError(f"{name}: rotary positions on {rope_dim} of {head_dim} head dimensions are not supported")
    config: dict[str, Any] = {
        "architectures": [architecture.hf_class],
        "model_type": architecture.model_type,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": metadata.size("embedding_length"),
        "intermediate_size": metadata.size("feed_forward_length"),
        "num_hidden_layers": metadata.size("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": metadata.size("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    # Qwen2 has no such key: its q, k and v always have a bias, and its output projection never.
    if architecture.model_type != "qwen2":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if architecture.model_type == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    if architecture.experts is not None:
        config |= _experts_config(metadata, architecture)
    config |= _token_ids(metadata.values)
    if architecture.model_type == "gemma3_text":
        return config | _gemma3_config(metadata, config)
    return config | {"hidden_act": "silu"} | _rope_config(metadata, file, head_dim)


def _experts_config(metadata: _Metadata, architecture: _Architecture) -> dict[str, Any]:
    experts = {
        "num_local_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
    }
    if architecture.model_type == "mixtral":
        return experts
    # The file does not say it, but such models are only run like this.
    return experts | {"moe_intermediate_size": metadata.size("expert_feed_forward_length"), "norm_topk_prob": True}


def _check_heads(file_name: str, file: GgufFile, rows: dict[str, int]) -> None:
    # Only the row order depends on the head counts being right, so a wrong count would go unnoticed without this.
    for name, info in file.tensors.items():
        part = re.fullmatch(r"blk\.\d+\.(attn_q|attn_k)\.(?:weight|bias)", name)
        if part and info.shape[0] != rows[part[1]]:
            raise WeightsError(f"{file_name}: tensor {shown(name)} has {info.shape[0]} rows, expected {rows[part[1]]}")


def _gemma3_config(metadata: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    num_layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    pattern = metadata.get("attention.sliding_window_pattern")
    if isinstance(pattern, list) and len(pattern) == num_layers:
        sliding = [bool(flag) for flag in pattern]
    else:
        period = metadata.size("attention.sliding_window_pattern", 6)
        sliding = [(layer + 1) % period != 0 for layer in range(num_layers)]
    # The file does not say how queries are scaled. Of the family, only the 27B model (62 layers) scales by something
    # else than its head size.
    scale = config["hidden_size"] // config["num_attention_heads"] if num_layers == 62 else head_dim
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scale,
        "sliding_window": metadata.size("attention.sliding_window"),
        "layer_types": ["sliding_attention" if flag else "full_attention" for flag in sliding],
        "rope_theta": metadata.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10_000.0),
        "rope_scaling": _linear_scaling(metadata),
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping"),
    }


def _linear_scaling(metadata: _Metadata) -> dict[str, Any] | None:
    kind = metadata.get("rope.scaling.type")
    if kind not in (None, "none", "linear"):
        raise WeightsError(f"{metadata.file_name}: rope scaling type {shown(kind)} is not supported (linear is)")
    # Old files name no type and hold the factor under another key.
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 1.0))
    if kind == "none" or factor == 1.0:
        return None
    return {"rope_type": "linear", "factor": factor}


def _rope_config(metadata: _Metadata, file: GgufFile, head_dim: int) -> dict[str, Any]:
    theta = metadata.number("rope.freq_base", 10_000.0)
    base = {"rope_theta": theta, "rope_type": "default"}
    scaling = _linear_scaling(metadata)
    if _ROPE_FACTORS not in file.tensors:
        return {"rope_parameters": base | (scaling or {})}
    factors = file.read(_ROPE_FACTORS)
    if scaling or factors.shape != (head_dim // 2,) or not np.all(factors > 0):
        raise WeightsError(
            f"{metadata.file_name}: tensor {_ROPE_FACTORS} must hold {head_dim // 2} positive numbers, "
            "and excludes another rope scaling"
        )
    # The file has Llama 3's scaling as its result only. Its parameters are the published ones if they give that result.
    llama3 = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": metadata.size("rope.scaling.original_context_length", 8192),
    }
    if np.allclose(factors, _llama3_factors(theta, head_dim, llama3), rtol=1e-4, atol=0):
        return {"rope_parameters": base | llama3}
    return {"rope_parameters": base, "rope_freq_factors": factors.tolist()}


def _llama3_factors(theta: float, head_dim: int, parameters: dict[str, Any]) -> np.ndarray:
    """What Llama 3's scaling divides each inverse frequency by."""
    factor, low, high = parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"]
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = parameters["original_max_position_embeddings"] / wavelengths
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - smooth) / factor + smooth)


def _token_ids(metadata: dict[str, Any]) -> dict[str, Any]:
    keys = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    found = {hf_key: metadata.get(f"tokenizer.ggml.{key}") for hf_key, key in keys.items()}
    return {key: value for key, value in found.items() if isinstance(value, int)}


def _generation_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """End ids as generation_config.json has them: the end of text, of a turn and of a message all end a generation."""
    ids = _token_ids(metadata)
    found = [ids.get("eos_token_id"), *(metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom"))]
    ends = list(dict.fromkeys(value for value in found if isinstance(value, int)))
    if ends:
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return ids
