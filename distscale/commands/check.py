"""``distscale check``: one process, or all ranks of a job."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, NoReturn

import typer

from distscale.commands.console import console
from distscale.env import Environment, read_environment
from distscale.errors import DistScaleError

__all__ = ["check"]


def check(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILES", help="What must be there, and equal on all ranks, such as a config."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of the tables.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Under a launcher: seconds to wait for a rank.")] = 60.0,
) -> None:
    """Say which sweep is in use on each device and why, and test it. Exit code 1 if a test fails, or a file is missing.

    Started on all ranks of a job (torchrun, srun, mpirun) it tests them together: versions, code and FILES, the sweep
    of each, the exchange with an inf planted on one, the clocks. Rank 0 prints; all ranks have the same exit code.
    """
    from distscale.preflight.alone import check_alone  # the other commands do without
    from distscale.preflight.table import print_own_report

    environment = read_environment(os.environ)
    if environment.world_size > 1:
        _check_ranks(environment, files or [], as_json, timeout)
    report = check_alone(files or [])
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        print_own_report(console(), report)
    raise typer.Exit(0 if report.passed else 1)


def _check_ranks(environment: Environment, files: list[str], as_json: bool, timeout_s: float) -> NoReturn:
    """Ends this process, on every rank with the same exit code."""
    from distscale.preflight import preflight
    from distscale.preflight.table import print_report

    try:
        report = preflight(environment, files, timeout_s)
    except DistScaleError as error:
        print(f"distscale: {error}", file=sys.stderr)
        code = 1
    else:
        code = 0 if report.passed else 1
        if environment.rank == 0 and as_json:
            print(json.dumps(report.to_json(), indent=2))
        elif environment.rank == 0:
            print_report(console(), report)
    # Taking the interpreter down while threads of a process group live may abort it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
