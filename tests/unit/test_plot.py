"""The picture of a run."""

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "launch" / "plot.py"


def draw(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, PROGRAM, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_picture_of_a_record(tmp_path: Path) -> None:
    steps = [
        {"step": n, "skipped": n < 2, "scale": 2.0 ** (4 - min(n, 2)), "loss": 3.0 - n if n else "nan"}
        for n in range(5)
    ]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    pictures = [tmp_path / "new" / name for name in ("one.svg", "two.svg", "one.png")]
    for picture in pictures:
        assert draw(tmp_path, picture).returncode == 0
    text = pictures[0].read_text()
    assert "<!-- 2 steps skipped on all ranks -->" in text
    assert pictures[1].read_text() == text
    assert pictures[2].read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_a_record(tmp_path: Path) -> None:
    drawn = draw(tmp_path, tmp_path / "picture.svg")
    assert drawn.returncode == 1
    assert "it has no steps.jsonl" in drawn.stderr
