"""What the same comparison came to with several seeds, as a Markdown table.

python launch/seeds.py runs/NAME_0 runs/NAME_1 ...    # of runs that were made with --compare
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

__all__ = ["table"]


def table(summaries: Sequence[Mapping[str, Any]]) -> str:
    """A row for each precision: its validation loss with each seed, their mean, and how far it is above that of FP32.

    Raises:
        ValueError: if there is a run without a comparison, or one whose comparison ended with an error.
    """
    losses: dict[str, list[float]] = {}
    for summary in summaries:
        comparison = summary["comparison"]
        if not comparison:
            raise ValueError(f"the run {summary['name']} has no comparison; make it with --compare")
        found = {"this": summary, **comparison}
        for name, result in found.items():
            if "validation_loss" not in result:
                raise ValueError(f"the run {summary['name']}, {name}: {result['error']}")
            losses.setdefault(name, []).append(float(result["validation_loss"]))
    reference = mean(losses["FP32"])
    runs = [f"run {number}" for number in range(len(summaries))]
    lines = [f"| | {' | '.join(runs)} | mean | to FP32 |"]
    lines.append("|---" * (len(summaries) + 3) + "|")
    for name, values in losses.items():
        cells = [f"{value:.3f}" for value in [*values, mean(values)]]
        lines.append(f"| {name} | {' | '.join(cells)} | {mean(values) / reference - 1:+.2%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table([json.loads((Path(folder) / "summary.json").read_text(encoding="utf-8")) for folder in sys.argv[1:]]))
