"""One read over the local gradient shards; the only code that reads gradients in bulk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from distscale.shards import is_dtensor
from distscale.sweep import reference
from distscale.sweep.choice import Backend, backend_for
from distscale.sweep.parts import INF_BITS as INF_BITS
from distscale.sweep.parts import Count as Count
from distscale.sweep.parts import Limits as Limits
from distscale.sweep.parts import Part as Part
from distscale.sweep.parts import Request as Request
from distscale.sweep.parts import Swept as Swept
from distscale.sweep.reference import amax_bits

__all__ = ["INF_BITS", "Count", "Limits", "Part", "Request", "Swept", "loss_bits", "scale_", "sweep"]


def sweep(
    parts: Sequence[Part],
    num_slots: int,
    inv_scale: Tensor,
    want_norm: bool,
    device: torch.device,
    *,
    num_groups: int = 1,
    limits: Limits | None = None,
    done: Sequence[Swept] = (),
) -> Swept:
    """Checks and measures every shard in one read, and unscales those that have an ``out``.

    Args:
        parts: on any mix of devices, dtypes and shapes.
        num_slots: length of the slot table.
        inv_scale: one element (float64 is best): reciprocal of the scale that scaled parts carry.
        want_norm: whether to form the sums of squares.
        device: of the results.
        num_groups: of sums of squares.
        limits: of the format to count losses for; None: count non-finite values only.
        done: answers for other parts, to be joined with those of this sweep.

    Raises:
        TypeError: for a dtype that is not fp64, fp32, fp16, bf16, e4m3fn or e5m2.

    Collective: no. Syncs host: no, if all parts are on ``device``.
    """
    request = Request(num_slots, inv_scale.double(), want_norm, num_groups, limits)
    answers = [*done, *(backend.sweep(here, request) for backend, here in _by_backend(parts))]
    torch.autograd.graph.increment_version([part.out for part in parts if part.out is not None])
    if len(answers) == 1 and answers[0].slots.device == device:
        return answers[0]
    slots = torch.zeros(num_slots, dtype=torch.int32, device=device)
    sums = torch.zeros(num_groups, dtype=torch.float64, device=device) if want_norm else None
    counts = torch.zeros(num_slots, len(Count), dtype=torch.int64, device=device)
    for answer in answers:
        torch.maximum(slots, answer.slots.to(device, non_blocking=True), out=slots)
        counts += answer.counts.to(device, non_blocking=True)
        if sums is not None and answer.sums is not None:
            sums += answer.sums.to(device, non_blocking=True)
    return Swept(slots, sums, counts)


def scale_(tensors: Sequence[Tensor], factor: Tensor, found_inf: Tensor | None = None) -> None:
    """Multiplies every tensor in place by ``factor``; the product is formed in fp32 (fp64 for fp64).

    Args:
        tensors: on any mix of devices, dtypes and shapes. No two may share memory; one that is given
            twice is multiplied once.
        factor: fp32, one element, on any device.
        found_inf: fp32, one element, on any device: nothing is touched unless it is 0.

    Collective: no. Syncs host: no, if both are on the device of the tensors.
    """
    factor, found_inf = factor.float(), None if found_inf is None else found_inf.float()
    once = list({id(tensor): tensor for tensor in tensors}.values())
    for backend, here in _by_backend([Part(tensor, 0, 1.0, False) for tensor in once]):
        backend.scale_([part.values for part in here], factor, found_inf)
    # Native code writes behind torch's back.
    torch.autograd.graph.increment_version(tensors)


def loss_bits(loss: Tensor) -> Tensor:
    """Amax bits of a loss, int32, shape (), on its device; 0 for one that is not floating point. Syncs host: no.

    A loss on the meta device, where pipeline schedules try out the loss function, has no values: 0, on the CPU.
    """
    local: Tensor = loss.to_local().detach() if is_dtensor(loss) else loss.detach()
    if local.is_meta:
        return torch.zeros((), dtype=torch.int32)
    if local.is_complex():
        local = torch.view_as_real(local.resolve_conj())
    if not local.is_floating_point():
        return torch.zeros((), dtype=torch.int32, device=local.device)
    return amax_bits([local])[0]


def _by_backend(parts: Sequence[Part]) -> list[tuple[Backend, Sequence[Part]]]:
    """The parts of each device and backend, none of them empty of parts."""
    are_on_cpu = all(map(attrgetter("values.is_cpu"), parts))  # quicker than a set of devices
    places = {torch.device("cpu")} if are_on_cpu else {part.values.device for part in parts}
    if parts and len(places) == 1:
        native = backend_for(places.pop())
        if native.takes(parts):
            return [(native, parts)]
    by_backend: dict[tuple[Backend, torch.device], list[Part]] = defaultdict(list)
    for part in parts:
        native = backend_for(part.values.device)
        backend: Backend = native if native.takes([part]) else reference
        by_backend[backend, part.values.device].append(part)
    return [(backend, here) for (backend, _), here in by_backend.items()]
