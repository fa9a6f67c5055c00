"""What XLA compiles is counted, by whether the runner was ready."""

from __future__ import annotations

import jax
import numpy as np

from jaxpage.runner.compilations import CompilationCounter


def test_compilations_before_and_after_ready() -> None:
    # Functions of this test alone: what was compiled before is not compiled again.
    double, triple = jax.jit(lambda x: 2 * x + 0.125), jax.jit(lambda x: 3 * x + 0.375)
    x = np.ones(7, np.float32)
    counter = CompilationCounter()
    assert (counter.num_warmup, counter.num_serving) == (0, 0)
    double(x)
    assert (counter.num_warmup, counter.num_serving) == (1, 0)
    counter.is_ready()
    double(x)
    assert (counter.num_warmup, counter.num_serving) == (1, 0)
    triple(x)
    later = CompilationCounter()
    assert (counter.num_warmup, counter.num_serving, later.num_warmup) == (1, 1, 0)
