"""Model, optimizer and scaler of a run, and its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import fp8
from cluster import Cluster
from data import Text
from distscale import DistributedGradScaler, ProcessGroupReducer
from distscale.config import Config
from distscale.injector import Injector
from distscale.profile import FORMATS, LossCounts, count_losses
from gpt import GPT, Linear, plain_linear
from layout import DTYPES, distribute, gradient_sync, new_optimizer
from saver import Saver
from steps import Trained, evaluate, learning_rate, micro_batches
from stopwatch import Stopwatch, TimedReducer, time_optimizer

__all__ = ["Trainer"]


class Trainer:
    """One run of one configuration on all ranks.

    Args:
        config: of the run.
        text: equal on all ranks.
        cluster: connected.
        injector: of faults; None for none.

    Raises:
        ConfigError: if a fault is for a tensor that the model does not have.
    """

    def __init__(self, config: Config, text: Text, cluster: Cluster, injector: Injector | None = None) -> None:
        self.config = config
        self.step = 0
        self.applied = 0
        self._text = text
        self._cluster = cluster
        self._stopwatch = Stopwatch(cluster.device)
        self._profile_is_due = False

        torch.manual_seed(config.run.seed)
        shape = config.model
        self.model = GPT(
            text.vocabulary,
            shape.layers,
            shape.width,
            shape.heads,
            shape.sequence,
            DTYPES[config.precision.dtype],
            plain_linear if config.fp8.linears else Linear,
        ).to(cluster.device)
        scales = fp8.convert(self.model, config)
        self._replica = distribute(self.model, config)
        fp8.send(self._replica, scales, config)
        self.optimizer = new_optimizer(self.model, config.train)
        time_optimizer(self.optimizer, self._stopwatch)
        rule = config.scaler.model_dump()
        self.scaler = DistributedGradScaler(
            cluster.device.type,
            reducer=TimedReducer(ProcessGroupReducer(), self._stopwatch),
            names=self.model,
            fp8=scales,
            **rule,
        )
        self._injector = injector
        self._params = dict(self.model.named_parameters())
        if injector:
            injector.check_tensors(self._params)
        self._saver = Saver(config, injector)

    @property
    def agrees_on_stops(self) -> bool:
        return self.scaler.is_enabled()

    def request_stop(self) -> None:
        self.scaler.request_stop()

    def train_step(self) -> Trained:
        """Attempts one optimizer step. Collective: yes. Syncs host: yes, for the loss and the report."""
        config, watch = self.config, self._stopwatch
        num_micro = config.train.accumulation
        lr = learning_rate(self.applied, config.train, config.run.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr

        watch.restart()
        watch.mark("step begins")
        total = torch.zeros((), device=self._cluster.device)
        batches = micro_batches(config, self._text, self._cluster, self.step)
        for micro_batch, (inputs, targets) in enumerate(batches):
            with gradient_sync(self._replica, micro_batch == num_micro - 1):
                loss = self._replica(inputs, targets) / num_micro
                self.scaler.scale(loss).backward()
            total += loss.detach()
        if self._injector:
            self._injector.before_exchange(self.step, self._params, self.scaler)
        watch.mark("profile begins")
        profile = self._profile()
        watch.mark("scaler begins")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        watch.mark("scaler ends")
        report = self.scaler.last_step
        assert report is not None
        self.optimizer.zero_grad(set_to_none=True)
        watch.mark("step ends")

        extra = {
            "loss": float(total),
            "lr": lr,
            "applied": self.applied,
            "time_s": watch.seconds("step begins", "step ends") - watch.seconds("profile begins", "scaler begins"),
            "scaler_s": watch.seconds("scaler begins", "scaler ends")
            - watch.seconds("optimizer begins", "optimizer ends"),
            "exchange_s": watch.seconds("exchange begins", "exchange ends"),
        }
        if profile and not report.skipped:
            extra["gradients"] = profile
            self._profile_is_due = False
        self.step += 1
        self.applied += not report.skipped
        return Trained(report, extra)

    def evaluate(self) -> float:
        return evaluate(self.model, self.config, self._text, self._cluster)

    def save(self) -> None:
        """Writes a checkpoint of the present step, or starts to. Collective: yes. Raises: OSError."""
        self._saver.save(self.step, self._state())

    def finish_saving(self) -> None:
        """Waits until the last checkpoint is complete. Collective: yes. Raises: OSError."""
        self._saver.finish()

    def load(self, path: Path) -> None:
        """Restores a checkpoint, also of another number of ranks. Collective: yes. Raises: OSError."""
        state = self._state()
        try:
            # A rank that the saved run did not have starts from its seed.
            if f"rng.{self._cluster.rank}.cpu" not in FileSystemReader(path).read_metadata().state_dict_metadata:
                del state["rng"]
            dcp.load(state, checkpoint_id=path)
        except CheckpointException as error:
            raise OSError(
                f"the checkpoint {path} cannot be read; remove it to resume from an older one: {error}"
            ) from None
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        if "rng" in state:
            _set_rng_state(state["rng"][str(self._cluster.rank)], self._cluster.device)
        progress = state["progress"]
        self.step, self.applied = progress["step"], progress["applied"]
        self._profile_is_due = progress["profile_is_due"]

    def fingerprint(self) -> tuple[Any, ...]:
        """What must be equal on all ranks: with DDP, also the sum of each parameter. Collective: no."""
        copies = [param.detach() for param in self.model.parameters() if not isinstance(param, DTensor)]
        sums = [float(copy.double().sum()) for copy in copies]
        return (self.step, self.applied, self.scaler.state_dict(), sums)

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "scaler": self.scaler.state_dict(),
            "rng": {str(self._cluster.rank): _rng_state(self._cluster.device)},
            # Also where it is in the data: the batches are a function of the step.
            "progress": {"step": self.step, "applied": self.applied, "profile_is_due": self._profile_is_due},
        }

    def _profile(self) -> dict[str, dict[str, int]] | None:
        """Counts what small formats would lose of the unscaled gradients. Collective: yes, when due."""
        every = self.config.train.profile_every
        # An overflowing step says nothing about typical gradients, so the count is due until one is applied.
        self._profile_is_due |= every > 0 and self.step % every == 0
        if not self._profile_is_due:
            return None
        counts = {name: LossCounts() for name in FORMATS}
        inv_scale = 1 / self.scaler.get_scale()
        for param in self.model.parameters():
            if param.grad is not None:
                grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
                for name, dtype in FORMATS.items():
                    counts[name] += count_losses(grad, dtype, inv_scale)
        of_ranks = self._cluster.gather(counts)
        return {name: vars(sum((counts[name] for counts in of_ranks), LossCounts())) for name in FORMATS}


def _rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of torch's generators, uint8, shape (n,), by device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_rng_state(states: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
