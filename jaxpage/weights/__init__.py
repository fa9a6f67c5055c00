"""Where weights come from: named tensors in Hugging Face naming, read one at a time from safetensors or GGUF files.

The readers know nothing about jax, meshes or the model's parameter tree; only the loader does, and ``orbax_arrays`` and
``orbax_writer``, which restore and write checkpoints that hold that tree itself.
"""

from __future__ import annotations

from jaxpage.weights.builtin import BUILTIN_MODELS
from jaxpage.weights.checkpoint import Checkpoint, WeightsError
from jaxpage.weights.source import open_checkpoint, resolve_model

__all__ = ["BUILTIN_MODELS", "Checkpoint", "WeightsError", "open_checkpoint", "resolve_model"]
