"""Safetensors checkpoints: what is read, where it is taken from, and how damaged files are refused."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpage.weights import WeightsError, open_checkpoint

DTYPE_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int8": "I8"}
DTYPE_NAMES |= {"float8_e4m3fn": "F8_E4M3", "int64": "I64"}
INDEX = "model.safetensors.index.json"


def encode(tensors: dict[str, np.ndarray], metadata: dict[str, str] | None = None) -> bytes:
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, array in tensors.items():
        start = len(data)
        data += array.tobytes()
        offsets = [start, len(data)]
        header[name] = {"dtype": DTYPE_NAMES[array.dtype.name], "shape": list(array.shape), "data_offsets": offsets}
    return with_header(json.dumps(header).encode(), data)


def with_header(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def entry(shape: list[object], offsets: list[object], dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def with_entries(num_bytes: int = 16, **entries: object) -> bytes:
    return with_header(json.dumps(entries).encode(), bytes(num_bytes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def ramp(*shape: int, dtype: object = np.float32, start: float = 0.0) -> np.ndarray:
    return (np.arange(np.prod(shape)).reshape(shape) / 7 + start).astype(dtype)


def test_wgt_1a_mixed_dtypes_are_read_bit_for_bit(folder: Path) -> None:
    tensors = {
        "a": ramp(3, 4),
        "odd": ramp(5, dtype=np.int8),  # makes every later tensor unaligned
        "b": ramp(2, 3, dtype=np.float16),
        "c": ramp(4, 2, dtype=ml_dtypes.bfloat16),
        "d": ramp(3, dtype=np.float64),
        "e": ramp(6, dtype=ml_dtypes.float8_e4m3fn),
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }
    (folder / "model.safetensors").write_bytes(encode(tensors, {"format": "pt"}))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.names() == list(tensors)
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.generation_config == {}
    for name, array in tensors.items():
        read = checkpoint.read(name)
        assert checkpoint.shape(name) == read.shape == array.shape
        assert checkpoint.dtype(name) == read.dtype == array.dtype
        assert read.tobytes() == array.tobytes()
        assert read.flags.aligned


def test_reads_what_the_reference_writer_wrote(folder: Path) -> None:
    tensors = {"w": ramp(8, 4), "h": ramp(3, dtype=np.float16)}
    save_file(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert {name: checkpoint.read(name).tolist() for name in checkpoint.names()} == {
        name: array.tolist() for name, array in tensors.items()
    }


def test_unknown_tensor_is_refused_by_name(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(encode({"w": ramp(2)}))
    checkpoint = open_checkpoint(folder)
    for ask in (checkpoint.read, checkpoint.shape, checkpoint.dtype):
        with pytest.raises(WeightsError, match="'v'"):
            ask("v")


@pytest.fixture
def sharded(folder: Path) -> Path:
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    (folder / first).write_bytes(encode({"a": ramp(4), "b": ramp(2, 2)}))
    (folder / second).write_bytes(encode({"c": ramp(3), "a": ramp(4, start=100)}))  # an old copy of "a"
    for stray in ("backup.safetensors", "consolidated.safetensors", "model.safetensors"):
        (folder / stray).write_bytes(encode({"a": ramp(4, start=200), "stray": ramp(1)}))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"a": first, "b": first, "c": second}}))
    return folder


def test_wgt_1_index_decides_where_a_tensor_comes_from(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    assert checkpoint.names() == ["a", "b", "c"]
    np.testing.assert_array_equal(checkpoint.read("a"), ramp(4))
    np.testing.assert_array_equal(checkpoint.read("c"), ramp(3))


def test_wgt_1_missing_shard_is_named_with_its_tensor(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"^model-00002-of-00002.safetensors: the file is missing.*'c'"):
        open_checkpoint(sharded)


def test_wgt_1_index_entry_without_its_tensor_is_named(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "model-00001-of-00002.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"^model-00001-of-00002.safetensors: has no tensor 'lm_head.weight'"):
        open_checkpoint(sharded)


def test_wgt_1_a_single_file_without_index_is_the_only_one_read(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    checkpoint = open_checkpoint(sharded)
    assert checkpoint.names() == ["a", "stray"]
    np.testing.assert_array_equal(checkpoint.read("a"), ramp(4, start=200))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": "../up.safetensors"}}', "'a': not a plain file name"),
        ('{"weight_map": {"a": ".."}}', "the file is missing"),
        ('{"weight_map": {"a": 3}}', "'a': not a plain file name"),
    ],
)
def test_broken_index_is_refused(sharded: Path, text: str, message: str) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(WeightsError, match=message):
        open_checkpoint(sharded)


@pytest.mark.parametrize("text", [None, "{not json", "[1]", ""])
def test_config_must_be_a_json_object(folder: Path, text: str | None) -> None:
    (folder / "model.safetensors").write_bytes(encode({"w": ramp(2)}))
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    with pytest.raises(WeightsError, match=r"^config.json: "):
        open_checkpoint(folder)


def test_generation_config_is_read_and_checked(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(encode({"w": ramp(2)}))
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert open_checkpoint(folder).generation_config == {"eos_token_id": [1, 2]}
    (folder / "generation_config.json").write_text("nothing")
    with pytest.raises(WeightsError, match=r"^generation_config.json: is not JSON"):
        open_checkpoint(folder)


GOOD = encode({"first": ramp(8, 8), "last": ramp(16)})
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 269060552\n"
BROKEN: dict[str, tuple[bytes, str]] = {
    "cut after 100 bytes": (GOOD[:100], "truncated"),
    "cut in the length": (GOOD[:5], "truncated"),
    "cut in the last tensor": (GOOD[:-3], "tensor 'last': is cut off"),
    "bytes after the last tensor": (GOOD + b"xx", "2 bytes follow"),
    "header length too large": (struct.pack("<Q", 1 << 62) + GOOD[8:], "header length 4611686018427387904"),
    "header longer than the file": (struct.pack("<Q", 9999) + GOOD[8:], "truncated: the header has 9999"),
    "header not JSON": (with_header(b"{nonsense"), "header is not JSON"),
    "header not text": (with_header(b"\xff\xfe\x00\x01"), "header is not JSON"),
    "header nested deeply": (with_header(b"[" * 100_000), "header is not JSON"),
    "header a list": (with_header(b"[]"), "not a JSON object"),
    "name twice": (with_header(b'{"a": 1, "a": 2}'), "occurs twice"),
    "overlap": (with_entries(a=entry([2], [0, 8]), b=entry([3], [4, 16])), "'b' overlaps tensor 'a'"),
    "gap": (with_entries(a=entry([1], [0, 4]), b=entry([2], [8, 16])), "'b' leaves a gap after tensor 'a'"),
    "out of range": (with_entries(a=entry([8], [0, 32])), "'a': is cut off"),
    "offsets reversed": (with_entries(a=entry([1], [8, 4])), "'a': data_offsets"),
    "offsets not numbers": (with_entries(a=entry([1], ["0", 4])), "'a': data_offsets"),
    "offsets missing": (with_entries(a={"dtype": "F32", "shape": [1]}), "'a': needs dtype, shape and two data_offsets"),
    "entry not an object": (with_entries(a=3), "'a': needs dtype"),
    "shape and bytes disagree": (with_entries(a=entry([5], [0, 16])), r"'a': 16 bytes do not hold shape \[5\] of F32"),
    "negative size": (with_entries(a=entry([-4], [0, 16])), "'a': shape"),
    "unknown dtype": (with_entries(a=entry([4], [0, 16], "F4")), "'a': dtype 'F4' is not supported"),
    "dtype not text": (with_entries(a=entry([4], [0, 16], [])), "'a': dtype"),
    "zero bytes": (b"", "empty"),
    "LFS pointer": (LFS_POINTER, "Git LFS pointer"),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("indexed", [False, True], ids=["single", "indexed"])
def test_wgt_1b_broken_file_is_refused_at_opening(folder: Path, case: str, indexed: bool) -> None:
    content, message = BROKEN[case]
    file_name = "part.safetensors" if indexed else "model.safetensors"
    (folder / file_name).write_bytes(content)
    if indexed:
        (folder / INDEX).write_text(json.dumps({"weight_map": {"a": file_name}}))
    with pytest.raises(WeightsError, match=message) as caught:
        open_checkpoint(folder)
    assert str(caught.value).startswith(f"{file_name}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cut", range(0, len(GOOD), 13))
def test_wgt_1b_no_cut_goes_unnoticed(folder: Path, cut: int) -> None:
    (folder / "model.safetensors").write_bytes(GOOD[:cut])
    with pytest.raises(WeightsError, match=r"^model.safetensors: "):
        open_checkpoint(folder)


def test_tokenizer_is_loaded_from_the_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "model.safetensors").write_bytes(encode({"w": ramp(2)}))
    fake: Any = SimpleNamespace(Tokenizer=SimpleNamespace(from_directory=lambda path: ("tokenizer of", path)))
    monkeypatch.setitem(sys.modules, "jaxpage.tokenizer", fake)
    assert open_checkpoint(folder).load_tokenizer() == ("tokenizer of", folder)
