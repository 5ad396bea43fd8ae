"""The JSON lines: every step once, whatever happened to the process that wrote them."""

import json
import math
from pathlib import Path

import pytest

from distscale import Culprit, JsonlRecord, StepReport


def report(step: int, skipped: bool = False) -> StepReport:
    culprit = Culprit(3, "head.weight", "inf") if skipped else None
    norm = math.inf if skipped else 1.5
    return StepReport(step, skipped, 1024.0, 512.0 if skipped else 1024.0, norm, None, culprit, {"head.weight": norm})


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_a_step(tmp_path: Path) -> None:
    path = tmp_path / "new" / "steps.jsonl"
    record = JsonlRecord(path)
    record(report(0))
    record(report(1, skipped=True), loss=math.nan, lr=0.1)
    record.close()
    assert lines(path) == [
        {
            "step": 0, "skipped": False, "scale": 1024.0, "next_scale": 1024.0, "grad_norm": 1.5, "clip_coef": None,
            "culprit": None, "vetoed_by": None,
        },
        {
            "step": 1, "skipped": True, "scale": 1024.0, "next_scale": 512.0, "grad_norm": "inf", "clip_coef": None,
            "culprit": {"rank": 3, "tensor": "head.weight", "kind": "inf"}, "vetoed_by": None, "loss": "nan", "lr": 0.1,
        },
    ]  # fmt: skip


def test_each_line_is_on_disk_before_the_next_step(tmp_path: Path) -> None:
    record = JsonlRecord(tmp_path / "steps.jsonl")
    record(report(0))
    assert len(lines(record.path)) == 1
    record.close()


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_resume_drops_later_steps_and_a_line_cut_short(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "steps.jsonl"
    record = JsonlRecord(path)
    for step in range(6):
        record(report(step))
    record.close()
    path.write_bytes(path.read_bytes()[:-cut])
    resumed = JsonlRecord(path, resume_step=4)
    assert [line["step"] for line in lines(path)] == [0, 1, 2, 3]
    resumed(report(4))
    resumed.close()
    assert [line["step"] for line in lines(path)] == [0, 1, 2, 3, 4]


def test_a_new_run_begins_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"step": 0}\n')
    JsonlRecord(path).close()
    assert path.read_text() == ""
