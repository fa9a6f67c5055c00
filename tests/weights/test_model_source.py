"""From a model's name to its files: order of the search, what is never loaded, and the refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from jaxpage.weights import BUILTIN_MODELS, WeightsError, builtin, open_checkpoint, resolve_model


@pytest.fixture(autouse=True)
def in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The calls that would have gone to the hub."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def snapshot_download(name: str, **options: Any) -> str:
        calls.append((name, options))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_built_in_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "fetch", lambda name: Path("fetched") / name)
    (tmp_path / "gemma-3-270m").mkdir()
    assert resolve_model("gemma-3-270m") == Path("fetched/gemma-3-270m")
    assert resolve_model("./gemma-3-270m") == Path("gemma-3-270m")


def test_local_path_comes_before_the_hub(tmp_path: Path, hub: list[Any]) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "file.gguf").touch()
    assert resolve_model("org/name") == Path("org/name")
    assert resolve_model(str(tmp_path / "file.gguf")) == tmp_path / "file.gguf"
    assert hub == []


def test_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "weights").mkdir()
    assert resolve_model("~/weights") == tmp_path / "weights"


def test_hub_id_downloads_no_code_and_no_pickles(tmp_path: Path, hub: list[tuple[str, dict[str, Any]]]) -> None:
    assert resolve_model("org/name", revision="v1") == tmp_path / "snapshot"
    [(name, options)] = hub
    assert (name, options["revision"]) == ("org/name", "v1")
    files = [
        "config.json",
        "tokenizer.json",
        "tokenizer.model",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "modeling_x.py",
        "tokenizer_x.py",
        "original/consolidated.00.pth",
        "consolidated.safetensors",
        "onnx/model.safetensors",
    ]
    wanted = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"]
    )
    assert list(wanted) == files[:5]


def hub_error(kind: type[errors.HfHubHTTPError]) -> Exception:
    response: Any = httpx.Response(404, request=httpx.Request("GET", "https://hub.invalid/org/name"))
    return kind("404\nsecond line", response=response)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub_error(errors.RepositoryNotFoundError), "neither a directory here nor a model the hub shows"),
        (hub_error(errors.RevisionNotFoundError), "no such revision"),
        (hub_error(errors.GatedRepoError), "gated: accept its licence"),
        (errors.LocalEntryNotFoundError("offline\nmore"), "could not be fetched from the hub: offline"),
        (httpx.ConnectError("no route to host"), "could not be fetched from the hub: no route to host"),
        (OSError(28, "No space left on device"), "No space left"),
    ],
)
def test_hub_failure_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(WeightsError, match=message) as caught:
        resolve_model("org/name", revision="v1")
    assert str(caught.value).startswith("model: 'org/name' at revision 'v1'")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "model", ["./none", "/none/here", "a/b/c", "dir/file.gguf", "smol", "", "../none", "a\0b", "x" * 5000]
)
def test_unknown_model_names_itself_and_the_built_in_models(model: str, hub: list[Any]) -> None:
    with pytest.raises(WeightsError, match="model: ") as caught:
        resolve_model(model)
    assert all(name in str(caught.value) for name in BUILTIN_MODELS)
    assert len(str(caught.value)) < 500
    assert hub == []


def test_revision_is_for_the_hub_only(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="revision: 'main'"):
        resolve_model("gemma-3-270m", revision="main")
    with pytest.raises(WeightsError, match="revision: 'main'"):
        resolve_model(str(tmp_path), revision="main")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_never_loaded(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"\x80\x04")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(WeightsError, match=r"pickled weights .* are never loaded"):
            open_checkpoint(path)


def test_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "backup.safetensors").touch()
    with pytest.raises(WeightsError, match=r"holds no model.safetensors"):
        open_checkpoint(tmp_path)


def test_directory_with_two_gguf_files_is_refused_by_name(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(WeightsError, match=r"2 GGUF files.*'a.gguf', 'b.gguf'"):
        open_checkpoint(tmp_path)


def test_other_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(WeightsError, match="give the directory"):
        open_checkpoint(tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="no such file or directory"):
        open_checkpoint(tmp_path / "none")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(WeightsError, match=r"notes.txt: is not a GGUF file"):
        open_checkpoint(tmp_path / "notes.txt")


def test_readers_do_not_import_jax() -> None:
    code = "import sys, jaxpage.weights; sys.exit('jax' in sys.modules or 'torch' in sys.modules)"
    root = Path(builtin.__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
