"""Lightning, for real, on two gloo ranks in FP16: Fabric over DDP, FSDP1 and FSDP2, and the Trainer over FSDP2."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from cases import error_of, local, on_all, poison, results_by_case, snapshot, tiny_model
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

from distscale import DistributedGradScaler

WORLD_SIZE = 2
SCALE = 1024.0
RATE = 2.0**-6
BAD_RANKS = (1, None, 0, None, 1)


def fp16_fsdp2(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    fully_shard(model, mesh=mesh["data_parallel"], mp_policy=MixedPrecisionPolicy(torch.float16, torch.float16))
    return model


def poison_one(model: torch.nn.Module) -> None:
    grads = [local(param.grad) for param in model.parameters() if param.grad is not None]
    poison(next(grad for grad in grads if grad.numel()), torch.inf)


def inputs(rank: int) -> torch.Tensor:
    return torch.linspace(-1.0, 1.0 + rank, 20).view(5, 4)


def environment() -> None:
    """What a launcher would set; the process group is there already, and Lightning takes it."""
    os.environ.update(LOCAL_WORLD_SIZE=str(WORLD_SIZE), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    warnings.simplefilter("ignore")  # of Lightning, about CUDA and about a loader without workers


def fabric(rank: int) -> dict[str, Any]:
    """(skipped, scale, untouched) of each step, by layout, optimizer and scaler."""
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.precision import FSDPPrecision, MixedPrecision
    from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy

    class FSDPOnCpu(FSDPStrategy):
        """Fabric refuses FSDPStrategy itself without a GPU."""

    environment()
    seen: dict[str, Any] = {}
    for layout in ("ddp", "fsdp1", "fsdp2"):
        for fused in (False, True):
            for kind in (DistributedGradScaler, ShardedGradScaler if layout == "fsdp1" else GradScaler):
                scaler, model = kind("cpu", init_scale=SCALE), tiny_model()
                strategy: Any
                plugin: Any
                if layout == "fsdp1":
                    plugin = FSDPPrecision("16-mixed")
                    plugin.scaler = scaler  # its argument scaler= does not work, see below
                    strategy = FSDPOnCpu()
                else:
                    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
                    strategy = "ddp"
                if layout == "fsdp2":
                    strategy = ModelParallelStrategy(fp16_fsdp2, data_parallel_size=2, tensor_parallel_size=1)
                run = Fabric(accelerator="cpu", devices=WORLD_SIZE, strategy=strategy, plugins=[plugin])
                run.launch()
                if layout == "fsdp1":
                    # Fabric would give it the index of a GPU; a model that is wrapped already is left alone.
                    device, precision = torch.device("cpu"), plugin.mixed_precision_config
                    model = FullyShardedDataParallel(model, device_id=device, mixed_precision=precision)
                model = run.setup_module(model)
                optimizer = run.setup_optimizers(AdamW(model.parameters(), lr=RATE, fused=fused))
                seen[f"{layout}, {fused}, {kind.__name__}"] = _fabric_steps(run, model, optimizer, scaler, rank)
    return seen


def _fabric_steps(run: Any, model: Any, optimizer: Any, scaler: Any, rank: int) -> list[Any]:
    steps = []
    for bad_rank in BAD_RANKS:
        optimizer.zero_grad()
        run.backward(model(inputs(rank)).float().square().mean())
        if rank == bad_rank:
            poison_one(model)
        before = snapshot(optimizer.optimizer)
        optimizer.step()
        skipped = scaler.last_step.skipped if isinstance(scaler, DistributedGradScaler) else None
        steps.append((skipped, scaler.get_scale(), snapshot(optimizer.optimizer) == before))
    return steps


def closed_door(rank: int) -> list[tuple[str, str]]:
    """What becomes of a scaler that is given as ``FSDPPrecision``'s argument."""
    from lightning.fabric.plugins.precision import FSDPPrecision as OfFabric
    from lightning.pytorch.plugins.precision import FSDPPrecision as OfTrainer

    scaler = ShardedGradScaler("cpu")
    return [error_of(lambda door=door: door("16-mixed", scaler=scaler)) for door in (OfFabric, OfTrainer)]  # type: ignore[misc]


def trainer(rank: int) -> dict[str, Any]:
    """(skipped, scale, untouched, learning rate after it, clip coefficient) of each step of ``Trainer.fit``."""
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Training(pl.LightningModule):
        def __init__(self, fused: bool) -> None:
            super().__init__()
            self.fused, self.steps, self.model = fused, [], tiny_model()

        def configure_model(self) -> None:
            fp16_fsdp2(self.model, self.device_mesh)

        def configure_optimizers(self) -> Any:
            optimizer = AdamW(self.model.parameters(), lr=RATE, fused=self.fused)
            return [optimizer], [{"scheduler": StepLR(optimizer, 1, gamma=0.5), "interval": "step"}]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(inputs(rank)).float().square().mean()

        def on_after_backward(self) -> None:
            if rank == BAD_RANKS[self.trainer.fit_loop.total_batch_idx]:
                poison_one(self.model)
            self.before = snapshot(self.trainer.optimizers[0])

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            if not self.trainer.scaler.last_step.skipped:
                super().lr_scheduler_step(scheduler, metric)

        def on_train_batch_end(self, *_: Any) -> None:
            scaler, (optimizer,) = self.trainer.scaler, self.trainer.optimizers
            untouched = snapshot(optimizer) == self.before
            rate, clip_coef = optimizer.param_groups[0]["lr"], scaler.last_step.clip_coef
            self.steps.append((scaler.last_step.skipped, scaler.get_scale(), untouched, rate, clip_coef))

    environment()
    seen: dict[str, Any] = {}
    for fused in (False, True):
        scaler = DistributedGradScaler("cpu", init_scale=SCALE, max_norm=0.01)
        run = pl.Trainer(
            accelerator="cpu",
            devices=WORLD_SIZE,
            strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
            plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)],
            max_steps=len(BAD_RANKS),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        training = Training(fused)
        run.fit(training, torch.utils.data.DataLoader(range(2 * len(BAD_RANKS)), batch_size=1))
        seen[str(fused)] = (training.steps, run.global_step)
    return seen


CASES = [fabric, closed_door, trainer]
SKIPS = [True, False, True, False, True]
SCALES = [SCALE / 2, SCALE / 2, SCALE / 4, SCALE / 4, SCALE / 8]


@pytest.fixture(scope="module")
def results() -> dict[str, list[Any]]:
    return results_by_case(CASES, WORLD_SIZE)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layout", ["ddp", "fsdp1", "fsdp2"])
def test_fabric_skips_on_all_ranks(results: dict[str, list[Any]], layout: str, fused: bool) -> None:
    seen = on_all([rank_seen[f"{layout}, {fused}, DistributedGradScaler"] for rank_seen in results["fabric"]])
    assert seen == list(zip(SKIPS, SCALES, SKIPS, strict=True))


def test_fabric_with_the_scaler_of_its_own_choice_splits(results: dict[str, list[Any]]) -> None:
    # Under FSDP1 with a fused optimizer each rank is on its own; rank 0 has the inf in the third step.
    seen = [rank_seen["fsdp1, True, ShardedGradScaler"] for rank_seen in results["fabric"]]
    assert [steps[2][2] for steps in seen] == [True, False]
    assert [steps[0][1] for steps in seen] == [SCALE, SCALE / 2]


def test_fsdp_precision_refuses_any_scaler(results: dict[str, list[Any]]) -> None:
    # So it has to be set afterwards, as above. If this fails, the argument works, and the documentation can say so.
    for kind, text in [error for rank_seen in results["closed_door"] for error in rank_seen]:
        assert (kind, "does not use a scaler" in text) == ("ValueError", True)


@pytest.mark.parametrize("fused", [False, True])
def test_c14_the_trainer_keeps_its_learning_rate_on_a_skip(results: dict[str, list[Any]], fused: bool) -> None:
    steps, global_step = on_all([rank_seen[str(fused)] for rank_seen in results["trainer"]])
    rates = [RATE, RATE / 2, RATE / 2, RATE / 4, RATE / 4]
    assert [step[:-1] for step in steps] == list(zip(SKIPS, SCALES, SKIPS, rates, strict=True))
    assert [clip_coef is None or clip_coef < 0.1 for *_, clip_coef in steps] == [True] * 5
    assert [clip_coef is None for *_, clip_coef in steps] == SKIPS
    assert global_step == 5  # skipped ones too
