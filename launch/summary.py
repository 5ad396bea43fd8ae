"""What a finished run came to: numbers from its record, a verdict computed from them, and a table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from data import Text
from display import power_of_two
from distscale.config import Config
from distscale.profile import FORMATS, LossCounts

__all__ = ["mean_last_loss", "missing_steps", "read_record", "read_verdict", "show", "summarize", "to_json"]

# A single batch is noisy; the training loss of a run is the mean of its last batches.
NUM_LAST_LOSSES = 20
NUM_SHOWN_SKIPS = 20


def read_record(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a ``steps.jsonl``, oldest first."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_verdict(folder: Path, compared: bool) -> tuple[bool, str] | None:
    """Returns whether a complete run has passed, and its verdict; None without its ``summary.json``.

    Args:
        folder: of the run.
        compared: whether a summary without a comparison does not count.
    """
    path = folder / "summary.json"
    if not path.exists():
        return None
    summary = json.loads(path.read_text(encoding="utf-8"))
    if compared and summary["comparison"] is None:
        return None
    return summary["passed"], summary["verdict"]


def summarize(
    config: Config,
    text: Text,
    rows: Sequence[Mapping[str, Any]],
    validation_loss: float,
    ranks_agree: bool,
    comparison: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Returns the contents of ``summary.json``.

    Args:
        config: of the run.
        text: that it was trained on.
        rows: its whole record, restarts included.
        validation_loss: in nats a token.
        ranks_agree: whether all ranks ended in the same state.
        comparison: by name of another precision, its losses or the error it ended with; None: not asked for.
    """
    skips = [
        {"step": row["step"], "scale": row["scale"], "culprit": row["culprit"], "vetoed_by": row["vetoed_by"]}
        for row in rows
        if row["skipped"]
    ]
    # A step without a line cannot be vouched for; without any line there is nothing to show, either.
    time_s = sum(row["time_s"] for row in rows) or math.nan
    summary = {
        "name": config.run.name,
        "finished": True,
        "text": text.source,
        "steps": len(rows),
        "applied_steps": len(rows) - len(skips),
        "num_skips": len(skips),
        "skips": skips,
        "missing_steps": missing_steps(rows, config.run.steps),
        "scale": rows[-1]["next_scale"] if rows else math.nan,
        "train_loss": mean_last_loss(rows),
        "validation_loss": validation_loss,
        "unigram_entropy": text.entropy,
        "comparison": comparison,
        "step_time_s": time_s / max(1, len(rows)),
        "scaler_share": sum(row["scaler_s"] for row in rows) / time_s,
        "exchange_share": sum(row["exchange_s"] for row in rows) / time_s,
        "gradients": _gradient_shares(rows),
        "ranks_agree": ranks_agree,
    }
    summary["passed"], summary["verdict"] = _verdict(summary)
    return summary


def to_json(summary: Mapping[str, Any]) -> str:
    """Returns ``summary`` as JSON; numbers that are not finite become strings, as in the record."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list):
            return [plain(item) for item in value]
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(summary), indent=2, allow_nan=False) + "\n"


def mean_last_loss(rows: Sequence[Mapping[str, Any]]) -> float:
    """Returns the mean training loss of the last steps of a record, in nats a token."""
    # The record holds losses that are not finite as strings, as JSON has no numbers for them.
    last = [float(row["loss"]) for row in rows[-NUM_LAST_LOSSES:]]
    return sum(last) / len(last) if last else math.nan


def missing_steps(rows: Sequence[Mapping[str, Any]], num_steps: int) -> list[int]:
    """Returns the steps below ``num_steps`` that have no line."""
    return sorted(set(range(num_steps)) - {row["step"] for row in rows})


def show(console: Console, summary: Mapping[str, Any]) -> None:
    """Prints the table and the verdict."""
    table = Table(title=f"Run {summary['name']}", title_justify="left", show_header=False, min_width=72)
    table.add_column(style="bold")
    table.add_column()
    for label, value in _lines(summary):
        table.add_row(label, value)
    console.print(table)
    console.print(summary["verdict"], style="bold green" if summary["passed"] else "bold red", highlight=False)


def _verdict(summary: Mapping[str, Any]) -> tuple[bool, str]:
    loss, entropy = summary["validation_loss"], summary["unigram_entropy"]
    learned = math.isfinite(loss) and loss < entropy
    unexplained = [skip["step"] for skip in summary["skips"] if skip["culprit"] is None and skip["vetoed_by"] is None]
    missing = summary["missing_steps"]
    findings = [
        (
            not missing,
            f"the record steps.jsonl lacks {len(missing)} steps, the first is {missing[0]}" if missing else "",
        ),
        (
            learned,
            f"validation loss {loss:.3f} {'<' if learned else 'is not below'} unigram entropy {entropy:.3f} nats",
        ),
        (
            not unexplained,
            _skips_in_words(summary["num_skips"])
            if not unexplained
            else f"steps {', '.join(map(str, unexplained))} were skipped for no reason that is known",
        ),
        (summary["ranks_agree"], "ranks agree" if summary["ranks_agree"] else "RANKS DIFFER"),
    ]
    passed = all(holds for holds, _ in findings)
    sentences = [sentence for holds, sentence in findings if sentence and (passed or not holds)]
    return passed, ("PASS: " if passed else "FAIL: ") + "; ".join(sentences)


def _skips_in_words(num_skips: int) -> str:
    return {0: "no skips", 1: "1 skip, explained"}.get(num_skips, f"{num_skips} skips, all explained")


def _gradient_shares(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]] | None:
    """By format, smallest and largest share of nonzero values lost and subnormal, over the profiles."""
    profiles = [row["gradients"] for row in rows if row.get("gradients")]
    if not profiles:
        return None
    shares = {}
    for name in FORMATS:
        counts = [LossCounts(**profile[name]) for profile in profiles]
        lost = [count.lost_share for count in counts]
        subnormal = [count.subnormal_share for count in counts]
        shares[name] = {"lost": [min(lost), max(lost)], "subnormal": [min(subnormal), max(subnormal)]}
    return {"steps": [row["step"] for row in rows if row.get("gradients")], **shares}


def _lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = [
        ("steps", f"{summary['steps']}, of which {summary['applied_steps']} applied"),
        ("skips", str(summary["num_skips"])),
    ]
    for skip in summary["skips"][:NUM_SHOWN_SKIPS]:
        lines.append((f"  step {skip['step']}", f"{_reason(skip)} at scale {power_of_two(skip['scale'])}"))
    if summary["num_skips"] > NUM_SHOWN_SKIPS:
        lines.append(("  ...", f"{summary['num_skips'] - NUM_SHOWN_SKIPS} more in steps.jsonl"))
    lines += [
        ("scale now", power_of_two(summary["scale"])),
        ("training loss", f"{summary['train_loss']:.3f} nats (mean of the last steps)"),
        ("validation loss", f"{summary['validation_loss']:.3f} nats"),
        ("unigram entropy", f"{summary['unigram_entropy']:.3f} nats, of {summary['text']}"),
        *_comparison_lines(summary["comparison"]),
        ("time a step", f"{1000 * summary['step_time_s']:.1f} ms"),
        ("  in the scaler", f"{summary['scaler_share']:.2%} of it"),
        ("  in its exchange", f"{summary['exchange_share']:.2%} of it, waiting for peers included"),
    ]
    if summary["gradients"]:
        for name in FORMATS:
            shares = summary["gradients"][name]
            lines.append(
                (
                    f"gradients in {name}",
                    f"unscaled: {_range(shares['lost'])} lost, {_range(shares['subnormal'])} subnormal",
                )
            )
    return lines


def _comparison_lines(comparison: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if comparison is None:
        return [("other precisions", "run with --compare")]
    return [
        (
            f"the same in {name}",
            result.get("error")
            or f"{result['validation_loss']:.3f} nats validation, "
            f"{result['train_loss']:.3f} training, {result['num_skips']} skips",
        )
        for name, result in comparison.items()
    ]


def _reason(skip: Mapping[str, Any]) -> str:
    if skip["culprit"]:
        return "{kind} in {tensor} on rank {rank}".format(**skip["culprit"])
    return "unknown reason" if skip["vetoed_by"] is None else f"vetoed by rank {skip['vetoed_by']}"


def _range(bounds: Sequence[float]) -> str:
    low, high = bounds
    return f"{low:.2%} to {high:.2%}"
