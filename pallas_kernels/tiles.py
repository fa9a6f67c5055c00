"""Tile sizes measured for a chip, which take the place of a kernel's own heuristic where a table has them.

It owns where tables lie, how they read and which chip is meant; it must not know any operation or what its tiles mean.

A kernel computes its tiles by a heuristic and passes them through ``pick`` at trace time, with a key built from what is
static in the call, e.g. "decode G3 H64 bs16 bfloat16". ``configs/kernels/<chip>.json`` may hold other values for that
key, as ``python -m pallas_kernels.autotune`` writes them; without a file everything runs on the heuristics. Whatever is
wrong with a table is a warning, once, and never an error: it can only cost speed.

Folder of the tables: ``JAXPAGE_KERNEL_CONFIGS`` in the environment, else ``configs`` in this package (where a wheel has
them), else ``configs/kernels`` beside the package (a clone of the repository).
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax

ENVIRONMENT = "JAXPAGE_KERNEL_CONFIGS"
TPU_NAMES = {"v4lite": "v4i", "v5lite": "v5e", "v5": "v5p", "v6lite": "v6e"}
VENDOR_WORDS = ("nvidia", "tesla", "quadro", "geforce", "amd", "instinct", "radeon")

logger = logging.getLogger("pallas_kernels")


class Key(NamedTuple):
    """What an entry of a table is for."""

    operation: str
    implementation: str
    key: str


TileT = TypeVar("TileT", bound=tuple[Any, ...])  # a NamedTuple of ints

_trials: list[Trial] = []


class Trial:
    """While it lasts (see ``trial``): tiles to take instead of any table's, and what was asked for.

    Attributes:
        tiles: values to take, by key; keys that it lacks get the heuristic's.
        asked: the heuristic's values for every key that a kernel traced meanwhile asked for.
        refused: keys in ``tiles`` whose values the kernel could not take.
    """

    def __init__(self, tiles: Mapping[Key, Mapping[str, int]]) -> None:
        self.tiles = dict(tiles)
        self.asked: dict[Key, dict[str, int]] = {}
        self.refused: set[Key] = set()


@contextlib.contextmanager
def trial(tiles: Mapping[Key, Mapping[str, int]]) -> Iterator[Trial]:
    """What is traced inside takes ``tiles`` and no table. For the command that measures; not for several threads."""
    current = Trial(tiles)
    _trials.append(current)
    try:
        yield current
    finally:
        _trials.remove(current)


def tuned(operation: str, implementation: str, key: str) -> dict[str, int] | None:
    """Tiles from the table of the chip that this is traced for; None if there is no table, or no such entry in it."""
    if _trials:
        found = _trials[-1].tiles.get(Key(operation, implementation, key))
        return None if found is None else dict(found)
    try:
        folder = config_folder()
        chip = None if folder is None else target_chip()
        found = (
            None
            if chip is None or folder is None
            else _table(folder / f"{chip}.json").get(Key(operation, implementation, key))
        )
    except Exception as error:  # a table is a matter of speed: nothing about it may end the program being traced
        _warn_once(f"no table of tiles is used: {type(error).__name__}: {error!s:.200}")
        return None
    return None if found is None else dict(found)


def pick(
    operation: str,
    implementation: str,
    key: str,
    heuristic: TileT,
    fits: Callable[[TileT], bool] | None = None,
) -> TileT:
    """``heuristic``, a NamedTuple of ints, with the fields that a table has for ``key`` taken from there.

    Args:
        fits: whether the kernel can run with some tiles. An entry that does not fit is passed over, with a warning; so
            is one with a field that ``heuristic`` lacks, for it was written for another version of the kernel.
    """
    full_key = Key(operation, implementation, key)
    if _trials:
        _trials[-1].asked[full_key] = heuristic._asdict()  # type: ignore[attr-defined]
    values = tuned(operation, implementation, key)
    if values is None:
        return heuristic
    wrong = sorted(set(values) - set(heuristic._fields))  # type: ignore[attr-defined]
    chosen = heuristic if wrong else heuristic._replace(**values)  # type: ignore[attr-defined]
    if wrong or (fits is not None and not fits(chosen)):
        if _trials:
            _trials[-1].refused.add(full_key)
        else:
            reason = f"{', '.join(wrong)} unknown" if wrong else "they do not fit"
            _warn_once(f"tiles {values} for {' '.join(full_key)} are passed over: {reason}")
        return heuristic
    return chosen


def config_folder() -> Path | None:
    """The folder of the tables, see above; None if there is none."""
    named = os.environ.get(ENVIRONMENT)
    if named:
        return Path(named)
    package = Path(__file__).resolve().parent
    for folder in (package / "configs", package.parent / "configs" / "kernels"):
        if folder.is_dir():
            return folder
    return None


def target_chip() -> str | None:
    """Name of the chip that a program traced now is for, e.g. "h200", "v5e" or "cpu"; None if it is not known.

    That is the chip of the abstract mesh around the call, if it names one (compiling ahead of time for another chip),
    else that of the default device, unless it is given as the mere name of a platform without devices here.
    """
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract is not None:
        return chip_name(abstract.device_kind)
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None:
        device = jax.local_devices()[0]
    elif isinstance(device, str):
        device = next((local for local in jax.local_devices() if local.platform == device), None)
    return None if device is None else chip_name(device.device_kind)


def chip_name(device_kind: str) -> str | None:
    """Short name of a chip from JAX's ``device_kind``, fit for a file name; None where nothing is left of it.

    "NVIDIA H100 80GB HBM3" is "h100", "NVIDIA GeForce RTX 4090" is "rtx4090", "TPU v5 lite" is "v5e", "TPU7x" is "v7x".
    """
    lower = device_kind.lower()
    if lower.startswith("tpu"):
        name = "".join(re.findall(r"[a-z0-9]+", lower[3:]))
        name = name if name.startswith("v") else f"v{name}"
        return TPU_NAMES.get(name, name) if len(name) > 1 else None
    words = [word for word in re.findall(r"[a-z0-9]+", lower) if word not in VENDOR_WORDS]
    # What follows the first word with a digit says how much memory and which socket.
    with_digit = next((index for index, word in enumerate(words) if re.search(r"\d", word)), len(words) - 1)
    return "".join(words[: with_digit + 1]) or None


def read_table(path: Path) -> dict[Key, dict[str, int]]:
    """The tiles of a table.

    Raises:
        OSError: if the file cannot be read.
        ValueError: saying what is wrong with it.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    entries = content.get("entries") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ValueError('not an object with a list "entries"')
    table = {}
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise ValueError(f"entry {index} is not an object")
        names = [name for name in map(entry.get, Key._fields) if isinstance(name, str) and name]
        if len(names) < len(Key._fields):
            raise ValueError(f"entry {index} lacks one of the strings {', '.join(Key._fields)}")
        values = entry.get("tiles")
        if not isinstance(values, dict) or not values:
            raise ValueError(f'entry {index} lacks an object "tiles"')
        for name, value in values.items():
            if type(value) is not int or not 0 < value < 2**31:  # bool is an int to isinstance
                raise ValueError(f"entry {index}: {name} must be a whole number above 0, got {value!r:.200}")
        table[Key(*names)] = values
    return table


@functools.cache
def _table(path: Path) -> Mapping[Key, dict[str, int]]:
    """A table that may be missing (silently empty) or malformed (empty, with a warning)."""
    if not path.is_file():
        return {}
    try:
        return read_table(path)
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("the table of tiles %s is ignored: %s: %.200s", path, type(error).__name__, error)
        return {}


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)
