"""Where the reference data lies, and which tiny families there are."""

from __future__ import annotations

from pathlib import Path

DATA = Path(__file__).parent / "data"
TINY = DATA / "golden" / "tiny"
REAL = DATA / "golden" / "real"
TINY_FAMILIES = (
    "llama",
    "llama3_rope_tied",
    "llama_bias_headdim",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma3_text",
    "mixtral",
    "qwen3_moe",
)
