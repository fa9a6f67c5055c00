"""``jaxpage collect-env``: what a bug report should say about a machine, with nothing secret in it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxpage.benchmarks.report import processor
from jaxpage.commands.models import directory_bytes, list_models, megabytes
from jaxpage.weights.builtin import cache_directory

PACKAGES = (
    "jaxpage", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "numpy", "flax", "ml_dtypes",
    "transformers", "tokenizers", "safetensors", "gguf", "huggingface_hub", "llguidance", "starlette", "uvicorn",
    "httptools", "uvloop",
)  # fmt: skip
VARIABLES = re.compile(r"(JAX|XLA|JAXPAGE|CUDA|NVIDIA|TPU|LIBTPU|HF|HUGGINGFACE|OMP|NPROC|LD_LIBRARY_PATH)(_|$)")
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")
MASK = "***"


def main(argv: Sequence[str] | None = None, prog: str = "python -m jaxpage.commands.collect_env") -> int:
    """Prints the report; returns 0."""
    parser = argparse.ArgumentParser(prog=prog, description="Describe this machine for a bug report.")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(argv)
    found = collect()
    print(json.dumps(found, indent=1) if options.json else as_text(found))
    return 0


def collect() -> dict[str, Any]:
    """All sections of the report; what cannot be found out says why."""
    return {
        "system": {
            "os": platform.platform(),
            "libc": " ".join(platform.libc_ver()).strip() or None,
            "python": sys.version.replace("\n", " "),
            "processor": processor(),
            "cores": os.cpu_count(),
            "usable cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
            "memory": memory(),
        },
        "packages": {name: version(name) for name in PACKAGES},
        "devices": devices(),
        "cache": cache(),
        "environment": variables(os.environ),
    }


def version(package: str) -> str | None:
    """Of an installed distribution; None if it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def memory() -> dict[str, str] | None:
    """Of the machine, and what of it this process may use: the limit of its control group."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":", 1) for line in lines)}
    found = {"total": megabytes(sizes["MemTotal"]), "available": megabytes(sizes.get("MemAvailable", 0))}
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return found
    return found if limit == "max" else found | {"limit": megabytes(int(limit))}


def devices() -> Any:
    """Every device JAX sees, with its memory; or JAX's reason for seeing none."""
    try:
        import jax

        return [
            {
                "id": device.id,
                "platform": device.platform,
                "kind": device.device_kind,
                "memory": megabytes(limit) if (limit := (device.memory_stats() or {}).get("bytes_limit")) else None,
            }
            for device in jax.devices()
        ]
    except Exception as error:  # a broken plugin raises whatever it likes, and is why this command is called
        return f"none: {type(error).__name__}: {str(error)[:500]}"


def cache() -> dict[str, Any]:
    """The cache's directory, its size, whether it can be written to, and the models in it."""
    folder = cache_directory()
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return {
        "directory": str(folder),
        "exists": folder.is_dir(),
        "writable": os.access(nearest, os.W_OK),
        "size": megabytes(directory_bytes(folder)),
        "models": [model.name for model in list_models() if model.state == "here"],
    }


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those that change what JAX, its plugins or jaxpage do; keys, tokens and logins are masked."""
    return {
        name: MASK if SECRET.search(name) else URL_LOGIN.sub(f"{MASK}@", value)
        for name, value in sorted(environment.items())
        if VARIABLES.match(name)
    }


def as_text(found: dict[str, Any]) -> str:
    """The report, a section a paragraph."""
    lines = []
    for title, section in found.items():
        lines.append(f"{title}:")
        if isinstance(section, dict):
            lines += [f"  {name}: {_shown(value)}" for name, value in section.items()]
        elif isinstance(section, list):
            lines += [f"  {_shown(entry)}" for entry in section]
        else:
            lines.append(f"  {section}")
        lines.append("")
    return "\n".join(lines).rstrip()


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "-" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
