"""The commands that turn a config into another text: ``distscale convert`` and ``distscale slurm render``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from distscale.errors import ConfigError
from distscale.lenient_json import parse_json
from distscale.slurm import render as batch_script
from distscale.slurm_job import Job, Kind

__all__ = ["convert", "render"]

_FormatName = Literal["toml", "deepspeed", "megatron", "nemo", "nemo2", "colossalai", "accelerate", "transformers"]


def convert(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The configuration to read; - is standard input.")],
    to: Annotated[_FormatName, typer.Option("--to", help="The format to write.")],
    source: Annotated[_FormatName | None, typer.Option("--from", help="That of FILE, if it cannot be told.")] = None,
    output: Annotated[str | None, typer.Option("--output", metavar="FILE", help="Write there, not to stdout.")] = None,
) -> None:
    """Convert what a configuration says about precision and loss scale from one trainer's form to another's.

    Of FILE only that part is read, and only that part is written. What the new form cannot hold is printed to stderr, a
    note a line. Formats: nemo is NeMo 1 and its native_amp keys, nemo2 is NeMo 2 and its fp16 arguments,
    transformers is TrainingArguments.
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


def render(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="The TOML file of the run.")],
    kind: Annotated[
        Kind,
        typer.Option(help="What srun starts: one torchrun a node, one task a rank, or a check in place of each."),
    ] = Job.kind,
    deepspeed: Annotated[str | None, typer.Option(metavar="JSON", help="Train in a DeepSpeed engine.")] = None,
    account: Annotated[str, typer.Option(help="Who pays.")] = Job.account,
    partition: Annotated[str, typer.Option(help="Where it runs.")] = Job.partition,
    nodes: Annotated[int, typer.Option(min=1, help="How many.")] = Job.nodes,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="One a GPU; with --cpu, processes.")] = Job.ranks_per_node,
    cpu: Annotated[bool, typer.Option("--cpu", help="Train on CPUs.")] = False,
    time: Annotated[str | None, typer.Option(help="Limit, like 12:00:00; default: the partition's.")] = None,
    max_requeues: Annotated[int, typer.Option(min=0, help="How often the job may be put back.")] = Job.max_requeues,
    output: Annotated[str | None, typer.Option("--output", metavar="FILE", help="Write there, not to stdout.")] = None,
) -> None:
    """Write a batch script that pretrains with CONFIG, saves before its time is up, is requeued and goes on.

    Account, partition and nodes stand at its top, to be edited. Submit it from the root of the repository.
    """
    from distscale.config import load_config  # needs the extra train

    if deepspeed is not None:
        _check_json(deepspeed)
    name = load_config(config).run.name
    job = Job(name, config, kind, deepspeed, account, partition, nodes, ranks_per_node, cpu, time, max_requeues)
    _write(batch_script(job), output)


def _check_json(file: str) -> None:
    try:
        is_object = isinstance(parse_json(Path(file).read_text(encoding="utf-8")), dict)
    except OSError as error:
        raise ConfigError(
            f"--deepspeed {file} cannot be read: {error.strerror}; give the path of a JSON file"
        ) from None
    except ValueError as error:
        raise ConfigError(f"--deepspeed {file} is no JSON: {error}; give the path of a JSON file") from None
    if not is_object:
        raise ConfigError(f"--deepspeed {file} holds no JSON object; give the path of DeepSpeed's config")


def _write(text: str, output: str | None) -> None:
    if output is None:
        print(text, end="")
        return
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the result cannot be written to {output}: {error.strerror}") from error
