# SPDX-License-Identifier: Apache-2.0
"""Takes functions and classes out of the plugin, word for word, with all that they use.

Annotations that only type checkers read are kept as they are, so the code needs
``from __future__ import annotations``.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from dataclasses import dataclass, field
from typing import TypeAlias

PACKAGE = "vllm_moe_dp_fix"
Names: TypeAlias = dict[str, ast.stmt]


@dataclass
class Extract:
    """Imports, and definitions in the order in which they must stand."""

    imports: list[str] = field(default_factory=list)
    definitions: list[str] = field(default_factory=list)


def extract(module: str, *names: str) -> Extract:
    """The definitions of these names in a module of the plugin, and of what they use from it."""
    found = Extract()
    _take(module, names, found, set())
    found.imports = sorted(set(found.imports))
    return found


def _take(module: str, names: tuple[str, ...], found: Extract, seen: set[tuple[str, str]]) -> None:
    text = inspect.getsource(importlib.import_module(module))
    tree = ast.parse(text)
    known = _definitions(tree)
    wanted: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name not in known or (module, name) in seen:
            continue
        seen.add((module, name))
        node = known[name]
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            _take(node.module or "", (name,), found, seen)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.imports.append(_single_import(node, name))
        else:
            wanted.add(name)
            pending += _names_in(node)
    nodes = {id(known[name]): known[name] for name in wanted}
    ordered = sorted(nodes.values(), key=lambda node: node.lineno)
    for node in ordered:
        segment = _segment(text, node)
        if isinstance(node, ast.Assign | ast.AnnAssign) and found.definitions:
            last = found.definitions[-1].splitlines()[-1]
            if not last.startswith((" ", ")")):  # constants stand together
                found.definitions[-1] += "\n" + segment
                continue
        found.definitions.append(segment)


def _definitions(tree: ast.Module) -> Names:
    """Top-level name -> the statement that binds it; TYPE_CHECKING blocks are looked into."""
    known: Names = {}
    for node in tree.body:
        inner = node.body if isinstance(node, ast.If) else [node]
        for statement in inner:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                known[statement.name] = statement
            elif isinstance(statement, ast.Import | ast.ImportFrom):
                for alias in statement.names:
                    known[(alias.asname or alias.name).partition(".")[0]] = statement
            elif isinstance(statement, ast.Assign):
                for target in statement.targets:
                    for name in ast.walk(target):
                        if isinstance(name, ast.Name):
                            known[name.id] = statement
            elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                known[statement.target.id] = statement
    return known


def _names_in(node: ast.stmt) -> list[str]:
    return [child.id for child in ast.walk(node) if isinstance(child, ast.Name)]


def _single_import(node: ast.Import | ast.ImportFrom, name: str) -> str:
    (alias,) = [a for a in node.names if (a.asname or a.name).partition(".")[0] == name]
    spelled = alias.name + (f" as {alias.asname}" if alias.asname else "")
    if isinstance(node, ast.Import):
        return f"import {spelled}"
    return f"from {node.module} import {spelled}"


def _segment(text: str, node: ast.stmt) -> str:
    """The lines of a statement, with its decorators and the comment right above it."""
    lines = text.splitlines()
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(d.lineno for d in decorators)]) - 1
    while first > 0 and lines[first - 1].startswith("# ") and "---" not in lines[first - 1]:
        first -= 1
    return textwrap.dedent("\n".join(lines[first : node.end_lineno]))
