"""A peer that dies or hangs: the others get an error that says so, within the group's timeout."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import counted, error_of, run_step, set_grad, snapshot
from torch import nn
from torch.optim import AdamW

from ranks import RanksError, run_ranks

GROUPS = {"dies in mid-run": [0, 1, 2], "dies before the first step": [3, 4], "hangs": [5, 6]}
EXIT_CODE = 7


def lose_a_peer(rank: int, store_path: Path) -> tuple[str, str, bool, int]:
    """Every group loses its second rank. The others return their error, and whether anything was applied."""
    # A death is seen at once, by the closed connection; a hang only by the timeout.
    timeouts = {name: timedelta(seconds=3 if name == "hangs" else 20) for name in GROUPS}
    groups = {name: dist.new_group(ranks, timeout=timeouts[name]) for name, ranks in GROUPS.items()}
    name = next(name for name, ranks in GROUPS.items() if rank in ranks)
    is_lost = rank == GROUPS[name][1]
    store = dist.FileStore(str(store_path), 2)
    param = nn.Parameter(torch.ones(3))
    optimizer = AdamW([param], lr=1e-2)
    scaler, reducer = counted(init_scale=8.0, process_group=groups[name], max_norm=1.0)
    for _ in range(0 if name == "dies before the first step" else 2):
        set_grad(param, torch.ones(3))
        run_step(scaler, optimizer)
    dist.barrier(groups[name])  # all are connected
    if is_lost and name == "dies in mid-run":
        os._exit(EXIT_CODE)
    if is_lost and name == "dies before the first step":
        os.kill(os.getpid(), signal.SIGKILL)
    if is_lost:  # hangs until its peer has its error
        store.wait(["seen"], timedelta(seconds=30))
        return "", "", True, 0
    before = snapshot(optimizer)
    set_grad(param, torch.ones(3))
    kind, text = error_of(lambda: run_step(scaler, optimizer))
    if name == "hangs":
        store.set("seen", "yes")
    return kind, text, snapshot(optimizer) == before, reducer.num_reduces


def test_the_others_get_an_error(tmp_path: Path) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(lose_a_peer, 7, tmp_path / "store")
    failures, results = caught.value.failures, caught.value.results
    assert set(failures) == {1, 4}
    assert f"exit code {EXIT_CODE}" in failures[1]
    assert "SIGKILL" in failures[4]
    assert results.pop(6) == ("", "", True, 0)
    assert set(results) == {0, 2, 3, 5}
    for rank, (kind, text, is_untouched, num_reduces) in results.items():
        assert kind == "ProtocolError", text
        rank_in_group = next(ranks.index(rank) for ranks in GROUPS.values() if rank in ranks)
        what = "the agreement on tensor names and settings" if rank == 3 else "the exchange of a step"
        assert text.startswith(f"rank {rank_in_group}: {what} failed. A peer died, was stopped, or did not answer")
        assert is_untouched
        assert num_reduces == (0 if rank == 3 else 3)
