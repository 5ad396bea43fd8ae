"""``distscale bench``: the sweep beside torch's operators."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from distscale import bench as benchmark
from distscale.bench.table import table as bench_table
from distscale.commands.console import console
from distscale.diagnose import choose_quietly
from distscale.errors import ConfigError
from distscale.machine import device_name

__all__ = ["bench"]


def _numel(text: str) -> int:
    """Reads ``4096``, ``4Ki``, ``64Mi``, ``1Gi``."""
    match = re.fullmatch(r"([1-9][0-9]*)(Ki|Mi|Gi)?", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a number of elements; write one like 4096, 4Ki, 64Mi or 1Gi")
    return int(match[1]) << {None: 0, "Ki": 10, "Mi": 20, "Gi": 30}[match[2]]


def _dtypes(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in benchmark.DTYPES:
            raise typer.BadParameter(f"{name!r} is not a dtype; write some of {','.join(benchmark.DTYPES)}")
    return names


def _json_target(text: str) -> str:
    if text != "-" and (Path(text).is_dir() or not Path(text).absolute().parent.is_dir()):
        raise typer.BadParameter(f"{text!r} cannot be written: it is a folder, or lies in one that does not exist")
    return text


def bench(
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to measure.")] = "cpu",
    numel: Annotated[
        Any, typer.Option(parser=_numel, metavar="N", help="Elements of all tensors together: 4096, 4Ki, 64Mi.")
    ] = "64Mi",
    tensors: Annotated[int, typer.Option(min=1, help="Tensors that they are split into.")] = 64,
    dtype: Annotated[
        Any, typer.Option(parser=_dtypes, metavar="NAMES", help=f"Some of {','.join(benchmark.DTYPES)}.")
    ] = "fp32,fp16,bf16",
    repeats: Annotated[int, typer.Option(min=3, help="Rounds; what is slow is measured in fewer.")] = 15,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the CPU; default: torch's.")] = None,
    json_to: Annotated[
        Any, typer.Option("--json", parser=_json_target, metavar="FILE", help="Write all numbers; - is stdout.")
    ] = None,
) -> None:
    """Measure the sweep beside torch's operators for the same work, and beside a plain read and copy of the bytes.

    All take turns in every round, so that what else the machine does falls on all alike. Operations in place leave the
    values as they were. For many small tensors: distscale bench --numel 4000Ki --tensors 1000
    """
    if threads is not None:
        _check_threads(threads)
        torch.set_num_threads(threads)
    options = benchmark.Options(device, numel, tensors, dtype, repeats)
    options.check()
    out = console(stderr=json_to == "-")
    choice = choose_quietly(torch.device(device))
    machine = f"{device_name(torch.device(device))}, {torch.get_num_threads()} CPU threads"
    out.print(Text(f"{machine}; sweep: {choice.name} ({choice.why})\n"))
    results = []
    for name in dtype:
        results.append(_measure(options, name))
        out.print(bench_table(options, results[-1]))
    if json_to is not None:
        text = json.dumps(benchmark.report(options, results), indent=2)
        if json_to == "-":
            print(text)
            return
        try:
            Path(json_to).write_text(text + "\n")
        except OSError as error:
            raise ConfigError(f"the numbers cannot be written to {json_to}: {error.strerror}") from error


def _check_threads(threads: int) -> None:
    # Of more, nothing is learnt. Of very many, the system refuses some, and the process dies of it.
    num_cpus = os.cpu_count() or 1
    most = 4 * num_cpus
    if threads > most:
        raise ConfigError(
            f"--threads {threads} is not allowed: at most {most}, four for each of the {num_cpus} CPUs here"
        )


def _measure(options: benchmark.Options, dtype: str) -> benchmark.Result:
    console = Console(stderr=True)
    # Without the thread that refreshes the bar: it would take turns with what is measured.
    with Progress(console=console, transient=True, auto_refresh=False, disable=not console.is_terminal) as progress:
        bar = progress.add_task(dtype, total=options.rounds)
        return benchmark.measure(options, dtype, lambda done: progress.update(bar, completed=done, refresh=True))
