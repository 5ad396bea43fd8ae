"""Sweeps made while the backward pass still runs, kept until the step that asks for them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from distscale.sweep import sweep
from distscale.sweep.conclusion import conclude, constant
from distscale.sweep.parts import Part, Request, Swept
from distscale.sweep.reference import subnormals_kept

__all__ = ["EarlySweeps"]


class _Seen(NamedTuple):
    """A tensor as it was when it was swept."""

    values: Tensor
    """Held, so that no other tensor gets its memory."""
    version: int
    row: int
    """In the results of its unit."""

    def is_still(self, values: Tensor) -> bool:
        """Whether ``values``, which has the same address and size, is unchanged."""
        mine = self.values
        return (mine.dtype, mine.device, self.version) == (values.dtype, values.device, values._version)


class EarlySweeps:
    """What has been swept since the last step, by unit of the model. Used by one backward pass at a time.

    Args:
        want_norm: whether to form sums of squares.
    """

    def __init__(self, want_norm: bool) -> None:
        self._want_norm = want_norm
        self._seen: dict[Hashable, list[_Seen]] = {}
        self._swept: dict[Hashable, Swept] = {}

    def sweep(self, unit: Hashable, tensors: Sequence[Tensor]) -> None:
        """Measures ``tensors`` as they are, on the current stream; replaces what was known of ``unit``.

        Args:
            unit: any key.
            tensors: on one device.

        Collective: no. Syncs host: no.
        """
        device = tensors[0].device
        one = torch.ones((), dtype=torch.float64, device=device)
        parts = [Part(tensor, row, 1.0, False, group=row) for row, tensor in enumerate(tensors)]
        self._swept[unit] = sweep(parts, len(parts), one, self._want_norm, device, num_groups=len(parts))
        self._seen[unit] = [_Seen(tensor, tensor._version, row) for row, tensor in enumerate(tensors)]

    def take(self, parts: Sequence[Part], request: Request) -> tuple[list[Swept], list[Part]]:
        """Answers for those of ``parts`` that are unchanged since they were swept; unscaled ones are not.

        Returns:
            An answer for each device, and the parts that are still to be swept.
        """
        if not self._seen:
            return [], list(parts)
        found: dict[torch.device, list[tuple[Part, Hashable, int]]] = {}
        by_address = {
            (seen.values.data_ptr(), seen.values.numel()): (unit, seen)
            for unit, of_unit in self._seen.items()
            for seen in of_unit
        }
        left = []
        for part in parts:
            values = part.values
            unit, seen = by_address.get((values.data_ptr(), values.numel()), (None, None))
            if seen is not None and part.is_scaled and part.out is None and seen.is_still(values):
                found.setdefault(values.device, []).append((part, unit, seen.row))
            else:
                left.append(part)
        return [self._conclude(of_device, request) for of_device in found.values()], left

    def _conclude(self, found: Sequence[tuple[Part, Hashable, int]], request: Request) -> Swept:
        units = list(dict.fromkeys(unit for _, unit, _ in found))
        swept = [self._swept[unit] for unit in units]
        starts = dict(zip(units, accumulate((len(of_unit.slots) for of_unit in swept), initial=0), strict=False))
        rows = constant(tuple(starts[unit] + row for _, unit, row in found), torch.int64, swept[0].slots.device)
        parts = [part for part, _, _ in found]
        bits = torch.cat([of_unit.slots for of_unit in swept])[rows]
        counts = torch.cat([of_unit.counts for of_unit in swept])[rows]
        sums = [of_unit.sums for of_unit in swept if of_unit.sums is not None]
        with subnormals_kept():
            return conclude(parts, bits, torch.cat(sums)[rows] if sums else None, counts, request)

    def clear(self) -> None:
        """Forgets everything, and lets go of the memory."""
        self._seen.clear()
        self._swept.clear()
