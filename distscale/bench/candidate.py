"""What is measured side by side: the sweeps, torch's operators for the same work, and the machine's own limits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from distscale.sweep import Part, reference, scale_, sweep
from distscale.sweep.choice import Unavailable
from distscale.sweep.parts import Request

__all__ = ["DTYPES", "Candidate", "candidates", "gradients", "plain_copy", "plain_read"]

DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
"""By the names of the command line."""


@dataclass(frozen=True)
class Candidate:
    """One piece of work over all gradients."""

    key: str
    """In the JSON result."""
    label: str
    """For people."""
    side: Literal["limit", "distscale", "torch"]
    num_bytes: int
    """Read and written in one run."""
    run: Callable[[], object]
    limit: str | None = None
    """Key of the limit that it is held against, where that is not the plain read or copy of the gradients."""
    rival: str | None = None
    """Key of what does the same work by torch, where that is not the sequences."""


def gradients(numel: int, num_tensors: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Random values such as gradients have: normal within a tensor, of a spread that differs from tensor to tensor.

    Args:
        numel: of all tensors together; their sizes differ by one element at most.
        num_tensors: at most ``numel``.
    """
    generator = torch.Generator(device).manual_seed(0)
    limit = torch.finfo(dtype).max / 2
    tensors = []
    for index in range(num_tensors):
        size = numel // num_tensors + (index < numel % num_tensors)
        values = torch.randn(size, generator=generator, device=device)
        tensors.append(values.mul_(2.0 ** (index % 9 - 4)).clamp_(-limit, limit).to(dtype))
    return tensors


def candidates(grads: list[Tensor]) -> list[Candidate]:
    """All that can be measured on ``grads``, of one dtype and device; those in place leave the values as they were.

    What torch cannot do on their dtype is among them, and raises when it is run.
    """
    return [*_limits(grads), *_ours(grads), *_torch(grads)]


def _limits(grads: list[Tensor]) -> Iterator[Candidate]:
    size = _num_bytes(grads)
    if read := plain_read(grads):
        yield Candidate("read", "plain read", "limit", size, read)
    yield Candidate("copy", "plain copy", "limit", 2 * size, plain_copy(grads))


def plain_copy(tensors: Sequence[Tensor]) -> Callable[[], object]:
    """Copies every byte by torch."""
    bits = [tensor.view(torch.uint8) for tensor in tensors]  # FP8 too
    copies = [torch.empty_like(one) for one in bits]
    return lambda: torch._foreach_copy_(copies, bits)


def plain_read(tensors: Sequence[Tensor]) -> Callable[[], object] | None:
    """Reads every byte with the threads of a sweep; None on a GPU, and without the native library."""
    if tensors[0].device.type != "cpu":
        return None
    try:
        from distscale.sweep import cpu

        cpu.load()
    except (ImportError, Unavailable):
        return None
    return lambda: cpu.read(tensors)


def _ours(grads: list[Tensor]) -> Iterator[Candidate]:
    device = grads[0].device
    scale_inv = torch.ones((), device=device) if grads[0].dtype.itemsize == 1 else None
    parts = [Part(grad, slot, 1.0, True, 0, scale_inv) for slot, grad in enumerate(grads)]
    in_place = [part._replace(out=part.values) for part in parts]
    fixed = torch.full((), 2.0**-16, dtype=torch.float64, device=device)
    found_inf = torch.zeros((), device=device)
    factors, inv_scales = _halves_and_doubles(device), _halves_and_doubles(device, torch.float64)

    def measure() -> object:
        return sweep(parts, len(parts), fixed, True, device)

    def rescale() -> None:
        scale_(grads, next(factors), found_inf)

    def measure_and_rescale() -> None:
        measure()
        rescale()

    request, size = Request(len(parts), fixed, True), _num_bytes(grads)
    yield Candidate("sweep", "sweep: check, amax, norm", "distscale", size, measure)
    yield Candidate(
        "sweep_unscale",
        "same, unscaling in place",
        "distscale",
        2 * size,
        lambda: sweep(in_place, len(parts), next(inv_scales), True, device),
    )
    yield Candidate("scale", "scale_ (unscale and clip)", "distscale", 2 * size, rescale)
    yield Candidate("sweep_scale", "sweep, then scale_", "distscale", 3 * size, measure_and_rescale)
    yield Candidate(
        "reference", "reference sweep, the same", "distscale", size, lambda: reference.sweep(parts, request)
    )


def _torch(grads: list[Tensor]) -> Iterator[Candidate]:
    found_inf = torch.zeros((), device=grads[0].device)
    factors = _halves_and_doubles(grads[0].device)

    def unscale() -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, next(factors))

    def norm() -> None:
        get_total_norm(grads)

    def clip() -> None:
        torch._foreach_mul_(grads, next(factors))

    def amax() -> None:
        torch._foreach_norm(grads, math.inf)

    def in_turn(*steps: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            for step in steps:
                step()

        return run

    size, sequence, with_amax = _num_bytes(grads), in_turn(unscale, norm, clip), in_turn(unscale, norm, clip, amax)
    yield Candidate("torch_unscale", "check and unscale", "torch", 2 * size, unscale)
    yield Candidate("torch_norm", "total norm", "torch", size, norm)
    yield Candidate("torch_clip", "clip multiply", "torch", 2 * size, clip)
    yield Candidate("torch_amax", "amax", "torch", size, amax)
    yield Candidate("torch_sequence", "unscale, norm, clip", "torch", 5 * size, sequence)
    yield Candidate("torch_sequence_amax", "unscale, norm, clip, amax", "torch", 6 * size, with_amax)


def _num_bytes(grads: Sequence[Tensor]) -> int:
    return sum(grad.nbytes for grad in grads)


def _halves_and_doubles(device: torch.device, dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
    """Factors, shape (), that are undone in turn: no value drifts, and no code can skip a factor of 1."""
    return itertools.cycle([torch.full((), factor, dtype=dtype, device=device) for factor in (0.5, 2.0)])
