"""Which scale the gradients of this rank carry; between losses, steps and updates it need not be the current one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from distscale.apply import with_gradients
from distscale.decision import Decision
from distscale.roster import Roster
from distscale.sweep import scale_

__all__ = ["CarriedScale"]


class CarriedScale:
    """Follows the scale from the loss, which it is multiplied with, to the step that takes it out of the gradients.

    Args:
        roster: knows the optimizers whose gradients are meant.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._of_losses: Tensor | None = None  # None until this rank scales a loss
        self._may_differ = True  # the current scale from that of the last loss: there was an update
        # Since a loss was last scaled:
        self._stepped: list[Optimizer] = []  # whose gradients cannot be waiting
        self._applied: list[tuple[Sequence[Optimizer], Decision]] = []  # whose gradients are unscaled, unless skipped

    @property
    def has_scaled(self) -> bool:
        """Whether this rank has scaled a loss."""
        return self._of_losses is not None

    def value(self, current: Tensor) -> Tensor:
        """The scale that the gradients carry: that of the last loss, even if an update came in between.

        Args:
            current: fp32, shape (): the answer on a rank that has scaled no loss, as in a pipeline.
        """
        return current if self._of_losses is None else self._of_losses

    def is_known(self, optimizers: Sequence[Optimizer]) -> bool:
        """False on a rank without loss and gradients, which may have missed by what the others scaled theirs."""
        return not self._may_differ or any(map(with_gradients, optimizers))

    def unscaled_ids(self, optimizers: Sequence[Optimizer]) -> set[int]:
        """Parameters whose gradients a step has unscaled since the last loss, of steps that concern ``optimizers``.

        A step does so if it was not skipped, and concerns those that share a parameter with it. Syncs host: only if
        there are such steps.
        """
        unscaled: set[int] = set()
        for stepped, decision in self._applied:
            ids = self._roster.ids(stepped)
            if not ids.isdisjoint(self._roster.ids(optimizers)) and not decision.skipped:
                unscaled |= ids
        return unscaled

    # ---------------------------------------------------------------- what happens to it, in order

    def for_loss(self, current: Tensor) -> Tensor:
        """What a loss is to be multiplied with, which is the current scale. Collective: no. Syncs host: no.

        Gradients that are still waiting from before an update are brought to this scale, since new ones are added.
        """
        if self._may_differ:
            if self._of_losses is not None:
                self._rescale_waiting(self._of_losses, current)
            self._of_losses = current.clone()
            self._may_differ = False
        self._stepped, self._applied = [], []  # the backward pass may add to the gradients of any optimizer
        assert self._of_losses is not None
        return self._of_losses

    def note_applied(self, optimizers: Sequence[Optimizer], decision: Decision) -> None:
        """``decision`` was carried out, or is being carried out by fused optimizers."""
        self._applied.append((optimizers, decision))

    def note_stepped(self, optimizers: Sequence[Optimizer]) -> None:
        """Their step is over, applied or skipped."""
        self._stepped += optimizers

    def update(self, old: Tensor, new: Tensor) -> None:
        """The scale changes. On a rank without losses, the next gradients have the new one whenever they come."""
        if self._of_losses is None:
            self._rescale_waiting(old, new)
            self._stepped = []

    def begin_step(self) -> None:
        """Whatever comes now belongs to the next step, and may have another scale."""
        self._may_differ = True
        self._applied = []

    def forget_losses(self) -> None:
        """Takes the current scale for the one that the gradients carry, as after a restart."""
        self._of_losses = None

    def _rescale_waiting(self, old: Tensor, new: Tensor) -> None:
        """Rescales gradients that wait, unstepped, from before an update, so that new ones can be added.

        Without it, an optimizer that steps more rarely than ``update()`` is called would sum gradients of two scales.
        Optimizers are known from their first step on (what ``names`` has besides may be another scaler's), and their
        gradients by ``grad``. What FSDP2 keeps to itself while ``set_requires_gradient_sync(False)`` is not seen: do
        not update the scale before those gradients are reduced.
        """
        scale_(self._roster.values_of_others(self._stepped), (new.double() / old.double()).float())
