"""What ``unscale_`` finds, kept for the step: what was not finite then counts, whatever became of it since."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distscale.roster import Held
from distscale.sweep import INF_BITS, Count, Part, Request, Swept, sweep
from distscale.sweep.conclusion import constant
from distscale.table import SlotTable

__all__ = ["Found", "unscale"]


class Found(NamedTuple):
    """What is known of the gradients of one optimizer since they were unscaled."""

    by_device: Mapping[torch.device, Tensor]
    """fp32, one element each: not 0 if a gradient on that device was not finite. Callers may have changed them."""
    bits: Sequence[tuple[Sequence[str], Tensor]]
    """By device: names, and the unscaled amax bits of each (int32). Empty where other code than ours has unscaled."""

    def swept(self, names: Iterable[str], table: SlotTable, request: Request, device: torch.device) -> Swept:
        """As the answer of a sweep: the slots of what was not finite. Syncs host: no.

        Args:
            names: of all parameters of the optimizer on this rank.

        If only a flag says so, which another rank or other code has set, the optimizer's first tensor stands for it.
        The report names the last one that is not finite, so one that is known comes before it.
        """
        slots = torch.zeros(request.num_slots, dtype=torch.int32, device=device)
        for known, bits in self.bits:
            # A parameter that has left its optimizer since then has no slot any more.
            rows = constant(tuple(table.slots.get(name, request.num_slots) for name in known), torch.int64, device)
            bad = torch.where(bits >= INF_BITS, bits, 0).to(device, non_blocking=True)
            slots = torch.maximum(slots, bad.new_zeros(request.num_slots + 1).index_copy_(0, rows, bad)[:-1])
        first = min((table.slots[name] for name in names if name in table.slots), default=None)
        flags = [flag.detach().reshape(1).to(device, non_blocking=True) for flag in self.by_device.values()]
        if flags and first is not None:
            is_elsewhere = (torch.cat(flags) != 0).any() & (slots < INF_BITS).all()
            slots[first] = torch.where(is_elsewhere, INF_BITS, slots[first])
        counts = torch.zeros(request.num_slots, len(Count), dtype=torch.int64, device=device)
        sums = torch.zeros(request.num_groups, dtype=torch.float64, device=device) if request.want_norm else None
        return Swept(slots, sums, counts)


def unscale(
    gradients: Mapping[int, Held], unscaled: Collection[int], inv_scale: Tensor, found_inf: Tensor
) -> tuple[dict[torch.device, Tensor], list[tuple[list[str], Tensor]]]:
    """Multiplies gradients by ``inv_scale`` in place and checks them, before and after, in the same pass.

    Args:
        gradients: by id of the parameter.
        unscaled: ids of those that are only to be checked.
        inv_scale: fp32, one element.
        found_inf: fp32, one element: not 0 if something is known to be not finite.

    Returns:
        ``found_inf`` by device, and the amax bits by device; see :class:`Found`. Collective: no. Syncs host: no.
    """
    by_device: dict[torch.device, list[tuple[Held, bool]]] = defaultdict(list)
    for key, held in gradients.items():
        by_device[held.shard.values.device].append((held, key not in unscaled))
    found: dict[torch.device, Tensor] = {}
    bits = []
    for device, here in by_device.items():
        parts = [
            Part(shard.values, slot, 1.0, is_scaled, out=shard.values if is_scaled else None)
            for slot, ((_, shard), is_scaled) in enumerate(here)
        ]
        slots, _, _ = sweep(parts, len(parts), inv_scale.double().reshape(()), False, device)
        known = found_inf.to(device, non_blocking=True)
        found[device] = torch.maximum(known, (slots >= INF_BITS).any().to(known.dtype))
        bits.append(([held.name for held, _ in here], slots))
    return found or {found_inf.device: found_inf}, bits
