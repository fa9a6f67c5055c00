"""Scripts that run in the Python environments of other engines, where there is no jaxpage and may be no numpy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jaxpage.benchmarks import attention_peers, peers, scheduler_peer


@pytest.mark.parametrize("module", [attention_peers, peers, scheduler_peer], ids=lambda module: module.__name__)
def test_a_script_for_peers_needs_only_python(module: object, tmp_path: Path) -> None:
    load = f"import runpy; print('_main' in runpy.run_path({module.__file__!r}, run_name='peer'))"  # type: ignore[attr-defined]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", load], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert done.stdout == "True\n", done.stderr
