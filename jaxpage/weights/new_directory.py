"""Directories that appear complete or not at all, whenever the process that makes them is killed.

It must not know what is in them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from jaxpage.weights.checkpoint import WeightsError


@contextlib.contextmanager
def new_directory(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Gives an empty directory beside ``target``, which takes that name when the block ends without an exception.

    What earlier processes left beside it, when they were killed, is removed first. One that is still at work keeps its
    directory: each holds a lock on its own, which ends with it.

    Args:
        overwrite: whether ``target`` may exist; its directory is then replaced at the end.

    Raises:
        FileExistsError: ``target`` exists, and is not to be replaced.
        WeightsError: another process is making the same directory.
    """
    parent = target.parent
    parent.mkdir(parents=True, exist_ok=True)
    _sweep(target)
    if os.path.lexists(target) and not overwrite:
        raise FileExistsError(f"{target} exists")
    work = parent / f".{target.name}.converting-{secrets.token_hex(4)}"
    work.mkdir()
    with _lock(work) as is_mine:
        if not is_mine:
            raise WeightsError(f"{target}: another process is making it")
        try:
            yield work
            _put_in_place(work, target)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise


def _put_in_place(work: Path, target: Path) -> None:
    replaced = None
    if os.path.lexists(target):
        replaced = target.parent / f".{target.name}.replaced-{secrets.token_hex(4)}"
        target.rename(replaced)
    work.rename(target)
    with contextlib.suppress(OSError):
        # So that the name survives a power failure too, where directories can be written through.
        descriptor = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def _sweep(target: Path) -> None:
    """Removes what processes that are no more have left, and undoes a replacement that was cut short."""
    for entry in list(target.parent.iterdir()):
        if entry.name.startswith(f".{target.name}.replaced-"):
            if os.path.lexists(target):
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.rename(target)
        elif entry.name.startswith(f".{target.name}.converting-"):
            with _lock(entry) as is_mine:
                if is_mine:
                    shutil.rmtree(entry, ignore_errors=True)


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[bool]:
    """Whether this process has the directory to itself, for as long as the block lasts."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            # Between its making and its lock another process may have taken it for a left one.
            yield directory.is_dir()
    finally:
        os.close(descriptor)
