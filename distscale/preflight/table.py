"""The reports of ``distscale check``, of one process and of several ranks, for people. Needs rich."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from distscale.preflight import Report
from distscale.preflight.alone import OwnReport
from distscale.preflight.facts import combined
from distscale.sweep.choice import SETTING

__all__ = ["print_own_report", "print_report"]

_SHORT = 8


def print_own_report(console: Console, report: OwnReport) -> None:
    """Prints what is in use, then a row a device."""
    facts = Table(show_header=False)
    facts.add_column(overflow="fold")
    facts.add_column(overflow="fold")
    for name, version in report.versions.items():
        facts.add_row(name, version or "none: a build of torch for CPUs")
    if report.commit:
        facts.add_row("commit", report.commit)
    facts.add_row(SETTING, report.setting or "not set: native code where there is some")
    facts.add_row("threads", f"{report.threads} (torch.get_num_threads())")
    facts.add_row("torch's CPU code", report.torch_cpu_capability)
    for file, digest in report.files.items():
        facts.add_row(Text(file), f"digest {digest[:_SHORT]}" if digest else Text("cannot be read", "bold red"))
    console.print(facts)
    devices = Table()
    for heading in ("device", "hardware", "sweep", "why", "self-test"):
        devices.add_column(heading, overflow="fold")
    for finding in report.devices:
        verdict = Text("\n".join(finding.faults), "bold red") if finding.faults else Text("passed", "green")
        devices.add_row(finding.device, finding.name, finding.sweep, finding.why, verdict)
    console.print(devices)
    if report.files:
        console.print("note: this process is alone; started on all ranks of a job, it compares the files of the ranks")


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
            f"{len(fact.files)} ({combined(fact.files)[:_SHORT]})" if fact.files else "-",
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
