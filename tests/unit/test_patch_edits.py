# SPDX-License-Identifier: Apache-2.0
"""What the patch series are made with."""

from __future__ import annotations

import ast
import textwrap

import pytest

from scripts.patches.edit import EditError, Source
from scripts.patches.extract import extract
from scripts.patches.fold import fold

MODULE = '''
from a import b
from c import d


class Kind:
    def run(self, x):
        """Says what."""
        # About the first.
        y = x

        return y
'''


def edited(path: str, index: int, code: str) -> str:
    source = Source(MODULE)
    source.insert(path, index, code)
    return source.text


def test_insert_stays_above_the_comment() -> None:
    text = edited("Kind.run", 0, "\n    check(x)\n    check(self)\n")
    assert '"""\n        check(x)\n        check(self)\n        # About the first.\n' in text


def test_insert_keeps_the_blank_line() -> None:
    assert "y = x\n\n        y += 1\n\n        return y\n" in edited("Kind.run", -1, "y += 1")


def test_add_after_goes_to_the_same_level() -> None:
    source = Source(MODULE)
    source.add_after("Kind.run", "\ndef stop(self):\n    pass\n")
    source.add_after("Kind", "\ndef alone():\n    pass\n")
    assert source.text.endswith(
        "return y\n\n    def stop(self):\n        pass\n\n\ndef alone():\n    pass\n"
    )


@pytest.mark.parametrize(
    ("module", "line"), [("a.x", 2), ("b", 2), ("c.x", 3), ("z", 3)], ids=lambda x: str(x)
)
def test_imports_are_in_order(module: str, line: int) -> None:
    source = Source(MODULE)
    source.add_import(module, "name")
    assert source.text.splitlines()[line] == f"from {module} import name"


def test_edits_say_what_is_not_there() -> None:
    with pytest.raises(EditError, match=r"no Kind\.stop"):
        edited("Kind.stop", 0, "pass")
    with pytest.raises(EditError, match="2 times"):
        Source(MODULE).replace("from ", "")


def words(count: int) -> str:
    return " ".join(f"word{i}" for i in range(count))


@pytest.mark.parametrize(
    "code",
    [
        f"# {words(9)}\n# {words(3)}\nx = 1\n",
        f"# {words(30)}\nx = 1\n",
        f'def f():\n    """{words(12)}"""\n    return 1\n',
        f'def f(x):\n    """Short.\n\n    Args:\n        x: {words(9)}\n            {words(4)}\n'
        f'        y: {words(2)}\n    """\n    return 1\n',
        f'x = (\n    "{words(12)} "\n    "{words(2)}",\n)\n',
        f'def f(a):\n    return f"{words(6)} {{a}} {words(6)}"\n',
        f'def f(a):\n    g(\n        f"{words(8)} {{a}}",\n        a,\n    )\n',
    ],
)
def test_fold_keeps_what_is_said(code: str) -> None:
    folded = fold(code, 60)
    assert max(map(len, folded.splitlines())) <= 60

    def said(text: str) -> list[str]:
        """Every string's words, and the comments'."""
        tree = ast.parse(text)
        strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value != 1]
        comments = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
        return " ".join([*map(str, strings), *comments]).split()

    assert said(folded) == said(code)
    assert ast.dump(ast.parse(textwrap.dedent(folded))).count("Return") == ast.dump(
        ast.parse(code)
    ).count("Return")


def test_what_cannot_be_folded_is_named() -> None:
    with pytest.raises(ValueError, match="longer than 20"):
        fold("x = call(a_name, another_name)\n", 20)


def test_extract_takes_what_is_used() -> None:
    found = extract("vllm_moe_dp_fix.fixes.moe_dp_all_gather", "_probe_f2a")
    code = "\n".join(found.definitions)
    for name in ("overridden", "_NoNccl", "_CollectiveReached", "_probe_cuda", "_probe_f2a"):
        assert f"def {name}(" in code or f"class {name}" in code
    assert "_probe_f2d" not in code
    assert "import contextlib" in found.imports
    assert not any("vllm_moe_dp_fix" in line for line in found.imports)
    compile(
        "from __future__ import annotations\n" + "\n".join(found.imports) + "\n" + code, "", "exec"
    )
