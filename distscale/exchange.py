"""The vectors of the one exchange: what a rank writes into them, and what their reduction means.

``maxima`` (int32, reduced by MAX) is a header of fixed size, then one slot a tensor::

    stop | failed | veto | scaled | unread | trains | loss | x, ~x for each agreed value | sides |
    amax bits of every gradient | of every FP8 tensor, those that are sent first

Amax is that of the unscaled gradient; that of an FP8 tensor is as it was seen. Gradients, as they are stepped and as
they are sent, must be finite; other FP8 tensors need not be.

``sums`` (float64, reduced by SUM, only when there is something in it) is the squared norm of the unscaled gradients,
and how many values of each FP8 tensor that is sent were beyond its scale.

Two encodings make MAX enough. A value that must be equal on all ranks travels as ``x`` and ``~x``: their maxima are
complements only if no rank differs; a rank that does not know it sends the smallest integer in both places. A
non-finite slot carries the rank that found it in the mantissa bits, which mean nothing in an inf or NaN; so the largest
slot is at once the flag, the kind and the place.

If agreed values differ, the four words of the sides say who differs from whom: their upper bits are a checksum of the
agreed values, or its complement, and their lower bits the rank, or its complement. So their maxima are the last and the
first rank among those with the largest checksum, and among those with the smallest. It is short, so that one
disagreement in a thousand goes without ranks; that there is one does not depend on it.

Everything here is a pure function of its arguments, and of the reduced vectors alone after the exchange: ranks
compute the same bits because they compute the same thing.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from distscale.policy import Outcome, ScaleState
from distscale.sweep import INF_BITS

__all__ = [
    "Agreed",
    "Flag",
    "Verdict",
    "agreed_loss_scale",
    "judge",
    "mark_rank",
    "pack",
    "read_agreed",
    "read_flag",
    "read_sides",
]

_NAN_BITS = 0x7FC00000
_UNKNOWN = -(2**31)  # below every agreed value and every complement, so MAX ignores it
_RANK_MASK = 0x003FFFFF  # the mantissa bits below NaN's first: over four million ranks


class Flag(IntEnum):
    """Positions of the header's flags: 0, or rank + 1 of the highest rank that raised it."""

    STOP = 0
    """Wants the run to end."""
    FAILED = 1
    """Raised an exception before the exchange; takes part so that its peers do not wait for it."""
    VETO = 2
    """Wants this step skipped."""
    SCALED = 3
    """Has scaled a loss, now or earlier."""
    UNREAD = 4
    """Steps on the device and reads the decision some time later, so that it cannot be asked for more now."""
    TRAINS = 5
    """Takes this for a step of training, not for a rehearsal; see :class:`Verdict`."""
    LOSS = 6
    """Not a flag but a slot: marked bits of a non-finite loss."""


class Agreed(IntEnum):
    """Values that must be equal on all ranks, in the order of their pairs."""

    SCALE = 0
    LOSS_SCALE = 1
    GROWTH_TRACKER = 2
    HYSTERESIS_TRACKER = 3
    BLOCKED_STEPS = 4
    STEP = 5
    TABLE = 6

    @property
    def label(self) -> str:
        """As an error message calls it."""
        return "the table of tensors" if self is Agreed.TABLE else self.name.lower()


_AGREED_AT = len(Flag)
_SIDES_AT = _AGREED_AT + 2 * len(Agreed)
_SLOTS_AT = _SIDES_AT + 4
# Odd, and large: each spreads a small difference over the upper bits. The loss scale, which not all ranks know, is
# left out.
_WEIGHTS = tuple(0 if key is Agreed.LOSS_SCALE else 0x9E3779B1 * (2 * key + 1) % 2**31 for key in Agreed)


def mark_rank(bits: Tensor, rank: int) -> Tensor:
    """Writes ``rank`` into every non-finite entry of ``bits`` (int32, amax bits); finite entries stay as they are."""
    assert 0 <= rank <= _RANK_MASK
    marked = torch.where(bits > INF_BITS, _NAN_BITS | rank, INF_BITS | rank)
    return torch.where(bits >= INF_BITS, marked, bits).int()


def pack(
    rank: int,
    flags: Sequence[int],
    step: int,
    digest: int,
    loss: Tensor,
    state: ScaleState,
    loss_scale: Tensor | None,
    slots: Tensor,
) -> Tensor:
    """Builds this rank's ``maxima``.

    Args:
        rank: of this process.
        flags: one number for each :class:`Flag` but LOSS.
        step: number of the update that this step belongs to.
        digest: of the slot table and the settings.
        loss: int32, shape (): marked bits of a non-finite loss, or 0.
        state: of the policy.
        loss_scale: fp32, shape (): the scale that the gradients carry; None if this rank has none.
        slots: int32, shape (num_slots,): marked amax bits, 0 where this rank holds nothing.

    Returns:
        int32, shape (header + num_slots,), on the device of ``slots``. Syncs host: no.
    """
    device = slots.device
    marks = (rank, rank ^ _RANK_MASK, rank ^ ~_RANK_MASK, ~rank)
    numbers = [*flags, step, digest, *_WEIGHTS, *marks]
    on_host = torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
    # In one copy.
    lengths = [len(flags), 2, len(_WEIGHTS), len(marks)]
    header, ours, weights, sides = on_host.to(device, non_blocking=True).split_with_sizes(lengths)
    counters = torch.stack([state.growth_tracker, state.hysteresis_tracker, state.blocked_steps])
    scales = torch.stack([state.scale, state.scale if loss_scale is None else loss_scale]).view(torch.int32)
    agreed = torch.cat([scales.to(device), counters.to(device), ours])
    sides = sides ^ ((agreed * weights).sum(dtype=torch.int32) & ~_RANK_MASK)
    pairs = torch.stack([agreed, ~agreed])
    if loss_scale is None:
        pairs[:, Agreed.LOSS_SCALE] = _UNKNOWN
    return torch.cat([header, loss.to(device).view(1), pairs.view(-1), sides, slots])


def agreed_loss_scale(maxima: Tensor, scale: Tensor) -> Tensor:
    """The scale that the gradients of all ranks carry, like ``scale``, which it is if no rank knew. Syncs host: no."""
    bits = maxima[_AGREED_AT + Agreed.LOSS_SCALE].to(scale.device, non_blocking=True)
    return torch.where(bits == _UNKNOWN, scale.view(torch.int32), bits).view(torch.float32)


class Verdict(NamedTuple):
    """The decision, as device tensors of shape ()."""

    found_inf: Tensor
    """fp32: 1 if the step is skipped, for whatever reason, else 0; torch's name, as fused optimizers know it."""
    outcome: Outcome
    grad_norm: Tensor
    """float64: norm of the unscaled gradients over all ranks; NaN if none was asked for."""
    clip_coef: Tensor
    """float64: in [0, 1], multiplies the unscaled gradients; 1 if nothing is clipped."""
    is_rehearsal: Tensor
    """bool: no rank takes this for a step of training, and none has seen a loss or a gradient other than zero. So it is
    done, and nothing is learned from it."""


def judge(maxima: Tensor, sums: Tensor | None, max_norm: float | None, num_decisive: int | None = None) -> Verdict:
    """Reads the decision off the reduced vectors. Syncs host: no.

    The clip coefficient is that of ``torch.nn.utils.clip_grad_norm_``: ``min(1, max_norm / (norm + 1e-6))``.

    Args:
        sums: of squares alone; None if no norm is wanted.
        num_decisive: slots that must be finite, the first of all; None: all.
    """
    slots = maxima[_SLOTS_AT:][:num_decisive]
    largest = slots.amax() if slots.numel() else maxima.new_zeros(())
    overflow = largest >= INF_BITS
    if sums is not None:
        # Finite gradients in fp64 can have a norm that is not, by which nothing can be clipped.
        overflow = overflow | ~sums.isfinite().all().to(maxima.device)
    lost = maxima[Flag.LOSS] >= INF_BITS
    agreed, complements = maxima[_AGREED_AT:_SIDES_AT].view(2, len(Agreed)).unbind()
    differs = ((agreed != ~complements) & (agreed != _UNKNOWN)).any()
    is_rehearsal = (maxima[Flag.TRAINS] == 0) & (maxima[Flag.LOSS] == 0) & (largest == 0)
    forbidden = (maxima[Flag.SCALED] == 0) | (maxima[Flag.VETO] > 0)
    skip = overflow | lost | differs | (maxima[Flag.FAILED] > 0) | (forbidden & ~is_rehearsal)

    one = maxima.new_ones((), dtype=torch.float64)
    grad_norm = one * float("nan") if sums is None else sums.sum().sqrt().to(maxima.device)
    clip_coef = one if sums is None or max_norm is None else (max_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    return Verdict(skip.float(), Outcome(overflow & ~lost, lost, ~skip), grad_norm, clip_coef, is_rehearsal)


def read_flag(maxima: np.ndarray, flag: Flag) -> int | None:
    """The highest rank that raised ``flag``, or None. On the host."""
    value = int(maxima[flag])
    return value - 1 if value else None


def read_agreed(maxima: np.ndarray) -> list[tuple[Agreed, int, int]]:
    """The agreed values that differ between ranks, with their smallest and largest bits. On the host."""
    pairs = maxima[_AGREED_AT:_SIDES_AT].reshape(2, len(Agreed))
    differing = (pairs[0] != ~pairs[1]) & (pairs[0] != _UNKNOWN)
    return [(key, int(~pairs[1, key]), int(pairs[0, key])) for key in Agreed if differing[key]]


def read_sides(maxima: np.ndarray) -> list[tuple[int, int]]:
    """The first and the last rank of two groups whose agreed values differ; [] if they cannot be told. On the host.

    All ranks of a group have the same values, but ranks between its first and its last may be of the other.
    """
    words = maxima[_SIDES_AT:_SLOTS_AT].copy()
    words[2:] ^= ~_RANK_MASK
    words[[1, 3]] ^= _RANK_MASK
    checksums, ranks = words & ~_RANK_MASK, words & _RANK_MASK
    return [] if checksums[0] == checksums[2] else [(int(ranks[1]), int(ranks[0])), (int(ranks[3]), int(ranks[2]))]


def read_slots(maxima: np.ndarray) -> np.ndarray:
    """The amax of every tensor over all ranks, float32; inf or NaN where one was found. On the host."""
    slots = maxima[_SLOTS_AT:].copy()
    slots[slots >= INF_BITS] &= ~_RANK_MASK
    return slots.view(np.float32)


def read_culprit(maxima: np.ndarray, num_decisive: int | None = None) -> tuple[int | None, int, bool] | None:
    """The non-finite value to report: (slot or None for the loss, rank, whether it is a NaN). On the host.

    Among several tensors it is the last in the table: backward runs from the last layer to the first, so a value that
    overflows spoils the gradients of the layers before it, and the last one is nearest to where it began.
    """
    if maxima[Flag.LOSS] >= INF_BITS:
        bits, slot = int(maxima[Flag.LOSS]), None
    else:
        bad = np.flatnonzero(maxima[_SLOTS_AT:][:num_decisive] >= INF_BITS)
        if not bad.size:
            return None
        slot = int(bad[-1])
        bits = int(maxima[_SLOTS_AT + slot])
    return slot, bits & _RANK_MASK, bits >= _NAN_BITS
