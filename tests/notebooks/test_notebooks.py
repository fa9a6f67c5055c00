"""The notebooks, run from top to bottom as a reader would: a cell that fails, fails the test."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

REPOSITORY = Path(__file__).parents[2]
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
CELL_TIMEOUT_S = 300
"""Whole notebooks take less than a minute on an idle machine."""


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def test_all_are_found() -> None:
    names = [path.stem for path in NOTEBOOKS]
    assert names == ["paged_attention_explained", "quick_start", "sharding_experiment"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_files_hold_no_outputs_and_no_traces_of_a_machine(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        assert not cell.metadata, cell.source
        if cell.cell_type == "code":
            assert cell.execution_count is None and not cell.outputs, cell.source
    assert not re.search(r"/(?:home|root|tmp|Users)/", path.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))  # nothing of the developer's own
    # Devices are the notebook's business, and so is its backend for plots: the inline one, not that of a test.
    for name in ("XLA_FLAGS", "MPLBACKEND"):
        monkeypatch.delenv(name, raising=False)
    work = tmp_path / "work"
    work.mkdir()
    notebook = read(path)
    before = os.listdir(REPOSITORY / "notebooks")
    NotebookClient(notebook, timeout=CELL_TIMEOUT_S, resources={"metadata": {"path": str(work)}}).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code), "a cell did not run"
    shown = [output for cell in code for output in cell.outputs]
    assert not any("Traceback" in output.get("text", "") for output in shown)
    assert os.listdir(REPOSITORY / "notebooks") == before
