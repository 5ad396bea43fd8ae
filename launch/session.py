"""One call of the pretraining program on one rank: train, compare, judge."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console

from cluster import Cluster, leave_last_words
from data import Text
from display import Display
from distscale import JsonlRecord, ScaleExhaustedError
from distscale.config import Config
from distscale.faults import Fault
from distscale.injector import Injector
from distscale.sections import Fp8Section, PrecisionSection, ScalerSection
from files import sync, write_whole
from launcher import call_of_launcher
from resume import ResumePoint
from start import Start, find_start, prepare
from steps import AnyTrainer
from stop import StopRequest
from summary import mean_last_loss, read_record, read_verdict, show, summarize, to_json
from trainer import Trainer
from watchdog import Watchdog

__all__ = ["Session"]

LOG_WIDTH = 120
LAUNCHER_VARIABLE = "DISTSCALE_LAUNCHER"


class Session:
    """One call of the program on one rank.

    Args:
        options: of the command line: config, resume, compare, set.
        config: checked.
        engine: the DeepSpeed config, checked, or None for the layouts of the TOML.
        text: equal on all ranks.
        resumed: where an earlier run goes on, or None for a new one.
        cluster: not yet connected.
        stop: that may be asked for.
        faults: to inject, checked.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        config: Config,
        engine: dict[str, Any] | None,
        text: Text,
        resumed: ResumePoint | None,
        cluster: Cluster,
        stop: StopRequest,
        faults: Sequence[Fault] = (),
    ) -> None:
        self.options = options
        self.config = config
        self.engine = engine
        self.text = text
        self.resumed = resumed
        self.cluster = cluster
        self.stop = stop
        self.faults = faults
        self.step = 0
        self._watchdog = Watchdog(cluster.rank, config.parallel.timeout_s, leave_last_words)
        # Away from a terminal the lines go to a log, which has no width.
        width = None if sys.stdout.isatty() else LOG_WIDTH
        self.console = Console(width=width) if cluster.rank == 0 else None

    def run(self) -> int:
        """Trains, compares, and judges. Collective: yes. Returns the exit code, the same on all ranks.

        Raises:
            ConfigError: if the ranks would start at different steps, or a run that was started again cannot go on.
            DistScaleError, OSError, RuntimeError: as training does.
        """
        self.cluster.connect(self.config.parallel.timeout_s)
        start = find_start(self.config, self.text, self.engine, self.resumed, self.cluster)
        if (had_passed := self._earlier_verdict(start)) is not None:
            return 0 if had_passed else 1
        folder = self.config.folder
        prepare(start, self.config, self.text, self.engine, self.faults, self.cluster, self._say)
        trainer = self._new_trainer(start.restart)
        if start.resumed:
            trainer.load(start.resumed.path)
            self._say(f"resumed {folder} at step {trainer.step}")
        if not self._train(trainer, folder, self.config.run.name):
            done, steps = trainer.step, self.config.run.steps
            self._say(f"stopped after step {done} of {steps}; everything is saved in {folder}")
            self._say(f"to continue: {self._resume_command()}")
            return 0
        self._watchdog.begin(trainer.step)
        validation_loss = trainer.evaluate()
        ranks_agree = len({repr(state) for state in self.cluster.gather(trainer.fingerprint())}) == 1
        # Nothing is compared with a DeepSpeed engine.
        comparison: dict[str, Any] | None = None if self.engine is None else {}
        if self.options.compare and (comparison := self._compare()) is None:
            self._say(f"the comparison was cut short; {self.config.run.name} itself is complete")
            self._say(f"to compare: {self._resume_command()}")
        passed = [True]
        if self.console:
            rows = read_record(folder / "steps.jsonl")
            summary = summarize(self.config, self.text, rows, validation_loss, ranks_agree, comparison)
            write_whole(folder / "summary.json", to_json(summary))
            show(self.console, summary)
            self._say(f"results are in {folder}")
            passed = [summary["passed"]]
            if not summary["passed"]:
                leave_last_words(summary["verdict"])
        dist.broadcast_object_list(passed)
        return 0 if passed[0] else 1

    def _earlier_verdict(self, start: Start) -> bool | None:
        """Says what the run came to if this job has completed it in an earlier life. Collective: yes.

        (A launcher that starts failed jobs again does so after a failed verdict, too.) Returns None if it has not.
        """
        told: list[tuple[bool, str] | None] = [None]
        is_done = start.restart and start.resumed and start.resumed.step == self.config.run.steps
        if is_done and self.console and (verdict := read_verdict(self.config.folder, self.options.compare)):
            told = [verdict]
            self._say(f"the run {self.config.folder} was completed before this restart, and is left as it is")
            self._say(verdict[1])
            if not verdict[0]:
                leave_last_words(verdict[1])
        dist.broadcast_object_list(told)
        return told[0][0] if told[0] else None

    def _new_trainer(self, restart: int) -> AnyTrainer:
        if self.engine is None:
            injector = Injector(self.faults, self.cluster.rank, restart) if self.faults else None
            return Trainer(self.config, self.text, self.cluster, injector)
        # DeepSpeed takes seconds to import, and may not be installed.
        from deepspeed_trainer import DeepSpeedTrainer

        return DeepSpeedTrainer(self.config, self.engine, self.text, self.cluster)

    def _train(self, trainer: AnyTrainer, folder: Path, title: str, saves: bool = True) -> bool:
        """Trains to the end. Returns False if a stop came first; the checkpoint is then written."""
        config, train = self.config, self.config.train
        tokens = self.cluster.world_size * train.batch * train.accumulation * config.model.sequence
        record = JsonlRecord(folder / "steps.jsonl", trainer.step) if self.console else None
        num_skips = trainer.step - trainer.applied
        with Display(
            self.console, title, config.run.steps, trainer.step, num_skips, tokens, train.log_every
        ) as display:
            while trainer.step < config.run.steps:
                self.step = trainer.step
                self._watchdog.begin(self.step)
                if self.stop.is_made():
                    trainer.request_stop()
                trained = trainer.train_step()
                stops = trained.report.stop_requested
                if not trainer.agrees_on_stops:
                    stops = self.cluster.any(self.stop.is_made())
                if record:
                    record(trained.report, **trained.extra)
                    display.show(trained)
                done = trainer.step
                is_last = done == config.run.steps
                if train.eval_every and done % train.eval_every == 0 and not (is_last or stops):
                    validation_loss = trainer.evaluate()
                    display.say(f"{title}: step {done}  validation loss {validation_loss:.3f}")
                if saves and (stops or config.saves_at(done)):
                    if record:
                        # Or after a loss of power the record might lack steps that the checkpoint has.
                        sync(record.path)
                    trainer.save()
                if stops and not is_last:
                    break
            trainer.finish_saving()
        if record:
            record.close()
        return trainer.step >= config.run.steps

    def _compare(self) -> dict[str, Any] | None:
        """The same run in other precisions, nothing else changed; None if a stop came first."""
        results: dict[str, Any] = {}
        for name, config in _others(self.config).items():
            folder = self.config.folder / "compare" / name.lower().replace(" ", "_")
            trainer = Trainer(config, self.text, self.cluster)
            try:
                if not self._train(trainer, folder, name, saves=False):
                    return None
            except ScaleExhaustedError as error:
                results[name] = {"error": f"ended at step {self.step}: {error}"}
                continue
            results[name] = {"validation_loss": trainer.evaluate()}
            if self.console:
                rows = read_record(folder / "steps.jsonl")
                results[name] |= {
                    "train_loss": mean_last_loss(rows),
                    "num_skips": sum(row["skipped"] for row in rows),
                }
        return results

    def _say(self, sentence: str) -> None:
        if self.console:
            self.console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    def _resume_command(self) -> str:
        settings = "".join(f" --set {shlex.quote(setting)}" for setting in self.options.set)
        compare = " --compare" if self.options.compare else ""
        # The wrapper says how it was called, since torchrun may not be on the user's path.
        start = os.environ.get(LAUNCHER_VARIABLE) or call_of_launcher(sys.argv[0], self.cluster.environment)
        engine = f" --deepspeed {shlex.quote(self.options.deepspeed)}" if self.engine is not None else ""
        return f"{start} {self.options.config}{engine} --resume{compare}{settings}"


def _others(config: Config) -> dict[str, Config]:
    """The same run in FP32, and in its own precision without scales, by name."""
    without_scale = ScalerSection(
        policy="none", max_norm=config.scaler.max_norm, max_consecutive_skips=config.scaler.max_consecutive_skips
    )
    fp32 = {
        "precision": PrecisionSection(dtype="fp32", reduce_dtype="fp32"),
        "scaler": without_scale,
        "fp8": Fp8Section(),
    }
    if config.fp8.is_used:
        unscaled = {"fp8": config.fp8.model_copy(update={"scaling": "none"})}
        return {"FP32": config.model_copy(update=fp32), "FP8 without scales": config.model_copy(update=unscaled)}
    unscaled = {"precision": config.precision.model_copy(update={"dtype": "fp16"}), "scaler": without_scale}
    return {"FP32": config.model_copy(update=fp32), "FP16 without a scale": config.model_copy(update=unscaled)}
