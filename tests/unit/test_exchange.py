"""The vectors of the exchange: what any mixture of ranks writes, reduced, reads back as what they meant."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distscale import exchange
from distscale.exchange import Agreed, Flag
from distscale.policy import ScaleState
from distscale.sweep import INF_BITS
from distscale.sweep.reference import amax_bits


def state(scale: float = 1024.0, growth: int = 3, hysteresis: int = 1, blocked: int = 0) -> ScaleState:
    return ScaleState(torch.tensor(scale), *(torch.tensor(n, dtype=torch.int32) for n in (growth, hysteresis, blocked)))


def maxima(
    rank: int,
    slots: list[float],
    step: int = 5,
    digest: int = 7,
    loss: float = 0.0,
    flag: Flag | None = None,
    **kwargs: float,
) -> torch.Tensor:
    bits = amax_bits([torch.tensor([slot]) for slot in slots])
    loss_bits = exchange.mark_rank(amax_bits([torch.tensor([loss])])[0], rank)
    flags = [rank + 1 if name in (flag, Flag.SCALED) else 0 for name in Flag if name is not Flag.LOSS]
    mine = state(**kwargs)  # type: ignore[arg-type]
    return exchange.pack(rank, flags, step, digest, loss_bits, mine, mine.scale, exchange.mark_rank(bits, rank))


def reduced(*vectors: torch.Tensor) -> torch.Tensor:
    return torch.stack(vectors).amax(0)


@given(ranks=st.lists(st.lists(st.floats(width=32), min_size=3, max_size=3), min_size=1, max_size=6))
def test_slots_flag_kind_and_place(ranks: list[list[float]]) -> None:
    vector = reduced(*(maxima(rank, slots) for rank, slots in enumerate(ranks)))
    verdict = exchange.judge(vector, None, None)
    bad = [
        (slot, rank) for rank, slots in enumerate(ranks) for slot, value in enumerate(slots) if not math.isfinite(value)
    ]
    assert verdict.found_inf.item() == bool(bad)
    assert verdict.outcome.overflow.item() is bool(bad)
    amax = exchange.read_slots(vector.numpy())
    for slot in range(3):
        values = [abs(slots[slot]) for slots in ranks]
        expected = math.nan if any(map(math.isnan, values)) else max(values)
        assert np.array_equal(amax[slot], np.float32(expected), equal_nan=True)
    culprit = exchange.read_culprit(vector.numpy())
    assert (culprit is not None) is bool(bad)
    if culprit is not None:
        slot, rank, is_nan = culprit
        assert slot == max(bad)[0]
        assert (slot, rank) in bad
        assert is_nan is math.isnan(amax[slot])
        assert math.isnan(ranks[rank][slot]) is is_nan


def test_rank_of_a_very_large_job() -> None:
    rank = (1 << 22) - 1
    for value, is_nan in ((math.inf, False), (math.nan, True)):
        assert exchange.read_culprit(maxima(rank, [value]).numpy()) == (0, rank, is_nan)


def test_loss_comes_before_any_tensor() -> None:
    vector = reduced(maxima(0, [math.nan]), maxima(3, [1.0], loss=math.inf), maxima(2, [1.0]))
    assert exchange.read_culprit(vector.numpy()) == (None, 3, False)
    outcome = exchange.judge(vector, None, None).outcome
    assert (outcome.overflow.item(), outcome.lost.item(), outcome.clean.item()) == (False, True, False)


def test_finite_loss_leaves_no_trace() -> None:
    vector = maxima(0, [1.0], loss=3.0)
    assert exchange.read_culprit(vector.numpy()) is None
    assert exchange.judge(vector, None, None).found_inf.item() == 0


@pytest.mark.parametrize("flag", [Flag.VETO, Flag.FAILED, Flag.STOP, Flag.UNREAD])
def test_flags_name_the_rank(flag: Flag) -> None:
    vector = reduced(maxima(0, [1.0]), maxima(1, [1.0], flag=flag))
    assert exchange.read_flag(vector.numpy(), flag) == 1
    assert exchange.judge(vector, None, None).found_inf.item() == (flag in (Flag.VETO, Flag.FAILED))
    assert exchange.read_flag(maxima(0, [1.0]).numpy(), flag) is None


@pytest.mark.parametrize(
    ("key", "ours", "theirs", "bits"),
    [
        (Agreed.SCALE, {"scale": 2.0}, {"scale": 4.0}, None),
        (Agreed.GROWTH_TRACKER, {"growth": 0}, {"growth": 9}, (0, 9)),
        (Agreed.HYSTERESIS_TRACKER, {"hysteresis": 2}, {"hysteresis": 1}, (1, 2)),
        (Agreed.BLOCKED_STEPS, {"blocked": 0}, {"blocked": 1}, (0, 1)),
        (Agreed.STEP, {"step": 8}, {"step": 6}, (6, 8)),
        (Agreed.TABLE, {"digest": -1}, {"digest": 7}, (-1, 7)),
    ],
)
def test_any_difference_is_seen(key: Agreed, ours: dict, theirs: dict, bits: tuple[int, int] | None) -> None:
    vector = reduced(maxima(0, [1.0], **ours), maxima(1, [1.0], **theirs), maxima(2, [1.0], **ours))
    assert exchange.judge(vector, None, None).found_inf.item() == 1
    found = {name: (low, high) for name, low, high in exchange.read_agreed(vector.numpy())}
    assert key in found
    if bits is not None:
        assert found == {key: bits}
    alike = reduced(maxima(0, [1.0], **ours), maxima(1, [1.0], **ours))
    assert exchange.read_agreed(alike.numpy()) == []
    assert exchange.read_sides(alike.numpy()) == []
    assert sorted(exchange.read_sides(vector.numpy())) == [(0, 2), (1, 1)]


def test_ranks_of_a_very_large_job_that_differ() -> None:
    last = (1 << 22) - 1
    for scale in (2.0**exponent for exponent in range(-20, 30)):
        vector = reduced(
            maxima(last, [1.0], scale=2 * scale), maxima(7, [1.0], scale=scale), maxima(9, [1.0], scale=scale)
        )
        assert sorted(exchange.read_sides(vector.numpy())) == [(7, 9), (last, last)]


def test_nobody_scaled() -> None:
    vector = maxima(0, [1.0])
    vector[Flag.SCALED] = 0
    assert exchange.judge(vector, None, None).found_inf.item() == 1


@pytest.mark.parametrize(("max_norm", "expected"), [(2.5, 0.5), (5.0, 1.0), (50.0, 1.0), (math.inf, 1.0)])
def test_clip_coefficient(max_norm: float, expected: float) -> None:
    verdict = exchange.judge(maxima(0, [4.0]), torch.tensor([25.0], dtype=torch.float64), max_norm)
    assert verdict.grad_norm.item() == 5.0
    assert verdict.clip_coef.item() == pytest.approx(expected, rel=1e-6)
    assert verdict.clip_coef.item() <= 1


def test_size_is_that_of_the_table_alone() -> None:
    # G3: the vector never depends on what a rank holds.
    assert maxima(0, [0.0] * 10).numel() - maxima(0, []).numel() == 10
    assert maxima(0, [0.0, 0.0]).numel() == maxima(5, [math.nan, 1.0], loss=math.nan, flag=Flag.VETO).numel()
    assert maxima(0, [0.0]).max().item() < INF_BITS
