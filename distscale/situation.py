"""What one rank brings to a decision, and what must be equal on all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import cast

from torch import Tensor
from torch.optim import Optimizer

from distscale.checksum import digest
from distscale.fp8.recipe import Recipe
from distscale.policy import Outcome, Policy, ScaleState
from distscale.table import UNKNOWN
from distscale.unscaling import Found

__all__ = ["TABLE_CHANGES", "Situation", "digest_of_settings", "settings_of"]

TABLE_CHANGES = -1
"""Sent in place of the table's digest by a rank that needs a new table; no digest is negative."""


@dataclass(frozen=True)
class Situation:
    """This rank's side of a step, before the exchange."""

    step: int
    policy: Policy
    state: ScaleState
    outcome: Outcome | None
    """Of earlier decisions since the last update."""
    loss_scale: Tensor
    """fp32, shape (): the scale that the gradients carry."""
    knows_loss_scale: bool
    """False on a rank without loss and gradients, which may have missed by what the others scaled theirs."""
    loss_bits: Tensor | None
    """int32, shape (): amax bits of the losses that were scaled; None if there were none."""
    unscaled: Callable[[], Collection[int]]
    """Returns the parameters, by id, whose gradients do not carry the scale any more."""
    found: Sequence[tuple[Optimizer, Found]]
    """What the calls of ``unscale_`` found."""
    stop: bool
    veto: bool
    has_scaled: bool
    """Whether this rank has ever scaled a loss."""
    trains: bool
    """False if all that is known here allows that the step only creates the optimizers' state."""
    failure: Exception | None
    """What keeps this rank from going on, since an earlier step."""
    reads: bool
    """Whether this rank reads the decision on the host before it goes on."""

    def agreed_values(self, digest: int) -> dict[str, object]:
        """What must be equal on all ranks, readable, for an error message. Syncs host: yes."""
        scale, *trackers = self.state
        return {
            "scale": float(scale),
            "loss_scale": float(self.loss_scale) if self.knows_loss_scale else UNKNOWN,
            **{key: int(value) for key, value in zip(ScaleState._fields[1:], trackers, strict=True)},
            "step": self.step,
            "the table of tensors": "with new parameters" if digest == TABLE_CHANGES else f"no. {digest}",
        }


def settings_of(policy: Policy, max_norm: float | None, recipe: Recipe | None) -> dict[str, object]:
    """What must be equal on all ranks by construction, by name."""
    rule = asdict(policy)  # type: ignore[call-overload]
    return {"policy": policy.name, **rule, "max_norm": max_norm, "the FP8 recipe": recipe}


@lru_cache(maxsize=16)
def digest_of_settings(policy: Hashable, max_norm: float | None, recipe: Recipe | None) -> int:
    """Of what :func:`settings_of` returns. 31 bits."""
    return digest(settings_of(cast(Policy, policy), max_norm, recipe))
