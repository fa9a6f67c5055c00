"""The requests that benchmarks send, the same for jaxpage and for its peers."""

from __future__ import annotations

BATCH_SIZES: tuple[int, ...] = (1, 8, 32)
NEW_TOKENS = 64


def decode_prompts(count: int) -> list[str]:
    """Short prompts that share nothing but a few words: nearly all the time goes into decoding."""
    return [f"Story number {index}: once upon a time" for index in range(count)]


def long_prompt(num_tokens: int, vocab_size: int, seed: int) -> list[int]:
    """Token ids without repetition of blocks, so that only a deliberate repeat can hit the prefix cache."""
    state = seed * 2654435761 % 2**32
    ids = []
    for _ in range(num_tokens):
        state = (1664525 * state + 1013904223) % 2**32
        ids.append(1000 + state % (vocab_size - 1000))
    return ids
