"""The same run in a DeepSpeed engine: DeepSpeed's loop, and distscale's decision within it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from checkpoints import save_checkpoint
from cluster import Cluster
from data import Text
from deepspeed_import import import_deepspeed
from distscale import ConfigError, ProcessGroupReducer
from distscale.config import Config
from distscale.integrations.deepspeed import deepspeed_initialize
from gpt import GPT
from layout import adamw
from steps import Trained, evaluate, learning_rate, micro_batches
from stopwatch import Stopwatch, TimedReducer

__all__ = ["DeepSpeedTrainer"]


class DeepSpeedTrainer:
    """One run of one configuration on all ranks, by a DeepSpeed engine. Gradients are not profiled.

    Args:
        config: of the run: model, data, optimizer, number of steps.
        engine_config: checked: engine, precision and scale.
        text: equal on all ranks.
        cluster: connected.

    Raises:
        ConfigError: if DeepSpeed refuses ``engine_config``, or makes an engine of it that cannot be coordinated.
    """

    def __init__(self, config: Config, engine_config: Mapping[str, Any], text: Text, cluster: Cluster) -> None:
        self.config = config
        self.step = 0
        self.applied = 0
        self._text = text
        self._cluster = cluster
        self._stopwatch = Stopwatch(cluster.device)

        deepspeed = import_deepspeed(cluster.device)
        torch.manual_seed(config.run.seed)
        shape = config.model
        self.model = GPT(text.vocabulary, shape.layers, shape.width, shape.heads, shape.sequence, torch.float32)
        reducer = TimedReducer(ProcessGroupReducer(), self._stopwatch)
        try:
            self.engine, *_ = deepspeed_initialize(
                model=self.model,
                optimizer=adamw(self.model, config.train),
                config=engine_config,
                distscale={"reducer": reducer},
            )
        except ConfigError:
            raise
        # How DeepSpeed words what it does not like.
        except (deepspeed.DeepSpeedConfigError, ValueError, AssertionError, NotImplementedError) as error:
            raise ConfigError(f"DeepSpeed refuses its config: {_in_a_sentence(error)}") from error
        self.scaler = self.engine.distscale
        # The engine has cast the parameters to what its config says.
        self.model.dtype = self.model.token.dtype

    @property
    def agrees_on_stops(self) -> bool:
        return True

    def request_stop(self) -> None:
        self.scaler.request_stop()

    def train_step(self) -> Trained:
        """Attempts one optimizer step. Collective: yes. Syncs host: yes, for the loss and the decision.

        ``scaler_s`` lasts from the call of ``engine.step`` to the end of the exchange: the sweep and the decision, and
        what DeepSpeed does before it asks for them.
        """
        config, watch = self.config, self._stopwatch
        num_micro = config.train.accumulation
        lr = learning_rate(self.applied, config.train, config.run.steps)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr

        watch.restart()
        watch.mark("step begins")
        total = torch.zeros((), device=self._cluster.device)
        for inputs, targets in micro_batches(config, self._text, self._cluster, self.step):
            loss = self.engine(inputs, targets)
            self.engine.backward(loss)
            watch.mark("scaler begins")
            self.engine.step()
            total += loss.detach() / num_micro
        watch.mark("step ends")
        report = self.scaler.last_step
        assert report is not None

        self.step += 1
        self.applied += not report.skipped
        return Trained(
            report,
            {
                "loss": float(total),
                "lr": lr,
                "applied": self.applied - (not report.skipped),
                "time_s": watch.seconds("step begins", "step ends"),
                "scaler_s": watch.seconds("scaler begins", "exchange ends"),
                "exchange_s": watch.seconds("exchange begins", "exchange ends"),
            },
        )

    def evaluate(self) -> float:
        self.engine.eval()
        loss = evaluate(self.engine, self.config, self._text, self._cluster)
        self.engine.train()
        return loss

    def save(self) -> None:
        """Writes a checkpoint of the present step, which DeepSpeed alone can read, too. Collective: yes."""
        progress = {"step": self.step, "applied": self.applied}

        def write(aside: Path) -> None:
            self.engine.save_checkpoint(str(aside.parent), aside.name, {"progress": progress}, save_latest=False)

        save_checkpoint(self.config.folder, self.step, self.config.train.keep, write)

    def finish_saving(self) -> None:
        """Does nothing: ``save`` has waited."""

    def load(self, path: Path) -> None:
        """Restores a checkpoint; from stage 1 on of as many ranks, unless it is universal. Collective: yes.

        Raises:
            ConfigError: if DeepSpeed cannot.
        """
        from deepspeed.runtime.zero.utils import ZeRORuntimeException

        try:
            _, state = self.engine.load_checkpoint(str(path.parent), path.name)
        except ZeRORuntimeException as error:
            raise ConfigError(f"DeepSpeed cannot load the checkpoint {path}: {error}") from error
        self.step, self.applied = state["progress"]["step"], state["progress"]["applied"]

    def fingerprint(self) -> tuple[Any, ...]:
        """What must be equal on all ranks: below ZeRO 3, also the sum of each parameter. Collective: no."""
        copies = [param.detach() for param in self.model.parameters() if not hasattr(param, "ds_id")]
        sums = [float(copy.double().sum()) for copy in copies]
        return (self.step, self.applied, self.scaler.state_dict(), sums)


def _in_a_sentence(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
