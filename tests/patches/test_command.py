# SPDX-License-Identifier: Apache-2.0
"""``vllm-moe-dp-fix patches``, on the files of a real release."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest
from trees import tree_of

from vllm_moe_dp_fix import cli
from vllm_moe_dp_fix.upstream import series

RELEASE = "0.26.0"
FILES = {file for patch in series.load(RELEASE) for file in patch.files}


def make_tree(folder: Path, says: bool = True) -> Path:
    """The files that the series is about, in a folder that says its release, or not."""
    for file in [*FILES, "vllm/__init__.py"]:
        if (tree_of(RELEASE) / file).is_file():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tree_of(RELEASE) / file, folder / file)
    if says:
        (folder / f"vllm-{RELEASE}+cu130.dist-info").mkdir()
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def patches(*arguments: str | Path) -> int:
    return cli.main(["patches", *map(str, arguments)])


def test_writes_a_series_and_a_cover_letter(tmp_path: Path) -> None:
    assert patches("--vllm", RELEASE, "-o", tmp_path / "new") == 0
    written = sorted(file.name for file in (tmp_path / "new").iterdir())
    assert written == [series.COVER, *(patch.name for patch in series.load(RELEASE))]
    letter = (tmp_path / "new" / series.COVER).read_text()
    assert all(f"/pull/{number}" in letter for number in (54683, 49335, 42133))


def test_writes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert patches("--vllm", f"{RELEASE}+cpu") == 0
    assert capsys.readouterr().out.count("\nSubject: [PATCH ") == len(series.load(RELEASE))


def test_one_fix_is_numbered_anew(tmp_path: Path) -> None:
    assert patches("--vllm", RELEASE, "--fix", "moe_dp_all_gather", "-o", tmp_path) == 0
    names = sorted(file.name for file in tmp_path.glob("*.patch"))
    assert [name[:4] for name in names] == ["0001", "0002", "0003"]
    assert "[PATCH 1/3]" in (tmp_path / names[0]).read_text()
    assert "/pull/54683" not in (tmp_path / series.COVER).read_text()


def test_does_not_mix_series(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert patches("--vllm", "0.25.0", "-o", tmp_path) == 0
    before = contents(tmp_path)
    assert patches("--vllm", RELEASE, "-o", tmp_path) == 2
    assert "holds patches already" in capsys.readouterr().err
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--vllm", "0.18.0"], "no series for vLLM 0.18.0, but for 0.19.0"),
        (["--vllm", RELEASE, "--fix", "oops"], "no such fix: oops; there are moe_dp_dispatch"),
        (["--vllm", "0.19.0", "--fix", "nixl_eplb_validator"], "none of the faults"),
        (["--vllm", RELEASE, "--apply", "/no/such/folder"], "holds no vLLM"),
    ],
)
def test_says_what_is_wrong(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert patches(*arguments) == 2
    assert said in capsys.readouterr().err


def test_check_and_reverse_need_a_tree() -> None:
    with pytest.raises(SystemExit):
        patches("--vllm", RELEASE, "--check")


def test_goes_in_and_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An installed vLLM, which has no tests; on a path with blanks."""
    root = make_tree(tmp_path / "site packages")
    before = contents(root)
    steps = [
        ([], "applied to"),
        ([], "is patched already"),
        (["--reverse", "--check"], "fit"),
        (["--reverse"], "taken out of"),
        (["--reverse"], "is without them already"),
    ]
    for index, (options, said) in enumerate([(["--check"], "nothing was changed"), *steps]):
        assert patches("--apply", root, *options) == 0
        assert said in capsys.readouterr().out
        assert (contents(root) == before) == (index in (0, 4, 5))
    assert not (root / "tests").exists()


def test_a_source_tree_gets_the_tests(tmp_path: Path) -> None:
    root = make_tree(tmp_path)
    (root / "tests").mkdir()
    assert patches("--apply", root / "vllm") == 0
    assert {file for file in FILES if not (root / file).is_file()} == set()


def test_is_not_led_astray_by_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """git apply leaves out what is outside of the repository that it finds itself in."""
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    root = make_tree(tmp_path / "venv")
    before = contents(root)
    assert patches("--apply", root) == 0
    assert contents(root) != before


def test_refuses_another_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_tree(tmp_path)
    before = contents(root)
    assert patches("--vllm", "0.25.1", "--apply", root) == 2
    assert "is vLLM 0.26.0, and this series is for 0.25.1" in capsys.readouterr().err
    assert contents(root) == before


def test_a_tree_that_does_not_say_is_told_by_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_tree(tmp_path, says=False)
    assert patches("--apply", root) == 2
    assert "--vllm" in capsys.readouterr().err
    assert patches("--vllm", "0.19.0", "--apply", root) == 2
    assert "is not an untouched 0.19.0" in capsys.readouterr().err
    for options in ([], [], ["--reverse"]):
        assert patches("--vllm", RELEASE, "--apply", root, *options) == 0


def test_a_changed_file_stops_it_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last patch does not fit: none is applied."""
    root = make_tree(tmp_path)
    (changed,) = [root / f for f in series.load(RELEASE)[-1].before if "communicator" in f]
    changed.write_text("import torch\n")
    before = contents(root)
    assert patches("--apply", root) == 2
    assert "left as it is" in capsys.readouterr().err
    assert contents(root) == before


def test_a_file_that_cannot_be_written_stops_it_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = make_tree(tmp_path)
    (tree / "vllm/distributed/eplb/nixl").write_text("a file where patches make a folder")
    before = contents(tree)
    assert patches("--apply", tree) == 2
    assert "cannot be written to, and was left as it is" in capsys.readouterr().err
    assert contents(tree) == before


def test_other_changes_stay(tmp_path: Path) -> None:
    root = make_tree(tmp_path)
    file = root / sorted(file for file in FILES if (root / file).is_file())[0]
    file.write_text(file.read_text() + "\n# mine\n")
    assert patches("--apply", root) == 0
    assert file.read_text().endswith("\n# mine\n")


def test_a_linked_file_is_replaced(tmp_path: Path) -> None:
    """uv links the files of its cache into environments: the cache must stay as it is."""
    root, cache = make_tree(tmp_path / "root"), tmp_path / "cache"
    file = root / sorted(file for file in FILES if (root / file).is_file())[0]
    file.chmod(0o640)
    os.link(file, cache)
    before = cache.read_bytes()
    assert patches("--apply", root) == 0
    assert cache.read_bytes() == before != file.read_bytes()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_needs_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert patches("--apply", make_tree(tmp_path)) == 2
    assert "git is needed" in capsys.readouterr().err
