"""The few shapes a step is compiled for."""

from __future__ import annotations


def token_buckets(max_tokens: int) -> list[int]:
    """Sizes a ragged batch is padded to: 1, then powers of two from 8 up, then the maximum itself.

    One token is worth a shape of its own: a matrix-vector product is bound by reading the weights, and padding it to 8
    rows costs more than half again on CPU. Between 2 and 7 rows padding costs little.
    """
    sizes = [1]
    size = 8
    while size < max_tokens:
        sizes.append(size)
        size *= 2
    return sorted({*sizes, max_tokens})


def bucket_for(buckets: list[int], size: int) -> int:
    """The smallest bucket that holds ``size``."""
    return next(bucket for bucket in buckets if bucket >= size)
