"""The result of a benchmark for people."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from distscale.bench import Measured, Options, Result

__all__ = ["table"]

_HEADINGS = {"limit": "the machine", "distscale": "distscale", "torch": "torch"}


def table(options: Options, result: Result) -> RenderableType:
    """One dtype: a row for each candidate, and below it the memory and the targets.

    ``torch/it``: the time of torch's unscale, norm and clip over the row's; ``+amax/it``: with torch's amax. A row with
    a limit or a rival of its own, as the cast to FP8, is held against that.
    """
    limit = "read" if "read" in result.timings else "copy"
    title = f"{result.dtype}: {options.numel:,} elements in {options.num_tensors:,} tensors"
    # As wide as a small terminal, and no wider.
    grid = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    grid.add_column("on " + options.device, no_wrap=True)
    for heading in ("ms", "±", "GB/s", f"/ {limit}", "torch/it", "+amax/it"):
        grid.add_column(heading, justify="right", no_wrap=True)
    side = None
    for one in result.measured:
        if one.candidate.side != side:
            side = one.candidate.side
            grid.add_row(Text(_HEADINGS[side], style="bold"))
        grid.add_row("  " + one.candidate.label, *_numbers(result, one, limit))
    return Group(grid, *_below(result))


def _numbers(result: Result, one: Measured, limit: str) -> list[str]:
    if one.timing is None:
        return ["-"] * 6
    timings, median = result.timings, one.timing.median_ms
    low, high = one.timing.quartiles_ms
    replaces_torch = one.candidate.side == "distscale" and one.candidate.key != "scale"
    rivals = (one.candidate.rival, "") if one.candidate.rival else ("torch_sequence", "torch_sequence_amax")
    over_torch = [
        f"{timings[key].median_ms / median:.1f}x" if replaces_torch and key in timings else "" for key in rivals
    ]
    spread = f"{(high - low) / 2 / median:.0%}"  # half of the distance of the quartiles
    ratio = f"{median / timings[one.candidate.limit or limit].median_ms:.2f}"
    return [f"{median:.2f}", spread, f"{one.gb_per_s:.1f}", ratio, *over_torch]


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
