"""The sections of the configuration of a pretraining run: what can be set, to what, and what it is by default.

Needs the extra ``train`` (pydantic); see :mod:`distscale.config`, which reads them from a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from distscale.faults import parse_faults
from distscale.policy import MAX_SCALE, MIN_SCALE

__all__ = [
    "Config",
    "DataSection",
    "FaultsSection",
    "Fp8Section",
    "ModelSection",
    "ParallelSection",
    "PrecisionSection",
    "RunSection",
    "ScalerSection",
    "Section",
    "TrainSection",
]

# Counts are int32 on the device.
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Scale = Annotated[float, Field(ge=MIN_SCALE, le=MAX_SCALE, allow_inf_nan=False)]
DType = Literal["fp16", "bf16", "fp32"]


class Section(BaseModel):
    """Base of all sections: no unknown keys, no silent conversions, no change after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class RunSection(Section):
    """What the run is called and how long it lasts."""

    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")
    """Folder of the results inside ``out``: letters, digits, dot, dash, underscore."""
    out: str = "runs"
    """Folder that holds all runs."""
    steps: Count = 400
    """Steps to attempt, in all, restarts included; a skipped step counts."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Of the initial weights and of the order of the data."""


class ModelSection(Section):
    """Shape of the GPT."""

    layers: Count = 4
    """Number of transformer blocks."""
    width: Count = 128
    """Size of the residual stream; a multiple of ``heads``."""
    heads: Count = 4
    """Attention heads a block."""
    sequence: int = Field(default=128, ge=2)
    """Tokens a sequence."""

    @model_validator(mode="after")
    def _check(self) -> ModelSection:
        if self.width % self.heads:
            raise ValueError(f"width = {self.width} must be a multiple of heads = {self.heads}")
        return self


class DataSection(Section):
    """The text."""

    path: str = ""
    """A text file, a folder of them, or a ``.bin`` of uint16 tokens; "" is Python's own standard library."""
    validation: float = Field(default=0.05, gt=0, lt=1)
    """Share of the text, at its end, that is kept for validation."""


class TrainSection(Section):
    """Optimization."""

    batch: int = Field(default=8, ge=1, le=2**20)
    """Sequences a rank and micro-batch."""
    accumulation: Count = 1
    """Micro-batches a step."""
    lr: Positive = 2e-3
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False)
    """Of AdamW, each in [0, 1)."""
    weight_decay: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Of AdamW, on matrices; vectors are not decayed."""
    warmup: int = Field(default=20, ge=0)
    """Applied steps of linear warm-up; a cosine to a tenth of ``lr`` follows."""
    fused: bool = True
    """Use the fused optimizer, which takes the scale and the skip decision on the device."""
    eval_every: int = Field(default=100, ge=0)
    """Steps between validations; 0: only at the end."""
    eval_batches: Count = 16
    """Batches a rank and validation."""
    checkpoint_every: int = Field(default=100, ge=0)
    """Steps between checkpoints; 0: only at the end or when stopped."""
    checkpoint_async: bool = False
    """Write checkpoints while training goes on, from a copy in the memory of the host; the last one is waited for."""
    keep: Count = 2
    """Newest checkpoints to keep."""
    profile_every: int = Field(default=100, ge=0)
    """Steps between counts of the gradient values that a small format would lose; 0: never."""
    log_every: Count = 20
    """Steps between lines when the output is not a terminal."""

    @model_validator(mode="after")
    def _check(self) -> TrainSection:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas = {list(self.betas)} must each be at least 0 and below 1")
        return self


class ParallelSection(Section):
    """How the ranks share the work."""

    layout: Literal["fsdp2", "ddp"] = "fsdp2"
    """Sharded parameters, gradients and optimizer (fsdp2), or a copy on each rank (ddp)."""
    timeout_s: float = Field(default=120.0, ge=1, le=7 * 24 * 3600)
    """Seconds after which a peer that does not answer is taken for dead."""


class PrecisionSection(Section):
    """Formats of the computation; parameters and optimizer state are fp32 throughout."""

    dtype: DType = "fp16"
    """Of activations and of weights and gradients within a layer."""
    reduce_dtype: DType = "fp32"
    """In which gradients are summed over ranks."""


class ScalerSection(Section):
    """Arguments of :class:`distscale.DistributedGradScaler`."""

    enabled: bool = True
    """False: no scale, no check, no clipping; the optimizer steps on whatever it gets."""
    policy: Literal["dynamic", "static", "none"] = "dynamic"
    """Adapt the scale, keep ``init_scale`` for ever, or scale by 1 (the finite check and the norm stay)."""
    init_scale: Scale = 2.0**16
    """Scale of the first step."""
    growth_factor: float = Field(default=2.0, gt=1, allow_inf_nan=False)
    """Multiplies the scale after ``growth_interval`` clean steps."""
    backoff_factor: float = Field(default=0.5, gt=0, lt=1)
    """Multiplies the scale on an overflow."""
    growth_interval: Count = 2000
    """Clean steps in a row before the scale grows."""
    min_scale: Scale = MIN_SCALE
    """Floor of the scale."""
    max_scale: Scale = MAX_SCALE
    """Cap of the scale."""
    hysteresis: Count = 1
    """Overflows since the last growth from which on the scale backs off."""
    hysteresis_refill: int | None = Field(default=None, ge=2, le=2**31 - 1)
    """Clean steps in a row after which it tolerates as many overflows again; leave the key out: only after a growth."""
    growth_delay: int = Field(default=0, ge=0, le=2**30)
    """Clean steps that the first growth after an overflow takes beyond ``growth_interval``; DeepSpeed's rule has 1."""
    max_consecutive_skips: Count = 100
    """Skips in a row, that no lower scale could have saved, after which the run ends with an error."""
    max_norm: float | None = Field(default=None, gt=0)
    """Clip the global gradient norm; inf: only measure it; leave the key out: neither."""

    @model_validator(mode="after")
    def _check(self) -> ScalerSection:
        if not self.min_scale <= self.init_scale <= self.max_scale:
            raise ValueError(
                f"init_scale = {self.init_scale:g} must lie between min_scale = {self.min_scale:g} "
                f"and max_scale = {self.max_scale:g}"
            )
        # A disabled scaler touches no gradient: the run would train unclipped, whatever the file says.
        if not self.enabled and self.max_norm is not None:
            raise ValueError(
                f"max_norm = {self.max_norm:g} has no effect with enabled = false; remove it, "
                'or write enabled = true and policy = "none" to clip without a scale'
            )
        return self


class Fp8Section(Section):
    """FP8; see :mod:`distscale.fp8`. The scaler keeps the scales, so it must be enabled."""

    linears: bool = False
    """Multiply in FP8 within the linear layers of the blocks."""
    gradients: bool = False
    """Send gradients to other ranks in FP8."""
    scaling: Literal["delayed", "current", "none"] = "delayed"
    """Scales from the amax values of earlier steps, or from a tensor's own; none, to see what happens: 1 for all."""
    fp8_format: Literal["E4M3", "HYBRID"] = "HYBRID"
    """HYBRID: E5M2 for the gradients of the outputs of linear layers, E4M3 for all else."""
    margin: int = Field(default=0, ge=0, le=16)
    """Powers of two that are left free above the largest value."""
    power_of_two: bool = True
    """Round scales down to powers of two."""
    amax_history_len: int = Field(default=16, ge=1, le=65536)
    """Steps that are remembered, with delayed scaling."""
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    """What of them counts."""

    @property
    def is_used(self) -> bool:
        """Whether anything is in FP8."""
        return self.linears or self.gradients


class FaultsSection(Section):
    """Faults on purpose; see :mod:`distscale.faults`."""

    inject: tuple[str, ...] = Field(default=(), strict=False)
    """Each as in ``DISTSCALE_FAULTS``, such as "kill step=12 rank=2"; those of the environment come on top."""

    @field_validator("inject")
    @classmethod
    def _check(cls, inject: tuple[str, ...]) -> tuple[str, ...]:
        parse_faults(";".join(inject))
        return inject


class Config(Section):
    """A whole run."""

    run: RunSection
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    parallel: ParallelSection = ParallelSection()
    precision: PrecisionSection = PrecisionSection()
    scaler: ScalerSection = ScalerSection()
    fp8: Fp8Section = Fp8Section()
    faults: FaultsSection = FaultsSection()

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.train.warmup > self.run.steps:
            raise ValueError(
                f"train.warmup = {self.train.warmup} is longer than run.steps = {self.run.steps}; shorten it"
            )
        if self.fp8.is_used and not self.scaler.enabled:
            raise ValueError(
                "fp8 needs scaler.enabled = true, for the scaler keeps the FP8 scales; to train without a loss scale "
                'write scaler.policy = "none"'
            )
        return self

    def saves_at(self, step: int) -> bool:
        """Whether there is a checkpoint after ``step`` steps, also without a stop."""
        every = self.train.checkpoint_every
        return step == self.run.steps or (every > 0 and step > 0 and step % every == 0)

    @property
    def folder(self) -> Path:
        """Where the results go."""
        return Path(self.run.out) / self.run.name
