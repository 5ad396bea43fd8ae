"""One call of the pretraining program on one rank: train, compare, judge."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console

from checkpoints import move_aside
from cluster import STOP_FILE_VARIABLE, Cluster, StopRequest, leave_last_words
from data import Text
from display import Display
from distscale import ConfigError, JsonlRecord, ScaleExhaustedError
from distscale.config import Config, Fp8Section, PrecisionSection, ScalerSection, dump_config
from distscale.faults import Fault
from distscale.injector import Injector
from engine_config import dump_settings
from launcher import call_of_launcher
from resume import ENGINE_FILE, ResumePoint, can_resume, describe, resume_point
from steps import AnyTrainer
from summary import mean_last_loss, missing_steps, read_record, show, summarize, to_json
from trainer import Trainer

__all__ = ["Session"]

JOB_FILE = "job.txt"
"""Where a run keeps the id of the job that trains it."""
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
        faults: Sequence[Fault] = (),
    ) -> None:
        self.options = options
        self.config = config
        self.engine = engine
        self.text = text
        self.resumed = resumed
        self.cluster = cluster
        self.faults = faults
        self.restart = 0
        self.step = 0
        # Away from a terminal the lines go to a log, which has no width.
        width = None if sys.stdout.isatty() else LOG_WIDTH
        self.console = Console(width=width) if cluster.rank == 0 else None
        # Each machine may have a file of its own.
        is_first = cluster.environment.local_rank == 0
        self.stop = StopRequest(os.environ.get(STOP_FILE_VARIABLE, "") if is_first else "")

    def run(self) -> int:
        """Trains, compares, and judges. Collective: yes. Returns the exit code, the same on all ranks.

        Raises:
            ConfigError: if the ranks would start at different steps, or a run that was started again cannot go on.
            DistScaleError, OSError, RuntimeError: as training does.
        """
        self.stop.install()
        self.cluster.connect(self.config.parallel.timeout_s)
        self._find_start()
        folder = self.config.folder
        self._prepare(folder)
        trainer = self._new_trainer()
        if self.resumed:
            trainer.load(self.resumed.path)
            self._say(f"resumed {folder} at step {trainer.step}")
        if not self._train(trainer, folder, self.config.run.name):
            done, steps = trainer.step, self.config.run.steps
            self._say(f"stopped after step {done} of {steps}; everything is saved in {folder}")
            self._say(f"to continue: {self._resume_command()}")
            return 0
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
            (folder / "summary.json").write_text(to_json(summary), encoding="utf-8")
            show(self.console, summary)
            self._say(f"results are in {folder}")
            passed = [summary["passed"]]
            if not summary["passed"]:
                leave_last_words(summary["verdict"])
        dist.broadcast_object_list(passed)
        return 0 if passed[0] else 1

    def _new_trainer(self) -> AnyTrainer:
        if self.engine is None:
            injector = Injector(self.faults, self.cluster.rank, self.restart) if self.faults else None
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

    def _find_start(self) -> None:
        """Resumes what was started again, asked or not, and checks that all ranks start alike. Collective: yes."""
        config = self.config
        # Each agent of torchrun counts the failures of its own workers alone.
        self.restart = max(self.cluster.gather(self.cluster.environment.restart_count))
        if self.restart and not self.resumed and self._is_of_this_job() and can_resume(config.folder):
            self.resumed = resume_point(config, self.text, has_more=True, engine=self.engine)
        # Each rank has looked by itself.
        steps = self.cluster.gather(self.resumed.step if self.resumed else 0)
        if len(set(steps)) > 1:
            told = ", ".join(f"rank {rank} at {step}" for rank, step in enumerate(steps))
            raise ConfigError(
                f"the ranks would not start at the same step ({told}); all must see the same folder {config.folder}"
            )

    def _is_of_this_job(self) -> bool:
        """Whether the run that is there is one of this job, not of an earlier job. Collective: no."""
        kept = self.config.folder / JOB_FILE
        return kept.exists() and kept.read_text(encoding="utf-8") == self.cluster.environment.job_id

    def _prepare(self, folder: Path) -> None:
        """Makes the folder of the run; an earlier run there is moved, never removed. Collective: yes."""
        if self.console:
            if not self.resumed and (aside := move_aside(folder)):
                self._say(f"the earlier run {folder} is now {aside}")
            folder.mkdir(parents=True, exist_ok=True)
            for note in self.resumed.notes if self.resumed else ():
                self._say(note)
            if self.resumed:
                record = folder / "steps.jsonl"
                JsonlRecord(record, self.resumed.step).close()
                if missing := missing_steps(read_record(record), self.resumed.step):
                    self._say(f"note: {record} lacks {len(missing)} of the steps so far, the first is {missing[0]}")
            # The verdict on fewer steps would outlive them.
            (folder / "summary.json").unlink(missing_ok=True)
            (folder / JOB_FILE).write_text(self.cluster.environment.job_id, encoding="utf-8")
            (folder / "text.json").write_text(describe(self.text), encoding="utf-8")
            settings = dump_config(self.config) if self.engine is None else dump_settings(self.config)
            (folder / "config.toml").write_text(settings, encoding="utf-8")
            if self.engine is not None:
                (folder / ENGINE_FILE).write_text(json.dumps(self.engine, indent=2) + "\n", encoding="utf-8")
            if self.cluster.device.type == "cpu":
                self._say(f"{self.cluster.world_size} ranks on the CPU, gloo")
            else:
                self._say(f"{self.cluster.world_size} ranks on GPUs, NCCL")
            if self.faults:
                self._say(f"faults to come: {'; '.join(map(str, self.faults))}")
            self._say(f"text: {self.text.source}, {len(self.text.train) + len(self.text.validation):,} tokens")
        dist.barrier()

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
