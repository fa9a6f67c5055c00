"""Who may import whom: lower layers never import higher ones, host packages never import jax."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxpage
import pallas_kernels

RANKS = {
    "pallas_kernels": 0,
    "jaxpage.errors": 0,
    "jaxpage.console": 1,
    "jaxpage.checks": 1,
    "jaxpage.params": 2,
    "jaxpage.request": 3,
    "jaxpage.metrics": 4,
    "jaxpage.client": 1,
    "jaxpage.config_file": 1,
    "jaxpage.batch": 1,
    "jaxpage.config": 4,
    "jaxpage.tokenizer": 4,
    "jaxpage.kv": 4,
    "jaxpage.grammar": 5,
    "jaxpage.sampling": 4,
    "jaxpage.parallel": 4,
    "jaxpage.scheduler": 5,
    "jaxpage.layers": 5,
    "jaxpage.models": 6,
    "jaxpage.weights": 7,
    "jaxpage.runner": 8,
    "jaxpage.engine": 9,
    "jaxpage.server": 10,
    "jaxpage.benchmarks": 11,
    "jaxpage.serve": 11,
    "jaxpage.commands": 12,
    "jaxpage.plan": 11,
    "jaxpage.checkpoint": 11,
    "jaxpage.ray_serve": 12,
    "jaxpage.generate": 13,
    "jaxpage.cli": 13,
    "jaxpage.__main__": 14,
}
"""A module imports its own package and packages of strictly lower rank."""

EXCEPTIONS: dict[tuple[str, str], str] = {}
"""(importing module, imported module) -> why."""

HOST_MODULES = (
    "jaxpage",
    "jaxpage.errors",
    "jaxpage.request",
    "jaxpage.config",
    "jaxpage.tokenizer",
    "jaxpage.kv.block_hash",
    "jaxpage.kv.block_pool",
    "jaxpage.kv.block_map",
    "jaxpage.kv.manager",
    "jaxpage.grammar",
    "jaxpage.metrics",
    "jaxpage.client",
    "jaxpage.config_file",
    "jaxpage.scheduler.schedule",
    "jaxpage.scheduler.scheduler",
    "jaxpage.scheduler.snapshot",
    "jaxpage.weights.builtin",
    "jaxpage.weights.source",
    "jaxpage.weights.orbax_checkpoint",
    "jaxpage.checkpoint",
    "jaxpage.checks",
    "jaxpage.params",
    "jaxpage.parallel.cluster",
    "jaxpage.parallel.meeting",
    "jaxpage.engine.async_engine",
    "jaxpage.engine.replicas.data_parallel",
    "jaxpage.engine.replicas.ray_replica",
    "jaxpage.engine.replicas.remote",
    "jaxpage.engine.replicas.supervision",
    "jaxpage.parallel.pipeline",
    "jaxpage.weights.safetensors",
    "jaxpage.weights.gguf",
    "jaxpage.benchmarks.traces",
    "jaxpage.benchmarks.replay",
    "jaxpage.benchmarks.kv",
    "jaxpage.benchmarks.scheduler",
    "jaxpage.benchmarks.serving.main",
    "jaxpage.commands.chat",
    "jaxpage.commands.generate",
    "jaxpage.commands.run_batch",
    "jaxpage.commands.models",
    "jaxpage.commands.collect_env",
    "jaxpage.cli",
    "jaxpage.serve",
    "jaxpage.server.app",
)


def module_files() -> dict[str, Path]:
    """Every module of both packages by its dotted name."""
    files = {}
    for package in (jaxpage, pallas_kernels):
        root = Path(package.__path__[0])
        for file in sorted(root.rglob("*.py")):
            parts = [package.__name__, *file.relative_to(root).with_suffix("").parts]
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return files


MODULES = module_files()


def imports(module: str, tree: ast.AST) -> Iterator[str]:
    """Modules of ours that ``tree`` imports, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            base = node.module or ""
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] in ("jaxpage", "pallas_kernels"))


def package_of(module: str) -> str:
    parts = module.split(".")
    return parts[0] if parts[0] == "pallas_kernels" else ".".join(parts[:2])


def is_upward(importer: str, imported: str) -> bool:
    source, target = package_of(importer), package_of(imported)
    if target in ("jaxpage", source):  # the package itself: its version; lazy names are covered by the host test
        return False
    return RANKS[target] >= RANKS[source]


@pytest.mark.parametrize("module", [name for name in MODULES if name != "jaxpage"])
def test_imports_point_downwards(module: str) -> None:
    assert package_of(module) in RANKS, f"give {package_of(module)} a rank"
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    upward = {name for name in imports(module, tree) if is_upward(module, name)}
    assert not {name for name in upward if (module, name) not in EXCEPTIONS}


def test_every_exception_is_needed() -> None:
    for importer, imported in EXCEPTIONS:
        tree = ast.parse(MODULES[importer].read_text(encoding="utf-8"))
        assert imported in set(imports(importer, tree)) and is_upward(importer, imported)


def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports at the top level of modules; those inside functions and for type checkers are not executed on import."""
    graph = {}
    for module, file in MODULES.items():
        body = ast.parse(file.read_text(encoding="utf-8")).body
        top = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
        graph[module] = {name for node in top for name in imports(module, node)} - {module}
    while leaves := [module for module, targets in graph.items() if not targets & graph.keys()]:
        for module in leaves:
            del graph[module]
    assert not graph, f"circle among {sorted(graph)}"


def test_pallas_kernels_never_imports_jaxpage() -> None:
    for module, file in MODULES.items():
        if package_of(module) == "pallas_kernels":
            names = set(imports(module, ast.parse(file.read_text(encoding="utf-8"))))
            assert not {name for name in names if name.startswith("jaxpage")}


def test_host_modules_never_import_jax() -> None:
    """One process for each would be slow: each is imported in turn, in one process, from light to heavy."""
    program = (
        "import importlib, sys\n"
        f"for name in {HOST_MODULES!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'jax' not in sys.modules, f'{name} imports jax'\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_only_known_packages_reach_the_kernels() -> None:
    """A researcher can take the kernels alone: jax, numpy and jaxtyping are all they need."""
    allowed = {"__future__", "jax", "jaxtyping", "numpy", "pallas_kernels", *sys.stdlib_module_names}
    for module, file in MODULES.items():
        if package_of(module) != "pallas_kernels":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            assert {name.split(".")[0] for name in names} <= allowed, f"{module} imports {names}"
