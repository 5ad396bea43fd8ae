"""torch.compile around the scaler: nothing of ours breaks a graph, and no decision reads a value on the host."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from distscale import DistributedGradScaler, DynamicScale
from distscale.exchange import Agreed, Flag, judge
from distscale.policy import NoScaling, Outcome, Policy, ScaleState, StaticScale

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # by torch's own compiler

INF = math.inf
POLICIES: list[Policy] = [
    DynamicScale(growth_interval=2),
    DynamicScale(hysteresis=2, min_scale=2.0**10, max_scale=2.0**17, growth_interval=1),
    StaticScale(),
    NoScaling(),
]


class NoHostReads(TorchDispatchMode):
    """Fails where a value of a tensor would go to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero"), f"{name} reads a value"
        return func(*args, **(kwargs or {}))


def batch(index: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(index))


def trained(is_compiled: bool, bad_step: int, fused: bool) -> tuple[list[Tensor], list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2))

    def loss_of(x: Tensor) -> Tensor:
        return model(x).square().mean()

    forward = torch.compile(loss_of, backend="aot_eager", fullgraph=True) if is_compiled else loss_of
    optimizer = AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = DistributedGradScaler("cpu", max_norm=1.0, names=model)
    scales = []
    for index in range(5):
        optimizer.zero_grad()
        scaler.scale(forward(batch(index))).backward()
        if index == bad_step:
            model[0].weight.grad[0, 0] = INF
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [param.detach() for param in model.parameters()], scales


@pytest.mark.parametrize("fused", [False, True])
def test_compiled_forward_and_backward_with_the_scaler_outside(fused: bool) -> None:
    params, scales = trained(True, 2, fused)
    expected, expected_scales = trained(False, 2, fused)
    torch.testing.assert_close(params, expected)
    assert scales == expected_scales == [2.0**16] * 2 + [2.0**15] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_loss_is_scaled_within_a_graph(dtype: torch.dtype) -> None:
    # The scale is a tensor that is changed in place, so what was compiled before sees a new one.
    scaler = DistributedGradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))

    def scaled(x: Tensor) -> Tensor:
        return x.square().sum() * scaler._scale

    compiled = torch.compile(scaled, backend="eager", fullgraph=True)
    x = torch.ones(3, dtype=dtype)
    assert compiled(x).item() == 24.0
    scaler.update(4.0)
    assert compiled(x).item() == 12.0


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{policy.name}-{policy.hysteresis}")
def test_policy_is_one_graph(policy: Policy) -> None:
    compiled = torch.compile(policy.next_state, backend="eager", fullgraph=True)
    state = mine = ScaleState(
        torch.tensor(policy.init_scale),
        torch.tensor(0, dtype=torch.int32),
        torch.tensor(policy.hysteresis, dtype=torch.int32),
        torch.tensor(0, dtype=torch.int32),
    )
    kinds = {"clean": (False, False, True), "overflow": (True, False, False), "lost": (False, True, False)}
    for kind in ("clean", "overflow", "overflow", "clean", "clean", "lost", "clean", "overflow"):
        outcome = Outcome(*map(torch.tensor, kinds[kind]))
        with NoHostReads():
            state = policy.next_state(state, outcome)
        mine = compiled(mine, outcome)
        assert [tensor.dtype for tensor in mine] == [torch.float32, *[torch.int32] * 3]
        assert [tensor.item() for tensor in mine] == [tensor.item() for tensor in state]


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_judgement_is_one_graph(max_norm: float | None) -> None:
    compiled = torch.compile(judge, backend="eager", fullgraph=True)
    sums = None if max_norm is None else torch.tensor([25.0], dtype=torch.float64)
    agreed = torch.arange(len(Agreed), dtype=torch.int32)
    for bits in (0, 0x7F800000, 0x7FC00001):
        header = torch.zeros(len(Flag), dtype=torch.int32)
        header[Flag.SCALED] = 1
        maxima = torch.cat([header, agreed, ~agreed, torch.tensor([0, 0, 0, 0, 0, bits, 7], dtype=torch.int32)])
        with NoHostReads():
            expected = judge(maxima, sums, max_norm)
        found = compiled(maxima, sums, max_norm)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert found.found_inf.item() == float(bits > 0)


@pytest.mark.parametrize("bad", [0.0, INF])
@pytest.mark.parametrize("unscales", [False, True])
def test_step_and_update_read_nothing(unscales: bool, bad: float) -> None:
    param = nn.Parameter(torch.zeros(3))
    optimizer = AdamW([param], fused=True)
    scaler = DistributedGradScaler("cpu", max_norm=1.0)
    for index in range(3):
        param.grad = torch.full((3,), bad if index == 2 else 1.0)
        scaler.scale(torch.ones(()))
        if index < 2:
            scaler.step(optimizer)
            scaler.update()
    storage = scaler._scale.data_ptr()  # type: ignore[union-attr]
    with NoHostReads():
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert scaler._scale is not None
    assert (scaler._scale.data_ptr(), scaler.get_scale()) == (storage, 2.0**15 if bad else 2.0**16)
    with pytest.raises(AssertionError, match="reads a value"), NoHostReads():
        scaler.get_scale()  # the mode sees what there is to see
