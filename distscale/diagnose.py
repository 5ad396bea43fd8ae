"""Which sweep is in use on each device and why, and whether it works: ``distscale check``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from distscale.machine import device_name
from distscale.sweep import reference
from distscale.sweep.choice import Backend, Choice, choose
from distscale.sweep.parts import INF_BITS, Count, Part, Request, Swept

__all__ = ["Finding", "choose_quietly", "diagnose", "faults"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Finding:
    """What is true of one device."""

    device: str
    name: str
    """Of the hardware."""
    sweep: str
    """``native`` or ``reference``."""
    why: str
    faults: tuple[str, ...]
    """What the self-test found; empty: it passed."""


def diagnose() -> list[Finding]:
    """Chooses, as training would, for the CPU and every GPU, and tests what was chosen.

    Raises:
        ConfigError: if ``DISTSCALE_SWEEP`` cannot be used.

    Collective: no. Syncs host: yes.
    """
    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]
    findings = []
    for device in devices:
        choice = choose_quietly(device)
        found = tuple(faults(choice.backend, device))
        findings.append(Finding(str(device), device_name(device), choice.name, choice.why, found))
    return findings


def choose_quietly(device: torch.device) -> Choice:
    """:func:`~distscale.sweep.choice.choose` without its warning, for those who show the reason of the choice."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return choose(device)


def faults(backend: Backend, device: torch.device) -> Iterator[str]:
    """What ``backend`` gets wrong on ``device``: nothing, if it works. Syncs host: yes."""
    for dtype in _DTYPES:
        name = str(dtype).removeprefix("torch.")
        try:
            for fault in (*_faults_of_known(backend, device, dtype), *_faults_of_random(backend, device, dtype)):
                yield f"{name}: {fault}"
        except Exception as error:  # whatever a driver or a library raises is what the report is for
            yield f"{name}: {type(error).__name__}: {error}"


def _faults_of_known(backend: Backend, device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """Values whose amax and norm are exact in every dtype: finite ones, and with a NaN or an inf among them."""
    inf = math.nan if dtype is torch.float8_e4m3fn else -math.inf  # it has no inf
    shards = [torch.tensor([3.0, -4.0] + [0.0] * 29 + [last]).to(dtype) for last in (0.0, math.nan, inf)]
    parts = [Part(shard.to(device), slot, 1.0, False, slot) for slot, shard in enumerate(shards)]
    found = _on_cpu(backend.sweep(parts, Request(3, torch.ones((), dtype=torch.float64, device=device), True, 3)))
    assert found.sums is not None
    if found.slots[:1].view(torch.float32).item() != 4.0:
        yield "the amax of (3, -4) is not 4"
    if found.sums[0].item() != 25.0:
        yield "the norm of (3, -4) is not 5"
    if found.slots[1].item() <= INF_BITS:
        yield "a NaN was not found"
    if math.isinf(inf) and found.slots[2].item() != INF_BITS:
        yield "an inf was not found"
    if found.counts[:, Count.NONFINITE].tolist() != [0, 1, 1]:
        yield "values that are not finite were counted wrongly"


def _faults_of_random(backend: Backend, device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """Many values against the reference on the CPU: amax, norm, the unscaled values, and the multiplied ones."""
    numel = 100_003
    values = torch.randn(numel + 1, generator=torch.Generator().manual_seed(0)).to(dtype)[1:]  # of odd alignment
    inv_scale = torch.tensor(2.0**-10, dtype=torch.float64)
    right_out, out = torch.empty(numel), torch.empty(numel, device=device)
    right = reference.sweep([Part(values, 0, 0.5, True, out=right_out)], Request(1, inv_scale, True))
    there = torch.empty(numel + 1, dtype=dtype, device=device)[1:].copy_(values)
    found = _on_cpu(backend.sweep([Part(there, 0, 0.5, True, out=out)], Request(1, inv_scale.to(device), True)))
    assert found.sums is not None and right.sums is not None
    if not torch.equal(found.slots, right.slots):
        yield "the amax of random values differs from the reference"
    if not torch.allclose(found.sums, right.sums, rtol=1e-6, atol=0):
        yield "the norm of random values differs from the reference"
    if not torch.equal(out.cpu(), right_out):
        yield "unscaled values differ from the reference"
    factor = torch.tensor(0.75)
    reference.scale_([values], factor)
    backend.scale_([there], factor.to(device), torch.zeros((), device=device))
    if not torch.equal(there.cpu().float(), values.float()):
        yield "multiplied values differ from the reference"


def _on_cpu(swept: Swept) -> Swept:
    return Swept(swept.slots.cpu(), None if swept.sums is None else swept.sums.cpu(), swept.counts.cpu())
