"""Where a figure was measured, and how results are shown and stored."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxpage.errors import ParameterError, shown


def processor() -> str:
    """Its name, and the vector instructions that decide about speed."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        flags = next((line for line in lines if line.startswith("flags")), "")
        model += " (AVX-512)" if " avx512f" in flags else " (AVX2)" if " avx2" in flags else ""
    except (OSError, StopIteration):
        pass
    return model


def machine() -> dict[str, Any]:
    """The processor and the versions that matter for a figure."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("jaxpage", "jax", "jaxlib")},
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as aligned columns under the keys of the first row."""
    if not rows:
        return ""
    columns = list(rows[0])
    cells = [columns] + [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in cells)


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def check_result_file(parameter: str, path: str | Path) -> None:
    """Raises ParameterError if a result cannot be stored there: better before a measurement than after it."""
    file = Path(path).absolute()
    if "\0" in str(path):
        raise ParameterError(parameter, f"is no path: {shown(str(path))}")
    if file.is_dir():
        raise ParameterError(parameter, f"is a directory: {shown(str(path))}")
    if not file.parent.is_dir():
        raise ParameterError(parameter, f"no such directory: {Path(path).parent}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ParameterError(parameter, f"cannot be written: {shown(str(path))}")


def write(path: str | None, name: str, rows: list[dict[str, Any]], **settings: Any) -> None:
    """Stores a result as JSON where ``path`` is given."""
    if path:
        content = {"benchmark": name, "machine": machine(), "settings": settings, "rows": rows}
        Path(path).write_text(json.dumps(content, indent=1) + "\n")
