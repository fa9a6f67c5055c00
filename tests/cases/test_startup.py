"""Checkpoints that cannot be served: the server does not start, and one line says which file, tensor or key is why."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpage import serve

if TYPE_CHECKING:
    from numpy_reference import RandomModel

WEIGHTS = "model.safetensors"


def with_header(raw: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The file with another header before the same data."""
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + raw[8 + length :]


def overlap(header: dict[str, Any]) -> None:
    first, second = (header[f"model.layers.{index}.self_attn.q_proj.weight"] for index in range(2))
    second["data_offsets"] = first["data_offsets"]


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "cut after 100 bytes": lambda raw: raw[:100],
    "cut in the last tensor": lambda raw: raw[:-3],
    "header length too large": lambda raw: struct.pack("<Q", 1 << 40) + raw[8:],
    "header not JSON": lambda raw: raw[:8] + b"x" + raw[9:],
    "offsets that overlap": lambda raw: with_header(raw, overlap),
    "zero bytes": lambda raw: b"",
    "text pointer": lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 269060552\n",
}


@pytest.fixture(autouse=True)
def _log_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start in this process must not leave its log behind."""
    monkeypatch.setattr(serve, "show_log", lambda *args, **options: None)


@pytest.fixture
def copy(random_model: Callable[..., RandomModel], tmp_path: Path) -> Path:
    """A good model's directory, to be broken."""
    shutil.copytree(random_model().directory, tmp_path, dirs_exist_ok=True)
    return tmp_path


def refusal(directory: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a server writes which does not start."""
    assert serve.main(["--model", str(directory), "--port", "0"]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("jaxpage: error: ")]
    assert len(errors) == 1
    return errors[0].removeprefix("jaxpage: error: ")


@pytest.mark.parametrize("case", BROKEN)
def test_wgt_1b_no_server_starts_with_a_broken_file(case: str, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / WEIGHTS).write_bytes(BROKEN[case]((copy / WEIGHTS).read_bytes()))
    assert refusal(copy, capsys).startswith(f"{WEIGHTS}: ")


def test_wgt_1b_the_process_ends_with_an_exit_code(copy: Path) -> None:
    (copy / WEIGHTS).write_bytes((copy / WEIGHTS).read_bytes()[:-3])
    command = [sys.executable, "-m", "jaxpage.serve", "--model", str(copy), "--port", "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert f"jaxpage: error: {WEIGHTS}: tensor " in result.stderr
    assert "Traceback" not in result.stderr
    assert "ready" not in result.stdout


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        pytest.param({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'", id="rope type"),
        pytest.param({"hidden_act": "xielu"}, "activation 'xielu'", id="activation"),
        pytest.param({"architectures": ["MambaForCausalLM"]}, "architecture 'MambaForCausalLM'", id="architecture"),
        pytest.param({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e5}}, "rope_theta", id="two rope bases"),
    ],
)
def test_cfg_1_cfg_1a_cfg_3a_unknown_values_are_refused_by_name(
    changes: dict[str, Any], named: str, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((copy / "config.json").read_text()) | changes
    (copy / "config.json").write_text(json.dumps(config))
    assert named in refusal(copy, capsys)


def test_cfg_2_cfg_2a_wgt_1a_wrong_tensors_are_refused_by_name(
    random_model: Callable[..., RandomModel], copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors, norm = random_model().tensors, "model.norm.weight"
    missing = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    for changed, words in [
        (missing, ["lm_head.weight"]),
        (tensors | {norm: np.ones(65, np.float32)}, [norm, "[65]", "[64]"]),
        (tensors | {norm: np.ones(64, np.int8)}, [norm, "int8"]),
        (tensors | {"model.stray.weight": np.ones(3, np.float32)}, ["model.stray.weight"]),
    ]:
        save_file(changed, copy / WEIGHTS)
        line = refusal(copy, capsys)
        assert all(word in line for word in words), line


def test_wgt_1_a_missing_shard_and_a_wrong_index_are_refused(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / WEIGHTS).rename(copy / "part.safetensors")
    for file_name, tensor, words in [
        ("lost.safetensors", "model.norm.weight", ["lost.safetensors", "'model.norm.weight'"]),
        ("part.safetensors", "no.such.weight", ["part.safetensors", "'no.such.weight'"]),
    ]:
        index = {"metadata": {}, "weight_map": {tensor: file_name}}
        (copy / "model.safetensors.index.json").write_text(json.dumps(index))
        line = refusal(copy, capsys)
        assert all(word in line for word in words), line
