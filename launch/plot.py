"""Draws a run: ``python launch/plot.py runs/fsdp2_fp16 docs/run.svg``. Needs the extra ``plot`` (matplotlib)."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

try:
    from matplotlib import pyplot as plt
except ImportError:
    sys.exit("drawing needs matplotlib: pip install 'distscale[plot]'")


def main() -> None:
    """Reads ``steps.jsonl`` of a run and writes one picture of loss, scale and skips."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="directory of a run")
    parser.add_argument("picture", type=Path, help="file to write; its ending says the format (.svg, .png)")
    arguments = parser.parse_args()
    record = arguments.run / "steps.jsonl"
    if not record.exists():
        sys.exit(f"{arguments.run} is not the directory of a run: it has no steps.jsonl")
    steps = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    draw(steps, arguments.picture)


def draw(steps: list[dict[str, Any]], picture: Path) -> None:
    """Writes a picture of ``steps``, the lines of a record."""
    figure, (upper, lower) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 4.2), height_ratios=(3, 2), layout="constrained"
    )
    numbers = [step["step"] for step in steps]
    losses = [step["loss"] if isinstance(step["loss"], float) else float("nan") for step in steps]
    skipped = [step for step in steps if step["skipped"]]

    upper.plot(numbers, losses, color="#1f77b4", linewidth=0.9)
    upper.set_ylabel("training loss (nats)")
    lower.step(numbers, [step["scale"] for step in steps], where="post", color="#444444", linewidth=1.2)
    lower.plot(
        [step["step"] for step in skipped], [step["scale"] for step in skipped], "v", color="#d62728",
        markersize=5, label=f"{len(skipped)} steps skipped on all ranks",
    )  # fmt: skip
    lower.set_yscale("log", base=2)
    lower.set_ylabel("loss scale")
    lower.set_xlabel("step")
    lower.legend(loc="upper right", frameon=False)
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    picture.parent.mkdir(parents=True, exist_ok=True)
    # With these the same run gives the same file.
    plt.rcParams["svg.hashsalt"] = "distscale"
    metadata = {"Date": None} if picture.suffix == ".svg" else None
    figure.savefig(picture, metadata=metadata, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    main()
