# SPDX-License-Identifier: Apache-2.0
"""Edits Python source by the names of functions and classes, and leaves the rest as it was."""

from __future__ import annotations

import ast
import textwrap
from typing import TypeAlias

from scripts.patches.fold import fold

COLUMNS = 88
Definition: TypeAlias = ast.FunctionDef | ast.ClassDef


class EditError(ValueError):
    """The source does not have what the edit is about."""


class Source:
    """The text of a module. Paths are those of definitions in it, such as ``Class.method``."""

    def __init__(self, text: str) -> None:
        self.text = text

    def find(self, path: str) -> Definition:
        node: ast.Module | Definition = ast.parse(self.text)
        for name in path.split("."):
            for child in node.body:
                if isinstance(child, Definition) and child.name == name:
                    node = child
                    break
            else:
                raise EditError(f"there is no {path}")
        assert isinstance(node, Definition)
        return node

    def has(self, path: str) -> bool:
        try:
            self.find(path)
        except EditError:
            return False
        return True

    def parameters(self, path: str) -> list[str]:
        node = self.find(path)
        assert isinstance(node, ast.FunctionDef)
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args]
        every += [arguments.vararg] if arguments.vararg else []
        every += arguments.kwonlyargs
        every += [arguments.kwarg] if arguments.kwarg else []
        return [argument.arg for argument in every]

    def insert(self, path: str, index: int, code: str) -> None:
        """Puts statements before the statement ``index`` of a body, docstrings not counted.

        A comment right above that statement stays with it, and so does a blank line.
        """
        at = _statements(self.find(path))[index]
        line = self._start(at)
        blank = "" if self.text.splitlines()[line - 1].strip() else "\n"
        self._insert_lines(line, _block(code) + blank, at.col_offset)

    def add_after(self, path: str, code: str) -> None:
        """Puts definitions behind another one, at its level."""
        node = self.find(path)
        assert node.end_lineno is not None
        blank = "\n" if node.col_offset else "\n\n"
        self._insert_lines(node.end_lineno, blank + _block(code), node.col_offset)

    def append(self, path: str, code: str) -> None:
        """Puts statements at the end of a body, after a blank line."""
        node = self.find(path)
        assert node.end_lineno is not None
        self._insert_lines(node.end_lineno, "\n" + _block(code), node.body[0].col_offset)

    def decorate(self, path: str, decorator: str) -> None:
        """Puts a decorator outside of those that are there."""
        node = self.find(path)
        line = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        self._insert_lines(line - 1, f"@{decorator}\n", node.col_offset)

    def replace_body(self, path: str, code: str) -> None:
        """Puts statements in place of those of a body; its docstring stays."""
        node = self.find(path)
        body = _statements(node)
        assert node.end_lineno is not None
        added = _laid_out(_block(code), body[0].col_offset)
        self._splice(self._start(body[0]), node.end_lineno, added)

    def split(self, path: str, name: str, code: str) -> None:
        """Gives a method another body, which calls the one it had: that of a new method now.

        The docstring stays. The new method has the same parameters.
        """
        node = self.find(path)
        assert isinstance(node, ast.FunctionDef)
        assert node.returns is not None
        assert node.returns.end_lineno is not None
        header = self.text.splitlines()[node.lineno - 1 : node.returns.end_lineno]
        header[0] = header[0].replace(f"def {node.name}(", f"def {name}(", 1)
        first = _statements(node)[0]
        body = textwrap.indent(_block(code), " " * first.col_offset)
        line = self._start(first)
        self._splice(line, line, "\n".join([body, *header, ""]))

    def replace(self, old: str, new: str) -> None:
        """Replaces what is there exactly once."""
        if (count := self.text.count(old)) != 1:
            raise EditError(f"{old!r} is there {count} times")
        self.text = self.text.replace(old, new)

    def add_import(self, module: str, names: str) -> None:
        """``from module import names``, where the import order wants it."""
        imports = [
            node
            for node in ast.parse(self.text).body
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module
        ]
        later = [node for node in imports if f"{node.module}" > module]
        line = later[0].lineno - 1 if later else (imports[-1].end_lineno or 0)
        statement = f"from {module} import {names}\n"
        if len(statement) > 89:
            listed = "".join(f"    {name.strip()},\n" for name in names.split(","))
            statement = f"from {module} import (\n{listed})\n"
        self._insert_lines(line, statement, 0)

    def _start(self, node: ast.stmt) -> int:
        """The line before which a statement begins, with the comment right above it."""
        lines = self.text.splitlines()
        line = node.lineno - 1
        while lines[line - 1].lstrip().startswith("#"):
            line -= 1
        return line

    def _insert_lines(self, line: int, code: str, indent: int) -> None:
        self._splice(line, line, _laid_out(code, indent))

    def _splice(self, begin: int, end: int, added: str) -> None:
        """Puts text in place of lines."""
        lines = self.text.splitlines(keepends=True)
        self.text = "".join([*lines[:begin], added, *lines[end:]])
        ast.parse(self.text)


def _laid_out(code: str, indent: int) -> str:
    return fold(textwrap.indent(code, " " * indent), COLUMNS)


def _block(code: str) -> str:
    """Lines of code from column 0 on, without blank ones around them."""
    return textwrap.dedent(code).strip("\n") + "\n"


def _statements(node: Definition) -> list[ast.stmt]:
    """Those of a body without its docstring."""
    first = node.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return node.body[1:] if is_docstring else node.body
