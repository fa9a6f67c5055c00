"""Every behaviour case has a test that carries its id in its name."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parent
IDS = (TESTS / "data" / "cases" / "ids.txt").read_text(encoding="utf-8").split()


def names_of_tests() -> set[str]:
    """Names of all test functions, methods of classes included."""
    names: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                names.add(node.name)
    return names


def test_every_case_has_a_test() -> None:
    assert len(IDS) == len(set(IDS)) == 169
    text = "\n".join(f"_{name}_" for name in names_of_tests())
    missing = [case for case in IDS if f"_{case.lower().replace('-', '_')}_" not in text]
    assert missing == []
