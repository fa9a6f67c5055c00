"""``jaxpage models`` and ``jaxpage collect-env``, with caches made up for the test."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from jaxpage.commands import collect_env, models
from jaxpage.weights import builtin

NAME = "smollm2-135m-instruct"


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of ours, and one of the hub's with a model of 1,000 bytes."""
    monkeypatch.setenv("JAXPAGE_CACHE", str(tmp_path / "jaxpage"))
    hub = tmp_path / "hub"
    snapshot = hub / "models--org--tiny" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"x" * 1000)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    (snapshot.parents[1] / "blobs").mkdir()
    import huggingface_hub

    scan = huggingface_hub.scan_cache_dir
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: scan(hub))
    return tmp_path


def put(num_bytes: int) -> Path:
    """A file in place of the built-in model, as large as it says; it takes no room on the disk."""
    folder = builtin.model_directory(NAME)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / builtin.BUILTIN_MODELS[NAME].file_name
    with file.open("wb") as out:
        out.truncate(num_bytes)
    return file


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    assert models.main(["list", "--json"]) == 0
    return {model["name"]: model for model in json.loads(capsys.readouterr().out)}


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(capsys)[NAME]["state"] == "not here"
    put(1000)
    assert listed(capsys)[NAME]["state"] == "partly here"
    file = put(builtin.BUILTIN_MODELS[NAME].num_bytes)
    found = listed(capsys)
    assert found[NAME]["state"] == "here"
    assert found[NAME]["path"] == f"models/{NAME}/{file.name}"
    assert found[NAME]["licence"] == "Apache-2.0"
    assert found["org/tiny"] == {
        "name": "org/tiny",
        "num_bytes": 1000,
        "licence": None,
        "state": "here",
        "path": "hub/models--org--tiny",
    }
    assert set(found) == {*builtin.BUILTIN_MODELS, "org/tiny"}


def test_list_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert models.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "SIZE", "LICENCE", "STATE", "PATH"]
    assert lines[1].split() == [NAME, "98", "MB", "Apache-2.0", "not", "here", "-"]


def test_remove_asks(caches: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = put(1_000_000)
    assert models.main(["remove", NAME]) == 1
    assert "nobody can be asked" in capsys.readouterr().err

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    assert models.main(["remove", NAME]) == 1
    assert file.exists()
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert models.main(["remove", NAME]) == 0
    assert f"removed {NAME}: 1 MB" in capsys.readouterr().out
    assert not file.parent.exists()
    assert models.main(["remove", NAME, "--yes"]) == 1
    assert f"{NAME} is not here" in capsys.readouterr().err


def test_remove_from_the_hubs_cache(caches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert models.main(["remove", "org/tiny", "-y"]) == 0
    assert not (caches / "hub" / "models--org--tiny" / "snapshots").exists()
    assert models.main(["remove", "org/tiny", "-y"]) == 1
    assert "'org/tiny' is not here" in capsys.readouterr().err


def test_pull(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pulled = []
    monkeypatch.setattr(models, "resolve_model", lambda name, revision: pulled.append((name, revision)))
    assert models.main(["pull", NAME]) == 0
    assert models.main(["pull", "org/name", "--revision", "v1"]) == 0
    assert pulled == [(NAME, None), ("org/name", "v1")]
    assert models.main(["pull", "./folder"]) == 1
    assert "neither built in" in capsys.readouterr().err


def test_collect_env(caches: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    put(builtin.BUILTIN_MODELS[NAME].num_bytes)
    monkeypatch.setenv("JAXPAGE_API_KEY", "hush")
    monkeypatch.setenv("HF_TOKEN", "hush")
    monkeypatch.setenv("JAX_EXAMPLE", "http://me:hush@host/x")
    monkeypatch.setenv("XLA_EXAMPLE", "--flag")
    monkeypatch.setenv("HOME_OF_JAX_", "not ours")
    assert collect_env.main(["--json"]) == 0
    text = capsys.readouterr().out
    assert "hush" not in text
    found = json.loads(text)
    environment = found["environment"]
    assert (environment["JAXPAGE_API_KEY"], environment["HF_TOKEN"]) == ("***", "***")
    assert (environment["JAX_EXAMPLE"], environment["XLA_EXAMPLE"]) == ("http://***@host/x", "--flag")
    assert "HOME_OF_JAX_" not in environment
    assert found["packages"]["jax"] and found["packages"]["jax-cuda12-plugin"] is None
    assert found["devices"][0]["platform"] == "cpu"
    assert found["cache"]["directory"] == str(caches / "jaxpage")
    assert (found["cache"]["writable"], found["cache"]["models"]) == (True, [NAME, "org/tiny"])
    assert collect_env.main([]) == 0
    assert "\n  JAXPAGE_API_KEY: ***\n" in capsys.readouterr().out


def test_a_broken_jax_is_what_it_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    def broken() -> None:
        raise RuntimeError("no backend\nat all")

    monkeypatch.setattr(jax, "devices", broken)
    assert collect_env.devices() == "none: RuntimeError: no backend\nat all"
