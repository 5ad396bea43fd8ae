"""What goes wrong on one rank alone must be known on all of them. Ranks are threads here; see tests/distributed."""

import pytest
import torch

from distscale import DesyncError, DistributedGradScaler, DistScaleError
from ranks import CountingReducer, ThreadReducer, run_threads


def _errors(reducer: ThreadReducer, fault: str, fused: bool) -> list[str]:
    """Three steps with a fault on rank 1 in the second; the errors that this rank sees, and what its parameter is."""
    parameter = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
    scaler = DistributedGradScaler("cpu", init_scale=4.0, reducer=reducer)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(parameter.sum()).backward()
        hook = None
        if step == 1 and reducer.rank == 1:
            if fault == "rule":
                scaler.set_growth_interval(7)
            else:
                hook = optimizer.register_step_pre_hook(_out_of_memory)
        try:
            scaler.step(optimizer)
            scaler.update()
        except DistScaleError as error:
            seen.append(f"{type(error).__name__}: {error}")
            break
        except MemoryError:
            scaler.update()
        finally:
            if hook is not None:
                hook.remove()
    return [*seen, str(parameter.tolist())]


def _out_of_memory(*_: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_failed_on_one_rank_stops_all_at_the_next(fused: bool) -> None:
    # Its peers have applied that step, so the ranks differ from then on.
    first, second = run_threads(_errors, 2, "apply", fused)
    assert first == ["ProtocolError: rank 1 failed before the exchange of step 2, so no rank applied it; "
                     "that rank's own error says why", "[-2.0, -2.0]"]  # fmt: skip
    assert second[0].startswith("ProtocolError: the optimizer step 1 failed on this rank (MemoryError())")
    assert second[1] == "[-1.0, -1.0]"


@pytest.mark.parametrize("fused", [False, True])
def test_a_rule_that_changed_on_one_rank_is_found_at_once(fused: bool) -> None:
    for seen in run_threads(_errors, 2, "rule", fused):
        assert seen[0].startswith(f"{DesyncError.__name__}: ranks differ in ")
        assert (", rank 0 unlike rank 1." if fused else "2000 on rank 0; 7 on rank 1") in seen[0]
        assert seen[1] == "[-1.0, -1.0]"


def _exchanges(inner: ThreadReducer) -> tuple[int, int]:
    reducer = CountingReducer(inner)
    scaler = DistributedGradScaler("cpu", reducer=reducer, max_norm=1.0)
    parameter = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for growth_interval in (5, 6, 7):
        scaler.set_growth_interval(growth_interval)
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return reducer.num_reduces, reducer.num_gathers


def test_a_rule_that_changes_on_all_ranks_costs_nothing() -> None:
    assert run_threads(_exchanges, 2) == [(3, 1), (3, 1)]
