"""Fp8Scales: the histories of all FP8 tensors of the job, equal on all ranks, and the scales that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distscale.errors import ConfigError
from distscale.fp8 import saved
from distscale.fp8.meter import Meter, Metered, join
from distscale.fp8.recipe import DelayedScaling, Recipe
from distscale.fp8.scales import advance, history_amax, scale_of_amax, scaled, unscaled

__all__ = ["Fp8Scales", "Seen"]


class Seen(NamedTuple):
    """What was seen of all FP8 tensors of the job since the last step, in the order of the table."""

    bits: Tensor
    """int32, shape (num_tensors,): amax bits; 0 of a tensor that this rank has not used."""
    num_saturated: Tensor
    """float64, shape (num_sent,): values beyond the scale, of the tensors that are sent."""


class _Table(NamedTuple):
    """What the ranks have agreed on, or this rank alone before that."""

    tensors: tuple[Metered, ...]
    num_sent: int
    is_gradient: Tensor
    """bool, shape (num_tensors,)."""
    largest: Tensor
    """float64, shape (num_tensors,): of the format of each tensor."""
    places: Tensor
    """int64: in the table, of the tensors of all meters of this rank, one meter after the other."""
    meters: tuple[Meter, ...]

    @property
    def names(self) -> list[str]:
        return [tensor.name for tensor in self.tensors]


class Fp8Scales:
    """One scale for each FP8 tensor, the same on all ranks, from amax values that travel in the exchange of the step.

    Made by :func:`~distscale.fp8.convert_to_fp8`, and given to the scaler, which keeps it up to date and saves it::

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
        self.is_agreed = False
        """Whether all tensors of this rank are in the table that the ranks have agreed on."""
        self.meters: list[Meter] = []
        """Of this rank."""
        self.listeners: list[Callable[[Tensor, Tensor, Tensor], None]] = []
        """Called at the end of each step with its ``found_inf``, its loss scale, and the next one: fp32, shape ()."""
        self._metered: dict[str, Metered] = {}
        self._loaded: Mapping[str, Sequence[float]] = {}  # also of tensors that are not in the table
        self._history = torch.zeros(0, 0)
        """fp32, shape (amax_history_len, num_tensors), newest first; 0 where nothing is remembered."""
        self._table = _Table((), 0, torch.empty(0), torch.empty(0), torch.empty(0), ())

    # ---------------------------------------------------------------- set-up

    def meter(self, tensors: Sequence[Metered]) -> Meter:
        """Registers tensors of this rank, before the first step, or later between the same two steps on all ranks.

        Raises:
            ConfigError: if a name is taken.
        """
        for tensor in tensors:
            if tensor.name in self._metered:
                raise ConfigError(
                    f"there is an FP8 tensor {tensor.name!r} already; give this model a prefix= of its own, or "
                    "convert it once"
                )
        self._metered |= {tensor.name: tensor for tensor in tensors}
        meter = Meter(tensors)
        self.meters.append(meter)
        self.is_agreed = False
        return meter

    @property
    def tensors(self) -> tuple[Metered, ...]:
        """Those of this rank."""
        return tuple(self._metered.values())

    def agree(self, by_rank: Sequence[Sequence[Metered]], device: torch.device) -> None:
        """Takes the tensors of all ranks into one table, and keeps the histories that there are.

        Args:
            by_rank: in the order of the ranks.
            device: of the histories: that of the vectors of the exchange.

        Raises:
            ProtocolError: if ranks mean different things by one name.
        """
        self._build(join(by_rank), device)
        self.is_agreed = True

    def _build(self, tensors: tuple[Metered, ...], device: torch.device) -> None:
        histories = self._histories()
        place = {tensor.name: index for index, tensor in enumerate(tensors)}
        mine = [place[tensor.name] for meter in self.meters for tensor in meter.tensors] if tensors else []
        largest = [torch.finfo(self.recipe.dtype_of(tensor)).max for tensor in tensors]
        self._table = _Table(
            tensors,
            sum(tensor.is_sent for tensor in tensors),
            torch.tensor([tensor.is_gradient for tensor in tensors], dtype=torch.bool, device=device),
            torch.tensor(largest, dtype=torch.float64, device=device),
            torch.tensor(mine, dtype=torch.int64, device=device),
            tuple(self.meters) if tensors else (),
        )
        self._set_histories(histories)

    # ---------------------------------------------------------------- the step

    def collect(self, device: torch.device) -> Seen:
        """What the meters have seen since :meth:`clear`, of the agreed table. Syncs host: no."""
        tensors, num_sent, *_, places, meters = self._table
        bits = torch.zeros(len(tensors), dtype=torch.int32, device=device)
        num_saturated = torch.zeros(len(tensors), dtype=torch.float64, device=device)
        if meters:
            amax = torch.cat([meter.amax.to(device, non_blocking=True) for meter in meters])
            bits.scatter_reduce_(0, places, amax, "amax")
        if meters and num_sent:
            over = torch.cat([meter.num_saturated.to(device, non_blocking=True) for meter in meters])
            num_saturated.scatter_add_(0, places, over.double())
        return Seen(bits, num_saturated[:num_sent])

    def clear(self) -> None:
        """Begins to accumulate anew. Syncs host: no."""
        for meter in self.meters:
            meter.clear()

    def commit(self, bits: Tensor, found_inf: Tensor, loss_scale: Tensor) -> None:
        """Lets the amax values of a step enter the histories. Syncs host: no.

        Args:
            bits: int32, shape (num_tensors,): reduced over all ranks.
            found_inf: fp32, shape (): not 0 if the step was skipped.
            loss_scale: fp32, shape (): that the gradients of the step carried.
        """
        if isinstance(self.recipe, DelayedScaling) and self._table.tensors:
            device, is_gradient = self._history.device, self._table.is_gradient
            bits = bits.to(device)
            bits = torch.where(is_gradient, unscaled(bits, loss_scale.to(device)), bits)
            self._history = advance(self._history, bits, ~is_gradient | (found_inf.to(device) == 0))

    def hand_out(self, loss_scale: Tensor) -> None:
        """Gives every meter its scales for the coming step, whose losses carry ``loss_scale``. Syncs host: no."""
        _, _, is_gradient, largest, places, meters = self._table
        if not isinstance(self.recipe, DelayedScaling) or not meters:
            return
        amax = history_amax(self._history, self.recipe)
        amax = torch.where(is_gradient, scaled(amax, loss_scale.to(amax.device)), amax)
        scale = scale_of_amax(amax, largest, self.recipe)
        mine = scale[places].split_with_sizes([len(meter.tensors) for meter in meters])
        for meter, values in zip(meters, mine, strict=True):
            meter.scale.copy_(values, non_blocking=True)

    def finish_step(self, bits: Tensor | None, found_inf: Tensor, loss_scale: Tensor, next_loss_scale: Tensor) -> None:
        """What the scaler does in ``update()``: :meth:`commit`, :meth:`hand_out`, and telling the listeners.

        Args:
            bits: None if nothing was decided.
        """
        if bits is not None:
            self.commit(bits, found_inf, loss_scale)
        self.hand_out(next_loss_scale)
        for listener in self.listeners:
            listener(found_inf, loss_scale, next_loss_scale)

    # ---------------------------------------------------------------- saving

    def state_dict(self) -> dict[str, str]:
        """The recipe and every history by name. Equal on all ranks. Syncs host: yes."""
        return saved.encode(self.recipe, self._histories())

    def load_state_dict(self, state: Mapping[str, str], reset: bool = False) -> None:
        """Restores the histories, on any number of ranks, after the model was converted. Collective: no.

        The scaler does this for its own state, and hands out the scales that follow from it. Without the scaler, call
        ``hand_out(loss_scale)`` after it: gradients carry the loss scale, which the histories do not know. Until then,
        or until the next ``update()``, no scale is known, and each tensor is scaled by its own amax.

        Another ``amax_history_len`` may be given: a shorter history keeps the newest entries, a longer one has room for
        more. Any other difference of the recipes is an error. Tensors that the state does not know begin without a
        history, as in a new run.

        Args:
            reset: begin without histories if the state is of another recipe, instead of raising. Of a scaler's state
                one takes ``"fp8"`` out for that, since loading it without lets the histories begin anew.

        Raises:
            ConfigError: if the state is not one, is of another recipe (it names the fields with both values), or holds
                impossible values. Nothing is changed then.
        """
        self._begin_with(saved.decode(self.recipe, state, reset))

    def forget(self) -> None:
        """Begins without histories and scales, and with nothing seen."""
        self._begin_with({})

    def _begin_with(self, histories: Mapping[str, Sequence[float]]) -> None:
        if not self.is_agreed:  # a table of this rank's own, until the ranks agree
            self._build(join([self.tensors]), torch.device("cpu"))
        self._loaded = histories
        self._set_histories({})
        if isinstance(self.recipe, DelayedScaling):  # by any other, no scale is handed out, so none is taken back
            for meter in self.meters:
                meter.scale.zero_()
        self.clear()

    def _histories(self) -> dict[str, Sequence[float]]:
        columns = self._history.t().tolist() if self._history.numel() else [()] * len(self._table.tensors)
        return {**self._loaded, **dict(zip(self._table.names, columns, strict=True))}

    def _set_histories(self, by_name: Mapping[str, Sequence[float]]) -> None:
        length = self.recipe.amax_history_len if isinstance(self.recipe, DelayedScaling) else 0
        history = torch.zeros(length, len(self._table.tensors))
        known = {**self._loaded, **by_name}
        for place, name in enumerate(self._table.names):
            newest = torch.tensor(known.get(name, ())[:length])
            history[: len(newest), place] = newest
        self._history = history.to(self._table.places.device)
