"""A peer that hangs or dies: the others get an error that says so, within the group's timeout."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import counted, error_of, run_step, set_grad, snapshot
from torch import nn
from torch.optim import AdamW

from ranks import RanksError, run_ranks

# One after the other, each in a group of its own, since a group is of no use after it; the last rank of each is lost.
GROUPS = {"hangs": [0, 1, 2, 3], "dies in mid-run": [0, 1, 2, 3], "dies before the first step": [0, 1, 2]}
EXIT_CODE = 7


def lose_peers(rank: int, store_path: Path) -> dict[str, Any]:
    # gloo's neighbours of a dead rank see the closed connection at once; the others wait for them until the timeout.
    timeout = timedelta(seconds=4)
    groups = {name: dist.new_group(ranks, timeout=timeout) for name, ranks in GROUPS.items()}
    store = dist.FileStore(str(store_path), len(GROUPS["hangs"]))
    return {name: _lose_a_peer(rank, name, groups[name], store) for name, ranks in GROUPS.items() if rank in ranks}


def _lose_a_peer(
    rank: int, name: str, group: dist.ProcessGroup, store: dist.Store
) -> tuple[str, str, bool, int] | None:
    """Returns the error of this rank, whether nothing was applied, and the number of exchanges."""
    param = nn.Parameter(torch.ones(3))
    optimizer = AdamW([param], lr=1e-2)
    scaler, reducer = counted(init_scale=8.0, process_group=group, max_norm=1.0)
    for _ in range(0 if name == "dies before the first step" else 2):
        set_grad(param, torch.ones(3))
        run_step(scaler, optimizer)
    dist.barrier(group)  # all are connected
    all_seen = [f"{name}: seen by {peer}" for peer in GROUPS[name][:-1]]
    if rank == GROUPS[name][-1]:
        if name == "dies in mid-run":
            os._exit(EXIT_CODE)
        if name == "dies before the first step":
            os.kill(os.getpid(), signal.SIGKILL)
        # Hangs until its peers have their errors.
        store.wait(all_seen, timedelta(seconds=30))
        return None
    before = snapshot(optimizer)
    set_grad(param, torch.ones(3))
    kind, text = error_of(lambda: run_step(scaler, optimizer))
    store.set(f"{name}: seen by {rank}", "yes")
    store.wait(all_seen, timedelta(seconds=30))  # the next group's timeout begins for all at the same time
    return kind, text, snapshot(optimizer) == before, reducer.num_reduces


def test_the_others_get_an_error(tmp_path: Path) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(lose_peers, 4, tmp_path / "store")
    failures, results = caught.value.failures, caught.value.results
    assert set(failures) == {2, 3}
    assert "SIGKILL" in failures[2]
    assert f"exit code {EXIT_CODE}" in failures[3]
    assert set(results) == {0, 1}
    for rank, seen in results.items():
        assert set(seen) == set(GROUPS)
        for name, (kind, text, is_untouched, num_reduces) in seen.items():
            is_first = name == "dies before the first step"
            what = "the agreement on tensor names and settings" if is_first else "the exchange of a step"
            assert kind == "ProtocolError", text
            assert text.startswith(f"rank {rank}: {what} failed. A peer died, was stopped, or did not answer")
            assert is_untouched
            assert num_reduces == (0 if is_first else 3)
