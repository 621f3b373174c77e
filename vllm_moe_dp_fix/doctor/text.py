# SPDX-License-Identifier: Apache-2.0
"""The report for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_moe_dp_fix.doctor.verdicts import Likelihood

_GIB = 2**30
_STYLES = {Likelihood.WILL.value: "red", Likelihood.MAY.value: "yellow"}


def show(document: dict[str, Any]) -> None:
    """Prints a report."""
    console = Console()
    if document["error"]:
        console.print(Text(f"! {document['error']}", "red"), soft_wrap=True)
        return
    for name, said in _head(document):
        console.print(Text(f"{name:<9}", "bold") + Text(said))
    table = Table("Fault", "Verdict", "Evidence", "What the plugin does")
    for fault in document["faults"]:
        verdict = fault["verdict"]
        hits = verdict != Likelihood.NOT.value
        style = "dim" if not hits else "green" if fault["repaired"] else _STYLES[verdict]
        table.add_row(
            fault["id"],
            Text(verdict, style),
            Text(fault["evidence"], "" if hits else "dim"),
            Text("" if not hits else "; set ".join(filter(None, (fault["action"], fault["set"])))),
        )
    console.print(table)
    for refusal in document["refusals"]:
        console.print(Text(f"! refused: {refusal}", "red"))
    for problem in document["problems"]:
        console.print(Text(f"! {problem}", "yellow"))
    console.print(Text(_conclusion(document), "red" if document["exit_code"] else "green"))


def _head(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    vllm, around, model = document["vllm"], document["environment"], document["model"]
    gpus = ", ".join(f"{gpu['name']} ({_gib(gpu['bytes'])})" for gpu in around["gpus"])
    tested = "tested release" if vllm["tested"] else "not a tested release"
    torch = f"torch {around['torch']}, CUDA {around['cuda'] or 'none'}"
    yield "vLLM", f"{vllm['version']} ({tested}), {torch}, GPUs: {gpus or 'none'}"
    yield "Model", document["command"]["directory"]
    widths = " and ".join(map(str, model["expert_widths"])) or "unknown width"
    size = f"{model['experts']} experts of {widths}" if model["experts"] else "dense"
    quantization = model["quantization"]
    scheme = quantization["method"] or "no quantization"
    if quantization["activations"]:
        scheme += f", activations {quantization['activations']}"
    yield "", f"{model['type']}, {size}, hidden {model['hidden']}, {scheme}"
    parallel = document["parallel"]
    ranks = f"data {parallel['data']}, tensor {parallel['tensor']}"
    if model["experts"]:
        ranks += f", experts {parallel['experts']}, expert-TP {parallel['expert_tp']}"
        ranks += ", expert parallel" if parallel["expert_parallel"] else ""
    yield "Ranks", ranks
    memory = document["memory"]
    if memory:
        of = f" of {_gib(memory['usable'])}" if memory["usable"] else ""
        yield (
            "Memory",
            f"weights a GPU: {_gib(memory['sharded'])} sharded, {_gib(memory['replicated'])} "
            f"replicated{of} (from the {memory['source']})",
        )
    nixl = around["nixl"]
    yield "NIXL", "registers memory" if nixl["registers"] else f"does not work: {nixl['error']}"
    yield from _plugins(around)


def _plugins(around: dict[str, Any]) -> Iterator[tuple[str, str]]:
    hidden = [plugin["name"] for plugin in around["plugins"] if plugin["hidden"]]
    if hidden:
        yield "Plugins", f"hidden by VLLM_PLUGINS: {', '.join(hidden)}"
    foreign = [
        f"{plugin['name']} ({plugin['distribution']})"
        for plugin in around["plugins"]
        if not plugin["ours"] and not plugin["hidden"]
    ]
    if foreign:
        yield "Plugins", f"of others: {', '.join(foreign)}"
    for other in around["others"]:
        yield "Plugins", f"{other['target']} is {other['owner']}"


def _conclusion(document: dict[str, Any]) -> str:
    hits = [fault for fault in document["faults"] if fault["verdict"] != Likelihood.NOT.value]
    left = [fault["id"] for fault in hits if not fault["repaired"]]
    if document["refusals"]:
        return "This deployment would not start."
    if left:
        return f"Nothing repairs {', '.join(left)}."
    if hits:
        return f"Repaired: {', '.join(fault['id'] for fault in hits)}. Nothing is left."
    return "Nothing will go wrong."


def _gib(size: float) -> str:
    return f"{size / _GIB:.1f} GiB" if size >= _GIB / 10 else f"{size / 2**20:.1f} MiB"
