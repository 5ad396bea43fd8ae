"""What is measured of FP8 beside the sweep: the cast of gradients for other ranks, and the sum of what arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from distscale.bench.candidate import Candidate, gradients, plain_copy, plain_read
from distscale.fp8.recipe import DelayedScaling
from distscale.fp8.scales import scale_of_amax
from distscale.fp8.wire import Piece, make_layout
from distscale.fp8.wire_kernels import quantize, sum_rows
from distscale.fp8.wire_reference import Quantized

__all__ = ["NUM_RANKS", "UNIT_TENSORS", "Unit", "fp8_candidates", "most_values"]

NUM_RANKS = 8
"""Whose messages are summed: a row of the gradients is for each of them."""
UNIT_TENSORS = 8
"""That are sent together, about as many as a block of a transformer has."""
_FORMATS = {torch.float8_e4m3fn: "E4M3", torch.float8_e5m2: "E5M2"}


class Unit:
    """Gradients that are sent together, each of shape (NUM_RANKS, numel), with a scale that is known before."""

    def __init__(self, grads: Sequence[Tensor], dtype: torch.dtype) -> None:
        recipe = DelayedScaling(_FORMATS[dtype])  # type: ignore[arg-type]
        self._dtype, self._largest = dtype, torch.finfo(dtype).max
        self._layout = make_layout([Piece(str(index), grad.shape[1], True) for index, grad in enumerate(grads)], recipe)
        self._scale = scale_of_amax(torch.stack([grad.abs().amax() for grad in grads]), self._largest, recipe)
        self.rows = torch.cat(list(grads), dim=1)
        self._messages = self.cast().messages

    def cast(self) -> Quantized:
        return quantize(self.rows, self._layout, self._scale)

    def sum(self) -> Tensor:
        return sum_rows(self._messages, self._layout, 1 / NUM_RANKS)

    def cast_by_torch(self) -> list[tuple[Tensor, Tensor]]:
        """Amax and FP8 values of each gradient."""
        grads = [self.rows[:, segment.start : segment.stop] for segment in self._layout.segments]
        return [
            (grad.abs().amax(), (grad * scale).clamp_(-self._largest, self._largest).to(self._dtype))
            for grad, scale in zip(grads, self._scale, strict=True)
        ]

    def sum_by_torch(self) -> list[Tensor]:
        """The mean over the ranks of each gradient."""
        segments = self._layout.segments
        sent = [self._messages[:, one.offset : one.offset + one.num_bytes].view(self._dtype) for one in segments]
        return [
            values.float().mul_(scale_inv).sum(dim=0).div_(NUM_RANKS)
            for values, scale_inv in zip(sent, self._scale.reciprocal(), strict=True)
        ]


def most_values(numel: int, num_tensors: int) -> int:
    """As many gradients as :func:`fp8_candidates` takes at most: one for each rank of each tensor, if not more."""
    return max(numel, num_tensors * NUM_RANKS)


def fp8_candidates(numel: int, num_tensors: int, dtype: torch.dtype, device: torch.device) -> Iterator[Candidate]:
    """The cast of fp32 gradients, and the sum of messages, by our kernels and by torch's operators.

    With an agreed scale for each tensor, as from the second step on.

    Args:
        numel: of all gradients together, about: each tensor has a multiple of :data:`NUM_RANKS`, and at least as many.
        dtype: an FP8 dtype; others have no such work.
    """
    if dtype not in _FORMATS:
        return
    grads = [
        grad[: len(grad) // NUM_RANKS * NUM_RANKS].view(NUM_RANKS, -1)
        for grad in gradients(most_values(numel, num_tensors), num_tensors, torch.float32, device)
    ]
    units = [Unit(grads[start : start + UNIT_TENSORS], dtype) for start in range(0, num_tensors, UNIT_TENSORS)]
    rows = [unit.rows for unit in units]
    size = sum(row.numel() for row in rows)  # bytes of them in FP8

    def each(work: Callable[[Unit], object]) -> Callable[[], None]:
        """One after the other; what a unit makes is gone before the next, as in a backward pass."""

        def run() -> None:
            for unit in units:
                work(unit)

        return run

    read = plain_read(rows)
    if read:
        yield Candidate("read_fp32", "plain read of fp32", "limit", 4 * size, read)
    yield Candidate("copy_fp32", "plain copy of fp32", "limit", 8 * size, plain_copy(rows))
    of_cast = "read_fp32" if read else "copy_fp32"
    yield Candidate("cast", "cast of fp32, and amax", "distscale", 5 * size, each(Unit.cast), of_cast, "torch_cast")
    summed = 4 * size // NUM_RANKS
    yield Candidate(
        "sum", f"sum of {NUM_RANKS} messages", "distscale", size + summed, each(Unit.sum), rival="torch_sum"
    )
    yield Candidate("torch_cast", "amax; scale, clamp, cast", "torch", 33 * size, each(Unit.cast_by_torch), of_cast)
    # Widened, multiplied and read again, and three times as much as comes out of it.
    yield Candidate("torch_sum", "widen, scale, sum", "torch", 17 * size + 3 * summed, each(Unit.sum_by_torch))
