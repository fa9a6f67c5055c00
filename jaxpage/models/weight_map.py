"""Names, shapes and logical axes of a decoder's parameters, and the checkpoint tensors each is made of.

Says nothing about files or devices: ``jaxpage.weights`` reads, ``jaxpage.parallel`` places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpage.models.config import ExpertsSpec, LayerSpec, ModelConfig

PRE_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
SANDWICH_NORMS = {
    "attention_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


@dataclasses.dataclass(frozen=True)
class ExpertNames:
    """What a checkpoint calls the experts of a layer, which it stores one by one, and the block they are in."""

    block: str
    gate: str
    up: str
    down: str


MIXTRAL_EXPERTS = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")
QWEN_EXPERTS = ExpertNames("mlp", gate="gate_proj", up="up_proj", down="down_proj")


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One leaf of the parameter tree.

    Attributes:
        path: where it is, for example ("layers", 3, "qkv").
        axes: logical axis of each dimension, None for one that is never split.
        sources: checkpoint tensors and their shapes.
        assemble: makes the leaf from the tensors, in the order of ``sources``.
        kv_repeats: how often each KV head stands in it (see ``repeat_kv_heads``).
        is_linear: it is the weight of a ``linear``, or of one for each expert, and may be quantised; its last axis is
            the one contracted.
    """

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    sources: Mapping[str, tuple[int, ...]]
    assemble: Callable[..., np.ndarray]
    is_linear: bool = False
    kv_repeats: int = 1

    @property
    def shape_without_repeats(self) -> tuple[int, ...]:
        """What the shape would be with each KV head once."""
        if self.kv_repeats == 1:
            return self.shape
        num_kv_heads, width, *rest = self.shape
        return (num_kv_heads // self.kv_repeats, (width - 2) * self.kv_repeats + 2, *rest)


def param_specs(
    config: ModelConfig, norm_names: Mapping[str, str], expert_names: ExpertNames = QWEN_EXPERTS
) -> Iterator[ParamSpec]:
    """Every parameter of a decoder in the Hugging Face naming that Llama began."""
    vocab, hidden = config.vocab_size, config.hidden_size
    yield _plain(("embedding",), "model.embed_tokens.weight", (vocab, hidden), ("vocab", "hidden"))
    for index, layer in enumerate(config.layers):
        yield from _layer_specs(config, layer, index, norm_names)
        if layer.experts is None:
            yield from _mlp_specs(config, layer, index)
        else:
            yield from _expert_specs(config, layer.experts, index, expert_names)
    yield _norm(config, ("final_norm",), "model.norm.weight", hidden)
    if not config.tied_embeddings:
        yield _plain(("lm_head",), "lm_head.weight", (vocab, hidden), ("vocab", "hidden"))


def repeat_kv_heads(
    model: ModelConfig, specs: Sequence[ParamSpec], repeats: int
) -> tuple[ModelConfig, list[ParamSpec]]:
    """The same model with each KV head ``repeats`` times, a copy for each part of the query heads that share it.

    So that devices can split KV heads of which there are fewer than devices; nothing else has to know.

    Raises:
        ValueError: the query heads of a KV head do not divide by ``repeats``.
    """
    group = model.num_heads // model.num_kv_heads
    if group % repeats:
        raise ValueError(f"{group} query heads of each KV head do not divide by {repeats}")
    if repeats == 1:
        return model, list(specs)

    def repeated(spec: ParamSpec) -> ParamSpec:
        if spec.axes[0] != "kv_heads":
            return spec
        # [K, G + 2, ...] to [K * repeats, G / repeats + 2, ...]
        shape = (spec.shape[0] * repeats, group // repeats + 2, *spec.shape[2:])

        def assemble(*parts: np.ndarray) -> np.ndarray:
            return with_kv_heads_repeated(spec.assemble(*parts).reshape(spec.shape), repeats)

        return dataclasses.replace(spec, shape=shape, assemble=assemble, kv_repeats=repeats)

    return dataclasses.replace(model, num_kv_heads=model.num_kv_heads * repeats), list(map(repeated, specs))


def with_kv_heads_repeated(whole: Any, repeats: int, axis: int = 0) -> Any:
    """[..., K, G + 2, ...] to [..., K * repeats, G / repeats + 2, ...]; a numpy or a jax array, K at ``axis``."""
    xp, group = whole.__array_namespace__(), whole.shape[axis + 1] - 2
    before = (slice(None),) * (axis + 1)
    q, kv = whole[(*before, slice(group))], whole[(*before, slice(group, None))]
    shape = list(whole.shape)
    shape[axis : axis + 2] = shape[axis] * repeats, group // repeats
    return xp.concat([xp.reshape(q, tuple(shape)), xp.repeat(kv, repeats, axis=axis)], axis=axis + 1)


def _layer_specs(
    config: ModelConfig, layer: LayerSpec, index: int, norm_names: Mapping[str, str]
) -> Iterator[ParamSpec]:
    hidden = config.hidden_size
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    group = heads // kv_heads
    prefix = f"model.layers.{index}."
    here = ("layers", index)
    for name, hf_name in norm_names.items():
        yield _norm(config, (*here, name), f"{prefix}{hf_name}.weight", hidden)

    projections = [f"{prefix}self_attn.{name}_proj" for name in "qkv"]
    rows = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)

    def by_kv_head(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        # One matrix for q, k and v, grouped by KV head, so that splitting KV heads over devices splits all three.
        split = [t.reshape(kv_heads, -1, head_dim, *t.shape[1:]) for t in (q, k, v)]
        return np.concatenate(split, axis=1)

    yield ParamSpec(
        (*here, "qkv"),
        (kv_heads, group + 2, head_dim, hidden),
        ("kv_heads", None, None, "hidden"),
        {f"{name}.weight": (n, hidden) for name, n in zip(projections, rows, strict=True)},
        by_kv_head,
        is_linear=True,
    )
    if layer.qkv_bias:
        yield ParamSpec(
            (*here, "qkv_bias"),
            (kv_heads, group + 2, head_dim),
            ("kv_heads", None, None),
            {f"{name}.bias": (n,) for name, n in zip(projections, rows, strict=True)},
            by_kv_head,
        )
    if layer.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield _norm(config, (*here, name), f"{prefix}self_attn.{name}.weight", head_dim)
    yield _linear((*here, "output"), f"{prefix}self_attn.o_proj", (hidden, heads * head_dim), ("hidden", "heads"))
    if layer.output_bias:
        yield _plain((*here, "output_bias"), f"{prefix}self_attn.o_proj.bias", (hidden,), ("hidden",))


def _mlp_specs(config: ModelConfig, layer: LayerSpec, index: int) -> Iterator[ParamSpec]:
    hidden, ffn = config.hidden_size, config.intermediate_size
    prefix, here = f"model.layers.{index}.", ("layers", index)
    gate_up = [f"{prefix}mlp.{name}_proj" for name in ("gate", "up")]
    yield ParamSpec(
        (*here, "gate_up"),
        (2, ffn, hidden),
        (None, "ffn", "hidden"),
        {f"{name}.weight": (ffn, hidden) for name in gate_up},
        lambda *parts: np.stack(parts),
        is_linear=True,
    )
    yield _linear((*here, "down"), f"{prefix}mlp.down_proj", (hidden, ffn), ("hidden", "ffn"))
    if layer.mlp_bias:
        yield ParamSpec(
            (*here, "gate_up_bias"),
            (2, ffn),
            (None, "ffn"),
            {f"{name}.bias": (ffn,) for name in gate_up},
            lambda *parts: np.stack(parts),
        )
        yield _plain((*here, "down_bias"), f"{prefix}mlp.down_proj.bias", (hidden,), ("hidden",))


def _expert_specs(config: ModelConfig, experts: ExpertsSpec, index: int, names: ExpertNames) -> Iterator[ParamSpec]:
    hidden, ffn, num_experts = config.hidden_size, experts.intermediate_size, experts.num_experts
    block, here = f"model.layers.{index}.{names.block}", ("layers", index)
    # Each device routes all tokens, whichever experts it has.
    yield _plain((*here, "router"), f"{block}.gate.weight", (num_experts, hidden), (None, "hidden"))
    each = [f"{block}.experts.{expert}" for expert in range(num_experts)]
    yield ParamSpec(
        (*here, "experts_gate_up"),
        (num_experts, 2, ffn, hidden),
        ("experts", None, "expert_ffn", "hidden"),
        {f"{expert}.{name}.weight": (ffn, hidden) for expert in each for name in (names.gate, names.up)},
        lambda *parts: np.stack(parts),
        is_linear=True,
    )
    yield ParamSpec(
        (*here, "experts_down"),
        (num_experts, hidden, ffn),
        ("experts", "hidden", "expert_ffn"),
        {f"{expert}.{names.down}.weight": (hidden, ffn) for expert in each},
        lambda *parts: np.stack(parts),
        is_linear=True,
    )


def _plain(path: tuple[str | int, ...], name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> ParamSpec:
    return ParamSpec(path, shape, axes, {name: shape}, lambda tensor: tensor)


def _linear(path: tuple[str | int, ...], layer: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> ParamSpec:
    return dataclasses.replace(_plain(path, f"{layer}.weight", shape, axes), is_linear=True)


def _norm(config: ModelConfig, path: tuple[str | int, ...], name: str, size: int) -> ParamSpec:
    offset = config.norm_offset

    def scale(weight: np.ndarray) -> np.ndarray:
        # The sum is made in float32: in bfloat16 the small deviations from 1 would be lost.
        return weight.astype(np.float32) + np.float32(offset) if offset else weight

    return ParamSpec(path, (size,), (None,), {name: (size,)}, scale)
