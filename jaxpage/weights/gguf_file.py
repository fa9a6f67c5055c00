"""Reads the container format GGUF (versions 2 and 3): metadata, the table of tensors, and values, float32 or as stored.

It must not know what the metadata and tensors mean. The parser is our own because the gguf package's reader keeps every
array element as a numpy object: it needs seconds for a vocabulary, this one a fraction of one. The dequantisation is
that package's. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxpage.errors import shown
from jaxpage.weights.checkpoint import WeightsError, map_file
from jaxpage.weights.gguf_blocks import Blocks, unpack

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_LENGTH = struct.Struct("<Q")
_MAX_DIMS = 4


class _Truncated(Exception):
    """The file ends before the value that is being read."""


@dataclass(frozen=True)
class TensorInfo:
    """One row of the table of tensors; ``shape`` is row-major, ``offset`` in bytes from the start of the file."""

    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    offset: int
    num_bytes: int


class GgufFile:
    """An open GGUF file.

    Attributes:
        path: The file.
        metadata: Every key of the file; arrays are lists.
        tensors: The table of tensors by name, in the order of the file.

    Raises:
        WeightsError: not a GGUF file, truncated, or with a tensor that cannot be dequantised.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._map = map_file(path)
        self._parse()
        self._check_ranges()
        self._check_quantizations()

    def read(self, name: str, index: int | None = None) -> np.ndarray:
        """One tensor, or the part of it at ``index`` of its first dimension, as float32.

        It is a read-only view of the file where that holds float32.
        """
        rows, shape = self._rows(name, index)
        return dequantize(rows, self.tensors[name].quantization).reshape(shape)

    def read_blocks(self, name: str, index: int | None = None) -> Blocks | None:
        """The same as the file holds it; None if that is no blocks of 8 bits or fewer with scales."""
        rows, _ = self._rows(name, index)
        return unpack(rows, self.tensors[name].quantization)

    def _rows(self, name: str, index: int | None) -> tuple[np.ndarray, tuple[int, ...]]:
        """The bytes of a tensor or a part of it, [..., bytes of a row], and its shape."""
        info = self.tensors[name]
        shape, num_bytes, offset = info.shape, info.num_bytes, info.offset
        if index is not None:
            # Blocks of quantised numbers lie within rows, so that a part is a piece of the file.
            num_bytes //= shape[0]
            shape, offset = shape[1:], offset + index * num_bytes
        raw = np.frombuffer(self._map, np.uint8, num_bytes, offset)
        return raw.reshape(*shape[:-1], -1), shape

    def _parse(self) -> None:
        if self._map[:4] != b"GGUF":
            raise WeightsError(f"{self.path.name}: is not a GGUF file (it starts with {self._map[:4]!r})")
        cursor = _Cursor(self._map, 4)
        doing = "the header"
        try:
            version = cursor.scalar(4)
            if version not in (2, 3):
                raise WeightsError(f"{self.path.name}: GGUF version {version} is not supported (2 and 3 are)")
            num_tensors, num_keys = cursor.scalar(10), cursor.scalar(10)
            for index in range(num_keys):
                doing = f"metadata entry {index} of {num_keys}"
                key = cursor.string()
                doing = f"metadata key {shown(key)}"
                self.metadata[key] = cursor.value(cursor.scalar(4))
            rows = []
            for index in range(num_tensors):
                doing = f"row {index} of {num_tensors} of the table of tensors"
                rows.append(self._parse_row(cursor))
        except _Truncated:
            raise WeightsError(f"{self.path.name}: is truncated or damaged: it ends within {doing}") from None
        except UnicodeDecodeError:
            raise WeightsError(f"{self.path.name}: is damaged: {doing} is not UTF-8 text") from None
        except WeightsError:
            raise
        except ValueError as error:
            raise WeightsError(f"{self.path.name}: is damaged: {doing}: {str(error)[:200]}") from error
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise WeightsError(f"{self.path.name}: general.alignment {shown(alignment)} is not a multiple of 8")
        data_start = -(-cursor.position // alignment) * alignment
        for name, shape, quantization, offset, num_bytes in rows:
            if name in self.tensors:
                raise WeightsError(f"{self.path.name}: tensor {shown(name)} occurs twice")
            if offset % alignment:
                raise WeightsError(f"{self.path.name}: tensor {shown(name)}: offset {offset} is not aligned")
            self.tensors[name] = TensorInfo(shape, quantization, data_start + offset, num_bytes)

    def _parse_row(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int, int]:
        name = cursor.string()
        where = f"{self.path.name}: tensor {shown(name)}"
        num_dims = cursor.scalar(4)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise WeightsError(f"{where}: {num_dims} dimensions (1 to {_MAX_DIMS} are allowed)")
        # The file lists the fastest-varying dimension first.
        shape = tuple(reversed([cursor.scalar(10) for _ in range(num_dims)]))
        type_number, offset = cursor.scalar(4), cursor.scalar(10)
        try:
            quantization = GGMLQuantizationType(type_number)
            block_size, block_bytes = GGML_QUANT_SIZES[quantization]
        except (ValueError, KeyError):
            raise WeightsError(f"{where}: type number {type_number} is unknown") from None
        if 0 in shape or shape[-1] % block_size:
            raise WeightsError(f"{where}: shape {shape} does not fit {quantization.name} (blocks of {block_size})")
        return name, shape, quantization, offset, math.prod(shape) // block_size * block_bytes

    def _check_ranges(self) -> None:
        position, previous = 0, ""
        for name, info in sorted(self.tensors.items(), key=lambda item: item[1].offset):
            end = info.offset + info.num_bytes
            if end > len(self._map):
                raise WeightsError(
                    f"{self.path.name}: is truncated: tensor {shown(name)} ends at byte {end}, "
                    f"the file has {len(self._map)}"
                )
            if info.offset < position:
                raise WeightsError(f"{self.path.name}: tensor {shown(name)} overlaps tensor {shown(previous)}")
            position, previous = end, name

    def _check_quantizations(self) -> None:
        first_of = {info.quantization: name for name, info in reversed(self.tensors.items())}
        for quantization, name in first_of.items():
            try:
                dequantize(np.zeros((1, GGML_QUANT_SIZES[quantization][1]), np.uint8), quantization)
            except NotImplementedError:
                raise WeightsError(
                    f"{self.path.name}: tensor {shown(name)}: type {quantization.name} cannot be dequantised"
                ) from None


class _Cursor:
    """Reads values one after the other; raises _Truncated where the file ends too early."""

    def __init__(self, buffer: mmap.mmap, position: int) -> None:
        self.buffer = buffer
        self.position = position

    def scalar(self, kind: int) -> Any:
        return self._array(kind, 1)[0]

    def string(self) -> str:
        return self._strings(1)[0]

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(kind)
        element_kind, count = self.scalar(4), self.scalar(10)
        if element_kind == _STRING:
            return self._strings(count)
        return self._array(element_kind, count)

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind} is not supported")
        dtype = np.dtype(_SCALARS[kind])
        end = self.position + count * dtype.itemsize
        if end > len(self.buffer):
            raise _Truncated
        values = np.frombuffer(self.buffer, dtype, count, self.position).tolist() if count else []
        self.position = end
        return values

    def _strings(self, count: int) -> list[str]:
        buffer, position, size = self.buffer, self.position, len(self.buffer)
        unpack = _LENGTH.unpack_from
        strings = []
        for _ in range(count):
            start = position + 8
            if start > size:
                raise _Truncated
            position = start + unpack(buffer, position)[0]
            if position > size:
                raise _Truncated
            strings.append(buffer[start:position].decode())
        self.position = position
        return strings
