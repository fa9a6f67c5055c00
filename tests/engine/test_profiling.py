"""JAX profiles: one at a time, written where they were asked for."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxpage.engine.profiling import Profiler
from jaxpage.errors import ParameterError


def test_a_profile_is_written(tmp_path: Path) -> None:
    profiler = Profiler()
    with pytest.raises(ParameterError, match="profile: is not being recorded"):
        profiler.stop()
    profiler.start(tmp_path / "profiles")
    with pytest.raises(ParameterError, match="profile: is being recorded already"):
        profiler.start(tmp_path / "profiles")
    jnp.ones(3).sum().block_until_ready()
    profiler.stop()
    assert [file for file in (tmp_path / "profiles").rglob("*.xplane.pb") if file.stat().st_size]
    profiler.start(tmp_path / "cut")
    profiler.close()
    profiler.close()
    assert list((tmp_path / "cut").rglob("*.xplane.pb"))
