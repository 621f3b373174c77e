# SPDX-License-Identifier: Apache-2.0
"""The command ``vllm-moe-dp-fix``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_moe_dp_fix import __version__
from vllm_moe_dp_fix.records import Outcome


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="vllm-moe-dp-fix",
        description="Repairs MoE serving under data parallelism in an installed vLLM.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    status = commands.add_parser(
        "status",
        help="show what each fix does in this environment",
        description="Exit code: 0 where all that is needed can be applied, 1 where something "
        "cannot, 2 without vLLM.",
    )
    status.add_argument("--json", action="store_true", help="print the report as JSON")
    doctor = commands.add_parser(
        "doctor",
        usage="vllm-moe-dp-fix doctor [--json] [--platform NAME] -- [KEY=VALUE …] "
        "[vllm serve] MODEL [options]",
        help="tell what will go wrong with a serve command, without starting it",
        description="Judges every fault for a 'vllm serve' command from its options, the model's "
        "configuration and the headers of its weights. Starts nothing, loads no weights, needs no "
        "network and no GPU.",
        epilog="Exit code: 0 where nothing will go wrong with what is installed and active; 1 "
        "where a fault will or may hit and nothing repairs it, or the deployment would be refused; "
        "2 where the question cannot be answered: no vLLM, a command that cannot be parsed, a "
        "model's file that is missing or broken.",
    )
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    doctor.add_argument(
        "--platform",
        choices=("cuda", "rocm", "cpu"),
        help="judge for a machine of this kind; by default, for this one",
    )
    _add_patches(commands)
    given = list(sys.argv[1:] if argv is None else argv)
    # Everything behind "--" is the command, whatever it looks like.
    end = given.index("--") if given[:1] == ["doctor"] and "--" in given else len(given)
    arguments = parser.parse_args(given[:end])
    if arguments.command == "doctor":
        return _doctor(given[end + 1 :], arguments.json, arguments.platform)
    if arguments.command == "patches":
        if (arguments.check or arguments.reverse) and arguments.apply is None:
            parser.error("--check and --reverse say how to --apply")
        return _patches(arguments)
    return _status(arguments.json)


def _add_patches(commands: Any) -> None:
    patches = commands.add_parser(
        "patches",
        help="export the fixes as patches for vLLM's source, or apply them",
        description="Writes the series of a release to DIR, or to stdout, as 'git am' takes it. "
        "Exit code: 0, or 2 where that could not be done.",
    )
    patches.add_argument("--vllm", metavar="VERSION", help="by default, what PATH or pip says")
    patches.add_argument("--fix", nargs="+", default=[], metavar="ID", help="these fixes alone")
    where = patches.add_mutually_exclusive_group()
    where.add_argument("-o", "--output", type=Path, metavar="DIR")
    where.add_argument(
        "--apply",
        type=Path,
        metavar="PATH",
        help="change this source tree or installed vLLM (the folder that holds vllm)",
    )
    patches.add_argument("--check", action="store_true", help="with --apply: try, change nothing")
    patches.add_argument("--reverse", action="store_true", help="with --apply: take them out")


def _patches(given: argparse.Namespace) -> int:
    from vllm_moe_dp_fix.upstream import command

    return command.run(given.vllm, given.fix, given.output, given.apply, given.check, given.reverse)


def _doctor(words: Sequence[str], as_json: bool, platform: str | None) -> int:
    from vllm_moe_dp_fix.doctor import report, text

    found = report.collect(words, platform)
    if as_json:
        _print_json(found.document)
    else:
        text.show(found.document)
    return found.exit_code


def _status(as_json: bool) -> int:
    from vllm_moe_dp_fix.status import collect

    status = collect()
    if as_json:
        _print_json(status.document)
    else:
        _print_table(status.document)
    return status.exit_code


def _print_json(document: dict[str, Any]) -> None:
    json.dump(document, sys.stdout, indent=2)
    sys.stdout.write("\n")


def _print_table(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    vllm = document["vllm"]
    if vllm is not None:
        distribution = ", ".join(vllm["distribution"] or ["no distribution"])
        tested = "tested release" if vllm["tested"] else "not a tested release"
        console.print(
            f"vLLM {vllm['version']} ({distribution}, platform {vllm['platform']}, {tested})",
            highlight=False,
        )
        console.print(vllm["path"], style="dim", highlight=False)
    table = Table("Fix", "Fault", "What it is", "Here", "Why")
    for fix in document["fixes"]:
        for index, fault in enumerate(fix["faults"]):
            outcome = Outcome(fault["outcome"])
            table.add_row(
                Text(fix["id"] if index == 0 else "", "bold"),
                fault["id"],
                Text(fault["summary"]),
                Text(outcome.words, _style(outcome) if fault["used_here"] else "dim"),
                Text(fault["reason"] + ("" if fault["used_here"] else "; not used here")),
                end_section=index == len(fix["faults"]) - 1,
            )
    if vllm is not None:
        console.print(table)
    for problem in document["problems"]:
        console.print(f"! {problem}", style="yellow", highlight=False)


def _style(outcome: Outcome) -> str:
    if outcome.is_failure:
        return "red"
    styles = {Outcome.APPLIED: "green", Outcome.HEALTHY: "green", Outcome.SWITCHED_OFF: "yellow"}
    return styles.get(outcome, "dim")


if __name__ == "__main__":
    sys.exit(main())
