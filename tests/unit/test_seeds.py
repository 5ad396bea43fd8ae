"""The table of a comparison with several seeds."""

from __future__ import annotations

from typing import Any

import pytest

from seeds import table


def summary(name: str, loss: float, **others: Any) -> dict[str, Any]:
    return {"name": name, "validation_loss": loss, "comparison": others}


def test_means_and_distances_to_fp32() -> None:
    runs = [
        summary("a", 2.0, FP32={"validation_loss": 1.9}, other={"validation_loss": 3.0}),
        summary("b", 2.2, FP32={"validation_loss": 2.1}, other={"validation_loss": 3.0}),
    ]
    assert table(runs).splitlines() == [
        "| | run 0 | run 1 | mean | to FP32 |",
        "|---|---|---|---|---|",
        "| this | 2.000 | 2.200 | 2.100 | +5.00% |",
        "| FP32 | 1.900 | 2.100 | 2.000 | +0.00% |",
        "| other | 3.000 | 3.000 | 3.000 | +50.00% |",
    ]


def test_a_run_that_has_nothing_to_compare_with_is_named() -> None:
    with pytest.raises(ValueError, match="the run a has no comparison; make it with --compare"):
        table([{"name": "a", "validation_loss": 2.0, "comparison": None}])
    with pytest.raises(ValueError, match="the run b, other: ended at step 3"):
        table([summary("b", 2.0, FP32={"validation_loss": 1.9}, other={"error": "ended at step 3"})])
