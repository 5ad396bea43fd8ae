"""The command ``distscale``: what is in use here, how fast it is, and conversions. Needs the extra ``cli``."""

from __future__ import annotations

import sys

from distscale.errors import ConfigError

try:
    import typer

    from distscale.commands import bench, check, texts
except ModuleNotFoundError as missing:
    sys.exit(f'distscale: this command needs {missing.name}, which is not installed: pip install "distscale[cli]"')

__all__ = ["app", "main"]

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
for command in (check.check, bench.bench, texts.convert):
    app.command()(command)
slurm.command()(texts.render)


def main() -> None:
    """Runs the command line; a user's mistake ends it with one sentence."""
    try:
        app()
    except ConfigError as error:
        sys.exit(f"distscale: {error}")


if __name__ == "__main__":
    main()
