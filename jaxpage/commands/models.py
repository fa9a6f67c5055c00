"""``jaxpage models``: which models are on this machine, fetching and removing them.

It must not know how models are fetched or what is in them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxpage.console import fail, show_log
from jaxpage.weights import builtin
from jaxpage.weights.checkpoint import WeightsError
from jaxpage.weights.source import is_hub_id, resolve_model

HUB_CACHE = "hub"


@dataclass(frozen=True)
class Listed:
    """One model of the list.

    Attributes:
        num_bytes: on this machine; of a built-in model that is not here, what it would take.
        licence: None where only the hub knows it.
        state: "here", "partly here" or "not here".
        path: within the cache; of a hub model, within the hub's own cache.
    """

    name: str
    num_bytes: int
    licence: str | None
    state: str
    path: str | None


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The three subcommands."""
    parser = argparse.ArgumentParser(prog=prog, description="List, pull and remove models on this machine.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="list | pull | remove")
    listing = actions.add_parser("list", help="built-in models, and what is here of the hub's")
    listing.add_argument("--json", action="store_true", help="for programs")
    pull = actions.add_parser("pull", help="fetch a model without starting it")
    pull.add_argument("name", help="built-in name or hub id")
    pull.add_argument("--revision", help="branch, tag or commit of a hub id")
    remove = actions.add_parser("remove", help="delete a model from the cache")
    remove.add_argument("name", help="built-in name or hub id")
    remove.add_argument("-y", "--yes", action="store_true", help="do not ask")
    return parser


def main(argv: Sequence[str] | None = None, prog: str = "python -m jaxpage.commands.models") -> int:
    """Returns the exit code: 0; 1 for errors and for a removal that is not confirmed; 130 after Ctrl-C."""
    options = build_parser(prog).parse_args(argv)
    show_log("info")
    try:
        if options.action == "list":
            _print_list(options.json)
        elif options.action == "pull":
            _pull(options.name, options.revision)
        else:
            return _remove(options.name, options.yes)
    except (WeightsError, OSError) as error:
        return fail(error)
    except KeyboardInterrupt:
        return 130
    return 0


def list_models() -> list[Listed]:
    """Built-in models, here or not, then those of the hub's cache."""
    return [_builtin(name) for name in builtin.BUILTIN_MODELS] + [_hub(repo) for repo in hub_models()]


def hub_models() -> list[Any]:
    """The hub's own account of the models in its cache, by name."""
    import huggingface_hub
    from huggingface_hub.errors import CacheNotFound

    try:
        info = huggingface_hub.scan_cache_dir()
    except CacheNotFound:
        return []
    return sorted((repo for repo in info.repos if repo.repo_type == "model"), key=lambda repo: repo.repo_id)


def _builtin(name: str) -> Listed:
    model = builtin.BUILTIN_MODELS[name]
    folder = builtin.model_directory(name)
    file = folder / model.file_name
    is_here = file.is_file() and file.stat().st_size == model.num_bytes
    # What else may lie there is the marker, a lock, and downloads that were broken off.
    is_partial = not is_here and directory_bytes(folder) > 0
    state = "here" if is_here else "partly here" if is_partial else "not here"
    path = str(file.relative_to(builtin.cache_directory())) if is_here else None
    return Listed(name, model.num_bytes, model.licence, state, path)


def _hub(repo: Any) -> Listed:
    is_whole = any(str(file.file_name).endswith(".safetensors") for version in repo.revisions for file in version.files)
    path = f"{HUB_CACHE}/{Path(repo.repo_path).name}"
    return Listed(repo.repo_id, repo.size_on_disk, None, "here" if is_whole else "partly here", path)


def _print_list(as_json: bool) -> None:
    models = list_models()
    if as_json:
        print(json.dumps([asdict(model) for model in models], indent=1))
        return
    rows = [("NAME", "SIZE", "LICENCE", "STATE", "PATH")]
    rows += [(m.name, megabytes(m.num_bytes), m.licence or "-", m.state, m.path or "-") for m in models]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    print(f"\npaths are within {builtin.cache_directory()}; {HUB_CACHE}/ is the hub's own cache")


def _pull(name: str, revision: str | None) -> None:
    if name not in builtin.BUILTIN_MODELS and not is_hub_id(name):
        names = ", ".join(builtin.BUILTIN_MODELS)
        raise WeightsError(f"model: {name[:200]!r} is neither built in ({names}) nor a hub id of the form org/name")
    resolve_model(name, revision)
    print(f"{name} is here")


def _remove(name: str, is_confirmed: bool) -> int:
    if name in builtin.BUILTIN_MODELS:
        folder = builtin.model_directory(name)
        num_bytes = directory_bytes(folder)
        if not num_bytes:
            return fail(f"{name} is not here")
        if not is_confirmed and not _confirm(name, num_bytes):
            return 1
        shutil.rmtree(folder)
    else:
        found = [repo for repo in hub_models() if repo.repo_id == name]
        if not found:
            return fail(f"{name[:200]!r} is not here; jaxpage models list shows what is")
        num_bytes = found[0].size_on_disk
        if not is_confirmed and not _confirm(name, num_bytes):
            return 1
        _remove_from_hub_cache(found[0])
    print(f"removed {name}: {megabytes(num_bytes)}")
    return 0


def _remove_from_hub_cache(repo: Any) -> None:
    import huggingface_hub

    revisions = [version.commit_hash for version in repo.revisions]
    huggingface_hub.scan_cache_dir().delete_revisions(*revisions).execute()


def _confirm(name: str, num_bytes: int) -> bool:
    if not sys.stdin.isatty():
        fail(f"nobody can be asked whether to remove {name}; --yes says so")
        return False
    return input(f"Remove {name} ({megabytes(num_bytes)})? [y/N] ").strip().lower() in ("y", "yes")


def directory_bytes(folder: Path) -> int:
    """Size of all files below a directory; 0 if there is none."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB"


if __name__ == "__main__":
    sys.exit(main())
