"""Transformer Engine's scales from our exchange, on a stand-in with the buffers that it has; it needs a GPU itself."""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from distscale import DistributedGradScaler
from distscale.errors import ConfigError
from distscale.fp8 import CurrentScaling, DelayedScaling
from distscale.integrations.transformer_engine import serve_transformer_engine
from ranks import run_ranks

Format = Enum("Format", ["E4M3", "E5M2", "HYBRID"])


class FP8GlobalStateManager:
    """Reduces at the end of each pass, as Transformer Engine's does; a rank that does so alone would wait for ever."""

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        raise AssertionError("Transformer Engine's own reduction")


class State:
    """DelayedScalingRecipeState: row 0 of the history is where casts leave their amax."""

    def __init__(self, num_tensors: int, fp8_format: Format) -> None:
        self.recipe = SimpleNamespace(fp8_format=fp8_format)
        self.scale = torch.ones(num_tensors)
        self.amax_history = torch.zeros(4, num_tensors)

    def see(self, index: int, values: Tensor) -> None:
        self.amax_history[0, index] = torch.maximum(self.amax_history[0, index], values.abs().max())  # atomicMaxFloat


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, meta: dict[str, State]) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.meta = meta
        meta["scaling_fwd"].see(0, input), meta["scaling_fwd"].see(1, weight)
        return input @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        input, weight = ctx.saved_tensors
        ctx.meta["scaling_bwd"].see(0, grad)
        FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return grad @ weight, grad.t() @ input, None


class EngineLinear(nn.Linear):
    """Makes its buffers at its first forward pass, for one matrix product."""

    fp8_format = Format["HYBRID"]

    def __init__(self, size: int) -> None:
        super().__init__(size, size, bias=False)
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}

    def forward(self, input: Tensor) -> Tensor:
        if "scaling_fwd" not in self.fp8_meta:
            self.fp8_meta |= {"scaling_fwd": State(3, self.fp8_format), "scaling_bwd": State(2, self.fp8_format)}
        return _Product.apply(input, self.weight, self.fp8_meta)


def install(monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    package = ModuleType("transformer_engine.pytorch.quantization")
    package.FP8GlobalStateManager = FP8GlobalStateManager  # type: ignore[attr-defined]
    modules = {name: ModuleType(name) for name in ("transformer_engine", "transformer_engine.pytorch")}
    for name, module in {**modules, package.__name__: package}.items():
        if monkeypatch is None:
            sys.modules[name] = module
        else:
            monkeypatch.setitem(sys.modules, name, module)
    if monkeypatch is not None:
        own = FP8GlobalStateManager.__dict__["reduce_and_update_fp8_tensors"]
        monkeypatch.setattr(FP8GlobalStateManager, "reduce_and_update_fp8_tensors", own)


def scales_of_ranks(rank: int) -> dict[str, list[float]]:
    install()
    torch.manual_seed(0)
    model = nn.ModuleDict({name: EngineLinear(4) for name in ("first", "side")})
    for module in model.values():
        nn.init.eye_(module.weight)
    scales = serve_transformer_engine(model, DelayedScaling())
    optimizer = SGD(model.parameters(), lr=0.0)
    scaler = DistributedGradScaler("cpu", init_scale=8.0, names=model, fp8=scales)
    found: dict[str, list[float]] = {}
    for step in range(2):
        if rank == 0 or step > 0:
            # The largest is neither in the last micro-batch, nor in the last call, nor on both ranks.
            for size in (3.0, 50.0, 2.0) if rank == 0 else (1.0,):
                x = model["first"](torch.full((2, 4), size))
                x = model["first"](x / 100)
                FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)  # the end of autocast
                if rank == 0:
                    x = model["side"](x * 10)
                scaler.scale(x.sum() * size).backward()
        model.eval()
        model["first"](torch.full((2, 4), 1e9))
        model.train()
        for module in model.values():
            for param in module.parameters():
                param.grad = torch.ones_like(param) if param.grad is None else param.grad
        scaler.step(optimizer)
        scaler.update()
    for name, module in model.items():
        for part in ("scaling_fwd", "scaling_bwd"):
            state = module.fp8_meta.get(part)
            if state is not None:
                assert not state.amax_history.any()
                found[f"{name}.{part}"] = state.scale.tolist()
    found["histories"] = list(map(str, scales.state_dict().items()))  # type: ignore[arg-type]
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, found)
    assert everywhere[0].items() >= everywhere[1].items()
    return found


def test_scales_come_from_the_exchange() -> None:
    found, of_rank_1 = run_ranks(scales_of_ranks, 2)
    # 448 / 50, / 1 and none for the third, which nothing was cast to.
    assert found["first.scaling_fwd"] == [8.0, 256.0, 1.0]
    assert found["side.scaling_fwd"] == [64.0, 256.0, 1.0]
    # Gradients of 50, times the loss scale of 8, times 10 where the side branch was applied.
    assert found["side.scaling_bwd"] == [2.0**7, 1.0]
    assert found["first.scaling_bwd"] == [2.0**3, 1.0]
    assert "side.scaling_fwd" not in of_rank_1


def test_what_cannot_be_served(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(EngineLinear(4))
    with pytest.raises(ConfigError, match="Transformer Engine is not installed"):
        serve_transformer_engine(model, DelayedScaling())
    install(monkeypatch)
    with pytest.raises(ConfigError, match="has no module of Transformer Engine"):
        serve_transformer_engine(nn.Sequential(nn.Linear(3, 3)), DelayedScaling())
    with pytest.raises(ConfigError, match="is served with DelayedScaling"):
        serve_transformer_engine(model, CurrentScaling())  # type: ignore[arg-type]
    serve_transformer_engine(model, DelayedScaling(fp8_format="E4M3"))
    with pytest.raises(ConfigError, match="0 runs by Transformer Engine's format HYBRID, and is served for E4M3"):
        model(torch.ones(2, 4))
