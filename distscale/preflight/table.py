"""A report of ``distscale check`` on several ranks, for people. Needs rich."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from distscale.preflight import Report

__all__ = ["print_report"]

_SHORT = 8


def print_report(console: Console, report: Report) -> None:
    """Prints a row a rank, then what is to be mended."""
    place = report.environment
    console.print(Text(f"{place.world_size} ranks, started by {place.launcher}"))
    table = Table()
    for heading in ("rank", "host", "device", "torch", "distscale", "files", "sweep", "exchange", "clock"):
        table.add_column(heading, overflow="fold")
    for rank, fact in enumerate(report.facts):
        exchange = report.exchanges[rank] if report.exchanges else None
        tried = exchange is not None and exchange.median_ms is not None
        table.add_row(
            str(fact.rank),
            fact.host,
            f"{fact.device}: {fact.hardware}",
            str(fact.versions["torch"]),
            f"{fact.versions['distscale']} ({fact.code[:_SHORT]})",
            "\n".join((digest or "unreadable")[:_SHORT] for digest in fact.files.values()) or "-",
            fact.sweep + (f", {fact.sweep_gb_per_s:.1f} GB/s" if fact.sweep_gb_per_s else ""),
            f"{exchange.median_ms:.2f} ms" if exchange is not None and tried else "not tried",
            f"{1000 * report.clocks[rank]:+.1f} ms",
        )
    console.print(table)
    for note in report.notes:
        console.print(Text(f"note: {note}"))
    for problem in report.problems:
        console.print(Text(problem, "bold red"))
    if report.passed:
        planted = report.exchanges[0].planted_on
        console.print(
            Text(f"passed: all ranks skipped the inf planted on rank {planted}, and agree on all else", "green")
        )
