"""What the steps of all trainers have in common: their data, their learning rate, their validation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cluster import Cluster
from data import Text, training_batch, validation_batch
from distscale import StepReport
from distscale.config import Config
from distscale.sections import TrainSection

__all__ = ["AnyTrainer", "Trained", "evaluate", "learning_rate", "micro_batches"]

FINAL_LR_SHARE = 0.1


@dataclass(frozen=True)
class Trained:
    """What one step did. The report is equal on all ranks, the rest is this rank's own."""

    report: StepReport
    extra: dict[str, Any] = field(default_factory=dict)
    """For the record: loss, lr, applied, time_s, scaler_s, exchange_s, and at times a gradient profile."""


class AnyTrainer(Protocol):
    """What a session needs of a trainer. All methods but ``request_stop`` and ``fingerprint`` are collective."""

    step: int
    """Steps attempted."""
    applied: int
    """Of these, the ones that were not skipped."""

    @property
    def agrees_on_stops(self) -> bool:
        """Whether reports say that some rank has asked for a stop."""

    def request_stop(self) -> None:
        """Asks all ranks to stop after the coming step."""

    def train_step(self) -> Trained:
        """Attempts one optimizer step."""

    def evaluate(self) -> float:
        """Returns the loss on the validation text in nats a token, the same on all ranks."""

    def save(self) -> None:
        """Writes a checkpoint of the present step, or starts to."""

    def finish_saving(self) -> None:
        """Waits until the last checkpoint is complete."""

    def load(self, path: Path) -> None:
        """Restores a checkpoint."""

    def fingerprint(self) -> tuple[Any, ...]:
        """What must be equal on all ranks."""


def learning_rate(applied: int, train: TrainSection, steps: int) -> float:
    """Linear warm-up, then a cosine to a tenth of the peak.

    Args:
        applied: optimizer steps before this one; a skipped step does not count.
        train: the settings.
        steps: of the whole run.
    """
    if applied < train.warmup:
        return train.lr * (applied + 1) / train.warmup
    progress = (applied - train.warmup) / max(1, steps - train.warmup)
    cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
    return train.lr * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * cosine)


def micro_batches(config: Config, text: Text, cluster: Cluster, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields this rank's inputs and targets of one step, int64, shape (batch, sequence), on its device."""
    for micro_batch in range(config.train.accumulation):
        inputs, targets = training_batch(
            text, config.run.seed, step, micro_batch, cluster.rank, config.train.batch, config.model.sequence
        )
        yield inputs.to(cluster.device), targets.to(cluster.device)


def evaluate(model: nn.Module, config: Config, text: Text, cluster: Cluster) -> float:
    """Returns the loss on the validation text in nats a token, the same on all ranks. Collective: yes."""
    num_batches = config.train.eval_batches * cluster.world_size
    total = torch.zeros((), dtype=torch.float64, device=cluster.device)
    with torch.no_grad():
        for index in range(cluster.rank, num_batches, cluster.world_size):
            inputs, targets = validation_batch(text, index, num_batches, config.train.batch, config.model.sequence)
            total += model(inputs.to(cluster.device), targets.to(cluster.device)).double()
    return cluster.mean(float(total) / config.train.eval_batches)
