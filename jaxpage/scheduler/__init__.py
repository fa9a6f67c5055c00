"""Decides, step by step, which requests compute how many tokens. Plain Python, no jax."""
