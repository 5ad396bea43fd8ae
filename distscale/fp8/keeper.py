"""Fp8Scales: the histories of all FP8 tensors of the job, equal on all ranks, and the scales that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distscale.checksum import digest
from distscale.errors import ConfigError, ProtocolError
from distscale.fp8.meter import Meter, Metered
from distscale.fp8.recipe import DelayedScaling, Recipe
from distscale.fp8.saved import decode, encode
from distscale.fp8.scales import advance, history_amax, scale_of_amax, unscaled

__all__ = ["Fp8Scales", "Seen"]


class Seen(NamedTuple):
    """What was seen of all FP8 tensors of the job, by place in the table."""

    bits: Tensor
    """int32, shape (num_tensors,): amax bits; 0 of a tensor that this rank has not used."""
    num_saturated: Tensor
    """float64, shape (num_sent,): values beyond the scale, of the tensors that are sent."""


class Fp8Scales:
    """One scale for each FP8 tensor, the same on all ranks, from amax values that travel in the exchange of the step.

    Made by :func:`~distscale.fp8.convert_to_fp8`, or by hand for :func:`~distscale.fp8.send_gradients_in_fp8` alone;
    given to the scaler, which keeps it up to date and saves it::

        scales = convert_to_fp8(model, DelayedScaling())
        scaler = DistributedGradScaler(names=model, fp8=scales)

    Amax values accumulate over all micro-batches and calls of a step, are reduced once, and enter the history once, in
    ``update()``. Those of gradients are kept without the loss scale, so that it may change. A skipped step gives
    nothing to the history of gradients, and an amax that is 0, inf or NaN nothing to any.

    Args:
        recipe: the same on all ranks.
    """

    def __init__(self, recipe: Recipe) -> None:
        if not isinstance(recipe, Recipe):
            raise ConfigError(f"{recipe!r} is not an FP8 recipe: DelayedScaling(...) or CurrentScaling(...)")
        self.recipe = recipe
        self._meters: list[Meter] = []
        self._metered: dict[str, Metered] = {}
        # Set by agree(): of all ranks, those that are sent first.
        self._table: tuple[Metered, ...] = ()
        self._is_agreed = False
        self._places: list[Tensor] = []  # of the tensors of each meter, int64
        self._history = torch.zeros(0, 0)
        self._saved: Mapping[str, Sequence[float]] = {}  # loaded, and of tensors that are not in the table (yet)

    # ---------------------------------------------------------------- set-up

    def meter(self, tensors: Sequence[Metered]) -> Meter:
        """Registers tensors of this rank before the first step, or between two on all ranks that share the decision.

        Raises:
            ConfigError: if a name is taken.
        """
        for tensor in tensors:
            if tensor.name in self._metered:
                raise ConfigError(f"there is an FP8 tensor {tensor.name!r} already; a model is to be converted once")
        self._metered |= {tensor.name: tensor for tensor in tensors}
        meter = Meter(tensors)
        self._meters.append(meter)
        self._is_agreed = False
        return meter

    @property
    def tensors(self) -> tuple[Metered, ...]:
        """Those of this rank."""
        return tuple(self._metered.values())

    @property
    def is_agreed(self) -> bool:
        """Whether all tensors of this rank are in the table that the ranks have agreed on."""
        return self._is_agreed

    @property
    def sent(self) -> tuple[str, ...]:
        """Names of the tensors that are sent: the first of the table, on all ranks alike."""
        return tuple(tensor.name for tensor in self._table if tensor.is_sent)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all tensors in the table."""
        return tuple(tensor.name for tensor in self._table)

    def agree(self, by_rank: Sequence[Sequence[Metered]], device: torch.device) -> None:
        """Makes the table, from what each rank has registered, the same on all of them.

        Args:
            by_rank: of all ranks, in their order.
            device: of the histories: that of the vectors of the exchange.

        Raises:
            ProtocolError: if ranks mean different things by one name.
        """
        found: dict[str, Metered] = {}
        for rank, tensors in enumerate(by_rank):
            for tensor in tensors:
                if found.setdefault(tensor.name, tensor) != tensor:
                    raise ProtocolError(
                        f"rank {rank} means {tensor} by the FP8 tensor, and another {found[tensor.name]}"
                    )
        known = self.state_dict()["amax_history"] if self._table else self._saved
        self._table = tuple(sorted(found.values(), key=lambda tensor: not tensor.is_sent))
        place = {name: index for index, name in enumerate(self.names)}
        self._places = [
            torch.tensor([place[tensor.name] for tensor in meter.tensors], device=device) for meter in self._meters
        ]
        self._set_history({**self._saved, **known}, device)
        self._is_agreed = True

    @property
    def digest(self) -> int:
        """Of what must be equal on all ranks. 31 bits."""
        return digest((self.recipe.as_dict(), self._table))

    # ---------------------------------------------------------------- the step

    def collect(self, device: torch.device) -> Seen:
        """Takes what the meters have seen since the last time. Syncs host: no."""
        bits = torch.zeros(len(self._table), dtype=torch.int32, device=device)
        num_saturated = torch.zeros(len(self._table), dtype=torch.float64, device=device)
        if self._meters:
            places = torch.cat(self._places)
            amax = torch.cat([meter.amax.to(device, non_blocking=True) for meter in self._meters])
            bits.scatter_reduce_(0, places, amax, "amax")
            if self.sent:
                over = torch.cat([meter.num_saturated.to(device, non_blocking=True) for meter in self._meters])
                num_saturated.scatter_add_(0, places, over.double())
            for meter in self._meters:
                meter.amax.zero_()
                meter.num_saturated.zero_()
        return Seen(bits, num_saturated[: len(self.sent)])

    def commit(self, bits: Tensor, found_inf: Tensor, loss_scale: Tensor) -> None:
        """Lets the amax values of a step enter the histories. Syncs host: no.

        Args:
            bits: int32, shape (num_tensors,): reduced over all ranks.
            found_inf: fp32, shape (): not 0 if the step was skipped.
            loss_scale: fp32, shape (): that the gradients of the step carried.
        """
        device = self._history.device
        if not isinstance(self.recipe, DelayedScaling) or not self._table:
            return
        bits, is_gradient = bits.to(device), self._is_gradient()
        bits = torch.where(is_gradient, unscaled(bits, loss_scale.to(device)), bits)
        commits = ~is_gradient | (found_inf.to(device) == 0)
        self._history = advance(self._history, bits, commits)

    def hand_out(self, loss_scale: Tensor) -> None:
        """Gives every meter its scales for the coming step, whose losses carry ``loss_scale``. Syncs host: no."""
        if not isinstance(self.recipe, DelayedScaling) or not self._table or not self._meters:
            return
        device = self._history.device
        amax = history_amax(self._history, self.recipe)
        is_gradient = self._is_gradient()
        scaled = (amax.double() * loss_scale.to(device).double()).float()
        largest = torch.where(is_gradient, *(torch.finfo(self.recipe.dtype(g)).max for g in (True, False)))
        scale = scale_of_amax(torch.where(is_gradient, scaled, amax), largest.double(), self.recipe)
        mine = scale[torch.cat(self._places)].split([len(meter.tensors) for meter in self._meters])
        for meter, values in zip(self._meters, mine, strict=True):
            meter.scale.copy_(values, non_blocking=True)

    # ---------------------------------------------------------------- saving

    def state_dict(self) -> dict[str, Any]:
        """The recipe and every history by name, newest first, as plain numbers. Equal on all ranks. Syncs host: yes."""
        columns = self._history.t().tolist() if self._table else []
        return encode(self.recipe, {**self._saved, **dict(zip(self.names, columns, strict=True))})

    def load_state_dict(self, state: Mapping[str, Any], reset: bool = False) -> None:
        """Restores the histories, on any number of ranks. Collective: no; all ranks load the same.

        A shorter history keeps the newest entries of a longer one. Tensors that the state does not know begin without a
        history, as in a new run. The scales follow once the loss scale is known.

        Args:
            reset: begin without histories if the state is of another recipe, instead of raising.

        Raises:
            ConfigError: if the state is not one, is of another recipe, or holds impossible values.
        """
        self._saved = decode(self.recipe, state, reset)
        if self._table:
            self._set_history(self._saved, self._history.device)

    def _set_history(self, by_name: Mapping[str, Sequence[float]], device: torch.device) -> None:
        length = self.recipe.amax_history_len if isinstance(self.recipe, DelayedScaling) else 0
        history = torch.zeros(length, len(self._table))
        for place, name in enumerate(self.names):
            newest = torch.tensor(by_name.get(name, ())[:length])
            history[: len(newest), place] = newest
        self._history = history.to(device)

    def _is_gradient(self) -> Tensor:
        return torch.tensor([tensor.is_gradient for tensor in self._table], device=self._history.device)
