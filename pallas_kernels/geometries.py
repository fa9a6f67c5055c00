"""Sizes of the models whose shapes the kernels are compiled and measured for, as one chip sees them.

It owns the numbers, which are those of each model's published configuration, and the look-up by name; it must not know
any operation.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Geometry(NamedTuple):
    """A model, or one chip's share of it under tensor parallelism.

    Attributes:
        name: of the model, and the degree of tensor parallelism if its layers are split.
        num_heads, num_kv_heads: of the chip.
        intermediate_size: the chip's share of the width of a feed-forward block, or of one expert.
        num_experts: 0 for a dense model.
        sliding_window: of the layers that have one.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    num_experts: int = 0
    num_experts_per_tok: int = 0
    sliding_window: int | None = None

    @property
    def heads(self) -> str:
        """Query heads / KV heads x head_dim."""
        return f"{self.num_heads}/{self.num_kv_heads}x{self.head_dim}"

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """[out_features, in_features] of the matrices of a layer that are no experts, by name."""
        heads = self.num_heads * self.head_dim
        sizes = {
            "qkv": (heads + 2 * self.num_kv_heads * self.head_dim, self.hidden_size),
            "output": (self.hidden_size, heads),
        }
        return sizes if self.num_experts else sizes | self.feed_forward

    @property
    def feed_forward(self) -> dict[str, tuple[int, int]]:
        """[out_features, in_features] of the matrices of a feed-forward block or of each expert, by name."""
        return {
            "gate_up": (2 * self.intermediate_size, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
        }


GEOMETRIES = (
    Geometry("SmolLM2-135M", 9, 3, 64, 576, 1536),
    Geometry("Gemma-3-270m", 4, 1, 256, 640, 2048, sliding_window=512),
    Geometry("Llama-3.1-8B", 32, 8, 128, 4096, 14336),
    Geometry("Llama-3.3-70B/TP8", 8, 1, 128, 8192, 3584),
    Geometry("Qwen2.5-0.5B", 14, 2, 64, 896, 4864),
    Geometry("Qwen3-8B", 32, 8, 128, 4096, 12288),
    Geometry("Mixtral-8x7B/TP8", 4, 1, 128, 4096, 1792, num_experts=8, num_experts_per_tok=2),
)


def find_geometry(name: str) -> Geometry:
    """The geometry of that name, whatever its case and punctuation.

    An unambiguous beginning is enough, and a longer name that contains the model's, such as a hub id.

    Raises:
        ValueError: if none or several match; the message lists the names.
    """
    wanted = _letters(name)
    named = {_letters(geometry.name): geometry for geometry in GEOMETRIES}
    if wanted in named:
        return named[wanted]
    matches = [geometry for key, geometry in named.items() if wanted and key.startswith(wanted)]
    matches = matches or [geometry for geometry in GEOMETRIES if _letters(geometry.name.split("/")[0]) in wanted]
    if len(matches) != 1:
        what = "is ambiguous" if matches else "is not known"
        names = ", ".join(geometry.name for geometry in matches or GEOMETRIES)
        raise ValueError(f"model {name!r:.200} {what}: choose one of {names}")
    return matches[0]


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
