"""Checkpoints on other meshes than they were written for, read by several processes; conversions that are killed."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jaxpage import checkpoint as command
from jaxpage.weights import orbax_writer
from jaxpage.weights.orbax_checkpoint import Manifest, OrbaxCheckpoint

if TYPE_CHECKING:
    from numpy_reference import RandomModel

PROGRAMS = Path(__file__).parent / "checkpoint_programs.py"
SIZES = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 512, "head_dim": 32}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
"""Some 10 MB: arrays large enough to be cut, and 4 KV heads, which 8 devices have twice."""


def start(*arguments: object) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    words = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finished(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    return output


def result_of(process: subprocess.Popen[str]) -> Any:
    return json.loads(finished(process).strip().splitlines()[-1])


@pytest.fixture(scope="module")
def model(random_model: Callable[..., RandomModel]) -> Path:
    return random_model(**SIZES, **HEADS).directory


def convert(source: Path, target: Path, *options: str) -> Path:
    finished(start("-m", "jaxpage.checkpoint", "convert", source, target, *options))
    return target


@pytest.fixture(scope="module")
def written_for_four(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(model, tmp_path_factory.mktemp("four") / "model", "--tensor-parallel-size", "4")


def test_files_are_cut_for_the_devices(written_for_four: Path) -> None:
    checkpoint = OrbaxCheckpoint(written_for_four)
    cut = {
        name.removeprefix("params/"): tuple(
            size // part for size, part in zip(array.shape, checkpoint.chunk_shape(name), strict=True)
        )
        for name, array in checkpoint.manifest.arrays.items()
        if "layers.1" not in name
    }
    assert cut == {
        "embedding/embedding": (4, 1),
        "layers.0/attention_norm": (1,),
        "layers.0/mlp_norm": (1,),
        "layers.0/qkv": (4, 1, 1, 1),
        "layers.0/output": (1, 4),
        "layers.0/gate_up": (1, 4, 1),
        "layers.0/down": (1, 4),
        "final_norm/final_norm": (1,),
        "lm_head/lm_head": (4, 1),
    }


def test_any_mesh_gets_what_a_load_from_the_source_gives_it(
    written_for_four: Path, model: Path, tmp_path: Path
) -> None:
    int4 = convert(model, tmp_path / "model", "--quantization", "int4", "--tensor-parallel-size", "8")
    cases = [
        f"{written_for_four},,2,",
        f"{written_for_four},,8,",  # has each KV head twice
        f"{written_for_four},,4,two_dimensional",
        f"{written_for_four},,2,2",  # stages
        f"{written_for_four},int8,8,",  # quantised as it is loaded
        f"{int4},int4,8,",
    ]
    results = result_of(start(PROGRAMS, "meshes", model, *cases))
    assert [result["wrong"] for result in results] == [[]] * len(cases)
    assert [result["repeats"] for result in results] == [1, 2, 1, 1, 2, 2]


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not say what a process reads")
def test_each_process_reads_its_part_only(written_for_four: Path, model: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = [
        result_of(process)
        for process in [start(PROGRAMS, "process", written_for_four, model, index, port) for index in (0, 1)]
    ]
    manifest = Manifest.read(written_for_four)
    total = manifest.num_param_bytes
    assert total > 8_000_000
    for result in results:
        assert result["wrong"] == []
        assert result["own"] < 0.51 * total
        # Beside its numbers, Orbax reads what it wrote about them.
        assert result["own"] <= result["read"] < result["own"] + 0.03 * total
        assert sum(manifest.files[name].num_bytes for name in result["checked"]) == result["own"]
        assert result["stage"] <= result["read for a stage"] < result["stage"] + 0.03 * total
    both = set(results[0]["checked"]) & set(results[1]["checked"])
    assert both and all("_norm/" in name for name in both), "only what every device has whole"


def test_a_killed_conversion_never_loads(tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    found = result_of(start(PROGRAMS, "kill", tiny_model_dir("llama"), tmp_path / "model", 16))
    assert set(found["outcomes"]) <= {"refused", "complete"}
    assert found["outcomes"].count("refused") >= 8
    assert set(found["left"]) == {"refused"}, "what some leave that are killed while they write"
    assert found["remain"] == []


def test_the_command_converts_describes_and_verifies(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = str(tiny_model_dir("qwen3_moe")), str(tmp_path / "model")
    arguments = ["convert", source, target, "--quantization", "int8", "--dtype", "bfloat16"]
    assert command.main([*arguments, "--tensor-parallel-size", "1"]) == 0
    assert "int8 and bfloat16" in capsys.readouterr().out
    assert command.main([*arguments, "--tensor-parallel-size", "1"]) == 1
    assert capsys.readouterr().err == f"jaxpage: error: {target} exists; --overwrite would replace it\n"
    assert command.main(["inspect", target]) == 0
    assert "layers.*/experts_down.values" in capsys.readouterr().out
    assert command.main(["inspect", target, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["quantization"] == "int8" and content["config"]["model_type"] == "qwen3_moe"
    assert command.main(["verify", target]) == 0
    assert "all as they were written" in capsys.readouterr().out
    (tmp_path / "model" / "params" / "final_norm" / "final_norm" / "0").write_bytes(b"\0" * 128)
    assert command.main(["verify", target]) == 1
    assert capsys.readouterr().err.startswith("jaxpage: error: params/final_norm/final_norm/0: is damaged or was chang")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "{model}", "{new}", "--tensor-parallel-size", "0"], "--tensor-parallel-size: must be at least 1"),
        (["convert", "{model}", "{new}", "--tensor-parallel-size", "64"], "cutting for 64 devices takes as many"),
        (["convert", "{model}", "{new}", "--tensor-parallel-size", "1", "--sharding", "no"], "--sharding: must be"),
        (["convert", "{new}", "{new}"], "is no file or directory here"),
        (["inspect", "{model}"], "it has no jaxpage_checkpoint.json"),
        (["verify", "{model}"], "it has no jaxpage_checkpoint.json"),
        (["inspect", "{new}"], "new: no such directory"),
        (["verify", "{new}"], "new: no such directory"),
        (["verify", "{model}/config.json"], "config.json: is no directory"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    arguments: list[str],
    message: str,
    tiny_model_dir: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [word.format(model=tiny_model_dir("llama"), new=tmp_path / "new") for word in arguments]
    assert command.main(words) == 1
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_a_conversion_even_where_its_exception_would_be_lost(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pressed = []

    def press(phase: str, info: object) -> None:
        if not pressed:
            pressed.append(phase)
            signal.raise_signal(signal.SIGINT)  # what this raises nobody outside of a callback gets to see

    def collected(*arguments: Any) -> None:
        gc.callbacks.append(press)
        gc.collect()
        gc.callbacks.remove(press)
        save(*arguments)

    save = orbax_writer._save
    monkeypatch.setattr(orbax_writer, "_save", collected)
    handler = signal.getsignal(signal.SIGINT)
    arguments = ["convert", str(tiny_model_dir("llama")), str(tmp_path / "model"), "--tensor-parallel-size", "1"]
    assert command.main(arguments) == 130
    assert pressed and list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_twice_ends_it_at_once(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = []

    def press_twice(*arguments: Any) -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
            reached.append("after")

    monkeypatch.setattr(orbax_writer, "_save", press_twice)
    arguments = ["convert", str(tiny_model_dir("llama")), str(tmp_path / "model"), "--tensor-parallel-size", "1"]
    assert command.main(arguments) == 130
    assert reached == ["after"] and list(tmp_path.iterdir()) == []
