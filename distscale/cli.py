"""The command ``distscale``: what is in use here, how fast it is, and conversions. Needs the extra ``cli``."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import torch

from distscale import bench as benchmark
from distscale.diagnose import Finding, choose_quietly, diagnose
from distscale.env import Environment, read_environment
from distscale.errors import ConfigError, DistScaleError
from distscale.machine import commit, device_name, versions
from distscale.sweep.choice import SETTING

try:
    import typer
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as missing:
    sys.exit(f'distscale: this command needs {missing.name}, which is not installed: pip install "distscale[cli]"')

from distscale.bench.table import table as bench_table

__all__ = ["app", "main"]

_FormatName = Literal["toml", "deepspeed", "megatron", "nemo", "nemo2", "colossalai", "accelerate"]

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="markdown",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="One loss scale and one skip decision for all ranks: what is in use on this machine, how fast it is, and the "
    "settings of other trainers, converted.",
)
slurm = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help="Batch scripts for SLURM.")
app.add_typer(slurm, name="slurm")


def main() -> None:
    """Runs the command line; a user's mistake ends it with one sentence."""
    try:
        app()
    except ConfigError as error:
        sys.exit(f"distscale: {error}")


@app.command()
def check(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILES", help="Under a launcher: what must be equal on all ranks, such as a config."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of the tables.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Under a launcher: seconds to wait for a rank.")] = 60.0,
) -> None:
    """Say which sweep is in use on each device and why, and test it. Exit code 1 if a test fails.

    Started on all ranks of a job (torchrun, srun, mpirun) it tests them together: versions, code and FILES, the sweep
    of each, the exchange with an inf planted on one, the clocks. Rank 0 prints; all ranks have the same exit code.
    """
    environment = read_environment(os.environ)
    if environment.world_size > 1:
        _check_ranks(environment, files or [], as_json, timeout)
    about: dict[str, Any] = {
        "versions": versions(),
        "commit": commit(),
        "setting": os.environ.get(SETTING),
        "threads": torch.get_num_threads(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    findings = diagnose()
    passed = not any(finding.faults for finding in findings)
    if as_json:
        print(
            json.dumps(
                about | {"devices": [dataclasses.asdict(finding) for finding in findings], "passed": passed}, indent=2
            )
        )
    else:
        _print_check(about, findings)
    raise typer.Exit(0 if passed else 1)


def _check_ranks(environment: Environment, files: list[str], as_json: bool, timeout_s: float) -> NoReturn:
    """Ends this process, on every rank with the same exit code."""
    from distscale.preflight import preflight  # the other commands do without
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
            print_report(_console(), report)
    # Taking the interpreter down while threads of a process group live may abort it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _print_check(about: dict[str, Any], findings: list[Finding]) -> None:
    console = _console()
    facts = Table(show_header=False)
    for name, version in about["versions"].items():
        facts.add_row(name, version or "none: a build of torch for CPUs")
    if about["commit"]:
        facts.add_row("commit", about["commit"])
    facts.add_row(SETTING, about["setting"] or "not set: native code where there is some")
    facts.add_row("threads", f"{about['threads']} (torch.get_num_threads())")
    facts.add_row("torch's CPU code", about["torch_cpu_capability"])
    console.print(facts)
    devices = Table()
    for heading in ("device", "hardware", "sweep", "why", "self-test"):
        devices.add_column(heading, overflow="fold")
    for finding in findings:
        verdict = Text("\n".join(finding.faults), "bold red") if finding.faults else Text("passed", "green")
        devices.add_row(finding.device, finding.name, finding.sweep, finding.why, verdict)
    console.print(devices)


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


@app.command()
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
        torch.set_num_threads(threads)
    options = benchmark.Options(device, numel, tensors, dtype, repeats)
    options.check()
    console = _console(stderr=json_to == "-")
    choice = choose_quietly(torch.device(device))
    machine = f"{device_name(torch.device(device))}, {torch.get_num_threads()} CPU threads"
    console.print(Text(f"{machine}; sweep: {choice.name} ({choice.why})\n"))
    results = []
    for name in dtype:
        results.append(_measure(options, name))
        console.print(bench_table(options, results[-1]))
    if json_to is not None:
        text = json.dumps(benchmark.report(options, results), indent=2)
        if json_to == "-":
            print(text)
            return
        try:
            Path(json_to).write_text(text + "\n")
        except OSError as error:
            raise ConfigError(f"the numbers cannot be written to {json_to}: {error.strerror}") from error


def _measure(options: benchmark.Options, dtype: str) -> benchmark.Result:
    console = Console(stderr=True)
    # Without the thread that refreshes the bar: it would take turns with what is measured.
    with Progress(console=console, transient=True, auto_refresh=False, disable=not console.is_terminal) as progress:
        bar = progress.add_task(dtype, total=options.rounds)
        return benchmark.measure(options, dtype, lambda done: progress.update(bar, completed=done, refresh=True))


@app.command()
def convert(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The configuration to read; - is standard input.")],
    to: Annotated[_FormatName, typer.Option("--to", help="The format to write.")],
    source: Annotated[_FormatName | None, typer.Option("--from", help="That of FILE, if it cannot be told.")] = None,
    output: Annotated[str | None, typer.Option("--output", metavar="FILE", help="Write there, not to stdout.")] = None,
) -> None:
    """Convert what a configuration says about precision and loss scale from one trainer's form to another's.

    Of FILE only that part is read, and only that part is written. What the new form cannot hold is printed to stderr, a
    note a line. Formats: nemo is NeMo 1 and its native_amp keys, nemo2 is NeMo 2 and its fp16 arguments.
    """
    from distscale.convert import convert as converted  # the other commands do without

    where = "standard input" if file == "-" else file
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{where} is not text in UTF-8") from None
    result = converted(text, to, source, where)
    if output is not None and Path(output).exists() and file != "-" and Path(output).samefile(file):
        raise ConfigError(
            f"--output {output} is the file that is read, and would lose all its other parts; write elsewhere"
        )
    for note in [*([] if source else [f"{where} was read as {result.source}"]), *result.notes]:
        print(f"note: {note}", file=sys.stderr)
    _write(result.text, output)


@slurm.command()
def render(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="The TOML file of the run.")],
    kind: Annotated[
        Literal["torchrun", "srun", "preflight"],
        typer.Option(help="What srun starts: one torchrun a node, one task a rank, or a check in place of each."),
    ] = "torchrun",
    deepspeed: Annotated[str | None, typer.Option(metavar="JSON", help="Train in a DeepSpeed engine.")] = None,
    account: Annotated[str, typer.Option(help="Who pays.")] = "ACCOUNT",
    partition: Annotated[str, typer.Option(help="Where it runs.")] = "PARTITION",
    nodes: Annotated[int, typer.Option(min=1, help="How many.")] = 2,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="One a GPU; with --cpu, processes.")] = 8,
    cpu: Annotated[bool, typer.Option("--cpu", help="Train on CPUs.")] = False,
    time: Annotated[str | None, typer.Option(help="Limit, like 12:00:00; default: the partition's.")] = None,
    max_requeues: Annotated[int, typer.Option(min=0, help="How often the job may be put back.")] = 20,
    output: Annotated[str | None, typer.Option("--output", metavar="FILE", help="Write there, not to stdout.")] = None,
) -> None:
    """Write a batch script that pretrains with CONFIG, saves before its time is up, is requeued and goes on.

    Account, partition and nodes stand at its top, to be edited. Submit it from the root of the repository.
    """
    from distscale.config import load_config  # needs the extra train
    from distscale.slurm import Job
    from distscale.slurm import render as rendered

    if deepspeed is not None and not Path(deepspeed).is_file():
        raise ConfigError(f"--deepspeed {deepspeed} is no file; give the path of a JSON file")
    name = load_config(config).run.name
    job = Job(name, config, kind, deepspeed, account, partition, nodes, ranks_per_node, cpu, time, max_requeues)
    _write(rendered(job), output)


def _write(text: str, output: str | None) -> None:
    if output is None:
        print(text, end="")
        return
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the result cannot be written to {output}: {error.strerror}") from error


def _console(*, stderr: bool = False) -> Console:
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=120)


if __name__ == "__main__":
    main()
