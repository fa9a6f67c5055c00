"""Reads checkpoints in safetensors files: headers at opening, tensors on demand from mapped memory.

It must not know what the tensors are for. The headers are parsed here and not by the safetensors package because numpy
alone has no bfloat16 or float8 (ml_dtypes adds them), and because a damaged file has to be refused by name.
"""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from jaxpage.errors import shown
from jaxpage.weights.checkpoint import Checkpoint, WeightsError, map_file, read_json

if TYPE_CHECKING:
    from jaxpage.tokenizer import Tokenizer

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class _Tensor:
    file: mmap.mmap
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int  # byte offset in the file
    end: int


class SafetensorsCheckpoint(Checkpoint):
    """A directory with config.json and either model.safetensors or an index over several shards.

    With an index, the index alone decides which file a tensor comes from: a file it does not name is not looked at, and
    a tensor in a shard that it places elsewhere is ignored. Without ``needs_weights`` the checkpoint has no tensors.

    Raises:
        WeightsError: config.json, the index or a file is missing or damaged, or the index names a tensor that the file
            does not hold. All headers are checked at opening.
    """

    def __init__(self, path: Path, *, needs_weights: bool = True) -> None:
        self.path = path
        self.config = read_json(path / "config.json")
        generation = path / "generation_config.json"
        self.generation_config = read_json(generation) if generation.exists() else {}
        self._tensors: dict[str, _Tensor] = {}
        if needs_weights:
            self._tensors = _read_index(path) if (path / INDEX_FILE).exists() else _read_header(path / SINGLE_FILE)

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def dtype(self, name: str) -> np.dtype:
        return self._tensor(name).dtype

    def read(self, name: str) -> np.ndarray:
        tensor = self._tensor(name)
        if tensor.begin == tensor.end:
            return np.zeros(tensor.shape, tensor.dtype)
        count = (tensor.end - tensor.begin) // tensor.dtype.itemsize
        array = np.frombuffer(tensor.file, tensor.dtype, count, tensor.begin).reshape(tensor.shape)
        # The format does not promise that a tensor starts at a multiple of its item size; device transfers expect it.
        return array if array.flags.aligned else array.copy()

    def load_tokenizer(self) -> Tokenizer:
        from jaxpage.tokenizer import Tokenizer

        return Tokenizer.from_directory(self.path)

    def _tensor(self, name: str) -> _Tensor:
        if name not in self._tensors:
            raise WeightsError(f"{self.path.name}: the checkpoint has no tensor {shown(name)}")
        return self._tensors[name]


def _read_index(path: Path) -> dict[str, _Tensor]:
    weight_map = read_json(path / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{INDEX_FILE}: has no weight_map")
    shards: dict[str, dict[str, _Tensor]] = {}
    tensors = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise WeightsError(f"{INDEX_FILE}: tensor {shown(name)}: not a plain file name: {shown(file_name)}")
        if file_name not in shards:
            if not (path / file_name).is_file():
                raise WeightsError(f"{file_name}: the file is missing; {INDEX_FILE} places tensor {shown(name)} in it")
            shards[file_name] = _read_header(path / file_name)
        if name not in shards[file_name]:
            raise WeightsError(f"{file_name}: has no tensor {shown(name)}, which {INDEX_FILE} places in it")
        tensors[name] = shards[file_name][name]
    return tensors


def _read_header(path: Path) -> dict[str, _Tensor]:
    """Parse and check one file's header: an 8-byte little-endian length, then that many bytes of JSON.

    The tensors' byte ranges must fill the rest of the file exactly, without gaps or overlaps, as the format demands.
    """
    file = map_file(path)
    if len(file) < 8:
        raise WeightsError(f"{path.name}: is truncated: {len(file)} bytes are no safetensors file")
    header_bytes = int.from_bytes(file[:8], "little")
    if header_bytes > _MAX_HEADER_BYTES:
        raise WeightsError(f"{path.name}: is not a safetensors file: header length {header_bytes} is too large")
    data_start = 8 + header_bytes
    if data_start > len(file):
        raise WeightsError(f"{path.name}: is truncated: the header has {header_bytes} bytes, the file {len(file)}")
    try:
        header = json.loads(file[8:data_start], object_pairs_hook=_refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path.name}: the header is not JSON: {str(error)[:200]}") from error
    if not isinstance(header, dict):
        raise WeightsError(f"{path.name}: the header is not a JSON object: {shown(header)}")
    header.pop("__metadata__", None)
    tensors = {name: _parse_entry(path.name, name, entry, file, data_start) for name, entry in header.items()}
    position, previous = data_start, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != position:
            fault = "overlaps" if tensor.begin < position else "leaves a gap after"
            raise WeightsError(f"{path.name}: tensor {shown(name)} {fault} {previous}")
        position, previous = tensor.end, f"tensor {shown(name)}"
    if position != len(file):
        raise WeightsError(f"{path.name}: {len(file) - position} bytes follow the last tensor and belong to none")
    return tensors


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _parse_entry(file_name: str, name: str, entry: Any, file: mmap.mmap, data_start: int) -> _Tensor:
    where = f"{file_name}: tensor {shown(name)}"
    try:
        dtype_name, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise WeightsError(f"{where}: needs dtype, shape and two data_offsets, got {shown(entry)}") from None
    dtype = _DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise WeightsError(f"{where}: dtype {shown(dtype_name)} is not supported")
    if not isinstance(shape, list) or not all(type(number) is int and number >= 0 for number in shape):
        raise WeightsError(f"{where}: shape {shown(shape)} is not a list of sizes")
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
        raise WeightsError(f"{where}: data_offsets {shown([begin, end])} are not a byte range")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise WeightsError(f"{where}: {end - begin} bytes do not hold shape {shown(shape)} of {dtype_name}")
    if data_start + end > len(file):
        raise WeightsError(f"{where}: is cut off: it ends at byte {data_start + end}, the file has {len(file)}")
    return _Tensor(file, dtype, tuple(shape), data_start + begin, data_start + end)
