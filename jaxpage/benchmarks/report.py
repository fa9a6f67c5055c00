"""Where a figure was measured, and how results are shown and stored."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any


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


def write(path: str | None, name: str, rows: list[dict[str, Any]], **settings: Any) -> None:
    """Stores a result as JSON where ``path`` is given."""
    if path:
        content = {"benchmark": name, "machine": machine(), "settings": settings, "rows": rows}
        Path(path).write_text(json.dumps(content, indent=1) + "\n")
