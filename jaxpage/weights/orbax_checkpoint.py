"""A checkpoint that jaxpage wrote: what its manifest says, and whether its files are still those that were written.

It must not know devices, nor how arrays get onto them; ``orbax_arrays`` does.

The directory holds config.json, generation_config.json and the tokenizer under Hugging Face's names, and in ``params``
an Orbax checkpoint for each layer and for each parameter outside of the layers. There an array is a directory with a
file for each of its parts, so that a process reads the files of its parts and no others. ``MANIFEST_FILE`` has shape
and type of every array and a checksum of every file. A weight that is quantised is two arrays, values and scales.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes  # makes its types known to numpy by their names
import numpy as np

from jaxpage.errors import StartupError, shown
from jaxpage.weights.checkpoint import ModelFiles, WeightsError, map_file, read_json

if TYPE_CHECKING:
    from jaxpage.tokenizer import Tokenizer

MANIFEST_FILE = "jaxpage_checkpoint.json"
PARAMS = "params"
FORMAT_VERSION = 1
VALUES, SCALES = "values", "scales"
TEMPORARY_NAME = re.compile(r"\..+\.(converting|replaced)-\w+")
"""Names of directories that a conversion was still at work on, or had put aside."""
_KIND_OF_DTYPE = {np.dtype(np.int8): "int8", np.dtype(np.uint8): "int4", np.dtype(ml_dtypes.float8_e4m3fn): "fp8"}
_READERS = 8


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """What a file has to be. A load compares size and CRC-32 of what it reads, ``find_damage`` everything."""

    num_bytes: int
    crc32: str
    sha256: str

    @classmethod
    def of(cls, path: Path) -> StoredFile:
        """As the file is now."""
        content = map_file(path) if path.stat().st_size else b""
        return cls(len(content), f"{zlib.crc32(content):08x}", hashlib.sha256(content).hexdigest())


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array of the parameter tree, or one of the two of a quantised weight."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        source: what it was made from, for people.
        dtype: of all that is not quantised.
        quantization: how the layers' linear weights are stored; None: in ``dtype``.
        arrays: by directory, relative to that of the checkpoint.
        files: every file but the manifest itself, likewise.
    """

    source: str
    dtype: str
    quantization: str | None
    arrays: dict[str, StoredArray]
    files: dict[str, StoredFile]

    @property
    def num_param_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.num_bytes for array in self.arrays.values())

    def to_json(self) -> dict[str, Any]:
        """The content of the file."""
        return {
            "format_version": FORMAT_VERSION,
            "source": self.source,
            "dtype": self.dtype,
            "quantization": self.quantization,
            "arrays": {
                name: {"shape": list(array.shape), "dtype": array.dtype.name} for name, array in self.arrays.items()
            },
            "files": {name: dataclasses.asdict(file) for name, file in self.files.items()},
        }

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Reads the manifest of a checkpoint.

        Raises:
            WeightsError: it is missing, damaged, or of another version.
        """
        content = read_json(directory / MANIFEST_FILE)
        version = content.get("format_version")
        if version != FORMAT_VERSION:
            raise WeightsError(
                f"{MANIFEST_FILE}: format_version {shown(version)} is not {FORMAT_VERSION}, the one this jaxpage reads"
            )
        try:
            arrays = {
                name: StoredArray(tuple(map(int, entry["shape"])), np.dtype(entry["dtype"]))
                for name, entry in content["arrays"].items()
            }
            files = {
                name: StoredFile(int(entry["num_bytes"]), str(entry["crc32"]), str(entry["sha256"]))
                for name, entry in content["files"].items()
            }
            return cls(str(content["source"]), content["dtype"], content["quantization"], arrays, files)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise WeightsError(f"{MANIFEST_FILE}: is damaged: {type(error).__name__} {str(error)[:200]}") from error


class OrbaxCheckpoint(ModelFiles):
    """A directory that ``jaxpage checkpoint convert`` wrote. Opening checks everything but the arrays.

    Attributes:
        manifest: what it consists of.

    Raises:
        WeightsError: it is not complete, or a file is not as it was written.
    """

    def __init__(self, path: Path, *, needs_weights: bool = True) -> None:
        if TEMPORARY_NAME.fullmatch(path.resolve().name):
            raise WeightsError(f"{path.name}: is what a conversion left that was interrupted, not a checkpoint")
        self.path = path
        self.manifest = Manifest.read(path)
        self.quantization = self.manifest.quantization
        self.check_files(name for name in self.manifest.files if not name.startswith(f"{PARAMS}/"))
        self.config = read_json(path / "config.json")
        self.generation_config = read_json(path / "generation_config.json")
        if needs_weights and not self.manifest.arrays:
            raise WeightsError(f"{MANIFEST_FILE}: names no arrays")

    def load_tokenizer(self) -> Tokenizer:
        from jaxpage.tokenizer import Tokenizer

        return Tokenizer.from_directory(self.path)

    def check_quantization(self, wanted: str | None) -> None:
        """Raises StartupError unless linear weights can be loaded as this kind; None: as they are."""
        if self.quantization is not None and wanted not in (None, self.quantization):
            raise StartupError(
                f"quantization: {self.path.name} holds {self.quantization} weights, which cannot be made {wanted} "
                "without a second loss; convert the model that it was made from"
            )

    def kind(self, param: str) -> str | None:
        """How a parameter is quantised: a kind of ``QuantizedWeight``, or None. ``param`` as in ``array_names``.

        Raises:
            WeightsError: the checkpoint does not have it.
        """
        arrays = self.manifest.arrays
        if param in arrays:
            return None
        values = arrays.get(f"{param}.{VALUES}")
        if values is None or values.dtype not in _KIND_OF_DTYPE or f"{param}.{SCALES}" not in arrays:
            raise WeightsError(f"{self.path.name}: the checkpoint has no parameter {param}")
        return _KIND_OF_DTYPE[values.dtype]

    def chunk_shape(self, array: str) -> tuple[int, ...]:
        """Shape of the part of an array that is one file.

        Raises:
            WeightsError: what Orbax wrote about the array is not what the manifest says.
        """
        header = f"{array}/.zarray"
        self.check_files([header])
        content, expected = read_json(self.path / header), self.manifest.arrays[array]
        if tuple(content["shape"]) != expected.shape or np.dtype(content["dtype"]) != expected.dtype:
            raise WeightsError(
                f"{header}: holds {content['dtype']} {content['shape']}, "
                f"{MANIFEST_FILE} says {expected.dtype} {list(expected.shape)}"
            )
        return tuple(content["chunks"])

    def check_files(self, names: Iterable[str]) -> None:
        """Compares size and CRC-32 of files with the manifest.

        Raises:
            WeightsError: naming the first that is missing, changed or not in the manifest.
        """
        with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:  # the checksums leave the interpreter free
            for damage in pool.map(self._damage, names):
                if damage is not None:
                    raise WeightsError(damage)

    def _damage(self, name: str) -> str | None:
        expected = self.manifest.files.get(name)
        if expected is None:
            return f"{name}: is missing in {MANIFEST_FILE}"
        path = self.path / name
        if not path.is_file():
            return f"{name}: the file is missing"
        num_bytes = path.stat().st_size
        if num_bytes != expected.num_bytes:
            return f"{name}: is damaged: it has {num_bytes} bytes, {expected.num_bytes} were written"
        found = f"{zlib.crc32(map_file(path) if num_bytes else b''):08x}"
        if found != expected.crc32:
            return (
                f"{name}: is damaged or was changed: its CRC-32 is {found}, that of what was written {expected.crc32}"
            )
        return None


def find_damage(path: Path) -> Iterator[str]:
    """Reads a whole checkpoint and compares it with its manifest; a line for each file with a fault.

    Raises:
        WeightsError: there is no manifest that can be read.
    """
    manifest = Manifest.read(path)
    for name, expected in manifest.files.items():
        if not (path / name).is_file():
            yield f"{name}: the file is missing"
        elif (found := StoredFile.of(path / name)) != expected:
            yield f"{name}: is damaged or was changed: {_difference(found, expected)}"
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        if file.is_file() and name not in manifest.files and name != MANIFEST_FILE:
            yield f"{name}: is no part of the checkpoint"
    for name in manifest.arrays:
        if f"{name}/.zarray" not in manifest.files:
            yield f"{name}: the array has no file"


def _difference(found: StoredFile, expected: StoredFile) -> str:
    if found.num_bytes != expected.num_bytes:
        return f"it has {found.num_bytes} bytes, {expected.num_bytes} were written"
    return f"its SHA-256 is {found.sha256}, that of what was written {expected.sha256}"


def param_name(path: tuple[str | int, ...]) -> str:
    """Where a parameter is, relative to the checkpoint: the directory of its array, or the start of those of its two.

    The last directory above is an Orbax checkpoint: "params/layers.3/qkv", "params/embedding/embedding".
    """
    item = ".".join(map(str, path[:-1])) or str(path[-1])
    return f"{PARAMS}/{item}/{path[-1]}"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file of a checkpoint."""
    path.write_text(json.dumps(content), encoding="utf-8")
