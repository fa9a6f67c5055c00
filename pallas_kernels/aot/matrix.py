"""Which cases are compiled for a chip, and by which implementations, in a fixed order.

It must not know how anything is compiled.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from pallas_kernels import dispatch
from pallas_kernels.case import KV_DTYPES, Case, kv_dtype_name
from pallas_kernels.geometries import GEOMETRIES, find_geometry
from pallas_kernels.targets import Target

OPERATIONS = {
    "ragged_paged_attention": ("ragged_paged_attention",),
    "kv_cache_update": ("write_kv", "copy_blocks", "gather_blocks", "scatter_blocks"),
    "quantized_matmul": ("quantized_matmul",),
    "grouped_matmul": ("grouped_matmul",),
}
"""Functions of each folder with an ``arg_specs``."""
HAS_KV_DTYPE = ("ragged_paged_attention", "kv_cache_update")
SHORT = (
    ("ragged_paged_attention", "SmolLM2-135M", "decode", "bfloat16"),
    ("ragged_paged_attention", "Llama-3.1-8B", "decode", "bfloat16"),
    ("ragged_paged_attention", "Llama-3.1-8B", "decode", "int8 dynamic"),
    ("ragged_paged_attention", "Llama-3.1-8B", "prefill", "bfloat16"),
    ("write_kv", "SmolLM2-135M", "decode", "bfloat16"),
    ("write_kv", "Llama-3.1-8B", "decode", "int8"),
    ("copy_blocks", "SmolLM2-135M", "64", "bfloat16"),
    ("quantized_matmul", "SmolLM2-135M", "decode", "int8"),
    ("quantized_matmul", "Llama-3.1-8B", "decode", "int4/128"),
    ("grouped_matmul", "Mixtral-8x7B/TP8", "decode", "bfloat16"),
    ("grouped_matmul", "Mixtral-8x7B/TP8", "decode", "int8"),
)
"""Operation, model, first word of the shape and dtype: of each, the first case is in the short matrix."""


class Selection(NamedTuple):
    """What the user asked for; empty means everything.

    Attributes:
        operations: folders, or functions in them.
        implementations: by name; those that a chip cannot have are left out.
        is_short: only a few representative cases.
    """

    operations: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    kv_dtypes: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()
    is_short: bool = False

    def check(self) -> None:
        """Raises ValueError for a name that does not exist."""
        functions = [function for names in OPERATIONS.values() for function in names]
        known = {"op": [*OPERATIONS, *functions], "implementation": _implementations()}
        for option, names in (("op", self.operations), ("implementation", self.implementations)):
            for name in names:
                if name not in known[option]:
                    raise ValueError(
                        f"{option} must be one of {', '.join(dict.fromkeys(known[option]))}, got {name!r:.200}"
                    )
        for name in self.models:
            find_geometry(name)
        for name in self.kv_dtypes:
            kv_dtype_name(name)


class Entry(NamedTuple):
    """A case for one implementation; a fallback is compiled only if all kernels refused the case before it."""

    case: Case
    implementation: str
    is_fallback: bool = False


def plan(selection: Selection, target: Target) -> tuple[list[Entry], list[str]]:
    """What to compile, in order, and notes on what is left out."""
    entries, notes = [], {}
    for case in cases(selection, target.platform):
        if not case.implementations:
            if not selection.implementations or "xla" in selection.implementations:
                entries.append(Entry(case, "xla"))
            continue
        names = []
        for name in dispatch.ORDER[target.platform]:
            if name not in case.implementations or (
                selection.implementations and name not in selection.implementations
            ):
                continue
            reason = _why_not(case.operation, name, target)
            if reason:
                notes[f"{case.operation}: no {name}: {reason}"] = None
            elif name not in dispatch.PORTABLE or selection.implementations:
                names.append(name)
        entries += [Entry(case, name) for name in names]
        if not selection.implementations:
            entries.append(Entry(case, "xla", is_fallback=bool(names)))
    return entries, list(notes)


def cases(selection: Selection, platform: str) -> list[Case]:
    """The cases selected, those that are one to a compiler joined."""
    kv_dtypes = [kv_dtype_name(name) for name in selection.kv_dtypes] or KV_DTYPES
    geometries = [find_geometry(name) for name in selection.models] or GEOMETRIES
    found: dict[object, Case] = {}
    seen: set[object] = set()
    for folder, functions in OPERATIONS.items():
        if selection.operations and not {folder, *functions} & set(selection.operations):
            continue
        arg_specs = importlib.import_module(f"pallas_kernels.{folder}.arg_specs")
        options: Mapping[str, Any] = {}
        if folder in HAS_KV_DTYPE:
            options = {"platform": platform, "kv_dtypes": kv_dtypes}
        for geometry in dict.fromkeys(geometries):
            for case in arg_specs.cases(geometry, **options):
                if _is_selected(case, folder, selection, seen):
                    same = found.get(case.identity)
                    found[case.identity] = same._replace(model=f"{same.model}, {case.model}") if same else case
    return list(found.values())


def _is_selected(case: Case, folder: str, selection: Selection, seen: set[object]) -> bool:
    if selection.operations and not {folder, case.operation} & set(selection.operations):
        return False
    kind = (case.operation, case.model, case.shape.split()[0], case.dtype)
    is_first = kind not in seen
    seen.add(kind)
    return not selection.is_short or (kind in SHORT and is_first)


def _implementations() -> list[str]:
    return list(dict.fromkeys(name for names in dispatch.ORDER.values() for name in names))


def _why_not(operation: str, name: str, target: Target) -> str | None:
    """Why a chip or this JAX cannot have an implementation; None if both can."""
    least = dispatch.MIN_CAPABILITY.get(name)
    if least is not None and target.compute_capability < least:
        return f"it needs compute capability {least}, {target.name} has {target.compute_capability}"
    try:
        importlib.import_module(f"pallas_kernels.{_folder(operation)}.{name}")
    except (ImportError, AttributeError) as error:
        return f"this JAX lacks what it needs: {error}"
    return None


def _folder(operation: str) -> str:
    return next(folder for folder, functions in OPERATIONS.items() if operation in functions)
