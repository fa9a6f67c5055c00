"""Virtual memory of the KV cache: which block holds what, who holds which block. Plain Python, no jax, no arrays."""
