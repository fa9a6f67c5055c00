"""Directories that are there complete or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpage.weights import WeightsError
from jaxpage.weights.new_directory import new_directory

HOLDER = """
import sys, time
from pathlib import Path
from jaxpage.weights.new_directory import new_directory
with new_directory(Path(sys.argv[1])) as work:
    (work / "half").write_text("half")
    print("working", flush=True)
    time.sleep(60)
"""


def make(target: Path, content: str = "all", *, overwrite: bool = False) -> None:
    with new_directory(target, overwrite=overwrite) as work:
        (work / "file").write_text(content)
        assert not target.exists() or overwrite


def test_it_appears_at_the_end_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    make(tmp_path / "deep" / "down" / "model")
    assert (tmp_path / "deep" / "down" / "model" / "file").read_text() == "all"
    assert [entry.name for entry in (tmp_path / "deep" / "down").iterdir()] == ["model"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_exception_there_is_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), new_directory(tmp_path / "model") as work:
        (work / "file").write_text("half")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_one_that_is_there_is_replaced_only_if_that_is_allowed(tmp_path: Path) -> None:
    make(tmp_path / "model", "first")
    with pytest.raises(FileExistsError, match="model exists"):
        make(tmp_path / "model", "second")
    assert (tmp_path / "model" / "file").read_text() == "first"
    with pytest.raises(ValueError, match="no"), new_directory(tmp_path / "model", overwrite=True):
        raise ValueError("no")
    assert (tmp_path / "model" / "file").read_text() == "first"
    make(tmp_path / "model", "second", overwrite=True)
    assert (tmp_path / "model" / "file").read_text() == "second"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_has_is_not(tmp_path: Path) -> None:
    target = tmp_path / "model"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(target)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "working\n"
        (left,) = tmp_path.iterdir()
        make(tmp_path / "other")
        make(target)
        assert (left / "half").exists(), "it is still being made"
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate()
    make(target, overwrite=True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model", "other"]


def test_a_directory_that_was_taken_away_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another process had swept it before it was locked."""
    mkdir = Path.mkdir

    def mkdir_and_lose(self: Path, *arguments: object, **options: object) -> None:
        mkdir(self, *arguments, **options)  # type: ignore[arg-type]
        if ".converting-" in self.name:
            self.rmdir()

    monkeypatch.setattr(Path, "mkdir", mkdir_and_lose)
    with pytest.raises(WeightsError, match="another process"):
        make(tmp_path / "model")


def test_a_replacement_that_was_cut_short_is_undone(tmp_path: Path) -> None:
    make(tmp_path / "model", "first")
    (tmp_path / "model").rename(tmp_path / ".model.replaced-00c0ffee")
    with pytest.raises(FileExistsError):
        make(tmp_path / "model", "second")
    assert (tmp_path / "model" / "file").read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
