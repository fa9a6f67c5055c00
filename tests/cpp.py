"""Whether this machine can have the C++ kernels; a machine that vouches for a change (``CI`` is set) has to."""

from __future__ import annotations

import os

import pytest

from pallas_kernels.native import find_compiler

HAS_COMPILER = find_compiler() is not None or bool(os.environ.get("CI"))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler (Debian: apt install g++)")
NATIVE = pytest.param("native", marks=needs_compiler)
ON_CPU = "native" if HAS_COMPILER else "xla"
"""What "auto" takes on CPU."""
