# SPDX-License-Identifier: Apache-2.0
"""A serve command as it is typed or pasted, parsed as vLLM parses it."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

_SETTING = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
# Where ``make_arg_parser`` of ``vllm serve`` is, the newest place first.
_PARSERS = (
    "vllm.entrypoints.common.cli_args",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.cli_args",
)
_API_SERVER = "vllm.entrypoints.openai.api_server"


class CommandError(ValueError):
    """The command cannot be understood, in one sentence."""


class Command(NamedTuple):
    """A command in parts.

    Attributes:
        environment: The settings before it.
        arguments: What follows ``vllm serve``.
    """

    environment: dict[str, str]
    arguments: list[str]


def split(words: Sequence[str]) -> Command:
    """Parts ``KEY=VALUE … vllm serve MODEL …``; ``vllm serve`` may be left out.

    Raises:
        CommandError: There is no model, or it is another command of vLLM.
    """
    rest = list(words)
    if len(rest) == 1 and "vllm serve " in rest[0]:  # quoted as a whole
        try:
            rest = shlex.split(rest[0], comments=True)
        except ValueError as error:
            raise CommandError(f"the command cannot be split into words: {error}") from error
        rest = [word for word in rest if word.strip()]  # lines that were continued
    if rest[:1] == ["env"]:
        del rest[0]
    environment = {}
    while rest and _SETTING.fullmatch(rest[0]):
        name, _, value = rest.pop(0).partition("=")
        environment[name] = value
    if rest and Path(rest[0]).name == "vllm":
        if rest[1:2] != ["serve"]:
            raise CommandError(f"{' '.join(rest[:2])!r} is not judged, only 'vllm serve'")
        del rest[:2]
    elif rest[1:3] == ["-m", _API_SERVER]:
        del rest[:3]
    if not rest:
        raise CommandError("there is no command after '--', such as 'vllm serve MODEL'")
    return Command(environment, rest)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """What vLLM's own parser of ``vllm serve`` makes of the arguments; ``model`` is set.

    vLLM loads its plugins to make that parser.

    Raises:
        CommandError: With the parser's own words.
    """
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            parser = FlexibleArgumentParser(prog="vllm")
            serve = parser.add_subparsers(dest="subparser").add_parser("serve")
            _make_arg_parser()(serve)
            with contextlib.suppress(argparse.ArgumentError):  # of its own to 0.19.1
                serve.add_argument("--grpc", action="store_true")
            parsed: argparse.Namespace = parser.parse_args(["serve", *arguments])
    except SystemExit as stop:
        error = (
            said.getvalue().rpartition("error: ")[2].strip() if stop.code else "it asks for help"
        )
        raise CommandError(f"vLLM cannot parse the command: {_one_line(error)}") from stop
    except Exception as error:
        raise CommandError(f"vLLM cannot parse the command: {_one_line(str(error))}") from error
    if parsed.model_tag is not None:
        parsed.model = parsed.model_tag
    return parsed


def _make_arg_parser() -> Callable[[Any], Any]:
    for name in _PARSERS:
        try:
            make: Callable[[Any], Any] = import_module(name).make_arg_parser
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            continue
        return make
    raise CommandError(f"this vLLM has no argument parser in {', '.join(_PARSERS)}")


def _one_line(text: str) -> str:
    return " ".join(text.split()) or "no reason given"
