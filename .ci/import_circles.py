"""Finds circles of imports in airflow_delayed; imports in functions and those for type checking count too."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

PACKAGE = "airflow_delayed"
ROOT = Path(__file__).resolve().parents[1]

Imports = Mapping[str, set[str]]


def imports(root: Path = ROOT, package: str = PACKAGE) -> Imports:
    """Return the modules of the package, each with those that it imports anywhere in its file."""
    files = {_module(file.relative_to(root)): file for file in sorted((root / package).rglob("*.py"))}
    return {module: _imported(file, files) - {module} for module, file in files.items()}


def _module(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(file: Path, modules: Iterable[str]) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # ``from package import name``: the name may be a module
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            names.update(members & set(modules) or {str(node.module)})
    return names & set(modules)


def circles(graph: Imports) -> list[list[str]]:
    """Return each group of modules that all import each other, directly or by way of others (Tarjan)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in order:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], order[other])
        if lowest[module] == order[module]:
            start = stack.index(module)
            group = stack[start:]
            del stack[start:]
            if len(group) > 1:
                groups.append(sorted(group))

    for module in sorted(graph):
        if module not in order:
            visit(module)
    return groups


def main() -> int:
    """Print each circle with the imports that make it, and what to do about it."""
    graph = imports()
    found = circles(graph)
    for group in found:
        print(f"{len(group)} modules import each other:")
        for module in group:
            print(f"  {module} imports {', '.join(sorted(graph[module] & set(group)))}")
    if found:
        print("Move what several of them need into a module below them, or pass it as an argument.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
