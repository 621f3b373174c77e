# SPDX-License-Identifier: Apache-2.0
"""Folds comments, docstrings and adjacent string literals to fewer columns.

What code formatters leave alone: the text of a line that is too long goes on in the next one.
"""

from __future__ import annotations

import io
import re
import tokenize

_LITERAL = re.compile(
    r'(?P<head>\s*(?:return |raise |assert )?[rbf]*")(?P<text>.*)(?P<tail>"[,)]*)$'
)
_ENTRY = re.compile(r"\w[\w, ]*: ")  # under Args, Raises and the like
_SECTION = re.compile(r"\w+:")


def fold(text: str, columns: int) -> str:
    """Raises ValueError for a line that cannot be folded."""
    lines = text.splitlines()
    docstrings = _docstring_lines(text)
    at = 0
    while at < len(lines):
        line = lines[at]
        if len(line) > columns:
            is_doc = at in docstrings
            if is_doc or line.lstrip().startswith("# "):
                inserted = _overflow(lines, at, columns, is_doc)
            else:
                inserted = _split_literal(lines, at, columns)
            docstrings = {n + inserted if n > at else n for n in docstrings}
            if is_doc and inserted:
                docstrings.add(at + 1)
        at += 1
    return "\n".join(lines) + "\n"


def _docstring_lines(text: str) -> set[int]:
    """Lines that a triple-quoted string is on, from 0."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING and token.string.endswith('"""'):
            found |= set(range(token.start[0] - 1, token.end[0]))
    return found


def _overflow(lines: list[str], at: int, columns: int, is_doc: bool) -> int:
    """Moves the end of a line to the next one, or to a new one; how many are new."""
    line = lines[at]
    lead = re.match(r"\s*(# )?", line)
    assert lead is not None
    prefix = lead.group()
    cut = line.rfind(" ", len(prefix) + 1, columns + 1)
    if cut < 0:
        raise ValueError(f"longer than {columns} columns: {line}")
    kept, rest = line[:cut], line[cut + 1 :]
    lines[at] = kept
    if is_doc and _is_entry(lines, at):
        prefix += "    "
    following = lines[at + 1] if at + 1 < len(lines) else ""
    goes_on = (
        following.startswith(prefix)
        and following[len(prefix) :][:1].strip() not in ("", '"')
        and '"""' not in rest
        and not (is_doc and _is_entry(lines, at + 1))
    )
    if goes_on:
        lines[at + 1] = f"{prefix}{rest} {following[len(prefix) :]}"
        return 0
    lines.insert(at + 1, prefix + rest)
    return 1


def _is_entry(lines: list[str], at: int) -> bool:
    """Whether a docstring's line begins the text about a name."""
    text = lines[at].lstrip()
    indent = len(lines[at]) - len(text)
    if not _ENTRY.match(text):
        return False
    above = (line for line in reversed(lines[:at]) if line.strip())
    outer = next((line for line in above if len(line) - len(line.lstrip()) < indent), "")
    return bool(_SECTION.fullmatch(outer.strip()))


def _split_literal(lines: list[str], at: int, columns: int) -> int:
    """Makes two literals of one, which stands alone on its line inside brackets."""
    line = lines[at]
    match = _LITERAL.match(line)
    if match is None:
        raise ValueError(f"longer than {columns} columns: {line}")
    head, text = match["head"], match["text"]
    room = columns - len(head) - 1
    cut = next(
        (
            place + 1
            for place in range(min(room, len(text)) - 1, 0, -1)
            if text[place] == " " and text[: place + 1].count("{") == text[: place + 1].count("}")
        ),
        None,
    )
    if cut is None:
        raise ValueError(f"longer than {columns} columns: {line}")
    indent = re.match(r"\s*", line)
    assert indent is not None
    following = _LITERAL.match(lines[at + 1]) if at + 1 < len(lines) else None
    if (
        match["tail"] == '"'
        and following
        and (following["head"].endswith('f"') or "{" not in text[cut:])
    ):
        lines[at] = f'{head}{text[:cut]}"'
        lines[at + 1] = f"{following['head']}{text[cut:]}{following['text']}{following['tail']}"
        return 0
    keyword, _, opening = head.strip().rpartition(" ")
    first, second = f'{opening}{text[:cut]}"', f"{opening}{text[cut:]}{match['tail']}"
    if not keyword:
        lines[at : at + 1] = [indent.group() + first, indent.group() + second]
        return 1
    inner = indent.group() + "    "
    lines[at : at + 1] = [
        f"{indent.group()}{keyword} (",
        inner + first,
        inner + second,
        f"{indent.group()})",
    ]
    return 3
