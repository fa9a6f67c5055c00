"""Tables of tiles: which file is read for which chip, and that nothing in it can break a program."""

from __future__ import annotations

import json
import logging
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import tiles

OPERATION, IMPLEMENTATION, KEY = "add", "triton", "decode H64 bfloat16"
ROOT = Path(__file__).resolve().parents[2]


class Tile(NamedTuple):
    rows: int
    chunk: int


HEURISTIC = Tile(16, 128)


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXPAGE_KERNEL_CONFIGS", str(tmp_path))
    tiles._table.cache_clear()
    tiles._warn_once.cache_clear()


def write(folder: Path, values: dict[str, Any], chip: str = "cpu") -> None:
    entry = {"operation": OPERATION, "implementation": IMPLEMENTATION, "key": KEY, "tiles": values, "us": 1.5}
    (folder / f"{chip}.json").write_text(json.dumps({"chip": chip, "entries": [entry]}))


@pytest.mark.parametrize(
    ("device_kind", "name"),
    [
        ("cpu", "cpu"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("TPU v4", "v4"),
        ("TPU v4 lite", "v4i"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5e", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "v7x"),
        ("../../etc", "etc"),
        ("TPU", None),
        ("", None),
    ],
)
def test_chip_names(device_kind: str, name: str | None) -> None:
    assert tiles.chip_name(device_kind) == name


class TestWhichTable:
    def test_of_the_device_at_hand(self, tmp_path: Path) -> None:
        assert tiles.tuned(OPERATION, IMPLEMENTATION, KEY) is None
        tiles._table.cache_clear()
        write(tmp_path, {"chunk": 64})
        assert tiles.tuned(OPERATION, IMPLEMENTATION, KEY) == {"chunk": 64}
        assert tiles.tuned(OPERATION, IMPLEMENTATION, "prefill H64 bfloat16") is None
        assert tiles.tuned(OPERATION, "xla", KEY) is None

    def test_of_the_chip_compiled_for(self, tmp_path: Path) -> None:
        write(tmp_path, {"chunk": 64}, "cpu")
        write(tmp_path, {"chunk": 32}, "v6e")
        mesh = AbstractMesh((), (), abstract_device=AbstractDevice("TPU v6 lite", 1, "tpu"))
        with jax.sharding.use_abstract_mesh(mesh):
            assert tiles.target_chip() == "v6e"
            assert tiles.tuned(OPERATION, IMPLEMENTATION, KEY) == {"chunk": 32}
        assert tiles.tuned(OPERATION, IMPLEMENTATION, KEY) == {"chunk": 64}

    def test_of_the_default_device(self, tmp_path: Path) -> None:
        write(tmp_path, {"chunk": 64})
        with jax.default_device(jax.local_devices()[0]):
            assert tiles.target_chip() == "cpu"
        with jax.default_device("cpu"):
            assert tiles.target_chip() == "cpu"
        with jax.default_device("tpu"):  # which chip is not known
            assert tiles.target_chip() is None
            assert tiles.tuned(OPERATION, IMPLEMENTATION, KEY) is None

    def test_in_the_clone_without_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("JAXPAGE_KERNEL_CONFIGS")
        assert tiles.config_folder() in (ROOT / "configs" / "kernels", ROOT / "pallas_kernels" / "configs")

    def test_the_wheel_carries_the_tables(self) -> None:
        wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
        assert "configs/kernels" in wheel["only-include"]
        assert wheel["sources"]["configs/kernels"] == "pallas_kernels/configs"

    def test_every_table_of_this_repository_reads(self) -> None:
        for path in (ROOT / "configs" / "kernels").glob("*.json"):
            assert tiles.read_table(path), path
            assert tiles.chip_name(path.stem) == path.stem or path.stem.startswith("v"), path

    def test_a_folder_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("JAXPAGE_KERNEL_CONFIGS", str(tmp_path / "missing"))
        assert tiles.tuned(OPERATION, IMPLEMENTATION, KEY) is None


class TestMalformed:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "JSONDecodeError"),
            ("\xff\x00", "JSONDecodeError"),
            ("[" * 100_000, "RecursionError"),
            ("[]", 'not an object with a list "entries"'),
            ('{"entries": 3}', 'not an object with a list "entries"'),
            ('{"entries": [3]}', "entry 0 is not an object"),
            ('{"entries": [{"operation": "add"}]}', "entry 0 lacks one of the strings operation, implementation, key"),
        ],
    )
    def test_files(self, text: str, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "cpu.json").write_text(text)
        with caplog.at_level(logging.WARNING, "pallas_kernels"):
            assert tiles.pick(OPERATION, IMPLEMENTATION, KEY, HEURISTIC) == HEURISTIC
            assert tiles.pick(OPERATION, IMPLEMENTATION, KEY, HEURISTIC) == HEURISTIC
        assert len(caplog.messages) == 1, "said once"
        assert "cpu.json is ignored" in caplog.text
        assert message in caplog.text

    @pytest.mark.parametrize("value", [0, -1, 1.0, True, "64", None, [64], 2**40])
    def test_values(self, value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        write(tmp_path, {"chunk": value})
        assert tiles.tuned(OPERATION, IMPLEMENTATION, KEY) is None
        assert "entry 0: chunk must be a whole number above 0, got" in caplog.text

    def test_a_folder_in_its_place(self, tmp_path: Path) -> None:
        (tmp_path / "cpu.json").mkdir()
        assert tiles.tuned(OPERATION, IMPLEMENTATION, KEY) is None

    def test_anything_else(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        def fails() -> None:
            raise RuntimeError("no devices")

        monkeypatch.setattr(tiles, "target_chip", fails)
        assert tiles.tuned(OPERATION, IMPLEMENTATION, KEY) is None
        assert "no table of tiles is used: RuntimeError: no devices" in caplog.text


class TestPick:
    def test_fields_of_the_table_replace_those_of_the_heuristic(self, tmp_path: Path) -> None:
        write(tmp_path, {"chunk": 64})
        picked = tiles.pick(OPERATION, IMPLEMENTATION, KEY, HEURISTIC, fits=lambda tile: tile == (16, 64))
        assert picked == Tile(16, 64)
        assert type(picked) is Tile

    def test_what_does_not_fit_is_passed_over(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        write(tmp_path, {"chunk": 64})
        for _ in range(2):
            assert tiles.pick(OPERATION, IMPLEMENTATION, KEY, HEURISTIC, fits=lambda tile: False) is HEURISTIC
        assert caplog.messages == [
            "tiles {'chunk': 64} for add triton decode H64 bfloat16 are passed over: they do not fit"
        ]

    def test_fields_of_another_version(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        write(tmp_path, {"chunk": 64, "warps": 4})
        assert tiles.pick(OPERATION, IMPLEMENTATION, KEY, HEURISTIC) is HEURISTIC
        assert "warps unknown" in caplog.text


def test_a_trial_takes_its_own_tiles_and_hears_what_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path, {"chunk": 64})
    key, other = tiles.Key(OPERATION, IMPLEMENTATION, KEY), tiles.Key(OPERATION, IMPLEMENTATION, "other")
    with tiles.trial({key: {"rows": 8}, other: {"rows": 3}}) as trial:
        assert tiles.pick(*key, HEURISTIC) == Tile(8, 128)
        assert tiles.pick(*other, HEURISTIC, fits=lambda tile: tile.rows % 8 == 0) == HEURISTIC
    assert trial.asked == {key: {"rows": 16, "chunk": 128}, other: {"rows": 16, "chunk": 128}}
    assert trial.refused == {other}
    assert tiles.pick(*key, HEURISTIC) == Tile(16, 64)
