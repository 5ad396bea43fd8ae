"""What is measured of FP8 beside the sweep: the cast of gradients for other ranks, and the sum of what arrives."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from distscale.bench.candidate import Candidate, gradients, plain_copy, plain_read
from distscale.fp8.recipe import DelayedScaling
from distscale.fp8.scales import scale_of_amax
from distscale.fp8.wire import Piece, make_layout
from distscale.fp8.wire_kernels import quantize, sum_rows

__all__ = ["NUM_RANKS", "fp8_candidates"]

NUM_RANKS = 8
"""Whose messages are summed: a row of the gradients is for each of them."""
_FORMATS = {torch.float8_e4m3fn: "E4M3", torch.float8_e5m2: "E5M2"}


def fp8_candidates(numel: int, num_tensors: int, dtype: torch.dtype, device: torch.device) -> Iterator[Candidate]:
    """The cast of fp32 gradients, and the sum of messages, by our kernels and by torch's operators.

    With an agreed scale for each tensor, as from the second step on. Passes are over as many FP8 values as there are
    gradients: a read of fp32 is 4.

    Args:
        numel: of all gradients together, about: each tensor has a multiple of :data:`NUM_RANKS`.
        dtype: an FP8 dtype; others have no such work.
    """
    if dtype not in _FORMATS:
        return
    grads = [
        grad[: len(grad) // NUM_RANKS * NUM_RANKS].view(NUM_RANKS, -1)
        for grad in gradients(max(numel, num_tensors * NUM_RANKS), num_tensors, torch.float32, device)
    ]
    rows = torch.cat(grads, dim=1)
    recipe = DelayedScaling(_FORMATS[dtype])  # type: ignore[arg-type]
    layout = make_layout([Piece(str(index), grad.shape[1], True) for index, grad in enumerate(grads)], recipe)
    largest = torch.finfo(dtype).max
    scale = scale_of_amax(torch.stack([grad.abs().amax() for grad in grads]), largest, recipe)
    grads = [rows[:, segment.start : segment.stop] for segment in layout.segments]
    messages = quantize(rows, layout, scale).messages
    sent = [messages[:, one.offset : one.offset + one.num_bytes].view(dtype) for one in layout.segments]

    def cast_by_torch() -> list[Tensor]:
        return [
            one
            for grad, factor in zip(grads, scale, strict=True)
            for one in (grad.abs().amax(), (grad * factor).clamp_(-largest, largest).to(dtype))
        ]

    def sum_by_torch() -> list[Tensor]:
        return [
            one.float().mul_(factor).sum(dim=0).div_(NUM_RANKS)
            for one, factor in zip(sent, scale.reciprocal(), strict=True)
        ]

    if read := plain_read([rows]):
        yield Candidate("read_fp32", "plain read of fp32", "limit", 4, read)
    yield Candidate("copy_fp32", "plain copy of fp32", "limit", 8, plain_copy([rows]))
    in_fp32 = "read_fp32" if read else "copy_fp32"
    yield Candidate(
        "cast",
        "cast of fp32, and amax",
        "distscale",
        5,
        lambda: quantize(rows, layout, scale),
        in_fp32,
        "torch_cast",
    )
    yield Candidate(
        "sum",
        f"sum of {NUM_RANKS} messages",
        "distscale",
        1 + 4 / NUM_RANKS,
        lambda: sum_rows(messages, layout, 1 / NUM_RANKS),
        rival="torch_sum",
    )
    yield Candidate("torch_cast", "amax; scale, clamp, cast", "torch", 33, cast_by_torch, in_fp32)
    yield Candidate("torch_sum", "widen, scale, sum", "torch", 17 + 12 / NUM_RANKS, sum_by_torch)
