"""From what a user calls a model to files on this machine, and from files to an open checkpoint.

It must not know what is inside the files: the readers of each format do.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from jaxpage.errors import shown
from jaxpage.weights import builtin
from jaxpage.weights.checkpoint import TOKENIZER_FILES, Checkpoint, WeightsError
from jaxpage.weights.gguf import GgufCheckpoint
from jaxpage.weights.orbax_checkpoint import MANIFEST_FILE, OrbaxCheckpoint
from jaxpage.weights.safetensors import INDEX_FILE, SINGLE_FILE, SafetensorsCheckpoint

__all__ = ["Checkpoint", "OrbaxCheckpoint", "WeightsError", "open_checkpoint", "resolve_model"]

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_NO_PICKLES = "pickled weights (.bin, .pt, .pth) are never loaded, since they can run code; convert them to safetensors"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What is downloaded from the hub: nothing that could hold code, no pickles, no second copies of the weights.
_HUB_FILES = ["*.safetensors", INDEX_FILE, "config.json", "generation_config.json", *TOKENIZER_FILES]
_HUB_STRAYS = ["*/*", "consolidated*", "*.py"]


def open_checkpoint(path: Path, *, needs_weights: bool = True) -> Checkpoint | OrbaxCheckpoint:
    """Open a directory in Hugging Face's layout, a GGUF file, or a directory that ``jaxpage checkpoint`` wrote.

    A directory is one of ours if it has our manifest. It is read as safetensors if it has an index or a
    model.safetensors; a directory with neither and exactly one .gguf file, as GGUF.

    Args:
        needs_weights: False if only config and tokenizer count: a directory then needs no weight files, and those it
            has are not looked at.

    Raises:
        WeightsError: nothing there can be opened, or a file is missing, damaged or not supported.
    """
    if path.is_dir():
        if (path / MANIFEST_FILE).exists():
            return OrbaxCheckpoint(path, needs_weights=needs_weights)
        if not needs_weights and (path / "config.json").exists():
            return SafetensorsCheckpoint(path, needs_weights=False)
        return _open_directory(path)
    if not path.is_file():
        raise WeightsError(f"{path}: no such file or directory")
    if path.suffix in _PICKLES:
        raise WeightsError(f"{path.name}: {_NO_PICKLES}")
    if path.suffix == ".safetensors":
        raise WeightsError(f"{path.name}: give the directory that holds it and its config.json, not the file")
    return GgufCheckpoint(path)


def _open_directory(path: Path) -> Checkpoint:
    if (path / INDEX_FILE).exists() or (path / SINGLE_FILE).exists():
        return SafetensorsCheckpoint(path)
    files = sorted(entry for entry in path.iterdir() if entry.is_file())
    gguf_files = [entry for entry in files if entry.suffix == ".gguf"]
    if len(gguf_files) == 1:
        return GgufCheckpoint(gguf_files[0])
    if gguf_files:
        names = shown([entry.name for entry in gguf_files])
        raise WeightsError(f"{path}: holds {len(gguf_files)} GGUF files, name one of them: {names}")
    if any(entry.suffix in _PICKLES for entry in files):
        raise WeightsError(f"{path}: {_NO_PICKLES}")
    raise WeightsError(f"{path}: holds no {SINGLE_FILE}, no {INDEX_FILE} and no .gguf file")


def resolve_model(model: str, revision: str | None = None) -> Path:
    """Find a model's files on this machine, fetching them first where they are named and not here.

    Tried in this order: a built-in name, a local directory or file, a hub id ``org/name``. (A directory that happens to
    carry a built-in name is reached as ``./name``.)

    Args:
        model: Built-in name, path, or hub id.
        revision: Branch, tag or commit; for hub ids only.

    Returns:
        A directory or a .gguf file for ``open_checkpoint``.

    Raises:
        WeightsError: nothing of that name, no network, no permission or no room to store it.
    """
    if model in builtin.BUILTIN_MODELS:
        _refuse_revision(revision, model)
        return builtin.fetch(model)
    path = Path(os.path.expanduser(model))
    # Not Path.exists, which raises for names that no file system takes; and Path("") is the current directory.
    if model and os.path.exists(path):
        _refuse_revision(revision, model)
        return path
    if is_hub_id(model):
        return _download_from_hub(model, revision)
    raise WeightsError(
        f"model: {shown(model)} is no file or directory here, no hub id of the form org/name, "
        f"and none of the built-in models {', '.join(builtin.BUILTIN_MODELS)}"
    )


def is_hub_id(name: str) -> bool:
    """Whether ``name`` has the form of a hub id; whether there is such a model, only the hub knows."""
    return _HUB_ID.fullmatch(name) is not None and not name.endswith(".gguf")


def _refuse_revision(revision: str | None, model: str) -> None:
    if revision is not None:
        raise WeightsError(f"revision: {shown(revision)} applies to hub models only, and {shown(model)} is not one")


def _download_from_hub(model: str, revision: str | None) -> Path:
    import huggingface_hub  # here, since it takes a while to import and most starts do not need it
    from huggingface_hub import errors

    wanted = f"model: {shown(model)}" + (f" at revision {shown(revision)}" if revision else "")
    names = ", ".join(builtin.BUILTIN_MODELS)
    try:
        folder = huggingface_hub.snapshot_download(
            model, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_STRAYS
        )
    except errors.GatedRepoError:
        raise WeightsError(f"{wanted} is gated: accept its licence on the hub and set HF_TOKEN") from None
    except errors.RevisionNotFoundError:
        raise WeightsError(f"{wanted}: the hub has no such revision") from None
    except errors.RepositoryNotFoundError:
        raise WeightsError(
            f"{wanted} is neither a directory here nor a model the hub shows to you; built-in models: {names}"
        ) from None
    # The hub's client raises its HTTP library's own classes, which change between its releases.
    except Exception as error:
        reason = str(error).split("\n", 1)[0][:200] or type(error).__name__
        raise WeightsError(
            f"{wanted} is not a directory here and could not be fetched from the hub: {reason} "
            f"(built-in models: {names})"
        ) from error
    return Path(folder)
