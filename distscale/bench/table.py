"""The result of a benchmark for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from distscale.bench import Measured, Options, Result

__all__ = ["table"]

_HEADINGS = {"limit": "the machine", "distscale": "distscale", "torch": "torch"}


def table(options: Options, result: Result) -> RenderableType:
    """One dtype: a row for each candidate, and below it the memory and the targets."""
    limit = "read" if "read" in result.timings else "copy"
    grid = Table(title=f"{result.dtype}: {options.numel:,} elements in {options.num_tensors:,} tensors")
    grid.add_column("on " + options.device)
    for heading in ("ms", "quartiles", "GB/s", f"time / {limit}", "torch / it", "torch with amax / it"):
        grid.add_column(heading, justify="right")
    side = None
    for one in result.measured:
        if one.candidate.side != side:
            side = one.candidate.side
            grid.add_section()
            grid.add_row(Text(_HEADINGS[side], style="bold"))
        grid.add_row("  " + one.candidate.label, *_numbers(result, one, limit))
    return Group(grid, *_below(result))


def _numbers(result: Result, one: Measured, limit: str) -> list[str]:
    if one.timing is None:
        return ["-"] * 6
    timings, median = result.timings, one.timing.median_ms
    low, high = one.timing.quartiles_ms
    replaces_torch = one.candidate.side == "distscale" and one.candidate.key != "scale"
    over_torch = [
        f"{timings[key].median_ms / median:.1f}x" if replaces_torch and key in timings else ""
        for key in ("torch_sequence", "torch_sequence_amax")
    ]
    rate = f"{one.gb_per_s:.1f}"
    return [f"{median:.2f}", f"{low:.2f} - {high:.2f}", rate, f"{median / timings[limit].median_ms:.2f}", *over_torch]


def _below(result: Result) -> list[Text]:
    lines = [
        Text(
            f"A sweep takes {result.sweep_memory_bytes / 1e6:.2f} MB of memory beside "
            f"{result.gradient_bytes / 1e6:.1f} MB of gradients."
        )
    ]
    if result.cores_of_others is not None:
        lines.append(Text(f"Other processes kept {result.cores_of_others:.2f} cores busy meanwhile."))
    if result.disturbed:
        lines.append(Text("That disturbed the measurement: do not trust it, but repeat it.", "bold yellow"))
    for target in result.targets:
        bound = f"at most {target.at_most:g}" if target.at_most is not None else f"at least {target.at_least:g}"
        verdict = Text("reached", style="green") if target.reached else Text("missed", style="bold red")
        lines.append(Text.assemble("Target ", verdict, f": {target.what} = {target.measured:.2f}, is to be {bound}."))
    return [*lines, Text()]
